"""A batch with an attention mask as rows that are padded on the right, which is how the library takes it.

Masked tokens are skipped: a row is what is left of it, whether its padding is on the left, on the right or between its
tokens. Padding on the left would otherwise move the tree, and a token's blocks with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from logdepth.ops.dispatch import outside_compiled_graphs


class Rows(NamedTuple):
    """The tokens of a batch without those that are masked."""

    tokens: Tensor
    """`[batch, longest]`, padded on the right."""
    lengths: list[int] | None = None
    """Tokens of each row; None: no token is masked."""
    order: Tensor | None = None
    """The column in the batch of each token, `[batch, longest]`, and of any masked ones after them; None: as above."""
    read: Tensor | None = None
    """For every column of the batch, how many tokens its row has up to there, `[batch, length]`; None: as above."""

    @property
    def has_empty_row(self) -> bool:
        return self.lengths is not None and 0 in self.lengths

    def taken(self, values: Tensor, padding: int) -> Tensor:
        """Values of the batch's columns, `[batch, length]`, in the order of `tokens`."""
        if self.lengths is None or self.order is None:
            return values
        there = torch.arange(self.order.shape[1], device=values.device) < torch.tensor(
            self.lengths, device=values.device
        ).unsqueeze(1)
        return values.gather(1, self.order).where(there, padding)

    def placed(self, found: Tensor, before: Tensor | None, columns: slice | Tensor) -> Tensor:
        """What was found for `tokens`, `[batch, longest, width]`, in the given columns of the batch.

        A masked column has what was found for the last token before it, or `before`, `[batch, width]`, or else zeros.
        """
        if self.read is None:
            return found[:, columns]
        if before is None:
            before = found.new_zeros(len(found), found.shape[2])
        index = self.read[:, columns, None].expand(-1, -1, found.shape[2])
        return torch.cat([before.to(found.dtype)[:, None], found], dim=1).gather(1, index)


@outside_compiled_graphs
def rows_of(tokens: Tensor, mask: Tensor | None) -> Rows:
    """The rows of a batch `[batch, length]`; a mask may also cover the columns before, which then are its first ones.

    The mask is read from the device.
    """
    if mask is None:
        return Rows(tokens)
    if mask.ndim != 2 or len(mask) != len(tokens) or mask.shape[1] < tokens.shape[1]:
        raise ValueError(
            "attention_mask must be [batch, length], with ones for tokens and zeros for padding; got shape "
            f"{tuple(mask.shape)} for tokens of shape {tuple(tokens.shape)}"
        )
    valid = mask[:, mask.shape[1] - tokens.shape[1] :].to(tokens.device) != 0
    if not tokens.shape[1] or bool(valid.all()):
        return Rows(tokens)
    read = valid.cumsum(1)
    lengths: list[int] = read[:, -1].tolist()
    # A stable sort brings the tokens of each row to its start and keeps their order.
    order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(lengths)]
    return Rows(tokens.gather(1, order), lengths, order, read)
