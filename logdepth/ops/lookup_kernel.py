"""Rows of a table by token, and the sums of gradients that belong to each token.

    look_up:        out[i] = table[token[i]]
    leaves:         out[i] = h + dropout(LN(h)),  h = table[token[i]]
    add_looked_up:  out[i] = x[i] + factor · table[token[i]]
    sum_by_token:   out[v] = factor · Σ x[i] over all i with token[i] = v

A token outside the table gives NaN. The sums run over the rows in the order of their tokens, and of time within a
token: the same each time, no atomics.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.dropout_kernel import keep
from logdepth.ops.launch import STAGES, block_of, tile_of, tile_warps
from logdepth.ops.norm_kernel import norm_programs, store_sums, unit_grad, unit_of

SITE = 5
CHUNK = 16
"""Rows that are summed ahead where they all belong to one token."""
NUMBERS, WARPS = 4096, 4
"""Of a program that only copies or adds rows, where a row is no longer: 32 numbers a thread, all under way at once."""


class TokenOrder(NamedTuple):
    """Where the rows of each token are."""

    tokens: Tensor
    """All tokens, sorted."""
    rows: Tensor
    """Their rows."""
    starts: Tensor
    """The place of each token's first row among them, and last their number."""


def order_of(tokens: Tensor, vocab_size: int) -> TokenOrder:
    # Few bits are sorted in few passes.
    short = tokens.flatten().to(torch.int16 if vocab_size < 2**15 else torch.int32)
    ordered, rows = torch.sort(short, stable=True)
    every = torch.arange(vocab_size + 1, device=tokens.device, dtype=ordered.dtype)
    return TokenOrder(ordered, rows, torch.searchsorted(ordered, every))


def look_up(table: Tensor, tokens: Tensor, out: Tensor) -> None:
    """Fills `out` `[tokens, width]`."""
    num_rows, width = out.shape
    tile = _plain_tile(width)
    if num_rows:
        _look_up[(triton.cdiv(num_rows, tile[0]),)](
            table, tokens, out, num_rows, len(table), width, *tile, num_warps=WARPS
        )


def leaves(
    table: Tensor, tokens: Tensor, scale: Tensor, shift: Tensor, out: Tensor, *, eps: float, rate: float, seed: Tensor
) -> None:
    """Fills `out` `[tokens, width]`."""
    num_rows, width = out.shape
    tile = tile_of(width)
    _leaves[(triton.cdiv(num_rows, tile[0]),)](
        table,
        tokens,
        scale,
        shift,
        out,
        seed,
        eps,
        num_rows,
        len(table),
        width,
        *tile,
        rate,
        SITE,
        num_warps=tile_warps(width),
    )


def leaves_backward(
    grad: Tensor,
    table: Tensor,
    tokens: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    eps: float,
    rate: float,
    seed: Tensor,
) -> Tensor:
    """Fills `out` with gradients of the looked-up rows; returns partial sums of those of scale and shift."""
    num_rows, width = out.shape
    tile = tile_of(width)
    programs = norm_programs(num_rows, width)
    sums = torch.empty(programs, 2 * width, device=out.device)
    _leaves_backward[(programs,)](
        grad,
        table,
        tokens,
        scale,
        out,
        sums,
        seed,
        eps,
        num_rows,
        len(table),
        width,
        *tile,
        rate,
        SITE,
        num_warps=tile_warps(width),
    )
    return sums


def add_looked_up(x: Tensor, table: Tensor, tokens: Tensor, factor: float, out: Tensor) -> None:
    """Fills `out` `[tokens, width]`, which may be `x`."""
    num_rows, width = x.shape
    tile = _plain_tile(width)
    if num_rows:
        _add_looked_up[(triton.cdiv(num_rows, tile[0]),)](
            x, table, tokens, out, factor, num_rows, len(table), width, *tile, num_warps=WARPS
        )


def sum_by_token(x: Tensor, order: TokenOrder, factor: float = 1.0) -> Tensor:
    """The sums of the rows of each token, float32 `[vocab, width]`."""
    (num_rows, width), vocab_size = x.shape, len(order.starts) - 1
    block, warps = block_of(width), tile_warps(width)
    chunks = torch.empty(max(1, num_rows // CHUNK), width, device=x.device)
    out = torch.empty(vocab_size, width, device=x.device)
    if num_rows >= CHUNK:
        _sum_chunks[(num_rows // CHUNK,)](x, order.tokens, order.rows, chunks, width, block, CHUNK, num_warps=warps)
    _sum_tokens[(vocab_size,)](x, order.rows, order.starts, chunks, out, factor, width, block, CHUNK, num_warps=warps)
    return out


def _plain_tile(width: int) -> tuple[int, int]:
    block = block_of(width)
    return max(1, NUMBERS // block), block


@triton.jit
def _rows(table, tokens, start, num_rows, vocab_size, width, rows: tl.constexpr, block: tl.constexpr):
    """Looked-up rows from `start` on in float32, where they lie among all rows, and what of the tile is inside."""
    row = tl.cast(start, tl.int64) + tl.arange(0, rows)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (column < width) & (row < num_rows)
    token = tl.load(tokens + row, mask=row < num_rows, other=0).to(tl.int64)
    known = (token >= 0) & (token < vocab_size)
    found = tl.load(table + token * width + column, mask=inside & known, other=0.0).to(tl.float32)
    return tl.where(known, found, float("nan")), row * width + column, inside


@triton.jit(do_not_specialize=["num_rows", "vocab_size"])
def _look_up(table, tokens, out, num_rows, vocab_size, width, rows: tl.constexpr, block: tl.constexpr):
    found, place, inside = _rows(table, tokens, tl.program_id(0) * rows, num_rows, vocab_size, width, rows, block)
    tl.store(out + place, found, mask=inside)


@triton.jit
def _leaves(
    table,
    tokens,
    scale,
    shift,
    out,
    seed,
    eps,
    num_rows,
    vocab_size,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
):
    hidden, place, inside = _rows(table, tokens, tl.program_id(0) * rows, num_rows, vocab_size, width, rows, block)
    unit, _ = unit_of(hidden, inside, width, eps)
    column = tl.arange(0, block)[None, :]
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + place, hidden + keep(unit * by + plus, seed, place, site, rate), mask=inside)


@triton.jit
def _leaves_backward(
    grad,
    table,
    tokens,
    scale,
    out,
    sums,
    seed,
    eps,
    num_rows,
    vocab_size,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
):
    column = tl.arange(0, block)[None, :]
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    scale_sum = tl.zeros((rows, block), tl.float32)
    shift_sum = tl.zeros((rows, block), tl.float32)
    for start in tl.range(tl.program_id(0) * rows, num_rows, tl.num_programs(0) * rows, num_stages=STAGES):
        hidden, place, inside = _rows(table, tokens, start, num_rows, vocab_size, width, rows, block)
        unit, deviation = unit_of(hidden, inside, width, eps)
        outer = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        inner = keep(outer, seed, place, site, rate)
        scale_sum += inner * unit
        shift_sum += inner
        tl.store(out + place, outer + unit_grad(inner * by, unit, deviation, inside, width), mask=inside)
    own = sums + tl.program_id(0) * 2 * width
    column = tl.arange(0, block)
    store_sums(own, scale_sum, column, width)
    store_sums(own + width, shift_sum, column, width)


@triton.jit
def _add_looked_up(x, table, tokens, out, factor, num_rows, vocab_size, width, rows: tl.constexpr, block: tl.constexpr):
    more, place, inside = _rows(table, tokens, tl.program_id(0) * rows, num_rows, vocab_size, width, rows, block)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, values + factor * more, mask=inside)


@triton.jit
def _sum_rows(x, rows, start, end, width, block: tl.constexpr):
    column = tl.arange(0, block)[None, :]
    total = tl.zeros((4, block), tl.float32)
    while start < end:
        number = start + tl.arange(0, 4)[:, None]
        row = tl.load(rows + number, mask=number < end, other=0)
        inside = (number < end) & (column < width)
        total += tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
        start += 4
    return tl.sum(total, axis=0)


@triton.jit
def _sum_chunks(x, tokens, rows, chunks, width, block: tl.constexpr, chunk: tl.constexpr):
    """Chunks of rows that all belong to one token."""
    number = tl.program_id(0).to(tl.int64)
    start = number * chunk
    column = tl.arange(0, block)
    if tl.load(tokens + start) == tl.load(tokens + start + chunk - 1):
        total = _sum_rows(x, rows, start, start + chunk, width, block)
        tl.store(chunks + number * width + column, total, mask=column < width)


@triton.jit
def _sum_tokens(x, rows, starts, chunks, out, factor, width, block: tl.constexpr, chunk: tl.constexpr):
    """Every token: its rows up to the first chunk, chunks, and the rows after the last."""
    token = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts + token), tl.load(starts + token + 1)
    column = tl.arange(0, block)
    number = (start + chunk - 1) // chunk
    total = _sum_rows(x, rows, start, tl.minimum(number * chunk, end), width, block)
    after = tl.maximum(end // chunk, number)
    while number < after:
        some = number + tl.arange(0, 4)[:, None]
        inside = (some < after) & (column < width)[None, :]
        total += tl.sum(tl.load(chunks + some * width + column[None, :], mask=inside, other=0.0), axis=0)
        number += 4
    total += _sum_rows(x, rows, after * chunk, end, width, block)
    tl.store(out + token * width + column, factor * total, mask=column < width)
