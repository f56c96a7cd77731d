"""How far trained operators are from associative, and the perplexity of the same weights with other trees."""

import math

from logdepth.associativity import LAWS, Associativity, Distance
from logdepth.report.table import Cell, Spread
from results_page.figures import associativity_figure, figure
from results_page.kept import Kept
from results_page.markdown import NOTHING, table


def associativity(kept: Kept) -> str:
    parts = [
        part
        for name, found in kept.associativity.items()
        for part in (figure(kept, associativity_figure(name)), _distances(name, found), _trees(name, found))
    ]
    return "\n\n".join(parts) or NOTHING


def _distances(name: str, found: Associativity) -> str:
    """Return a table with one row per block size in each layer, and three columns per law."""
    laws = [law for law in LAWS if any(one.law == law for one in found.distances)]
    measured: dict[tuple[int, int], dict[str, Distance]] = {}
    for one in found.distances:
        measured.setdefault((one.layer, one.level), {})[one.law] = one
    heads = ["tokens per block"]
    for law in laws:
        heads += [
            f"{law}: {what}" if len(laws) > 1 else what for what in ("distance", "influence", "untrained distance")
        ]
    rows: list[tuple[Cell, ...]] = [
        (1 << level, *(cell for law in laws for cell in _cells(found, by_law.get(law))))
        for (_, level), by_law in measured.items()
    ]
    if found.num_layers > 1:
        heads = ["layer", *heads]
        rows = [(layer + 1, *row) for (layer, _), row in zip(measured, rows, strict=True)]
    note = f"{found.num_windows} windows of {found.context:,} tokens; mean ± standard error."
    note += " Untrained: mean ± standard deviation over seeds."
    if len(laws) > 1:
        note += f" Laws: {'; '.join(f'*{law}* {LAWS[law]}' for law in laws)}."
    return table(heads, rows, title=f"{name}: distance from associative", note=note)


def _cells(found: Associativity, one: Distance | None) -> tuple[Cell, Cell, Cell]:
    if one is None:
        return None, None, None
    untrained = found.over_seeds(one)
    beside = None if untrained is None else Spread(untrained.distance, untrained.deviation, 3)
    return Spread(one.distance, one.error, 3), Spread(one.influence, None, 3), beside


def _trees(name: str, found: Associativity) -> str:
    rows: list[tuple[Cell, ...]] = []
    for tree, one in found.trees.items():
        perplexity, over = Spread(one.whole.token_perplexity, None), found.over_scan(tree)
        if math.isinf(over):
            rows.append((tree, "overflows", None, None))
        else:
            bits = Spread(one.whole.bits_per_byte, None, 4)
            rows.append((tree, perplexity, Spread(over, found.error_over_scan(tree), 4), bits))
    heads = ("tree", "token perplexity", "relative to the scan", "bits per byte")
    return table(heads, rows, title=f"{name}: other trees", note="± standard error over parts of the text.")
