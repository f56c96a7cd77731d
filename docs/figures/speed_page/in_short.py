"""What most readers come for: how many times as fast as the fastest Transformer."""

from collections.abc import Callable

from benchmarks.speed import bars
from benchmarks.speed.sizes import BOTH_NETS, NO_NETS, THEIRS
from speed_page.measured import Report, Result, measured, number, places_of, results
from speed_page.tables import table

Name = Callable[[Result], str]
LINES: dict[str, tuple[tuple[str, ...], Name]] = {
    "forward": (("context",), lambda one: f"forward pass, rows of {one['context']:,}"),
    "training": (("context", "batch"), lambda one: f"training step, {one['batch']}×{one['context']:,}"),
    "decoding": (
        ("batch", "absorbed", "spread"),
        lambda one: f"decoding, batch {one['batch']}, after {places_of(one)}",
    ),
}
"""Part → what a line is of, and its name."""


def in_short(report: Report) -> str:
    lines: list[list[str]] = []
    rivals: set[str] = set()
    for part, (facts, name) in LINES.items():
        tried, found = measured(report).get(part, []), results(report, part)
        kinds = {tuple(one[fact] for fact in facts): name(one) for one in found}
        for kind in sorted(kinds):
            here = dict(zip(facts, kind, strict=True))
            of_theirs = here | ({"spread": 0} if "spread" in here else {})  # a cache is as large wherever rows stand
            theirs = [one for one in bars.having(tried, **of_theirs) if one["model"] in THEIRS]
            if theirs and not any("failed" in one for one in theirs):  # the best of the rest would flatter us
                rival = bars.fastest(theirs)
                rivals.add(rival["model"])
                lines.append([kinds[kind], *(_times(found, model, here, rival) for model in (BOTH_NETS, NO_NETS))])
    always = f"Wherever others were measured too, the fastest was *{rivals.pop()}*." if len(rivals) == 1 else ""
    return f"{table(('times as fast as the fastest Transformer', BOTH_NETS, NO_NETS), lines)}\n\n{always}"


def _times(found: list[Result], model: str, here: Result, rival: Result) -> str:
    ours = bars.fastest(bars.fitting(found, model=model, **here)).get("milliseconds")
    return "" if ours is None else number(rival["milliseconds"] / ours)
