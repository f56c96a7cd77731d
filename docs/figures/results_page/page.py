"""The whole page: the text of docs/results.in.md, with what is generated in its places."""

import re
from collections.abc import Callable
from pathlib import Path

from results_page.associativity import associativity
from results_page.bars import bars
from results_page.headline import caveats, headline
from results_page.kept import Kept
from results_page.origins import origins
from results_page.studies import others, study_section
from results_page.sweeps import sweeps

TEMPLATE = Path(__file__).parents[2] / "results.in.md"
PLACE = re.compile(r"\{\{([\w:-]+)\}\}")
SECTIONS: dict[str, Callable[[Kept], str]] = {
    "headline": headline,
    "caveats": caveats,
    "bars": bars,
    "others": others,
    "sweeps": sweeps,
    "associativity": associativity,
    "origins": origins,
}
"""What stands at `{{name}}` in the template, besides `{{study:NAME}}`."""


def page(kept: Kept) -> str:
    def filled(place: re.Match[str]) -> str:
        part, _, study = place[1].partition(":")
        return study_section(kept, study) if part == "study" else SECTIONS[part](kept)

    text = PLACE.sub(filled, TEMPLATE.read_text(encoding="utf-8"))
    generated = "<!-- made by docs/figures/draw_results.py from results.in.md and results/: edit those -->\n"
    return generated + re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
