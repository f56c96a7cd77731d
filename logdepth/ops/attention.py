"""Causal attention, full or in a sliding window, with or without ALiBi, and the backends that compute it.

`attention` takes queries and keys at any positions, so whole sequences, continued ones and single tokens are the same
call. Its plain backend is the definition. A whole sequence can also go through torch's fused kernels.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from logdepth.keep_alive import keep
from logdepth.ops.dispatch import outside_compiled_graphs

FLEX_COMPILATIONS = 64
"""Shapes, dtypes and modes for which FlexAttention may be compiled in one process."""

SDPA_KERNELS = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN",
}

FLEX_HEAD_WIDTH = 16
"""The least that FlexAttention can be compiled for on CUDA."""

FLEX_BLOCK = 128
"""Queries and keys of a block of FlexAttention's masks."""

LONG, PART = 4096, 1024
"""Masked attention of more queries than `LONG` is computed in parts of `PART` queries where no gradient is needed: a
mask of all of them would take gigabytes."""

AttentionBackend = Literal["auto", "sdpa", "flex", "plain"]


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope per head: 2^(-8/n), 2^(-16/n), … for n heads; between powers of two, every second one of the next."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    extra = [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(slopes + extra)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sine and cosine of the positions at geometrically spaced frequencies: `[…, width]`, sines first."""
    half = (width + 1) // 2
    frequencies = torch.exp(torch.arange(half, device=positions.device) * (-math.log(10_000.0) / half))
    angles = positions[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :width]


def rotated(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary embedding of `[batch, heads, length, head_width]` at positions `[length]` or `[batch, length]`."""
    half, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = (positions[..., None] * frequencies).unsqueeze(-3)  # the heads
    cosine, sine = angles.cos(), angles.sin()
    first, second = x.to(dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    slopes: Tensor | None = None,
    window: int | None = None,
    backend: str = "sdpa",
) -> Tensor:
    """Causal attention of queries to the keys at positions up to their own; `[batch, heads, length, head_width]` each.

    Args:
        query_positions: `[length]`, or `[batch, length]` where rows differ.
        key_positions: likewise; a key at a negative position is not there.
        slopes: ALiBi's, `[heads]`.
        window: a query reads the last `window` positions only, its own included; None: all.
        backend: `plain` or `sdpa`.
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    hidden = (distance < 0) | (key_positions[..., None, :] < 0)
    if window is not None:
        hidden = hidden | (distance >= window)
    # Not −∞: a query that reads nothing, as in padding, would get NaN, and so would the gradients of all weights.
    lowest = torch.finfo(queries.dtype).min / 2
    bias = torch.zeros_like(distance, dtype=queries.dtype).masked_fill(hidden, lowest)
    bias = bias.unsqueeze(-3)  # the heads
    if slopes is not None:
        bias = bias - slopes.to(queries.dtype)[:, None, None] * distance.unsqueeze(-3)
    if bias.ndim == 3:
        bias = bias[None]
    if backend == "plain":
        scores = queries @ keys.mT / math.sqrt(queries.shape[-1]) + bias
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        return weights.to(values.dtype) @ values
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)


def whole_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    slopes: Tensor | None = None,
    window: int | None = None,
    backend: str = "sdpa",
) -> Tensor:
    """Causal attention of a whole sequence to itself, by the fastest kernel of the backend."""
    if backend == "flex":
        return _flex(queries, keys, values, slopes, window)
    if backend == "sdpa" and slopes is None and (window is None or window >= queries.shape[2]):
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    length = queries.shape[2]
    positions = torch.arange(length, device=queries.device)
    size = max(length, 1) if length <= LONG or torch.is_grad_enabled() else PART
    parts = []
    for start in range(0, max(length, 1), size):
        end = min(start + size, length)
        first = 0 if window is None else max(0, start + 1 - window)
        parts.append(
            attention(
                queries[:, :, start:end],
                keys[:, :, first:end],
                values[:, :, first:end],
                positions[start:end],
                positions[first:end],
                slopes=slopes,
                window=window,
                backend=backend,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def chosen_backend(name: AttentionBackend, *, masked: bool, head_width: int, device: torch.device) -> str:
    """`flex` for a whole sequence with ALiBi or a window on CUDA, else `sdpa`, unless the caller insists."""
    is_possible = device.type != "cuda" or head_width >= FLEX_HEAD_WIDTH
    if name == "auto":
        return "flex" if masked and device.type == "cuda" and is_possible else "sdpa"
    if name == "flex" and not is_possible:
        raise ValueError(
            f"FlexAttention needs heads of width {FLEX_HEAD_WIDTH} or more on CUDA; got {head_width}: "
            "use fewer heads, or the backend sdpa"
        )
    return name


def backend_in_words(backend: str, *, slopes: bool, window: int | None, queries: Tensor) -> str:
    """What computes a forward pass with such queries, for reports of speed."""
    if backend == "plain":
        return "plain matrix products"
    what = " and ".join(
        name for name, there in (("ALiBi", slopes), (f"a window of {window}", window is not None)) if there
    )
    if backend == "flex" and what:
        return f"FlexAttention, compiled, {what} as score modification"
    if queries.device.type != "cuda":
        return f"SDPA on the {queries.device.type}, " + (f"{what} as additive mask" if what else "causal")
    if what:
        return f"SDPA memory-efficient, {what} as additive mask"
    chosen = torch._fused_sdp_choice(queries, queries, queries, is_causal=True)
    return f"SDPA {SDPA_KERNELS.get(chosen, 'of another kind')}, causal"


@outside_compiled_graphs  # compiled code would make the mask again in every pass, which cannot be captured
def _flex(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None, window: int | None) -> Tensor:
    mask = _causal_mask(queries.shape[2], window, str(queries.device))
    keep(mask)

    def alibi(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert slopes is not None
        return score - slopes[head] * (query - key)

    score_mod = None if slopes is None else alibi
    result: Tensor = _compiled_flex()(queries, keys, values, score_mod=score_mod, block_mask=mask)
    return result


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Past the limit of recompilations dynamo would run it unfused, with all scores in memory, and only warn.
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, FLEX_COMPILATIONS)
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=64)
def _causal_mask(length: int, window: int | None, device: str) -> Any:
    """What FlexAttention's `create_block_mask` returns, without its tables of all pairs of positions."""
    from torch.nn.attention.flex_attention import BlockMask

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def in_window(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        return (query >= key) & (query - key < window)

    with torch.inference_mode(False):  # an evaluation may make the mask that training will need
        block = torch.arange(-(-length // FLEX_BLOCK), device=device)
        distance = FLEX_BLOCK * (block[:, None] - block)
        nearest, furthest = distance - (FLEX_BLOCK - 1), distance + (FLEX_BLOCK - 1)
        seen = (furthest >= 0) if window is None else (furthest >= 0) & (nearest < window)
        whole = (nearest >= 0) if window is None else (nearest >= 0) & (furthest < window)
        if length % FLEX_BLOCK:
            whole[-1] = False  # the last block has queries beyond the end
        partial_blocks, whole_blocks = _in_order(seen & ~whole), _in_order(whole)
        return BlockMask.from_kv_blocks(
            *partial_blocks,
            *whole_blocks,
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=causal if window is None else in_window,
            seq_lengths=(length, length),
        )


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, `[1, 1, blocks]`, and their numbers, then all others."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1).int()[None, None], numbers.int()[None, None]
