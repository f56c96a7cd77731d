"""Associativity: distances against loops, the study that puts everything together, and the verb as people meet it."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logdepth import associativity, drawing
from logdepth.associativity import (
    Associativity,
    Distance,
    InParts,
    WithTree,
    distances,
    draw,
    left_fold,
    parts_of,
    scanned,
    spread_windows,
    study,
)
from logdepth.associativity.trees import with_tree
from logdepth.blocks import PaperLayer
from logdepth.checksums import unseal
from logdepth.cli import main
from logdepth.errors import UserError
from logdepth.evaluate import evaluate
from logdepth.models import LM
from tests.small_models import SMALL_MODELS, VOCAB
from tests.tiny_corpus import VOCAB as TEXT_VOCAB
from tests.tiny_corpus import store_of

TOKENS = torch.randint(VOCAB, (501,), generator=torch.Generator().manual_seed(3)).tolist()
ASSOCIATIVE = dataclasses.replace(SMALL_MODELS["affine"], post_merge="none")


def by_loops(model: LM, windows: Tensor) -> dict[tuple[int, str, int], tuple[float, ...]]:
    """Distances as their definition has them: one triple at a time, and every pair of windows."""
    layers: list[tuple[Any, Any, Tensor]] = []

    def noted(operator: Any, leaves: Tensor) -> Tensor:
        layers.append((*(operator if isinstance(operator, tuple) else (operator, operator)), leaves))
        return scanned(operator, leaves)

    with with_tree(model, noted):
        model(windows)
    found = {}
    for layer, (up, down, leaves) in enumerate(layers):
        blocks, level = leaves, 0
        while blocks.shape[1] >= 3:
            for law, left, right in (("up", up, up), ("down", down, down), ("mixed", down, up)):
                squares, influences, relative, cosines, unrelated = [], [], [], [], []
                for place in range(blocks.shape[1] - 2):
                    a, b, c = blocks[:, place], blocks[:, place + 1], blocks[:, place + 2]
                    one, other = left(left(a, b), c), left(a, right(b, c))
                    replaced = left(left(torch.cat([a[-1:], a[:-1]]), b), c)
                    squares += (one - other).square().sum(-1).tolist()
                    influences += (one - replaced).square().sum(-1).tolist()
                    relative += ((one - other).norm(dim=-1) / one.norm(dim=-1)).tolist()
                    cosines += torch.cosine_similarity(one, other).tolist()
                    unrelated += [float((x - y).square().sum()) for x, y in itertools.combinations(one, 2)]
                scale = np.mean(unrelated)
                found[layer, law, level] = (
                    len(squares),
                    math.sqrt(np.mean(squares) / scale),
                    math.sqrt(np.mean(influences) / scale),
                    float(np.mean(relative)),
                    float(np.mean(cosines)),
                )
            pairs = blocks.shape[1] // 2
            blocks = torch.stack([up(blocks[:, 2 * j], blocks[:, 2 * j + 1]) for j in range(pairs)], dim=1)
            level += 1
    return found


@pytest.mark.parametrize("name", ["ar-grc", "every-merge", "deep"])
@pytest.mark.parametrize("context", [3, 13, 16])
def test_distances_are_their_definition(name: str, context: int) -> None:
    model = SMALL_MODELS[name].build(VOCAB).double().eval()
    windows = spread_windows(store_of(TOKENS), context, 5)
    with torch.no_grad():
        expected = by_loops(model, windows)
    found = distances(model, windows, batch_tokens=2 * context)
    assert max(one.level for one in found) == (context // 3).bit_length() - 1
    laws = {"up"} if name == "every-merge" else {"up", "down", "mixed"}
    assert {(one.layer, one.law, one.level) for one in found} == {key for key in expected if key[1] in laws}
    for one in found:
        values = (one.triples, one.distance, one.influence, one.relative, one.cosine)
        assert values == pytest.approx(expected[one.layer, one.law, one.level], rel=1e-9)
        assert one.error is None


def test_groups_of_windows_tell_the_error() -> None:
    model = SMALL_MODELS["ar-grc"].build(VOCAB).double().eval()
    windows = spread_windows(store_of(TOKENS), 12, 27)
    groups = [distances(model, windows[first::3], batch_tokens=500)[0] for first in range(3)]
    seen: list[None] = []
    whole = distances(model, windows, batch_tokens=500, on_group=lambda: seen.append(None))[0]
    assert len(seen) == 3
    assert whole.triples == 27 * 10 == sum(one.triples for one in groups)
    values = [one.distance for one in groups]
    assert whole.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))
    assert min(values) < whole.distance < max(values)


def test_an_associative_model_has_no_distance_but_an_influence() -> None:
    model = ASSOCIATIVE.build(VOCAB).double().eval()
    for one in distances(model, spread_windows(store_of(TOKENS), 32, 10), batch_tokens=500):
        assert one.law == "up"
        assert one.distance < 1e-6
        assert one.cosine == pytest.approx(1)
        assert one.influence > 1e-3


@pytest.mark.parametrize(("kept", "influence"), [(0, 1.0), (1, 0.0)])
def test_operators_that_keep_one_operand_differ_in_influence(
    kept: int, influence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PaperLayer, "operators", lambda _: lambda *operands: operands[kept])
    model = SMALL_MODELS["ar-grc"].build(VOCAB).double().eval()
    for one in distances(model, spread_windows(store_of(TOKENS), 16, 2), batch_tokens=500):
        assert one.distance == 0
        assert one.influence == pytest.approx(influence)


def test_windows_are_whole_spread_and_within_documents() -> None:
    store = store_of(list(range(100)))
    assert spread_windows(store, 10, 4)[:, 0].tolist() == [0, 30, 60, 90]
    assert spread_windows(store, 10, 99)[:, 0].tolist() == list(range(0, 100, 10))
    ends = {22, 23, 61}
    store = store_of([2 if place in ends else 3 + place for place in range(100)], separator=2)
    assert len(spread_windows(store, 10, 99)) == 10
    for window in spread_windows(store, 10, 99, within_documents=True):
        assert 2 not in window[:-1]
    assert spread_windows(store, 10, 99, within_documents=True)[:, 0].tolist() == [3, 13, 27, 37, 47, 65, 75, 85]
    with pytest.raises(UserError, match="'made' has 1 windows of 51 tokens, but a comparison needs at least two"):
        spread_windows(store, 51, 4)


@pytest.mark.parametrize("context", [7, 16, 100, 250, 251, 500])
def test_parts_have_the_windows_of_the_whole(context: int) -> None:
    model, store = SMALL_MODELS["ar-grc"].build(VOCAB).double(), store_of(TOKENS)
    parts = parts_of(store, context)
    assert len(parts) == min(16, 500 // context)
    whole = evaluate(model, store, context=context)
    found = InParts([evaluate(model, part, context=context) for part in parts]).whole
    assert (found.tokens, found.context) == (500, context)
    assert found.nats == pytest.approx(whole.nats, rel=1e-12)
    np.testing.assert_allclose(found.position_nats, whole.position_nats)
    np.testing.assert_array_equal(found.position_tokens, whole.position_tokens)


def test_a_study_puts_everything_together(tmp_path: Path) -> None:
    model, store = SMALL_MODELS["deep"].build(VOCAB), store_of(TOKENS)
    state = torch.get_rng_state()
    found = study(model, store, context=20, offsets=(3, 5), num_windows=20, num_seeds=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert (found.num_layers, found.num_windows, found.context) == (3, 20, 20)
    assert list(found.trees) == ["scan", "left fold", "offset 3", "offset 5"]
    assert found.trees["scan"].whole.nats == pytest.approx(evaluate(model, store, context=20).nats, rel=1e-6)
    fold = evaluate(WithTree(model, left_fold), store, context=20)
    assert found.over_scan("left fold") == pytest.approx(
        fold.token_perplexity / evaluate(model, store, context=20).token_perplexity, rel=1e-5
    )
    assert found.over_scan("scan") == 1
    assert found.error_over_scan("scan") == 0
    assert found.error_over_scan("left fold") > 0
    torch.manual_seed(1)
    fresh = distances(SMALL_MODELS["deep"].build(VOCAB).eval(), spread_windows(store, 20, 20), batch_tokens=500)
    assert [one.distance for one in found.untrained[1]] == pytest.approx([one.distance for one in fresh], rel=1e-4)
    one = found.distances[4]
    beside = found.over_seeds(one)
    values = [seed[4].distance for seed in found.untrained]
    assert beside is not None
    assert (beside.distance, beside.deviation) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    saved = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (saved["schema"], saved["version"]) == ("logdepth.associativity", 1)
    assert saved["distances"][4]["untrained"]["distance"] == beside.distance
    assert [tree["tree"] for tree in saved["trees"]] == list(found.trees)
    draw(found, tmp_path / "figure")
    assert {file.name for file in tmp_path.iterdir()} == {"figure.svg", "figure.png"}


def test_numbers_that_are_none_are_told_and_drawn(tmp_path: Path) -> None:
    whole = evaluate(SMALL_MODELS["ar-grc"].build(VOCAB), store_of(TOKENS), context=500)
    lost = dataclasses.replace(whole, nats=whole.nats + 1e6)
    worse = dataclasses.replace(whole, nats=whole.nats + 2e3)
    one = Distance(0, "up", 0, 9, math.nan, None, math.nan, 0.1, 0.9)
    trees = {"scan": InParts([whole]), "left fold": InParts([lost]), "offset 1": InParts([worse])}
    found = Associativity(context=500, num_windows=2, distances=[one], untrained=[], trees=trees)
    saved = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert saved["distances"][0]["distance"] is saved["distances"][0]["untrained"] is None
    assert saved["trees"][1]["perplexity_over_scan"] is saved["trees"][1]["error_over_scan"] is None
    assert saved["trees"][2]["perplexity_over_scan"] == pytest.approx(math.exp(4))
    assert found.error_over_scan("left fold") is None
    several = {
        name: InParts([part, dataclasses.replace(part, nats=part.nats * 1.1)])
        for name, part in (("scan", whole), ("left fold", lost))
    }
    assert dataclasses.replace(found, trees=several).error_over_scan("left fold") is None, "the ratio has no end"
    draw(found, tmp_path / "figure")


def test_contexts_that_would_need_a_state_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SMALL_MODELS["ar-grc"].build(VOCAB)
    assert associativity.longest_context(model) == 16_384
    for context in (2, 16_385):
        with pytest.raises(UserError, match=f"from 3, for three blocks, to 16,384, .* got {context:,}"):
            study(model, store_of(TOKENS), context=context)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("associativity")
    tiny = (
        f"--data.corpus text --data.tokenizer.vocab-size {TEXT_VOCAB} --data.paths {corpus} "
        "--train.max-steps 6 --train.batch-size 4 --train.context 16 --train.device cpu"
    ).split()
    widths = {"ar-grc": "--model.embed-width 16 --model.operator.width 16", "transformer-alibi": "--model.num-layers 1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGDEPTH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        for model, flags in widths.items():
            assert main(["train", f"pydocs-{model}", *tiny, *flags.split(), "--out", str(out / model)]) == 0
    return out


def test_the_verb_prints_tables_and_writes_files(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained / "ar-grc"
    capsys.readouterr()
    assert main(["associativity", str(run), "--windows", "16", "--seeds", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "16 windows of 16 tokens" in said
    for word in ("mixed", "influence", "left fold", "offset 8", "bits per byte"):
        assert word in said
    assert "offset 16" not in said  # it would be the scan
    names = {"associativity.json", "associativity.svg", "associativity.png"}
    assert {file.name for file in (run / "associativity").iterdir()} == names
    file = run / "associativity" / "associativity.json"
    record = unseal(json.loads(file.read_text()), file, "make it again", required=True)
    assert record["model"]["kind"] == "ScanLMConfig"
    assert (record["run"], record["step"], record["weights"]) == (str(run), 6, "best")
    assert "torch" in record["environment"]
    assert record["command"].startswith("logdepth")
    assert "command" not in record["environment"]

    flags = ("--context", "8", "--offsets", "3", "--seeds", "0", "--weights", "last", "--out", str(tmp_path / "other"))
    assert main(["associativity", str(run), *flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads((tmp_path / "other" / "associativity.json").read_text())
    assert [tree["tree"] for tree in answer["trees"]] == ["scan", "left fold", "offset 3"]
    assert answer["untrained"] == []
    assert main(["evaluate", str(run), "--contexts", "8", "--weights", "last", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["results"][0]
    assert answer["trees"][0]["nats"] == pytest.approx(plain["nats"], rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("ar-grc --windows 1", "--windows must be at least 2"),
        ("ar-grc --offsets 0", "--offsets at least 1"),
        ("ar-grc --seeds -1", "--seeds at least 0"),
        ("ar-grc --context 2", "the context must be from 3, for three blocks, to 16,384"),
        ("ar-grc --context 16000", "choose a shorter --context"),
        ("ar-grc --out {run}/config.json", "cannot write"),
        ("transformer-alibi", "contains a model without an operator; choose a run of a scan model"),
        ("nothing", "holds no run"),
    ],
)
def test_mistakes_are_one_line(trained: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    name, *rest = flags.format(run=trained / "ar-grc").split()
    assert main(["associativity", str(trained / name), *rest]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("logdepth associativity: ")
    assert message in line


def test_without_matplotlib_nothing_is_started(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UserError("figures need matplotlib")

    monkeypatch.setattr(drawing, "require_matplotlib", missing)
    capsys.readouterr()
    assert main(["associativity", str(trained / "ar-grc")]) == 2
    assert capsys.readouterr().err == "logdepth associativity: figures need matplotlib\n"
