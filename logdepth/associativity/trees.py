"""Alternative merge trees, and a model that uses one. With an associative ⊙, all trees give the same result.

scan         the tree that the model was trained with
left fold    s_{n+1} = s_n ⊙down e_n: one element after another
offset k     the scan's tree with the sequence starting at leaf k instead of leaf 0, as if the k elements before it
             were missing. A merge with a missing operand returns the other operand.

An offset moves the boundaries of blocks. A multiple of 2^l keeps the blocks of levels up to l and moves those above.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from logdepth.blocks import Layout, PaperLayer
from logdepth.models import LM, LanguageModel
from logdepth.scanning import LengthsLike, Operator, OperatorPair, scan
from logdepth.scanning.merge import operator_pair
from logdepth.shapes import Batch, Rows, Tokens

PrefixesOf = Callable[[Operator | OperatorPair, Batch], Batch]
"""Leaves to the states of their prefixes, by an operator: the scan, or another tree."""


def paper_layers(model: LM) -> list[PaperLayer]:
    """The layers of a model that scan."""
    return [block for block in model.blocks if isinstance(block, PaperLayer)]


@contextmanager
def with_tree(model: LM, tree: PrefixesOf) -> Iterator[None]:
    """A scope in which another tree makes the prefixes of every layer. There is no state to continue from."""

    def prefixes_of(
        operator: Operator | OperatorPair, leaves: Tensor, state: Any, layout: Layout, *, recompute: bool
    ) -> tuple[Tensor, None]:
        del state, recompute
        return layout.from_rows(tree(operator, layout.to_rows(leaves))), None

    layers = paper_layers(model)
    outer = [layer.scan for layer in layers]
    try:
        for layer in layers:
            layer.scan = prefixes_of
        yield
    finally:
        for layer, own in zip(layers, outer, strict=True):
            layer.scan = own


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
    """A scan model that computes prefixes with another tree. It has no state, so it must process a window at once."""

    def __init__(self, model: LM, tree: PrefixesOf) -> None:
        super().__init__()
        self.model = model
        self.tree = tree
        self.vocab_size = model.vocab_size

    def forward(
        self, tokens: Tokens, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        with with_tree(self.model, self.tree):
            logits: Tensor = self.model(tokens, lengths=lengths, cu_seqlens=cu_seqlens)
        return logits

    def token_losses(
        self, tokens: Tokens, targets: Tokens, state: Any = None, *, cu_seqlens: LengthsLike | None = None
    ) -> tuple[Tensor, Any]:
        if state is not None:
            raise NotImplementedError("another tree has no state to continue from")
        with with_tree(self.model, self.tree):
            return self.model.token_losses(tokens, targets, cu_seqlens=cu_seqlens)

    def init_state(self, batch: int) -> NoReturn:
        raise NotImplementedError(f"only the scan's tree has a state to continue from; got batch size {batch}")

    def step(self, tokens: Tokens, state: Any, *, lengths: LengthsLike | None = None) -> NoReturn:
        raise NotImplementedError("only the scan's tree has a state to continue from")
