"""The gated delta rule on chunks of tokens, and on one token. `delta_rule_reference.py` is the definition.

`delta_chunks` is what models call: it normalises queries and keys, and takes the kernel where it can.

With G_t the running sum of log α in a chunk, and decay_ts = e^{G_t − G_s} for s ≤ t:

    A_ts = β_t (k_t·k_s) decay_ts for s < t,   T = (I + A)⁻¹,   [U | W] = T [βV | βe^G K],   K̃_s = e^{G_c − G_s} k_s
    chunk       (M, S) = (e^{G_c} I − K̃ᵀ W, K̃ᵀ U)
    token t     reads a U of its own chunk, with a_ts = (q_t·k_s) decay_ts for s ≤ t; it reads what is before the chunk
                with the query e^{G_t} q_t − (a W)_t

Everything is computed in float32 at least, also under autocast. Sums of log α over a chunk reach hundreds, where
bfloat16 has steps of 1 and more; T is an inverse; and products of M over many levels would add up their rounding
errors. Exponents are never positive, so nothing overflows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.ops.dispatch import backward_by_kernels, on_device_of, use_kernels
from logdepth.ops.precision import dot_precision

NORM_EPSILON = 1e-6
"""Added to the squared length of a vector that is normalised, so that gradients at a zero vector are finite."""


class DeltaChunk(NamedTuple):
    """What chunks do to the memory before them, and what their tokens read."""

    matrices: Tensor
    """[M | S] of each chunk, `[chunks, heads, key_width, key_width + value_width]`."""
    outputs: Tensor
    """What each token reads of its own chunk, up to itself, `[chunks, heads, size, value_width]`."""
    queries: Tensor
    """With what each token reads the memory before its chunk, `[chunks, heads, size, key_width]`."""


def delta_chunks(vectors: Tensor, log_decay: Tensor, strength: Tensor, key_width: int) -> DeltaChunk:
    """`delta_chunk` of queries and keys of any length, which are normalised. Results have the dtype of `log_decay`.

    As a kernel, `outputs` lie in memory as `[chunks, size, heads, value_width]`.

    Args:
        vectors: queries, keys and values of each token side by side,
            `[chunks, heads, size, 2 · key_width + value_width]`; they may be in a lower dtype.
        log_decay: log α ≤ 0, `[chunks, heads, size]`.
        strength: β from 0 to 2, `[chunks, heads, size]`.
        key_width: width of queries and of keys.
    """
    if use_kernels(vectors) and log_decay.dtype == strength.dtype == torch.float32:
        from logdepth.ops.delta_rule_kernel import fits

        if fits(vectors, key_width):
            return DeltaChunk(*_DeltaChunks.apply(vectors, log_decay, strength, key_width))  # type: ignore[no-untyped-call]
    widths = [key_width, key_width, vectors.shape[-1] - 2 * key_width]
    queries, keys, values = torch.split(vectors.to(log_decay.dtype), widths, dim=-1)
    return delta_chunk(normalised(queries), normalised(keys), values, log_decay, strength)


class _DeltaChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, log_decay: Tensor, strength: Tensor, key_width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from logdepth.ops.delta_rule_kernel import chunk, sides_of

        num_chunks, heads, size, width = vectors.shape
        value_width = width - 2 * key_width
        vectors = _with_rows(vectors)
        empty = log_decay.new_empty
        rows, _, _ = sides_of(size, key_width, value_width)
        inverse = empty(num_chunks, heads, rows, rows)
        outputs = empty(num_chunks, size, heads, value_width).transpose(1, 2)
        queries = empty(num_chunks, heads, size, key_width)
        matrices = empty(num_chunks, heads, key_width, key_width + value_width)
        exact = _exact(vectors)
        with on_device_of(vectors):
            chunk(vectors, log_decay, strength, inverse, outputs, queries, matrices, epsilon=NORM_EPSILON, exact=exact)
        ctx.exact = exact
        ctx.save_for_backward(vectors, log_decay, strength, inverse)
        return matrices, outputs, queries

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.ops.delta_rule_kernel import chunk_backward

        matrices_grad, outputs_grad, queries_grad = grads
        given = _with_rows(outputs_grad), _with_rows(queries_grad), matrices_grad.contiguous()
        vectors, log_decay, strength, inverse = ctx.saved_tensors
        found = [torch.empty_like(one) for one in (vectors, log_decay, strength)]
        chunk_backward(*given, vectors, log_decay, strength, inverse, *found, epsilon=NORM_EPSILON, exact=ctx.exact)
        return *found, None


def _with_rows(x: Tensor) -> Tensor:
    """With neighbours in memory in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _exact(x: Tensor) -> bool:
    """Whether products of such vectors are as exact as float32, and not TF32."""
    return x.dtype == torch.float32 and dot_precision() == "tf32x3"


def delta_chunk(queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, strength: Tensor) -> DeltaChunk:
    """The gated delta rule within each chunk.

    A token with zeros in keys, values, log_decay and strength changes nothing: chunks may be padded anywhere.

    Args:
        queries: `[chunks, heads, size, key_width]`.
        keys: the same; of length 1 at most.
        values: `[chunks, heads, size, value_width]`.
        log_decay: log α ≤ 0, `[chunks, heads, size]`.
        strength: β from 0 to 2, `[chunks, heads, size]`.
    """
    key_width, value_width = keys.shape[-1], values.shape[-1]
    total = log_decay.cumsum(-1)
    # Masked before exp, where differences are positive, so that neither exp nor its gradient overflows.
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    since_start = total.exp()[..., None]

    erased = strength[..., None] * (keys @ keys.mT) * decay
    target = strength[..., None] * torch.cat([values, since_start * keys], dim=-1)
    solved = torch.linalg.solve_triangular(erased.tril(-1), target, upper=False, unitriangular=True)
    written, moved = torch.split(solved, [value_width, key_width], dim=-1)

    until_end = (total[..., -1:] - total).exp()[..., None] * keys
    identity = torch.eye(key_width, dtype=keys.dtype, device=keys.device)
    transition = since_start[..., -1:, :] * identity - until_end.mT @ moved
    matrices = torch.cat([transition, until_end.mT @ written], dim=-1)

    attention = (queries @ keys.mT) * decay
    return DeltaChunk(matrices, attention @ written, since_start * queries - attention @ moved)


def delta_step(matrices: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """[M | S] after one more token, in place of a product with the matrix of the token; or S alone.

    Args:
        matrices: [M | S] before it, `[rows, heads, key_width, key_width + value_width]`; or S, without M.
        key: `[rows, heads, key_width]`.
        value: `[rows, heads, value_width]`.
        log_decay: `[rows, heads]`; likewise `strength`.
    """
    decayed = log_decay.exp()[..., None, None] * matrices
    target = F.pad(value, (matrices.shape[-1] - value.shape[-1], 0))[..., None, :]
    correction = strength[..., None, None] * (target - key[..., None, :] @ decayed)
    return decayed + key[..., :, None] * correction


def normalised(vectors: Tensor) -> Tensor:
    """Vectors of length 1, and shorter ones where they are nearly zero. Zero vectors have finite gradients."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPSILON)
