"""MatrixAffineOperator: the module, its fused merges beside it, and their kernels."""

from logdepth.operators.matrix_affine.matrix_affine import MatrixAffineOperator

__all__ = ["MatrixAffineOperator"]
