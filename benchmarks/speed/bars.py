"""The bars that we set ourselves, in one place, and what the results of a run come to beside them."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.speed.sizes import ALIBI, BOTH_NETS, FLASH, LARGE, OURS, THEIRS

PEAK_FLOPS = 989e12
"""Of one H200 in bfloat16, as its maker gives it."""
LARGE_STEP_FLOPS = 15.1e12
"""Of a training step of 32 × 512 tokens of the 97.4M configuration, counted by hand before anything was built."""
Results = list[dict[str, Any]]
Verdict = Literal["stretch", "bar", "missed"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    what: str
    bar: float
    stretch: float | None = None
    at_most: bool = False
    """Whether a ratio is to be at most the bar, rather than at least."""

    def verdict(self, ratio: float) -> Verdict:
        if self.stretch is not None and self._meets(ratio, self.stretch):
            return "stretch"
        return "bar" if self._meets(ratio, self.bar) else "missed"

    def _meets(self, ratio: float, mark: float) -> bool:
        return ratio <= mark if self.at_most else ratio >= mark


FLOORS = {"every_token": "leaves of every token", "as_run": "leaves as run"}
"""Two ways to count the products of a model: see products.py."""
FLOOR = {
    kind: Bar(what=f"forward: time / floor, {words}", bar=1.25, stretch=1.12, at_most=True)
    for kind, words in FLOORS.items()
}
FORWARD: dict[int, tuple[Bar, Bar | None]] = {
    512: (Bar(what="forward at 512: flash Transformer / ours", bar=1.0, stretch=1.2), None),
    2_976: (
        Bar(what="forward at 2,976: flash Transformer / ours", bar=1.4, stretch=1.8),
        Bar(what="forward at 2,976: FlexAttention ALiBi / ours", bar=2, stretch=2.6),
    ),
    65_536: (Bar(what="forward at 65,536: flash Transformer / ours", bar=11, stretch=15), None),
}
"""Context → bars against FlashAttention and against FlexAttention's ALiBi."""
DEPTH = Bar(what="forward of 65,536 tokens in one row: time / that in rows of 512", bar=1.05, at_most=True)
MILLION = Bar(
    what="forward of 1,048,576 tokens in one row: time a token / that at 512", bar=1.1, stretch=1.03, at_most=True
)
TRAINING: dict[tuple[int, int], Bar] = {
    (32, 512): Bar(what="training step 32×512: best Transformer / ours", bar=0.9, stretch=1.1),
    (4, 8_192): Bar(what="training step 4×8,192: best Transformer / ours", bar=1.5, stretch=2),
}
TRAINING_FLOOR = {
    kind: Bar(what=f"training step 32×512: time / floor, {words}", bar=2.2, stretch=1.6, at_most=True)
    for kind, words in FLOORS.items()
}
MEMORY = Bar(what="training: peak memory, ours / leanest Transformer's", bar=1.0, stretch=0.6, at_most=True)
DECODE_ONE = Bar(what="decoding, batch 1, after 65,536 tokens: tokens/s, ours / Transformer's", bar=3, stretch=10)
DECODE_MANY = Bar(what="decoding, batch 256, after 8,192 tokens: tokens/s, ours / Transformer's", bar=5)
DECODE_STATE = Bar(
    what="decoding, batch 256, after 8,192 tokens: bytes of state, ours / Transformer's", bar=1 / 500, at_most=True
)
STARTUP = Bar(what="seconds from process start to the end of the first training step", bar=30, stretch=12, at_most=True)
LARGE_SHARE = Bar(what="97.4M, training 32×512: FLOPs done / (time × 989 TFLOP/s)", bar=0.45, stretch=0.55)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a ratio, what it is of, and whether it meets its bar."""

    what: str
    model: str
    against: str
    ours: float | None
    theirs: float | None
    unit: str
    ratio: float | None
    """None: not measured."""
    bar: float
    stretch: float | None
    at_most: bool
    met: Verdict | None


def verdicts(parts: dict[str, Results]) -> list[dict[str, Any]]:
    """All rows that the bars ask for; those whose numbers are missing say so."""
    rows = (
        *_against_transformers(parts),
        *_forward_floor(parts),
        *_flatness(parts),
        *_training(parts),
        *_training_floor(parts),
        *_decoding(parts),
        _startup(parts),
        *_large(parts),
    )
    order = list(dict.fromkeys(row.what for row in rows))
    return [asdict(row) for row in sorted(rows, key=lambda row: order.index(row.what))]


def best_rate(parts: dict[str, Results]) -> float | None:
    """FLOPs a second of the fastest large product in this run."""
    rates = [one["flops_per_second"] for one in parts.get("rates", ()) if "flops_per_second" in one]
    return max(rates, default=None)


def floor_milliseconds(parts: dict[str, Results], flops: float | None) -> float | None:
    rate = best_rate(parts)
    return None if rate is None or flops is None else 1e3 * flops / rate


def fitting(results: Iterable[dict[str, Any]], **facts: object) -> Results:
    """Results with these facts that did not fail."""
    return [one for one in having(results, **facts) if "failed" not in one]


def having(results: Iterable[dict[str, Any]], **facts: object) -> Results:
    """Results with these facts, those that failed among them."""
    return [one for one in results if all(one.get(name) == value for name, value in facts.items())]


def _of_all(models: Iterable[str], results: Results, **facts: object) -> Results:
    """What these models came to; nothing where one of them failed or is missing: the best of the rest flatters us."""
    found = [having(results, model=model, **facts) for model in models]
    whole = all(of_model and not any("failed" in one for one in of_model) for of_model in found)
    return [one for of_model in found for one in of_model] if whole else []


def value_of(results: Iterable[dict[str, Any]], key: str, **facts: object) -> Any:
    """The one such result's value; None where it is missing."""
    found = fitting(results, **facts)
    return found[0].get(key) if found else None


def fastest(results: Iterable[dict[str, Any]], key: str = "milliseconds") -> dict[str, Any]:
    """The result with the least of something; an empty one where there is none."""
    return min((one for one in results if one.get(key) is not None), key=lambda one: one[key], default={})


def _row(
    bar: Bar,
    *,
    model: str,
    against: str,
    ours: float | None,
    theirs: float | None,
    unit: str = "ms",
    of_ours: bool | None = None,
) -> Row:
    """`of_ours`: whether the ratio is ours / theirs; by default where it is to be small."""
    ratio = None
    if ours is not None and theirs is not None:
        ratio = ours / theirs if (bar.at_most if of_ours is None else of_ours) else theirs / ours
    return Row(
        what=bar.what,
        model=model,
        against=against,
        ours=ours,
        theirs=theirs,
        unit=unit,
        ratio=ratio,
        bar=bar.bar,
        stretch=bar.stretch,
        at_most=bar.at_most,
        met=None if ratio is None else bar.verdict(ratio),
    )


def _against_transformers(parts: dict[str, Results]) -> Iterator[Row]:
    results = parts.get("forward", [])
    for context, (flash, alibi) in FORWARD.items():
        for model in OURS:
            ours = value_of(results, "milliseconds", model=model, context=context)
            for against in (*FLASH, ALIBI):
                bar = alibi if against == ALIBI else flash
                if bar is not None:
                    theirs = value_of(results, "milliseconds", model=against, context=context)
                    yield _row(bar, model=model, against=against, ours=ours, theirs=theirs)


def _forward_floor(parts: dict[str, Results]) -> Iterator[Row]:
    results = parts.get("forward", [])
    for model in OURS:
        for context in (512, 2_976, 8_192, 65_536):
            facts: dict[str, Any] = {"model": model, "context": context}
            for kind, bar in FLOOR.items():
                yield _row(
                    bar,
                    model=f"{model}, at {context:,}",
                    against="floor",
                    ours=value_of(results, "milliseconds", **facts),
                    theirs=floor_milliseconds(parts, value_of(results, f"flops_{kind}", **facts)),
                )


def _flatness(parts: dict[str, Results]) -> Iterator[Row]:
    results = parts.get("forward", [])
    for model in OURS:
        short = _per_token(results, model, 512)
        for bar, context in ((DEPTH, 65_536), (MILLION, 1_048_576)):
            ours = _per_token(results, model, context)
            yield _row(bar, model=model, against="rows of 512", ours=ours, theirs=short, unit="ns/token")


def _per_token(results: Results, model: str, context: int) -> float | None:
    found = fitting(results, model=model, context=context)
    return 1e6 * found[0]["milliseconds"] / found[0]["tokens"] if found else None


def _training(parts: dict[str, Results]) -> Iterator[Row]:
    results = parts.get("training", [])
    for (batch, context), bar in TRAINING.items():
        theirs = _of_all(THEIRS, results, batch=batch, context=context)
        quickest, leanest = fastest(theirs), fastest(theirs, "peak_bytes")
        for model in OURS:
            for recompute in (False, True):
                mine = fastest(fitting(results, model=model, batch=batch, context=context, recompute=recompute))
                name = f"{model}, recomputing" if recompute else model
                yield _row(
                    bar, model=name, against=_with_loss(quickest),
                    ours=mine.get("milliseconds"), theirs=quickest.get("milliseconds"),
                )  # fmt: skip
                if not recompute:  # the Transformers do not either
                    yield _row(
                        MEMORY, model=f"{name}, {batch}×{context:,}", against=_with_loss(leanest),
                        ours=_mebibytes(mine), theirs=_mebibytes(leanest), unit="MiB",
                    )  # fmt: skip


def _with_loss(result: dict[str, Any]) -> str:
    return f"{result['model']}, {result['loss']}" if result else "Transformers"


def _mebibytes(result: dict[str, Any]) -> float | None:
    return None if result.get("peak_bytes") is None else result["peak_bytes"] / 2**20


def _training_floor(parts: dict[str, Results]) -> Iterator[Row]:
    results = parts.get("training", [])
    for model in OURS:
        facts: dict[str, Any] = {"model": model, "batch": 32, "context": 512, "recompute": False}
        for kind, bar in TRAINING_FLOOR.items():
            yield _row(
                bar,
                model=model,
                against="floor",
                ours=value_of(results, "milliseconds", **facts),
                theirs=floor_milliseconds(parts, value_of(results, f"flops_{kind}", **facts)),
            )


def _decoding(parts: dict[str, Results]) -> Iterator[Row]:
    results = parts.get("decoding", [])
    for bar, batch, absorbed, spread in (
        (DECODE_ONE, 1, 65_536, 0),
        (DECODE_MANY, 256, 8_192, 0),
        (DECODE_MANY, 256, 8_192, 512),
    ):
        quickest = fastest(_of_all(FLASH, results, batch=batch, absorbed=absorbed))
        facts: dict[str, Any] = {"model": BOTH_NETS, "batch": batch, "absorbed": absorbed, "spread": spread}
        model = f"{BOTH_NETS}, rows at 8,192 ± {spread}" if spread else BOTH_NETS
        against = quickest.get("model", "Transformers")
        yield _row(
            bar, model=model, against=against, unit="tokens/s", of_ours=True,
            ours=value_of(results, "tokens_per_second", **facts), theirs=quickest.get("tokens_per_second"),
        )  # fmt: skip
        if batch > 1:
            yield _row(
                DECODE_STATE, model=model, against=against, unit="bytes",
                ours=value_of(results, "state_bytes", **facts), theirs=quickest.get("state_bytes"),
            )  # fmt: skip


def _startup(parts: dict[str, Results]) -> Row:
    seconds = value_of(parts.get("startup", []), "first_step_seconds", caches="empty")
    row = _row(STARTUP, model=BOTH_NETS, against="", ours=seconds, theirs=1.0, unit="s")
    return replace(row, theirs=None)


def _large(parts: dict[str, Results]) -> Iterator[Row]:
    """Both ways to count the FLOPs of a step; recomputed ones are not counted again."""
    result = fastest(fitting(parts.get("large", []), model=LARGE))
    seconds = None if not result else 1e-3 * result["milliseconds"]
    for flops, words in ((LARGE_STEP_FLOPS, "15.1 TFLOP a step"), (result.get("flops_as_run"), "FLOPs as counted")):
        reached = None if seconds is None or flops is None else 1e-12 * flops / seconds
        yield _row(
            LARGE_SHARE,
            model=LARGE,
            against=words,
            unit="TFLOP/s",
            of_ours=True,
            ours=reached,
            theirs=1e-12 * PEAK_FLOPS,
        )
