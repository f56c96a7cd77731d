"""What tests of memories' kernels share: chunks with what reads them, run by kernels and in float64."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth import Tree, TreeState, build_tree
from logdepth.operators.matrix_affine import MatrixAffineOperator
from logdepth.ops import delta_chunk, kernels
from logdepth.ops.block_reading import read_blocks

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def chunk_elements(operator: MatrixAffineOperator, count: int, size: int = 4) -> Tensor:
    """Random chunks of tokens as rows, float64."""
    key_width, value_width = operator.widths

    def random(*shape: int) -> Tensor:
        return torch.randn(count, operator.heads, size, *shape, dtype=torch.float64)

    keys = F.normalize(random(key_width), dim=-1)
    made = delta_chunk(keys, keys, random(value_width), -0.02 * random().abs(), random().sigmoid())
    return made.matrices.flatten(1).to(DEVICE)


class Chunks(NamedTuple):
    """Pieces of packed sequences, the state before them, and weights."""

    operator: MatrixAffineOperator
    counts: Sequence[int]
    old: Sequence[int]
    inputs: dict[str, Tensor]

    @classmethod
    def random(
        cls,
        counts: Sequence[int],
        *,
        heads: int = 1,
        key_width: int = 16,
        value_width: int = 16,
        size: int = 4,
        levels: int = 2,
        old: Sequence[int] | None = None,
        weighted: bool = True,
    ) -> "Chunks":
        operator, total = MatrixAffineOperator(heads, key_width, value_width), sum(counts)
        old = [0] * len(counts) if old is None else old
        state = build_tree(operator, chunk_elements(operator, sum(old)), cu_seqlens=[0, *accumulate(old)]).state

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, device=DEVICE)

        inputs = {
            "outputs": random(total, heads, size, value_width),
            "queries": F.normalize(random(total, heads, size, key_width), dim=-1),
            "elements": chunk_elements(operator, total),
            "blocks": state.blocks,
        }
        if weighted:
            inputs |= {"slopes": 0.5 * random(total, heads, size, 2), "bias": 0.3 * random(levels * heads)}
        return cls(operator, counts, old, inputs)

    def tree(self, inputs: dict[str, Tensor]) -> Tree:
        state = build_tree(self.operator, inputs["elements"][:0], cu_seqlens=[0] * (len(self.counts) + 1)).state
        if sum(self.old):
            none = chunk_elements(self.operator, sum(self.old)).to(inputs["blocks"].dtype)
            lengths = build_tree(self.operator, none, cu_seqlens=[0, *accumulate(self.old)]).state.row_lengths
            state = TreeState(lengths, inputs["blocks"])
        return build_tree(self.operator, inputs["elements"], state, cu_seqlens=[0, *accumulate(self.counts)])

    def readers(self) -> tuple[list[int], list[int]]:
        """The row of each piece, and the chunks before it."""
        rows = [row for row, count in enumerate(self.counts) for _ in range(count)]
        prefixes = [old + one for old, count in zip(self.old, self.counts, strict=True) for one in range(count)]
        return rows, prefixes

    def run(self, dtype: torch.dtype, *, by_kernels: bool) -> dict[str, Tensor]:
        """What is read and the state after it, and the gradients of everything."""
        inputs = {name: one.to(dtype).requires_grad_() for name, one in self.inputs.items()}
        with kernels(by_kernels):
            tree, readers = self.tree(inputs), self.readers()
            table = tree.table(*readers)
            assert (table is not None) == by_kernels
            read = read_blocks(
                inputs["outputs"],
                inputs["queries"],
                lambda: tree.reads(*readers),
                table,
                inputs.get("slopes"),
                inputs.get("bias"),
            )
        values = {"read": read, "state": tree.state.blocks}
        generator = torch.Generator().manual_seed(7)
        loss = torch.zeros((), dtype=dtype, device=DEVICE)
        for one in values.values():
            loss = loss + (one * torch.randn(one.shape, generator=generator).to(one)).sum()
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
        of_inputs = {f"gradient of {name}": grad for name, grad in zip(inputs, grads, strict=True)}
        return {name: one.detach() for name, one in values.items()} | of_inputs
