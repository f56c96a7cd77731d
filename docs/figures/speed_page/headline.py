"""The headline table: the speedup over the fastest Transformer."""

from collections.abc import Callable

from benchmarks.speed import bars
from benchmarks.speed.sizes import BOTH_NETS, NO_NETS, THEIRS
from speed_page.measured import Report, Result, measured, number, results, tokens_read
from speed_page.tables import table

Name = Callable[[Result], str]
LINES: dict[str, tuple[tuple[str, ...], Name]] = {
    "forward": (("context",), lambda one: f"forward pass, sequences of {one['context']:,} tokens"),
    "training": (("context", "batch"), lambda one: f"training step, {one['batch']}×{one['context']:,}"),
    "decoding": (
        ("batch", "absorbed", "spread"),
        lambda one: f"decoding, batch {one['batch']}, after {tokens_read(one)} tokens",
    ),
}
"""Part → the facts that identify a line of the table, and the name of the line."""


def headline(report: Report) -> str:
    lines: list[list[str]] = []
    rivals: set[str] = set()
    for part, (facts, name) in LINES.items():
        tried, found = measured(report).get(part, []), results(report, part)
        kinds = {tuple(one[fact] for fact in facts): name(one) for one in found}
        for kind in sorted(kinds):
            here = dict(zip(facts, kind, strict=True))
            # A cache has the same size whatever the lengths: Transformers are measured with equal lengths only.
            of_theirs = here | ({"spread": 0} if "spread" in here else {})
            theirs = [one for one in bars.having(tried, **of_theirs) if one["model"] in THEIRS]
            if theirs and not any("failed" in one for one in theirs):  # the best of the rest would flatter us
                rival = bars.fastest(theirs)
                rivals.add(rival["model"])
                lines.append([kinds[kind], *(_speedup(found, model, here, rival) for model in (BOTH_NETS, NO_NETS))])
    fastest = (
        f"The fastest Transformer was *{rivals.pop()}* wherever several were measured." if len(rivals) == 1 else ""
    )
    return f"{table(('speedup over the fastest Transformer', BOTH_NETS, NO_NETS), lines)}\n\n{fastest}"


def _speedup(found: list[Result], model: str, here: Result, rival: Result) -> str:
    ours = bars.fastest(bars.fitting(found, model=model, **here)).get("milliseconds")
    return "" if ours is None else number(rival["milliseconds"] / ours)
