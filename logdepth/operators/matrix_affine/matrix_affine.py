"""MatrixAffineOperator: composition of affine maps of matrices, S → M S + W. It is exactly associative.

It is the operator of keyed memories: M decays and erases, W is what was written. It has no entry in `OPERATORS`: its
elements come from `ops.delta_chunk`, which bounds their products, and not from a projection, as those of a recipe do.
"""

from functools import partial

import torch
from torch import Tensor, nn

from logdepth.ops import use_kernels
from logdepth.ops.block_reading import MAX_KERNEL_WIDTH
from logdepth.ops.dispatch import is_unmodified
from logdepth.scanning import MergesFunction, SelfMergingOperator
from logdepth.shapes import Rows


class MatrixAffineOperator(nn.Module, SelfMergingOperator):
    """(M_L, W_L) ⊙ (M_R, W_R) = (M_R M_L, M_R W_L + W_R) for each head; it has no weights.

    A row holds `[heads, key_width, key_width + value_width]` numbers: the matrix [M | W] of each head.
    """

    def __init__(self, heads: int, key_width: int, value_width: int) -> None:
        super().__init__()
        if min(heads, key_width, value_width) < 1:
            raise ValueError(f"heads and widths must be at least 1; got {heads}, {key_width} and {value_width}")
        self.heads, self.widths = heads, [key_width, value_width]
        self.width = heads * key_width * (key_width + value_width)

    def forward(self, left: Rows, right: Rows) -> Rows:
        if self.has_kernels(left) and left.dtype == right.dtype:
            from logdepth.operators.matrix_affine.fused import merged_by_kernel

            return merged_by_kernel(self, left, right)
        transition, written = self.parts(right)
        product, moved = torch.split(transition @ self.matrices(left), self.widths, dim=-1)
        return torch.cat([product, moved + written], dim=-1).flatten(1)

    def merges_with(self, elements: Rows) -> MergesFunction | None:
        if not (self.has_kernels(elements) and is_unmodified(self, {"": MatrixAffineOperator})):
            return None
        from logdepth.operators.matrix_affine.fused import merges_by_kernel

        return partial(merges_by_kernel, self)

    def has_kernels(self, rows: Rows) -> bool:
        """Whether merges of such rows run as kernels."""
        return rows.dtype == torch.float32 and max(self.widths) <= MAX_KERNEL_WIDTH and use_kernels(rows)

    def identity(self, count: int, *, dtype: torch.dtype, device: torch.device) -> Rows:
        """Rows that change nothing: M = I and W = 0."""
        identity = torch.eye(self.widths[0], sum(self.widths), dtype=dtype, device=device)
        return identity.expand(count, self.heads, -1, -1).flatten(1)

    def matrices(self, rows: Rows) -> Tensor:
        """[M | W] of each row and head, `[rows, heads, key_width, key_width + value_width]`."""
        return rows.view(len(rows), self.heads, self.widths[0], sum(self.widths))

    def parts(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """M and W of each row and head."""
        transition, written = torch.split(self.matrices(rows), self.widths, dim=-1)
        return transition, written
