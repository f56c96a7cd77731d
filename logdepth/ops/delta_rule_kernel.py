"""The gated delta rule on chunks, each chunk of each head in one program; `delta_rule.py` has the formulas.

Products have float32 sums. Where the vectors are float32, each product is three TF32 products, which keeps about as
many bits as float32 has. Where they are bfloat16 or float16, or where torch's float32 products are allowed to be TF32,
operands are TF32, with as many bits as float16 has. Results are of operands rounded to nearest, since a bias would grow
in the product of many M; for gradients the tensor cores cut operands off. Normalised keys are rounded once, so that all
formulas mean the same key. The inverse is computed in float32: it amplifies rounding errors.

The inverse is a forward substitution within blocks of 16 tokens, and then blocks are merged. A product of powers of A
would be faster, but with β near 2 and keys that repeat, A⁸ has entries of millions that cancel.

No loop contains a product: compilers of Triton 3.4 on have reordered asynchronous products in loops wrongly on Hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.launch import block_of

LONGEST, WIDEST = 64, 128
"""Tokens of a chunk, and width of its keys and values, that fit into a program."""
NARROW = 64
"""Up to this width of keys and values, tiles are as large as needed."""
LEAST = 16
"""Of each side of a product."""
BLOCK = tl.constexpr(16)
"""Tokens whose triangle is inverted token by token."""
SCALARS = [
    "heads", "size", "decay_chunk", "decay_head", "decay_token", "strength_chunk", "strength_head", "strength_token",
]  # fmt: skip
"""For which no kernels of their own are compiled where they are 1, or multiples of 16."""
GRAD_SCALARS = [
    *SCALARS, "decay_grad_chunk", "decay_grad_head", "decay_grad_token",
    "strength_grad_chunk", "strength_grad_head", "strength_grad_token",
]  # fmt: skip


def fits(vectors: Tensor, key_width: int) -> bool:
    """Whether programs are made for chunks of this size and width."""
    size, width = vectors.shape[2:]
    return 0 < size <= LONGEST and max(key_width, width - key_width * 2) <= WIDEST and vectors.numel() > 0


def chunk(
    vectors: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    inverse: Tensor,
    outputs: Tensor,
    queries: Tensor,
    matrices: Tensor,
    *,
    epsilon: float,
    exact: bool,
) -> None:
    """Fills `inverse` `[chunks, heads, side, side]` by `sides_of`, `outputs`, `queries` and `matrices`."""
    num_chunks, heads, size, _ = vectors.shape
    key_width, value_width = queries.shape[-1], outputs.shape[-1]
    rows, keys, values = sides_of(size, key_width, value_width)
    _inverse[(num_chunks * heads,)](
        vectors, log_decay, strength, inverse,
        *vectors.stride()[:3], *log_decay.stride(), *strength.stride(),
        heads, size, epsilon, key_width, rows, keys, exact,
        num_warps=warps_of(key_width, value_width), num_stages=1,
    )  # fmt: skip
    _chunk[(num_chunks * heads,)](
        vectors, log_decay, strength, inverse, outputs, queries, matrices,
        *vectors.stride()[:3], *log_decay.stride(), *strength.stride(), *outputs.stride()[:3], *queries.stride()[:3],
        heads, size, epsilon, key_width, value_width, rows, keys, values, exact,
        num_warps=warps_of(key_width, value_width), num_stages=1,
    )  # fmt: skip


def chunk_backward(
    outputs_grad: Tensor,
    queries_grad: Tensor,
    matrices_grad: Tensor,
    vectors: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    inverse: Tensor,
    vectors_grad: Tensor,
    log_decay_grad: Tensor,
    strength_grad: Tensor,
    *,
    epsilon: float,
    exact: bool,
) -> None:
    """Fills the last three gradients from the first three."""
    num_chunks, heads, size, _ = vectors.shape
    key_width, value_width = queries_grad.shape[-1], outputs_grad.shape[-1]
    sides = sides_of(size, key_width, value_width)
    keys_grad = torch.empty(*queries_grad.shape[:2], *sides[:2], device=vectors.device, dtype=torch.float32)
    given = outputs_grad, queries_grad, matrices_grad, vectors, log_decay, strength, inverse
    strides = (
        *outputs_grad.stride()[:3], *queries_grad.stride()[:3],
        *vectors.stride()[:3], *log_decay.stride(), *strength.stride(),
        *vectors_grad.stride()[:3], *log_decay_grad.stride(),
    )  # fmt: skip
    sizes = heads, size, epsilon, key_width, value_width, *sides, exact
    warps = warps_of(key_width, value_width)
    _read_backward[(num_chunks * heads,)](
        *given, vectors_grad, log_decay_grad, keys_grad, *strides, *sizes, num_warps=warps, num_stages=1
    )
    _erase_backward[(num_chunks * heads,)](
        *given, vectors_grad, log_decay_grad, keys_grad, strength_grad, *strides, *strength_grad.stride(), *sizes,
        num_warps=warps, num_stages=1,
    )  # fmt: skip


def sides_of(size: int, key_width: int, value_width: int) -> tuple[int, int, int]:
    """Tokens, keys and values that tiles have room for.

    With widths above 64 there is one choice of tiles: others have not all been checked on a GPU, and 64 tokens with 16
    keys and 128 values, on 8 warps, ended in an illegal memory access with Triton 3.6 on an H200.
    """
    if max(key_width, value_width) > NARROW:
        return LONGEST, WIDEST, WIDEST
    return side_of(size), side_of(key_width), side_of(value_width)


def side_of(count: int) -> int:
    return max(LEAST, block_of(count))


def warps_of(key_width: int, value_width: int) -> int:
    return 4 if max(key_width, value_width) <= NARROW else 8


@triton.jit
def nearest(x):
    """Rounded to TF32; halves away from zero."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, exact: tl.constexpr):
    return x if exact else nearest(x)


@triton.jit
def product(left, right, exact: tl.constexpr):
    return tl.dot(left, right, input_precision="tf32x3" if exact else "tf32")


@triton.jit
def normalised(x, epsilon, exact: tl.constexpr):
    """Rows of length 1, and by what they were multiplied for it."""
    factor = tl.rsqrt(tl.sum(x * x, axis=1) + epsilon)
    return operand(x * factor[:, None], exact), factor


@triton.jit
def normalised_grad(grad, unit, factor):
    """From the gradient of such rows to that of what they were made from."""
    return factor[:, None] * (grad - unit * tl.sum(unit * grad, axis=1)[:, None])


@triton.jit
def decay_of(total, rows: tl.constexpr):
    """e^{G_t − G_s} for s ≤ t, otherwise 0."""
    late, early = tl.arange(0, rows)[:, None], tl.arange(0, rows)[None, :]
    return tl.where(late >= early, tl.exp(tl.where(late >= early, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def rows_of(start, stride, size, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """A tile of the first `size` rows and `width` columns, in float32, with zeros beyond."""
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    inside = (row < size) & (column < width)
    return tl.load(start + row * stride + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(start, stride, tile, size, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    tl.store(start + row * stride + column, tile, mask=(row < size) & (column < width))


@triton.jit
def rates_of(start, stride, size, rows: tl.constexpr):
    token = tl.arange(0, rows)
    return tl.load(start + token * stride, mask=token < size, other=0.0)


@triton.jit
def inverse_of(erased, rows: tl.constexpr):
    """(I + A)⁻¹ of a strict lower triangle A of 16, 32 or 64 rows."""
    count: tl.constexpr = rows // BLOCK
    triangles = on_diagonal(erased, count)
    late, early = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    solved = tl.where(late == early, 1.0, 0.0) + tl.zeros((count, BLOCK, BLOCK), tl.float32)
    for row in range(1, BLOCK):
        factors = tl.sum(tl.where(late == row, triangles, 0.0), axis=1)
        found = tl.sum(factors[:, :, None] * solved, axis=1)
        solved -= tl.where(late == row, found[:, None, :], 0.0)
    if count == 4:
        solved = merged(solved, on_diagonal(erased, 2))
    if count >= 2:
        solved = merged(solved, on_diagonal(erased, 1))
    return tl.reshape(solved, (rows, rows))


@triton.jit
def on_diagonal(matrix, count: tl.constexpr):
    """The square blocks on the diagonal, `[count, side, side]`."""
    side: tl.constexpr = matrix.shape[0] // count
    number = tl.arange(0, count)
    own = number[:, None, None, None] == number[None, None, :, None]
    return tl.sum(tl.where(own, tl.reshape(matrix, (count, side, count, side)), 0.0), axis=2)


@triton.jit
def merged(solved, erased):
    """Inverses `[count, side, side]` of pairs of blocks: the lower left quarter is −T₂ A₂₁ T₁."""
    count: tl.constexpr = erased.shape[0]
    side: tl.constexpr = solved.shape[1]
    half = tl.arange(0, 2)
    late, early = half[None, :, None, None, None], half[None, None, None, :, None]
    quarters = tl.reshape(erased, (count, 2, side, 2, side))
    between = tl.sum(tl.sum(tl.where((late == 1) & (early == 0), quarters, 0.0), axis=3), axis=1)
    pairs = tl.reshape(solved, (count, 2, side, side))
    second = half[None, :, None, None]
    first = tl.sum(tl.where(second == 0, pairs, 0.0), axis=1)
    last = tl.sum(tl.where(second == 1, pairs, 0.0), axis=1)
    lower = tl.dot(tl.dot(last, between, input_precision="ieee"), first, input_precision="ieee")
    quarters = tl.where(late == early, pairs[:, :, :, None, :], 0.0)
    quarters -= tl.where((late == 1) & (early == 0), lower[:, None, :, None, :], 0.0)
    return tl.reshape(quarters, (count, 2 * side, 2 * side))


@triton.jit(do_not_specialize=SCALARS)
def _inverse(
    vectors,
    log_decay,
    strength,
    inverses,
    vectors_chunk,
    vectors_head,
    vectors_token,
    decay_chunk,
    decay_head,
    decay_token,
    strength_chunk,
    strength_head,
    strength_token,
    heads,
    size,
    epsilon,
    key_width: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    exact: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    token = tl.arange(0, rows)
    decay_start = log_decay + number * decay_chunk + head * decay_head
    strength_start = strength + number * strength_chunk + head * strength_head
    total = tl.cumsum(rates_of(decay_start, decay_token, size, rows))
    beta = rates_of(strength_start, strength_token, size, rows)
    own = vectors + number * vectors_chunk + head * vectors_head + key_width
    k, _ = normalised(rows_of(own, vectors_token, size, key_width, rows, keys), epsilon, exact)
    erased = beta[:, None] * product(k, tl.trans(k), exact) * decay_of(total, rows)
    inverse = inverse_of(tl.where(token[:, None] > token[None, :], erased, 0.0), rows)
    store_rows(inverses + program * rows * rows, rows, inverse, rows, rows, rows, rows)


@triton.jit(do_not_specialize=SCALARS)
def _chunk(
    vectors,
    log_decay,
    strength,
    inverses,
    outputs,
    queries,
    matrices,
    vectors_chunk,
    vectors_head,
    vectors_token,
    decay_chunk,
    decay_head,
    decay_token,
    strength_chunk,
    strength_head,
    strength_token,
    outputs_chunk,
    outputs_head,
    outputs_token,
    queries_chunk,
    queries_head,
    queries_token,
    heads,
    size,
    epsilon,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    exact: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    token, key = tl.arange(0, rows), tl.arange(0, keys)
    decay_start = log_decay + number * decay_chunk + head * decay_head
    strength_start = strength + number * strength_chunk + head * strength_head
    total = tl.cumsum(rates_of(decay_start, decay_token, size, rows))
    beta = rates_of(strength_start, strength_token, size, rows)
    at_end = tl.sum(tl.where(token == rows - 1, total, 0.0), axis=0)
    since_start = tl.exp(total)
    own = vectors + number * vectors_chunk + head * vectors_head
    inverse_start = inverses + program * rows * rows
    width: tl.constexpr = key_width + value_width
    matrix = matrices + program * key_width * width

    k, _ = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    q, _ = normalised(rows_of(own, vectors_token, size, key_width, rows, keys), epsilon, exact)
    attention = operand(product(q, tl.trans(k), exact) * decay_of(total, rows), exact)
    until_end = tl.trans(operand(tl.exp(at_end - total)[:, None] * k, exact))

    inverse = rows_of(inverse_start, rows, rows, rows, rows, rows)
    moved = operand(product(operand(inverse * (beta * since_start)[None, :], exact), k, exact), exact)
    query = since_start[:, None] * q - product(attention, moved, exact)
    place = queries + number * queries_chunk + head * queries_head
    store_rows(place, queries_token, query, size, key_width, rows, keys)
    identity = tl.where(key[:, None] == key[None, :], tl.exp(at_end), 0.0)
    transition = identity - product(until_end, moved, exact)
    store_rows(matrix, width, transition, key_width, key_width, keys, keys)

    v = rows_of(own + 2 * key_width, vectors_token, size, value_width, rows, values)
    inverse = rows_of(inverse_start, rows, rows, rows, rows, rows)
    written = operand(product(operand(inverse * beta[None, :], exact), operand(v, exact), exact), exact)
    place = outputs + number * outputs_chunk + head * outputs_head
    store_rows(place, outputs_token, product(attention, written, exact), size, value_width, rows, values)
    store_rows(matrix + key_width, width, product(until_end, written, exact), key_width, value_width, keys, values)


@triton.jit(do_not_specialize=GRAD_SCALARS)
def _read_backward(
    outputs_grad,
    queries_grad,
    matrices_grad,
    vectors,
    log_decay,
    strength,
    inverses,
    vectors_grad,
    log_decay_grad,
    keys_grad,
    outputs_chunk,
    outputs_head,
    outputs_token,
    queries_chunk,
    queries_head,
    queries_token,
    vectors_chunk,
    vectors_head,
    vectors_token,
    decay_chunk,
    decay_head,
    decay_token,
    strength_chunk,
    strength_head,
    strength_token,
    vectors_grad_chunk,
    vectors_grad_head,
    vectors_grad_token,
    decay_grad_chunk,
    decay_grad_head,
    decay_grad_token,
    heads,
    size,
    epsilon,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    exact: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    token = tl.arange(0, rows)
    decay_start = log_decay + number * decay_chunk + head * decay_head
    strength_start = strength + number * strength_chunk + head * strength_head
    total = tl.cumsum(rates_of(decay_start, decay_token, size, rows))
    beta = rates_of(strength_start, strength_token, size, rows)
    at_end = tl.sum(tl.where(token == rows - 1, total, 0.0), axis=0)
    since_start, until_end = tl.exp(total), tl.exp(at_end - total)
    own = vectors + number * vectors_chunk + head * vectors_head
    own_grad = vectors_grad + number * vectors_grad_chunk + head * vectors_grad_head
    total_start = log_decay_grad + number * decay_grad_chunk + head * decay_grad_head
    output_start = outputs_grad + number * outputs_chunk + head * outputs_head
    query_start = queries_grad + number * queries_chunk + head * queries_head
    inverse_start = inverses + program * rows * rows
    width: tl.constexpr = key_width + value_width
    matrix = matrices_grad + program * key_width * width

    v = rows_of(own + 2 * key_width, vectors_token, size, value_width, rows, values)
    inverse = rows_of(inverse_start, rows, rows, rows, rows, rows)
    written = product(inverse * beta[None, :], v, exact)
    output = rows_of(output_start, outputs_token, size, value_width, rows, values)
    attention_grad = product(output, tl.trans(written), exact)
    memory = rows_of(matrix + key_width, width, key_width, value_width, keys, values)
    kept_grad = product(written, tl.trans(memory), exact)
    tl.debug_barrier()

    inverse = rows_of(inverse_start, rows, rows, rows, rows, rows)
    k, _ = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    moved = product(inverse * (beta * since_start)[None, :], k, exact)
    query = rows_of(query_start, queries_token, size, key_width, rows, keys)
    attention_grad -= product(query, tl.trans(moved), exact)
    transition = rows_of(matrix, width, key_width, key_width, keys, keys)
    kept_grad -= product(moved, tl.trans(transition), exact)

    tl.debug_barrier()

    total = tl.cumsum(rates_of(decay_start, decay_token, size, rows))
    k, _ = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    until_end = tl.exp(at_end - total)
    # Without what cancels, the last token here and the diagonal below: next to it, small numbers would be lost.
    end_grad = tl.where(token < size - 1, until_end * tl.sum(kept_grad * k, axis=1), 0.0)
    key = tl.arange(0, keys)
    diagonal = tl.load(matrix + key * (width + 1), mask=key < key_width, other=0.0).to(tl.float32)
    last_grad = tl.sum(end_grad, axis=0) + tl.exp(at_end) * tl.sum(diagonal, axis=0)
    total_grad = tl.where(token == size - 1, last_grad, 0.0) - end_grad
    k_grad = until_end[:, None] * kept_grad
    q, _ = normalised(rows_of(own, vectors_token, size, key_width, rows, keys), epsilon, exact)
    attention_grad = attention_grad * decay_of(total, rows)
    exponent_grad = attention_grad * product(q, tl.trans(k), exact)
    exponent_grad = tl.where(token[:, None] > token[None, :], exponent_grad, 0.0)
    total_grad += tl.sum(exponent_grad, axis=1) - tl.sum(exponent_grad, axis=0)
    tl.store(total_start + token * decay_grad_token, total_grad, mask=token < size)
    tl.debug_barrier()

    q, _ = normalised(rows_of(own, vectors_token, size, key_width, rows, keys), epsilon, exact)
    k_grad += product(tl.trans(attention_grad), q, exact)
    store_rows(keys_grad + program * rows * keys, keys, k_grad, rows, keys, rows, keys)
    k, _ = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    q_grad = product(attention_grad, k, exact)
    tl.debug_barrier()

    q, factor = normalised(rows_of(own, vectors_token, size, key_width, rows, keys), epsilon, exact)
    query = rows_of(query_start, queries_token, size, key_width, rows, keys)
    since_start = tl.exp(tl.cumsum(rates_of(decay_start, decay_token, size, rows)))
    total_grad = rates_of(total_start, decay_grad_token, size, rows) + since_start * tl.sum(query * q, axis=1)
    tl.store(total_start + token * decay_grad_token, total_grad, mask=token < size)
    q_grad = normalised_grad(q_grad + since_start[:, None] * query, q, factor)
    store_rows(own_grad, vectors_grad_token, q_grad, size, key_width, rows, keys)


@triton.jit(do_not_specialize=GRAD_SCALARS)
def _erase_backward(
    outputs_grad,
    queries_grad,
    matrices_grad,
    vectors,
    log_decay,
    strength,
    inverses,
    vectors_grad,
    log_decay_grad,
    keys_grad,
    strength_grad,
    outputs_chunk,
    outputs_head,
    outputs_token,
    queries_chunk,
    queries_head,
    queries_token,
    vectors_chunk,
    vectors_head,
    vectors_token,
    decay_chunk,
    decay_head,
    decay_token,
    strength_chunk,
    strength_head,
    strength_token,
    vectors_grad_chunk,
    vectors_grad_head,
    vectors_grad_token,
    decay_grad_chunk,
    decay_grad_head,
    decay_grad_token,
    strength_grad_chunk,
    strength_grad_head,
    strength_grad_token,
    heads,
    size,
    epsilon,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    exact: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    number, head = program // heads, program % heads
    token = tl.arange(0, rows)
    decay_start = log_decay + number * decay_chunk + head * decay_head
    strength_start = strength + number * strength_chunk + head * strength_head
    total = tl.cumsum(rates_of(decay_start, decay_token, size, rows))
    beta = rates_of(strength_start, strength_token, size, rows)
    at_end = tl.sum(tl.where(token == rows - 1, total, 0.0), axis=0)
    since_start, until_end = tl.exp(total), tl.exp(at_end - total)
    own = vectors + number * vectors_chunk + head * vectors_head
    own_grad = vectors_grad + number * vectors_grad_chunk + head * vectors_grad_head
    total_start = log_decay_grad + number * decay_grad_chunk + head * decay_grad_head
    output_start = outputs_grad + number * outputs_chunk + head * outputs_head
    query_start = queries_grad + number * queries_chunk + head * queries_head
    inverse_start = inverses + program * rows * rows
    width: tl.constexpr = key_width + value_width
    matrix = matrices_grad + program * key_width * width

    # Of what the inverse was multiplied by. The gradients of W, and of what it is made from, have their signs turned.
    k, _ = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    q, _ = normalised(rows_of(own, vectors_token, size, key_width, rows, keys), epsilon, exact)
    turned = tl.trans(product(q, tl.trans(k), exact) * decay_of(total, rows))
    kept = until_end[:, None] * k
    output = rows_of(output_start, outputs_token, size, value_width, rows, values)
    written_grad = product(turned, output, exact)
    memory = rows_of(matrix + key_width, width, key_width, value_width, keys, values)
    written_grad += product(kept, memory, exact)
    query = rows_of(query_start, queries_token, size, key_width, rows, keys)
    moved_grad = product(turned, query, exact)
    transition = rows_of(matrix, width, key_width, key_width, keys, keys)
    moved_grad += product(kept, transition, exact)
    inverse = tl.trans(rows_of(inverse_start, rows, rows, rows, rows, rows))
    value_grad = product(inverse, written_grad, exact)
    key_grad = product(inverse, moved_grad, exact)
    place = own_grad + 2 * key_width
    store_rows(place, vectors_grad_token, beta[:, None] * value_grad, size, value_width, rows, values)

    v = rows_of(own + 2 * key_width, vectors_token, size, value_width, rows, values)
    beta_grad = tl.sum(value_grad * v, axis=1)
    inverse = rows_of(inverse_start, rows, rows, rows, rows, rows)
    written = product(inverse * beta[None, :], v, exact)
    erased_grad = product(value_grad, tl.trans(written), exact)
    tl.debug_barrier()

    k, _ = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    inverse = rows_of(inverse_start, rows, rows, rows, rows, rows)
    moved = product(inverse * (beta * since_start)[None, :], k, exact)
    erased_grad = product(key_grad, tl.trans(moved), exact) - erased_grad
    inner = since_start * tl.sum(key_grad * k, axis=1)
    keys_start = keys_grad + program * rows * keys
    k_grad = rows_of(keys_start, keys, rows, keys, rows, keys) - (beta * since_start)[:, None] * key_grad
    store_rows(keys_start, keys, k_grad, rows, keys, rows, keys)
    tl.debug_barrier()

    total = tl.cumsum(rates_of(decay_start, decay_token, size, rows))
    beta = rates_of(strength_start, strength_token, size, rows)
    k, _ = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    erased_grad = tl.where(token[:, None] > token[None, :], erased_grad * decay_of(total, rows), 0.0)
    similar = product(k, tl.trans(k), exact) * erased_grad
    beta_grad += tl.sum(similar, axis=1) - inner
    place = strength_grad + number * strength_grad_chunk + head * strength_grad_head + token * strength_grad_token
    tl.store(place, beta_grad, mask=token < size)
    exponent_grad = beta[:, None] * similar
    total_grad = rates_of(total_start, decay_grad_token, size, rows) - beta * inner
    total_grad += tl.sum(exponent_grad, axis=1) - tl.sum(exponent_grad, axis=0)
    tl.store(total_start + token * decay_grad_token, tl.cumsum(total_grad, reverse=True), mask=token < size)
    erased_grad = beta[:, None] * erased_grad
    k_grad = product(erased_grad, k, exact) + product(tl.trans(erased_grad), k, exact)
    tl.debug_barrier()

    k, factor = normalised(rows_of(own + key_width, vectors_token, size, key_width, rows, keys), epsilon, exact)
    k_grad += rows_of(keys_start, keys, rows, keys, rows, keys)
    k_grad = normalised_grad(k_grad, k, factor)
    store_rows(own_grad + key_width, vectors_grad_token, k_grad, size, key_width, rows, keys)
