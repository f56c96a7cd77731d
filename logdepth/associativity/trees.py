"""Alternative merge trees, and a model that uses one. With an associative ⊙, all trees give the same result.

scan         the tree that the model was trained with
left fold    s_{n+1} = s_n ⊙down e_n: one element after another
offset k     the scan's tree with the sequence starting at leaf k instead of leaf 0, as if the k elements before it
             were missing. A merge with a missing operand returns the other operand.

An offset moves the boundaries of blocks. A multiple of 2^l keeps the blocks of levels up to l and moves those above.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from logdepth.models import LanguageModel, ScanLM
from logdepth.models.packing import check_tokens, unpack
from logdepth.models.scan_lm import PrefixesOf
from logdepth.scanning import LengthsLike, Operator, OperatorPair, scan
from logdepth.scanning.merge import operator_pair
from logdepth.shapes import Batch, Rows, Tokens


def scanned(operator: Operator | OperatorPair, elements: Batch) -> Batch:
    """Return the prefixes of the scan."""
    return scan(operator, elements).prefixes


def left_fold(operator: Operator | OperatorPair, elements: Batch) -> Batch:
    """Fold each element onto the prefix before it. The merges are sequential, one per element."""
    _, down = operator_pair(operator)
    prefixes = [elements[:, 0]]
    for element in elements.unbind(dim=1)[1:]:
        prefixes.append(down(prefixes[-1], element).to(elements.dtype))  # keep the states' dtype under autocast
    return torch.stack(prefixes, dim=1)


def shifted(offset: int) -> PrefixesOf:
    """Return a function that scans with the sequence starting at leaf `offset`."""
    if offset < 0:
        raise ValueError(f"an offset must not be negative; got {offset}")

    def prefixes_of(operator: Operator | OperatorPair, elements: Batch) -> Batch:
        batch, length, width = elements.shape
        # A missing block at least as large as the sequence changes nothing, so the offset is reduced modulo its size.
        missing = offset % (1 << (length - 1).bit_length())
        up, down = operator_pair(operator)
        present = torch.cat([elements, elements.new_ones(batch, length, 1)], dim=-1)
        leaves = torch.cat([present.new_zeros(batch, missing, width + 1), present], dim=1)
        return scanned((_where_present(up), _where_present(down)), leaves)[:, missing:, :-1]

    return prefixes_of


def _where_present(operator: Operator) -> Operator:
    """Extend an operator to states with one more column: 1 for a present state, 0 for a missing one.

    Missing states precede all present ones. So if the left operand is present, the right one is too; if it is missing,
    the result is the right operand, present or not.
    """

    def merge(left: Rows, right: Rows) -> Rows:
        merged = operator(left[:, :-1], right[:, :-1]).to(left.dtype)
        return torch.cat([torch.where(left[:, -1:] == 1, merged, right[:, :-1]), right[:, -1:]], dim=-1)

    return merge


class WithTree(LanguageModel):
    """A ScanLM that computes prefixes with another tree. It has no state, so it must process a window at once."""

    def __init__(self, model: ScanLM, tree: PrefixesOf) -> None:
        super().__init__()
        self.model = model
        self.tree = tree
        self.vocab_size = model.vocab_size

    def forward(
        self,
        tokens: Tokens,
        *,
        lengths: LengthsLike | None = None,  # noqa: ARG002  (prefixes do not see the padding that follows them)
        cu_seqlens: LengthsLike | None = None,
    ) -> Tensor:
        check_tokens(tokens, packed=cu_seqlens is not None)
        if cu_seqlens is None:
            return self.model.with_prefixes(tokens, self.tree)
        rows, index = unpack(tokens, cu_seqlens)
        return self.model.with_prefixes(rows, self.tree).flatten(0, 1)[index]

    def init_state(self, batch: int) -> NoReturn:
        raise NotImplementedError(f"only the scan's tree has a state to continue from; got batch size {batch}")

    def step(self, tokens: Tokens, state: Any, *, lengths: LengthsLike | None = None) -> NoReturn:
        raise NotImplementedError("only the scan's tree has a state to continue from")
