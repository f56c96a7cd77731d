"""The tables of measurements, one function per part of the benchmark."""

from collections.abc import Callable

import torch

from benchmarks.speed import bars, sizes
from benchmarks.speed.sizes import OURS, THEIRS
from speed_page.measured import FLOORS, Report, Result, measured, mebibytes, number, results, tokens_read, variant
from speed_page.tables import table


def forward(report: Report) -> str:
    found, everything = results(report, "forward"), measured(report)
    contexts = sorted({one["context"] for one in found})
    rows = []
    for model in (*OURS, *THEIRS):
        rows.append([model, *_cells(found, contexts, model, lambda one: number(one["milliseconds"]))])
        rows.append(["quartiles", *_cells(found, contexts, model, _quartiles)])
        if model in OURS:
            for kind, words in FLOORS.items():

                def floor(one: Result, kind: str = kind) -> str:
                    return number(bars.floor_milliseconds(everything, one.get(f"flops_{kind}")))

                def alone(one: Result, kind: str = kind) -> str:
                    return number(one.get(f"products_{kind}", {}).get("milliseconds"))

                rows.append([f"floor, {words}", *_cells(found, contexts, model, floor)])
                rows.append([f"matrix products alone, {words}", *_cells(found, contexts, model, alone)])
        else:
            by_flash = _cells(
                found, contexts, model, lambda one: number(one.get("whole_milliseconds", {}).get("flash"))
            )
            if set(by_flash) != {"–"}:
                rows.append(["with FlashAttention", *by_flash])
            least = _cells(found, contexts, model, lambda one: number(_floor_of_transformer(report, one)))
            if set(least) != {"–"}:
                rows.append(["products at the floor's rate plus measured attention", *least])
    tokens = max((one["tokens"] for one in found if one["model"] in THEIRS), default=0)
    note = (
        f"Milliseconds per forward pass of {tokens:,} tokens, as nearly as whole sequences allow, by sequence length."
    )
    if contexts and contexts[-1] > tokens:
        note += f" The last column is one sequence of {contexts[-1]:,} tokens."
    return f"{note} {_attentions(found)}\n\n{table(['ms', *(f'{one:,}' for one in contexts)], rows)}"


def _attentions(found: list[Result]) -> str:
    """List the attention kernels of each Transformer, in the order of sequence lengths."""
    used: dict[str, dict[str, None]] = {}
    for one in sorted(found, key=lambda one: one["context"]):
        if one["model"] in THEIRS:
            used.setdefault(one["model"], {})[one["attention"]] = None
    return "Attention: " + "; ".join(f"{model}: {' and '.join(names)}" for model, names in used.items()) + "."


def _floor_of_transformer(report: Report, one: Result) -> float | None:
    """Return the time of its matrix products at the best rate of the run plus its measured attention, in ms."""
    size = sizes.smoke() if report["smoke"] else sizes.full()
    config = size.theirs[one["model"]]
    with torch.device("meta"):
        model = config.build(size.vocab_size)
    looked_up = 0 if config.tied else model.embedding.weight.numel()
    weights = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2) - looked_up
    products = bars.floor_milliseconds(measured(report), 2 * one["tokens"] * weights)
    kernel = one["attention"].rpartition(", ")[2]
    attention = one.get("attention_milliseconds", {}).get(kernel)
    return None if products is None or attention is None else products + config.num_layers * attention


def _quartiles(one: Result) -> str:
    return " – ".join(number(quartile) for quartile in one["quartiles"])


def _cells(found: list[Result], contexts: list[int], model: str, text: Callable[[Result], str]) -> list[str]:
    cells = []
    for context in contexts:
        fitting = bars.fitting(found, model=model, context=context)
        cells.append(text(fitting[0]) if fitting else "–")
    return cells


def training(report: Report) -> str:
    found = sorted(results(report, "training"), key=_shape)
    head = ("model", "step", "ms", "quartiles", "tokens/s", "peak memory, MiB")
    return f"{_attentions(found)}\n\n{table(head, map(_training_row, found))}"


def training_floor(report: Report) -> str:
    everything = measured(report)
    rows = []
    for one in sorted(results(report, "training"), key=_shape):
        if "products_as_run" in one:
            floors = [bars.floor_milliseconds(everything, one[f"flops_{kind}"]) for kind in FLOORS]
            alone = [one[f"products_{kind}"]["milliseconds"] for kind in FLOORS]
            cells = (one["milliseconds"], *floors, *alone)
            rows.append([one["model"], f"{one['batch']}×{one['context']:,}", *map(number, cells)])
    words = FLOORS.values()
    head = ["ms", "step", "measured", *(f"floor, {one}" for one in words)]
    head += [f"matrix products alone, {one}" for one in words]
    return table(head, rows)


def _shape(one: Result) -> tuple[int, int]:
    """Return the sort key of a training step."""
    return one["context"], one["batch"]


def large(report: Report) -> str:
    found = results(report, "large")
    head = (
        "97.4M, vocabulary 50,000",
        "step",
        "ms",
        "quartiles",
        "tokens/s",
        "peak memory, MiB",
        "TFLOP per step, counted",
    )
    return table(head, ([*_training_row(one), number(1e-12 * one["flops_as_run"])] for one in found))


def _training_row(one: Result) -> list[str]:
    return [
        variant(one),
        f"{one['batch']}×{one['context']:,}",
        number(one["milliseconds"]),
        _quartiles(one),
        number(one["tokens_per_second"]),
        number(mebibytes(one)),
    ]


def decoding(report: Report) -> str:
    rows = [
        [
            one["model"],
            str(one["batch"]),
            tokens_read(one),
            number(1e3 * one["milliseconds"]),
            number(one["tokens_per_second"]),
            number(one["state_bytes"]),
        ]
        for one in sorted(results(report, "decoding"), key=lambda one: (one["batch"], one["absorbed"]))
    ]
    return table(("model", "batch", "tokens read before", "µs per step", "tokens/s", "state, bytes"), rows)


def startup(report: Report) -> str:
    rows = (
        [f"compile caches {one['caches']}", *(number(one["all_steps_seconds"][step]) for step in (0, -1))]
        for one in results(report, "startup")
    )
    return table(("seconds from process start to the end of", "the first step", "the first replayed step"), rows)


def rates(report: Report) -> str:
    rows = [
        ["×".join(f"{side:,}" for side in one["shape"]), number(1e-12 * one["flops_per_second"]) + " TFLOP/s"]
        if one["what"] == "product"
        else ["copy, bytes read and written", number(1e-12 * one["bytes_per_second"]) + " TB/s"]
        for one in results(report, "rates")
    ]
    return table(("bfloat16 matrix product", "measured rate"), rows)
