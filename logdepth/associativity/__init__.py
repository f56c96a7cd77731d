"""How far a trained operator is from associative: distances between both orders of merging, and perplexity by tree."""

from logdepth.associativity.figure import draw, drawn
from logdepth.associativity.outcome import Associativity, InParts, Untrained
from logdepth.associativity.study import DEFAULT_OFFSETS, longest_context, parts_of, study
from logdepth.associativity.trees import WithTree, left_fold, scanned, shifted
from logdepth.associativity.triples import LAWS, Distance, Law, distances
from logdepth.associativity.windows import spread_windows

__all__ = [
    "DEFAULT_OFFSETS",
    "LAWS",
    "Associativity",
    "Distance",
    "InParts",
    "Law",
    "Untrained",
    "WithTree",
    "distances",
    "draw",
    "drawn",
    "left_fold",
    "longest_context",
    "parts_of",
    "scanned",
    "shifted",
    "spread_windows",
    "study",
]
