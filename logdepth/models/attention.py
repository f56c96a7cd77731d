"""Causal attention with or without ALiBi, and the backends that compute it. It knows no model and no cache."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from logdepth.capture import keep
from logdepth.scanning.uncompiled import outside_compiled_graphs

FLEX_COMPILATIONS = 64
"""Shapes, dtypes and modes for which FlexAttention may be compiled in one process."""

SDPA_KERNELS = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN",
}

AttentionName = Literal["auto", "sdpa", "flex"]


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope a head: 2^(-8/n), 2^(-16/n), … for n heads; between powers of two, every second one of the next."""
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


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None, backend: str) -> Tensor:
    """Attention of a whole sequence to itself: `[batch, heads, length, head_width]` each."""
    if slopes is None:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    if backend == "flex":
        return _flex_alibi(queries, keys, values, slopes)
    positions = torch.arange(queries.shape[2], device=queries.device)
    return continued_attention(queries, keys, values, slopes, positions)


def continued_attention(
    queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None, positions: Tensor
) -> Tensor:
    """Attention of queries at `positions`, `[length]` or `[batch, length]`, to the keys at 0, 1, … up to their own."""
    distance = positions[..., :, None] - torch.arange(keys.shape[2], device=keys.device)
    bias = torch.zeros_like(distance, dtype=queries.dtype).masked_fill(distance < 0, -math.inf)
    bias = bias.unsqueeze(-3)  # the heads
    if slopes is not None:
        bias = bias - slopes.to(queries.dtype)[:, None, None] * distance.unsqueeze(-3)
    if bias.ndim == 3:
        bias = bias[None]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)


def chosen_backend(name: AttentionName, *, alibi: bool, device: torch.device) -> str:
    """`flex` for ALiBi on CUDA, else `sdpa`, unless the caller insists."""
    if name == "auto":
        return "flex" if alibi and device.type == "cuda" else "sdpa"
    return name


def backend_in_words(backend: str, *, alibi: bool, queries: Tensor) -> str:
    """What computes a forward pass with such queries, for reports of speed."""
    if backend == "flex" and alibi:
        return "FlexAttention, compiled, ALiBi as score modification"
    if queries.device.type != "cuda":
        return f"SDPA on the {queries.device.type}, " + ("ALiBi as additive mask" if alibi else "causal")
    if alibi:
        return "SDPA memory-efficient, ALiBi as additive mask"
    chosen = torch._fused_sdp_choice(queries, queries, queries, is_causal=True)
    return f"SDPA {SDPA_KERNELS.get(chosen, 'of another kind')}, causal"


@outside_compiled_graphs  # which would make the mask anew in every pass, and could not be captured
def _flex_alibi(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    attention, mask = _compiled_flex(), _causal_mask(queries.shape[2], str(queries.device))
    keep(mask)

    def alibi(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    result: Tensor = attention(queries, keys, values, score_mod=alibi, block_mask=mask)
    return result


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Past the limit of recompilations dynamo would run it unfused, with all scores in memory, and only warn.
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, FLEX_COMPILATIONS)
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=64)
def _causal_mask(length: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    with torch.inference_mode(False):  # an evaluation may make the mask that training will need
        return create_block_mask(causal, None, None, length, length, device=device)
