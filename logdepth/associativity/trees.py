"""Other trees in place of the scan's, and a model that uses one. With an associative ⊙ they would all be the same.

scan         the tree that the model was trained with
left fold    s_{n+1} = s_n ⊙down e_n: one element after another
offset k     the scan's tree, of which the sequence starts at leaf k instead of leaf 0, as if the k elements before it
             were missing. A missing operand means: take the other one.

An offset moves the edges of blocks: a multiple of 2^l leaves the blocks of level l and below as they are, and moves
those above. This file knows nothing of text or of distances.
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
    """The scan itself."""
    return scan(operator, elements).prefixes


def left_fold(operator: Operator | OperatorPair, elements: Batch) -> Batch:
    """Each element folded onto the prefix before it: as many dependent merges as there are elements."""
    _, down = operator_pair(operator)
    prefixes = [elements[:, 0]]
    for element in elements.unbind(dim=1)[1:]:
        prefixes.append(down(prefixes[-1], element).to(elements.dtype))  # autocast must not decide what states are
    return torch.stack(prefixes, dim=1)


def shifted(offset: int) -> PrefixesOf:
    """The scan's tree with the sequence at leaf `offset`."""
    if offset < 0:
        raise ValueError(f"an offset must not be negative; got {offset}")

    def prefixes_of(operator: Operator | OperatorPair, elements: Batch) -> Batch:
        batch, length, width = elements.shape
        # Whole missing blocks as large as the sequence change nothing, so that no offset costs more than they would.
        missing = offset % (1 << (length - 1).bit_length())
        up, down = operator_pair(operator)
        present = torch.cat([elements, elements.new_ones(batch, length, 1)], dim=-1)
        leaves = torch.cat([present.new_zeros(batch, missing, width + 1), present], dim=1)
        return scanned((_where_present(up), _where_present(down)), leaves)[:, missing:, :-1]

    return prefixes_of


def _where_present(operator: Operator) -> Operator:
    """The operator on states with one more column: 1 for a state that is there, 0 for a missing one.

    What is missing comes before all that is there. So where the left operand is present the right one is too, and where
    it is missing, the right one is the answer, be it present or not.
    """

    def merge(left: Rows, right: Rows) -> Rows:
        merged = operator(left[:, :-1], right[:, :-1]).to(left.dtype)
        return torch.cat([torch.where(left[:, -1:] == 1, merged, right[:, :-1]), right[:, -1:]], dim=-1)

    return merge


class WithTree(LanguageModel):
    """A scan model whose prefixes another tree makes. It takes whole windows: there is no state to continue from."""

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
        raise NotImplementedError(f"another tree has no state to continue from, for {batch} rows or any other number")

    def step(self, tokens: Tokens, state: Any, *, lengths: LengthsLike | None = None) -> NoReturn:
        raise NotImplementedError("another tree has no state to continue from")
