"""The non-associative prefix scan, for any operator (left, right) -> merged, any lengths and any split into chunks."""

from logdepth.scanning.integers import LengthsLike
from logdepth.scanning.merge import Operator, OperatorPair
from logdepth.scanning.prefix_scan import ScanResult, reduce, scan
from logdepth.scanning.program import MergesFunction, SelfMergingOperator
from logdepth.scanning.state import ScanState, TreeState
from logdepth.scanning.sweep import SelfSweepingOperator, SweepFunction, sweeps_itself
from logdepth.scanning.tree import Read, Tree, build_tree

__all__ = [
    "LengthsLike",
    "MergesFunction",
    "Operator",
    "OperatorPair",
    "Read",
    "ScanResult",
    "ScanState",
    "SelfMergingOperator",
    "SelfSweepingOperator",
    "SweepFunction",
    "Tree",
    "TreeState",
    "build_tree",
    "reduce",
    "scan",
    "sweeps_itself",
]
