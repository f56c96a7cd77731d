"""The GPU benchmark, rehearsed on the CPU, and the pages made from its results. Nothing here asserts a speed."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed import bars, products
from benchmarks.speed.baselines import (
    features_of,
    flex_alibi,
    forward_function,
    layers_of,
    loss_functions,
    positions_for,
)
from benchmarks.speed.bench import Bench
from benchmarks.speed.kv_cache import CachedTransformer
from benchmarks.speed.parts import PARTS
from benchmarks.speed.sizes import ALIBI, BOTH_NETS, NO_NETS, SINUSOIDAL, SINUSOIDAL_8, Sizes, full, smoke
from logdepth.blocks import PaperLayer
from logdepth.errors import UserError
from logdepth.ops.attention import whole_attention
from page_templates import PLACEHOLDER, templates
from tests.small_models import enlarge

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SMOKE_RESULTS = {"rates": 3, "forward": 17, "training": 24, "large": 2, "decoding": 9, "startup": 1}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of a whole run with tiny sizes."""
    out = tmp_path_factory.mktemp("speed") / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--smoke", "--out", str(out)]
    done = subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(smoke(), torch.device("cpu"), tmp_path / "part.json", seconds=60)


@pytest.fixture(scope="module")
def draw_speed() -> ModuleType:
    pytest.importorskip("matplotlib")
    return importlib.import_module("draw_speed")


def test_every_part_runs(rehearsed: dict[str, Any]) -> None:
    for name, part in rehearsed["parts"].items():
        assert part["status"] == "done"
        assert [one for one in part["results"] if "failed" in one] == []
        assert len(part["results"]) == SMOKE_RESULTS[name]
    assert list(rehearsed["parts"]) == list(PARTS)
    by_each = {one["model"] for one in rehearsed["parts"]["forward"]["results"] if "whole_milliseconds" in one}
    assert by_each == {SINUSOIDAL_8}


def test_a_rehearsal_is_no_result(rehearsed: dict[str, Any], draw_speed: ModuleType, tmp_path: Path) -> None:
    assert rehearsed["rows"] == []
    (tmp_path / "speed-h200.json").write_text(json.dumps(rehearsed))
    with pytest.raises(UserError, match=r"no results/speed-\*\.json: run benchmarks/gpu\.py first"):
        draw_speed.latest_report(tmp_path)


def test_the_pages_match_the_results(draw_speed: ModuleType) -> None:
    found = {"performance.md", *(f"performance/{path.name}" for path in (DOCS / "performance").glob("*.md"))}
    generated = [path for path in found - {"performance/history.md"} if not path.endswith(".in.md")]
    written = {path: (DOCS / path).read_text(encoding="utf-8") for path in generated}
    assert written == draw_speed.pages(draw_speed.latest_report()), "run: make performance"


def test_every_section_has_its_place_once(draw_speed: ModuleType) -> None:
    texts = [path.read_text(encoding="utf-8") for path in templates("performance").values()]
    places = Counter(place for text in texts for place in PLACEHOLDER.findall(text))
    figures = [f"{name}_figure" for name in draw_speed.FIGURES]
    assert sorted(places) == sorted([*draw_speed.SECTIONS, *figures])
    assert places - Counter(places.keys()) == {"forward_figure": 1}  # on the main page too


def test_every_page_is_in_the_navigation_and_linked_from_the_main_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    linked = templates("performance")["performance.md"].read_text(encoding="utf-8")
    for page in ("performance/history.md", *templates("performance")):
        assert f": {page}\n" in navigation
        assert page == "performance.md" or f"({page})" in linked


def test_the_performance_is_one_page_to_read() -> None:
    words = (DOCS / "performance.md").read_text(encoding="utf-8").replace("|", " ").split()
    assert len(words) < 1500


def test_all_targets_in_the_results_have_names(draw_speed: ModuleType) -> None:
    whats = [row["what"] for row in draw_speed.latest_report()["rows"]]
    assert set(importlib.import_module("speed_page.verdicts").TITLES) == set(whats)


def test_the_pages_say_which_parts_have_different_code(rehearsed: dict[str, Any]) -> None:
    machine = importlib.import_module("speed_page.machine")
    one = machine.machine(rehearsed)
    hashes = rehearsed["parts"]["rates"]["code"]
    assert f"code: {hashes['code']} and {hashes['benchmark']}." in one
    parts = rehearsed["parts"] | {"rates": rehearsed["parts"]["rates"] | {"code": None}}
    assert machine.code_hashes(rehearsed) in one
    assert "code: unknown (rates)" not in one
    assert "; unknown (rates)." in machine.machine(rehearsed | {"parts": parts})


def test_the_headline_compares_each_shape_with_its_fastest_transformer() -> None:
    headline = importlib.import_module("speed_page.headline").headline
    training = [
        {"model": model, "batch": batch, "context": context, "milliseconds": milliseconds}
        for model, batch, context, milliseconds in (
            (BOTH_NETS, 4, 8192, 2.0), (BOTH_NETS, 4, 8192, 3.0), (NO_NETS, 4, 8192, 1.0),
            (SINUSOIDAL, 4, 8192, 7.0), (SINUSOIDAL_8, 4, 8192, 5.0), (SINUSOIDAL_8, 32, 512, 1.0),
            (BOTH_NETS, 32, 512, 4.0), (BOTH_NETS, 8, 2048, 4.0), (ALIBI, 8, 2048, 1.0),
        )
    ]  # fmt: skip
    training.append({"model": SINUSOIDAL, "batch": 8, "context": 2048, "failed": "no memory"})
    rows = {"batch": 256, "absorbed": 8192, "milliseconds": 1.0}
    decoding = [
        rows | {"model": BOTH_NETS, "spread": 0},
        rows | {"model": BOTH_NETS, "spread": 512, "milliseconds": 2.0},
        rows | {"model": SINUSOIDAL_8, "spread": 0, "milliseconds": 9.0},
    ]
    report = {"parts": {name: {"results": found} for name, found in (("training", training), ("decoding", decoding))}}
    assert headline(report).splitlines()[2:] == [
        "| training step, 32×512 | 0.250 |  |",
        "| training step, 4×8,192 | 2.50 | 5.00 |",
        "| decoding, batch 256, after 8,192 tokens | 9.00 |  |",
        "| decoding, batch 256, after 8,192 ± 512 tokens | 4.50 |  |",
        "",
        f"The fastest Transformer was *{SINUSOIDAL_8}* wherever several were measured.",
    ]


def test_pages_and_figures_show_all_models(rehearsed: dict[str, Any], draw_speed: ModuleType) -> None:
    verdicts = importlib.import_module("speed_page.verdicts")
    report = rehearsed | {"rows": bars.verdicts(made_up())}
    pages = draw_speed.pages(report)
    text = "".join(pages.values())
    assert "{{" not in text
    assert "Not measured yet" not in text
    assert text.count("| with FlashAttention |") == 1
    for model in (BOTH_NETS, NO_NETS, SINUSOIDAL, SINUSOIDAL_8, ALIBI):
        for page in ("forward", "training"):
            assert f"\n| {model}" in pages[f"performance/{page}.md"]
    title = verdicts.title_of("forward at 2,976: FlexAttention ALiBi / ours")
    assert f"| {title} | ≥ 2 | ≥ 2.6 | 2.000, **met** | not measured |" in pages["performance.md"]
    assert set(draw_speed.drawn(report)) == set(draw_speed.FIGURES)


@pytest.mark.parametrize("name", smoke().ours)
@pytest.mark.parametrize(("batch", "length"), [(1, 13), (3, 16), (2, 1)])
def test_products_are_those_of_the_model(name: str, batch: int, length: int) -> None:
    config = smoke().ours[name]
    model = config.build(37).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(batch, length, dtype=torch.int64))
    counted = products.forward_products(config, 37, batch, length)
    assert products.total_flops(counted) == counter.get_total_flops()


def test_leaves_are_made_once_for_each_token_of_the_vocabulary() -> None:
    config, vocab_size = smoke().ours[BOTH_NETS], 5
    few, many = (
        products.total_flops(products.forward_products(config, vocab_size, 2, 16, each_token=each))
        for each in (False, True)
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer = config.build(vocab_size).blocks[0]
        assert isinstance(layer, PaperLayer)
        layer.leaves(torch.zeros(2 * 16 - vocab_size, config.embed_width))
    assert many - few == counter.get_total_flops()


def test_products_of_the_paper() -> None:
    sizes = full()
    flops = products.total_flops(products.forward_products(sizes.large, sizes.large_vocab_size, 32, 512))
    assert 3 * flops == pytest.approx(bars.LARGE_STEP_FLOPS, rel=0.01)


def test_products_alone_are_the_same_products() -> None:
    some = [products.Product(7, 3, 5), products.Product(2, 8, 1)]
    for backward in (False, True):
        run = products.run_of(some, torch.randn, backward=backward)
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == products.total_flops(some) * (3 if backward else 1)


@pytest.mark.parametrize("name", smoke().theirs)
def test_baselines_compute_what_the_models_compute(bench: Bench, name: str) -> None:
    model = bench.sizes.theirs[name].build(37).eval()
    tokens, targets = torch.randint(37, (2, 3, 20))
    torch.testing.assert_close(forward_function(bench, model, 20)(tokens), model(tokens))
    losses = {loss: function(tokens, targets) for loss, function in loss_functions(bench, model, 20).items()}
    assert len(losses) == 2
    for loss in losses.values():
        torch.testing.assert_close(loss, model.loss(tokens, targets))


@pytest.mark.parametrize("name", smoke().theirs)
def test_baselines_are_compiled_whole_with_a_residual_stream_in_the_dtype_of_the_products(name: str) -> None:
    """Check that the residual stream has the dtype of the states of an accelerated scan."""
    model = smoke().theirs[name].build(37).eval()
    enlarge(model, 3)
    tokens = torch.randint(37, (2, 20))
    positions, layers = positions_for(model, 20), layers_of(model)
    slopes = layers[0][0].slopes
    seen = []

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return whole_attention(queries, keys, values, slopes=slopes)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def features(tokens: torch.Tensor) -> torch.Tensor:
        return features_of(model, tokens, positions, attend)

    for _, mlp in layers:
        mlp.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        features_of(model, tokens, positions, attend)
        assert seen == [torch.bfloat16] * len(layers)
        plain = model.features(tokens)
        assert ((features(tokens) - plain).abs().mean() / plain.std()).item() < 0.02  # without attention: 0.4


def test_flex_attention_is_part_of_one_graph() -> None:
    model = smoke().theirs[ALIBI].build(37).eval()
    tokens = torch.randint(37, (2, 150))
    slopes = layers_of(model)[0][0].slopes
    assert slopes is not None
    attend = flex_alibi(slopes, 150)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(features_of(model, tokens, None, attend), model.head_weight)

    with torch.inference_mode():
        torch.testing.assert_close(logits(tokens), model(tokens))


def test_the_cached_transformer_decodes_as_the_model_does() -> None:
    model, length = smoke().theirs[SINUSOIDAL].build(37).eval(), 9
    with torch.inference_mode():
        enlarge(model, 5)
        _, state = model.step(torch.randint(37, (2, length - 1)), model.init_state(2))
        cached = CachedTransformer(model, 2, length)
        for pair, cache in zip(cached.caches, state.blocks[::2], strict=True):
            pair[0][:, :, :-1], pair[1][:, :, :-1] = cache.keys, cache.values
        cached.position.fill_(length - 1)  # the last place is still free
        tokens = torch.randint(37, (2,))
        logits, _ = model.step(tokens[:, None], state)
        torch.testing.assert_close(cached.logits(tokens), logits[:, 0])
        assert cached.position.tolist() == [length]
    assert cached.nbytes == 2 * len(layers_of(model)) * 2 * length * model.config.dim * 4


def made_up() -> dict[str, list[dict[str, Any]]]:
    """Return results, some of them missing."""
    ours = {"model": BOTH_NETS, "batch": 22, "context": 2_976, "tokens": 65_472, "milliseconds": 4.0}
    step = {"batch": 32, "context": 512, "tokens": 16_384}
    return {
        "rates": [{"what": "product", "flops_per_second": rate} for rate in (5e14, 8e14)] + [{"failed": "no"}],
        "forward": [
            ours | {"flops_every_token": int(2.4e12), "flops_as_run": int(1.6e12)},
            {"model": BOTH_NETS, "batch": 128, "context": 512, "failed": "no time left"},
            {"model": SINUSOIDAL, "context": 2_976, "failed": "no time left"},
            {"model": SINUSOIDAL_8, "context": 2_976, "milliseconds": 5.0},
            {"model": ALIBI, "context": 2_976, "milliseconds": 8.0},
        ],
        "training": [
            step | {"model": BOTH_NETS, "recompute": False, "milliseconds": 6.0, "peak_bytes": 2**30},
            step | {"model": SINUSOIDAL, "loss": "all logits", "milliseconds": 6.9, "peak_bytes": 4 * 2**30},
            step | {"model": SINUSOIDAL_8, "loss": "all logits", "milliseconds": 7.2, "peak_bytes": 4 * 2**30},
            step | {"model": ALIBI, "loss": "linear_cross_entropy", "milliseconds": 9.0, "peak_bytes": 2 * 2**30},
        ],
        "decoding": [
            {"model": BOTH_NETS, "batch": 1, "absorbed": 65_536, "spread": 0, "tokens_per_second": 9e3},
            *(
                {
                    "model": model, "batch": 1, "absorbed": 65_536, "spread": 0,
                    "milliseconds": 1e3 / speed, "tokens_per_second": speed,
                }
                for model, speed in ((SINUSOIDAL, 1e3), (SINUSOIDAL_8, 900.0))
            ),
        ],
        "startup": [{"caches": "empty", "first_step_seconds": 20.0}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("what", "against", "ratio", "met"),
    [
        ("forward at 2,976: flash Transformer / ours", SINUSOIDAL_8, 1.25, "missed"),
        ("forward at 2,976: flash Transformer / ours", SINUSOIDAL, None, None),
        ("forward at 2,976: FlexAttention ALiBi / ours", ALIBI, 2.0, "bar"),
        ("training step 32×512: best Transformer / ours", f"{SINUSOIDAL}, all logits", 1.15, "stretch"),
        ("training: peak memory, ours / leanest Transformer's", f"{ALIBI}, linear_cross_entropy", 0.5, "stretch"),
        ("decoding, batch 1, after 65,536 tokens: tokens/s, ours / Transformer's", SINUSOIDAL, 9.0, "bar"),
        ("decoding, batch 256, after 8,192 tokens: bytes of state, ours / Transformer's", "Transformers", None, None),
        ("seconds from process start to the end of the first training step", "", 20.0, "bar"),
        ("97.4M, training 32×512: FLOPs done / (time × 989 TFLOP/s)", "15.1 TFLOP a step", None, None),
    ],
)
def test_ratios_and_verdicts(what: str, against: str, ratio: float | None, met: str | None) -> None:
    rows = [row for row in bars.verdicts(made_up()) if row["what"] == what and row["against"] == against]
    row = next(row for row in rows if row["model"].startswith((BOTH_NETS, "AR-GRC, D")))
    assert row["ratio"] == (None if ratio is None else pytest.approx(ratio))
    assert row["met"] == met


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("part", ["training", "decoding"])
def test_no_best_of_transformers_of_which_one_failed_or_is_missing(part: str, fails: bool) -> None:
    results = made_up()
    rival = next(one for one in results[part] if one["model"] == SINUSOIDAL_8)
    if fails:
        del rival["milliseconds"]
        rival["failed"] = "TimeoutError: no time left"
    else:
        results[part].remove(rival)
    rows = [row for row in bars.verdicts(results) if row["what"].startswith(part) and "floor" not in row["what"]]
    assert len(rows) > 3
    assert {row["ratio"] for row in rows} == {None}


def test_the_floor_is_at_the_best_rate_of_the_run() -> None:
    rows = {row["what"]: row for row in bars.verdicts(made_up()) if row["model"] == f"{BOTH_NETS}, at 2,976"}
    assert rows["forward: time / floor, leaves of every token"]["ratio"] == pytest.approx(4 / 3)
    assert rows["forward: time / floor, leaves as run"]["ratio"] == pytest.approx(2)
    assert rows["forward: time / floor, leaves as run"]["met"] == "missed"


def test_every_bar_has_a_row_even_where_nothing_was_measured() -> None:
    rows = bars.verdicts({})
    assert {row["met"] for row in rows} == {None}
    whats = [row["what"] for row in rows]
    assert whats == sorted(whats, key=whats.index)  # rows of one bar stand together
    assert len(dict.fromkeys(whats)) == 18


def test_sizes_are_the_papers() -> None:
    sizes: Sizes = full()
    with torch.device("meta"):
        counts = {name: config.build(sizes.vocab_size) for name, config in sizes.ours.items()}
    millions = {name: sum(one.numel() for one in model.parameters()) / 1e6 for name, model in counts.items()}
    assert millions == {BOTH_NETS: pytest.approx(16.6, abs=0.05), NO_NETS: pytest.approx(10.9, abs=0.05)}
    assert {config.num_heads for config in sizes.theirs.values()} == {8, 16}
    assert dataclasses.asdict(sizes.ours[BOTH_NETS])["leaf_dropout"] == 0.1
