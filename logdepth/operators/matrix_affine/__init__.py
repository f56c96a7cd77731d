"""MatrixAffineOperator: the module, its fused merges beside it, and their kernels; and its form with summaries."""

from logdepth.operators.matrix_affine.matrix_affine import MatrixAffineOperator
from logdepth.operators.matrix_affine.summarising import SummarisingOperator, SummaryMerge

__all__ = ["MatrixAffineOperator", "SummarisingOperator", "SummaryMerge"]
