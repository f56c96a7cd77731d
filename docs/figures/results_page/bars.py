"""The targets of the reproduction and whether they were reached. Thresholds are defined only here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logdepth.report.table import Cell
from results_page.findings import Find, Finding, below, bits_per_byte, gap, of_model, of_two, order, word_perplexity
from results_page.kept import STUDIES, Kept, home_of, label_of
from results_page.lengths import LONGEST, TRAINED, over_trained
from results_page.markdown import table

HEADS = ("measure", "paper", "target", "stretch target", "measured", "verdict")
GRC, MLP_LDRU, ALIBI, SINUSOIDAL = "ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A target, and how to measure a study's runs against it. Lower is better."""

    what: str
    paper: str
    wanted: str
    hoped: str = ""
    bar: float | None = None
    stretch: float | None = None
    studies: tuple[str, ...]
    find: Find
    every: bool = False
    """Whether every study must reach the target; otherwise one is enough."""
    needs_all: bool = False
    """Whether the target can only be judged when all its studies have been run."""


BARS = (
    Bar(
        what="PTB, AR-GRC with at most 3.5M parameters, bits per byte",
        paper="1.316 if V = 1k, 1.202 if V = 1.5k",
        wanted="≤ 1.30",
        hoped="≤ 1.202",
        bar=1.30,
        stretch=1.202,
        studies=("ptb", "ptb-1k", "ptb-tuned", "ptb-tuned-deep"),
        find=of_model(GRC, bits_per_byte, most=3.5),
    ),
    Bar(
        what="PTB, order of the four models after tuning, bits per byte",
        paper="sinusoidal < ALiBi < AR-GRC < AR-MLP-LDRU",
        wanted="shown with standard deviations",
        studies=("ptb-tuned",),
        find=order,
    ),
    Bar(
        what="WikiText-2 `.tokens`, AR-GRC with at most 16.6M parameters, tuned, word perplexity",
        paper="– (raw text: about 418)",
        wanted="≤ 92",
        hoped="≤ 80",
        bar=92,
        stretch=80,
        studies=("wikitext2-tuned", "wikitext2-tuned-deep"),
        find=of_model(GRC, word_perplexity, most=16.6),
    ),
    Bar(
        what="WikiText-2, AR-GRC below AR-MLP-LDRU, token perplexity",
        paper="90.74 < 122.81",
        wanted="every seed of 3 below every seed of 3",
        bar=math.nextafter(1, 0),  # equal is not below
        studies=("wikitext2", "wikitext2-tuned"),
        find=of_two(GRC, MLP_LDRU, below),
        every=True,
    ),
    Bar(
        what=f"AR-GRC, perplexity at {LONGEST:,} / at {TRAINED}, in every study",
        paper="about 1",
        wanted="≤ 1.00",
        hoped="≤ 0.97",
        bar=1.00,
        stretch=0.97,
        studies=tuple(STUDIES),
        find=of_model(GRC, over_trained),
        every=True,
    ),
    Bar(
        what=f"Transformer with sinusoidal positions, perplexity at {LONGEST:,} / at {TRAINED}",
        paper="rises sharply",
        wanted="shown",
        studies=("wikitext2", "wikitext2-tuned", "ptb", "ptb-1k", "ptb-tuned", "webmix"),
        find=of_model(SINUSOIDAL, over_trained),
    ),
    Bar(
        what="AR-GRC minus Transformer with ALiBi, bits per byte, on webmix and on WikiText-2",
        paper="larger on OpenWebText2 than on WikiText-2",
        wanted="shown",
        studies=("wikitext2", "webmix"),
        find=of_two(GRC, ALIBI, gap),
        needs_all=True,
    ),
)


def bars(kept: Kept) -> str:
    """Return all targets, with what every study measured."""
    return table(HEADS, (_row(kept, bar) for bar in BARS))


def verdicts(kept: Kept) -> str:
    """Return all targets with their verdicts, without the measured numbers."""
    measured = HEADS.index("measured")
    rows = (_row(kept, bar) for bar in BARS)
    return table(_without(HEADS, measured), (_without(row, measured) for row in rows))


def _without(cells: tuple[Cell, ...], place: int) -> tuple[Any, ...]:
    return cells[:place] + cells[place + 1 :]


def _row(kept: Kept, bar: Bar) -> tuple[Cell, ...]:
    findings = {
        name: finding
        for name, results in kept.studies.items()
        if home_of(name) in bar.studies and (finding := bar.find(results.runs))
    }
    found = {label_of(name): finding for name, finding in findings.items()}
    named = len(bar.studies) > 1 or len(found) > 1
    texts = [f"{label}: {finding.text}" if named else finding.text for label, finding in found.items()]
    judged = verdict(bar, list(found.values()))
    there = {home_of(name) for name in findings}
    missing = [STUDIES[study] for study in bar.studies if study not in there]
    if bar.needs_all and there and missing:
        judged = f"needs {', '.join(missing)}"
    unjudged = judged == "shown" and len(bar.studies) > 1
    if (unjudged or (bar.every and judged.startswith("**"))) and missing:  # others may miss it
        judged += f" so far, in {len(there)} of {len(bar.studies)} studies"
    return bar.what, bar.paper, bar.wanted, bar.hoped, "<br>".join(texts), judged


def verdict(bar: Bar, findings: Sequence[Finding]) -> str:
    if not findings:
        return "not run yet"
    if bar.bar is None:
        return "shown"
    values = [one.value for one in findings if one.value is not None]
    if not values or (bar.every and len(values) < len(findings)):
        return "too few seeds"
    value = max(values) if bar.every else min(values)
    if bar.stretch is not None and value <= bar.stretch:
        return "**stretch**"
    return "**met**" if value <= bar.bar else "missed"
