"""Lookups by token. Whatever depends on the token alone is computed once per vocabulary entry where that is less work.

`TokenLookup` stands for `embedding(tokens)`: a block that accepts one can map the table instead of all tokens. As
kernels, gradients are summed by token in a fixed order.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.keep_alive import keep
from logdepth.ops.dispatch import backward_by_kernels, is_unmodified, on_device_of, use_kernels
from logdepth.ops.dropout import draw_seed, rate_of
from logdepth.ops.norm import LayerNorm
from logdepth.ops.precision import product_dtype

if TYPE_CHECKING:  # it needs Triton
    from logdepth.ops.lookup_kernel import TokenOrder

MAX_TABLE_ELEMENTS = 2**28
"""The largest table that is kept while weights are frozen."""


class FrozenTable:
    """A table of per-token results, kept between passes while the weights do not change."""

    def __init__(self, *, always: bool = False) -> None:
        self.always = always
        """Whether a table is made even for few tokens, because many more will follow."""
        self._key: object = None
        self._table: Tensor | None = None

    def mapped(self, function: Callable[[Tensor], Tensor], table: Tensor) -> Tensor:
        """function(table), computed once for each dtype of matrix products."""
        key = product_dtype(table), use_kernels(table)
        found = self._table if self._key == key else None
        if found is None:
            found = function(table)
            if not (table.is_cuda and torch.cuda.is_current_stream_capturing()):  # a capture computes nothing
                self._key, self._table = key, found
        keep(found)
        return found


class TokenLookup:
    """The rows of a table at some tokens, `[…, width]`, of which nothing is computed before it is needed."""

    def __init__(self, table: Tensor, tokens: Tensor, frozen: FrozenTable | None = None) -> None:
        self.table, self.tokens, self.frozen = table, tokens, frozen
        self.shape = torch.Size((*tokens.shape, table.shape[1]))
        self._order: TokenOrder | None = None

    @property
    def order(self) -> "TokenOrder":
        """Where the rows of each token are; made when a backward pass first asks for it."""
        if self._order is None:
            from logdepth.ops.lookup_kernel import order_of

            self._order = order_of(self.tokens.flatten(), len(self.table))
        return self._order

    def tensor(self) -> Tensor:
        """The rows themselves."""
        return F.embedding(self.tokens, self.table)

    def map(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """function(rows), for a function of each row alone; computed over the table where that has fewer rows.

        While weights are frozen and no gradient is needed, the mapped table is kept for later passes.
        """
        fits = self.table.numel() <= MAX_TABLE_ELEMENTS and not torch.is_grad_enabled()
        frozen = self.frozen if fits else None
        few = self.tokens.numel() <= len(self.table)
        if few and not (frozen is not None and frozen.always):
            return function(self.tensor())
        return self._rows_of(function(self.table) if frozen is None else frozen.mapped(function, self.table))

    def map_with_norm(self, function: Callable[[Tensor], Tensor], norm: nn.LayerNorm, dropout: nn.Dropout) -> Tensor:
        """h + dropout(LN(h)) for the rows h of `map(function)`; what is dropped differs from token to token."""
        if self.tokens.numel() <= len(self.table):
            return _plus_norm(function(self.tensor()), norm, dropout)
        table = function(self.table).contiguous()
        as_built = is_unmodified(dropout, {"": nn.Dropout}) and is_unmodified(norm, {"": type(norm)})
        if not (use_kernels(table) and as_built and type(norm) in (nn.LayerNorm, LayerNorm)):
            return _plus_norm(self._rows_of(table), norm, dropout)
        arguments = (self, norm.eps, rate_of(dropout), table, norm.weight, norm.bias)
        return _RowsPlusNorm.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]

    def add_to(self, x: Tensor, factor: float) -> Tensor:
        """x + factor · rows."""
        if not use_kernels(x) or not x.is_contiguous():
            return torch.add(x, self.tensor(), alpha=factor)
        return _Added.apply(self, factor, x, self.table)  # type: ignore[no-any-return, no-untyped-call]

    def _rows_of(self, table: Tensor) -> Tensor:
        if not use_kernels(table):
            return F.embedding(self.tokens, table)
        return _Rows.apply(self, table)  # type: ignore[no-any-return, no-untyped-call]


def _plus_norm(hidden: Tensor, norm: nn.LayerNorm, dropout: nn.Dropout) -> Tensor:
    normed: Tensor = dropout(norm(hidden))
    return hidden + normed


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: TokenLookup, table: Tensor) -> Tensor:
        from logdepth.ops.lookup_kernel import look_up

        ctx.lookup, ctx.dtype = lookup, table.dtype
        out = table.new_empty(*lookup.tokens.shape, table.shape[1])
        with on_device_of(table):
            look_up(table.contiguous(), lookup.tokens.contiguous(), out.flatten(0, -2))
        return out

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.ops.lookup_kernel import sum_by_token

        return None, sum_by_token(grad.flatten(0, -2).contiguous(), ctx.lookup.order).to(ctx.dtype)


class _RowsPlusNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lookup: TokenLookup, eps: float, rate: float, table: Tensor, scale: Tensor, shift: Tensor
    ) -> Tensor:
        from logdepth.ops.lookup_kernel import leaves

        tokens = lookup.tokens.contiguous()
        seed = draw_seed(table.device) if rate > 0 else tokens  # nothing reads it where nothing is dropped
        out = table.new_empty(*tokens.shape, table.shape[1])
        with on_device_of(table):
            leaves(table, tokens, scale, shift, out.flatten(0, -2), eps=eps, rate=rate, seed=seed)
        ctx.lookup, ctx.eps, ctx.rate = lookup, eps, rate
        ctx.save_for_backward(table, scale, seed)
        return out

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.ops.column_sums import column_sums
        from logdepth.ops.lookup_kernel import leaves_backward, sum_by_token

        table, scale, seed = ctx.saved_tensors
        grad = grad.flatten(0, -2).contiguous()
        rows = torch.empty_like(grad)
        tokens = ctx.lookup.tokens.flatten()
        sums = leaves_backward(grad, table, tokens, scale, rows, eps=ctx.eps, rate=ctx.rate, seed=seed)
        scale_grad, shift_grad = torch.split(column_sums(sums), len(scale))
        table_grad = sum_by_token(rows, ctx.lookup.order).to(table.dtype)
        return None, None, None, table_grad, scale_grad, shift_grad


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: TokenLookup, factor: float, x: Tensor, table: Tensor) -> Tensor:
        from logdepth.ops.lookup_kernel import add_looked_up

        out = torch.empty_like(x)
        with on_device_of(x):
            add_looked_up(x.flatten(0, -2), table, lookup.tokens.contiguous(), factor, out.flatten(0, -2))
        ctx.lookup, ctx.factor, ctx.dtype = lookup, factor, table.dtype
        return out

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.ops.lookup_kernel import sum_by_token

        table_grad = sum_by_token(grad.flatten(0, -2).contiguous(), ctx.lookup.order, ctx.factor)
        return None, None, grad, table_grad.to(ctx.dtype)
