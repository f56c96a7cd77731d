"""What tokens decide, as nodes of the graph: leaves looked up in a table, and what the embedding adds to an output."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from logdepth.fused.once import by_kernels
from logdepth.kernels.column_sums import column_sums
from logdepth.kernels.dropout import draw_seed, rate_of
from logdepth.kernels.lookup import TokenOrder, add_looked_up, leaves, leaves_backward, look_up, order_of, sum_by_token

RoomFor = Callable[[int, Tensor], Tensor]
"""Memory for so many rows, of the dtype of a tensor."""


class Lookups:
    """The lookups of one pass; their gradients are summed in one order."""

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        self.tokens, self.vocab_size = tokens.flatten().contiguous(), vocab_size
        self._order: TokenOrder | None = None

    @property
    def order(self) -> TokenOrder:
        """Made when it is first asked for."""
        if self._order is None:
            self._order = order_of(self.tokens, self.vocab_size)
        return self._order

    def rows(self, table: Tensor, room_for: RoomFor) -> Tensor:
        """The row of each token, `[tokens, width]`."""
        return _Rows.apply(self, self._room(room_for, table), table)  # type: ignore[no-any-return, no-untyped-call]

    def leaves(self, table: Tensor, norm: nn.LayerNorm | None, dropout: nn.Dropout, room_for: RoomFor) -> Tensor:
        """h + dropout(LN(h)) for the row h of each token, `[tokens, width]`; without a norm, h."""
        if norm is None:
            return self.rows(table, room_for)
        arguments = (self, self._room(room_for, table), norm.eps, rate_of(dropout), table, norm.weight, norm.bias)
        return _Leaves.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]

    def _room(self, room_for: RoomFor, table: Tensor) -> tuple[Tensor]:
        """Asked for where it is known whether anything learns, which inside a Function it is not; no input of that."""
        return (room_for(len(self.tokens), table),)

    def added(self, x: Tensor, table: Tensor, factor: float) -> Tensor:
        """x + factor · (the row of each token); `x` `[tokens, width]` is overwritten."""
        return _Added.apply(self, factor, x, table)  # type: ignore[no-any-return, no-untyped-call]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookups: Lookups, room: tuple[Tensor], table: Tensor) -> Tensor:
        ctx.lookups, ctx.dtype = lookups, table.dtype
        (out,) = room
        look_up(table, lookups.tokens, out)
        return out

    @staticmethod
    @by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, sum_by_token(grad.contiguous(), ctx.lookups.order).to(ctx.dtype)


class _Leaves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lookups: Lookups,
        room: tuple[Tensor],
        eps: float,
        rate: float,
        table: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> Tensor:
        seed = draw_seed(table.device) if rate > 0 else lookups.tokens  # nobody reads it where nothing is dropped
        (out,) = room
        leaves(table, lookups.tokens, scale, shift, out, eps=eps, rate=rate, seed=seed)
        ctx.lookups, ctx.eps, ctx.rate = lookups, eps, rate
        ctx.save_for_backward(table, scale, seed)
        return out

    @staticmethod
    @by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, scale, seed = ctx.saved_tensors
        rows = torch.empty_like(grad)
        sums = leaves_backward(
            grad.contiguous(), table, ctx.lookups.tokens, scale, rows, eps=ctx.eps, rate=ctx.rate, seed=seed
        )
        scale_grad, shift_grad = torch.split(column_sums(sums), len(scale))
        table_grad = sum_by_token(rows, ctx.lookups.order).to(table.dtype)
        return None, None, None, None, table_grad, scale_grad, shift_grad


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookups: Lookups, factor: float, x: Tensor, table: Tensor) -> Tensor:
        add_looked_up(x, table, lookups.tokens, factor)
        ctx.mark_dirty(x)
        ctx.lookups, ctx.factor, ctx.dtype = lookups, factor, table.dtype
        return x

    @staticmethod
    @by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table_grad = sum_by_token(grad.contiguous(), ctx.lookups.order, ctx.factor)
        return None, None, grad, table_grad.to(ctx.dtype)
