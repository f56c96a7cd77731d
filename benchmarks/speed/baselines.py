"""The Transformers, as fast as we can make them: compiled whole, with the fastest attention that there is for them.

They compute what the preset `logdepth.models.TransformerConfig` computes, with its weights (tests/test_performance.py).
FlexAttention is called as it is, for the compilation of the whole to fuse: compiled by itself inside, as the model has
it, it would end the graph in every layer. Sinusoids are added from a table, and under autocast the residual stream is
in the dtype of the products, as the states of an accelerated scan are.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.speed.bench import Bench, Result
from logdepth.blocks import AttentionBlock, Layout, MLPBlock
from logdepth.capture import Outputs
from logdepth.models import LM, TransformerConfig
from logdepth.ops import linear_cross_entropy, product_dtype
from logdepth.ops.attention import sinusoids, whole_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Function = Callable[..., Tensor]
KERNELS = ("flash", "cudnn")
"""Of scaled_dot_product_attention, for causal attention without a bias."""


def compiled(bench: Bench, function: Function) -> Function:
    """One graph for these shapes alone, or an error: a graph that breaks would be slower than it has to be."""
    return function if bench.sizes.smoke else torch.compile(function, dynamic=False, fullgraph=True)


def positions_for(model: LM, length: int) -> Tensor | None:
    """What is added to embeddings, `[length, width]`, made once: compiled with the rest, it would be in every pass."""
    if model.config.positions != "sinusoidal":
        return None
    weight = model.embedding.weight
    return sinusoids(torch.arange(length, device=weight.device), weight.shape[1]).to(weight.dtype)


def features_of(model: LM, tokens: Tensor, positions: Tensor | None, attend: Attend) -> Tensor:
    """What the head multiplies, `[batch, length, width]`."""
    features = embedded(model, tokens, positions)
    features = model.embed_dropout(features.to(product_dtype(features)))
    for attention, mlp in layers_of(model):
        features = after_attention(attention, mlp, features, attend(*attention.project(features)))
    assert model.norm is not None
    normed: Tensor = model.norm(features)
    return normed


def embedded(model: LM, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """The embedding with positions, `[batch, length, width]`."""
    features: Tensor = model.embedding(tokens) * math.sqrt(model.config.dim)
    return features if positions is None else features + positions


def layers_of(model: LM) -> list[tuple[AttentionBlock, MLPBlock]]:
    """The blocks of a Transformer in pairs."""
    blocks = list(model.blocks)
    return list(zip(blocks[::2], blocks[1::2], strict=True))  # type: ignore[arg-type]


def after_attention(attention: AttentionBlock, mlp: MLPBlock, features: Tensor, attended: Tensor) -> Tensor:
    """The residual stream after a layer, from the result of its attention, `[batch, heads, length, head_width]`."""
    features = features + attention.dropout(attention.out(attended.transpose(1, 2).flatten(-2)))
    after: Tensor = mlp(features, None, Layout(features.shape[:2]))[0]
    return after


def forward_function(bench: Bench, model: LM, length: int) -> Function:
    """Tokens to logits."""
    attend, positions = attention_for(bench, model, length), positions_for(model, length)
    weight = model.head_weight
    return compiled(bench, lambda tokens: F.linear(features_of(model, tokens, positions, attend), weight))


def loss_functions(bench: Bench, model: LM, length: int) -> dict[str, Function]:
    """Inputs and targets to the mean loss, by what computes the loss: one compilation of the layers serves both."""
    attend, positions = attention_for(bench, model, length), positions_for(model, length)
    features = compiled(bench, lambda tokens: features_of(model, tokens, positions, attend))
    weight = model.head_weight

    def of_all_logits(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, weight).float(), targets)

    heads = {"all logits": compiled(bench, of_all_logits), "linear_cross_entropy": linear_cross_entropy}

    def with_head(head: Function) -> Function:
        return lambda tokens, targets: head(features(tokens).flatten(0, 1), weight, targets.flatten())

    return {name: with_head(head) for name, head in heads.items()}


def attention_for(bench: Bench, model: LM, length: int) -> Attend:
    """Causal attention over rows of one length."""
    slopes = layers_of(model)[0][0].slopes
    if slopes is None or bench.sizes.smoke:
        return lambda queries, keys, values: whole_attention(queries, keys, values, slopes=slopes)
    return flex_alibi(slopes.float(), length)  # distances in bfloat16 would be wrong from 256 on


def flex_alibi(slopes: Tensor, length: int) -> Attend:
    """FlexAttention with ALiBi, for a whole model to be compiled around it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def alibi(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    mask = create_block_mask(causal, None, None, length, length, device=str(slopes.device))

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attended: Tensor = flex_attention(queries, keys, values, score_mod=alibi, block_mask=mask)
        return attended

    return attend


@contextmanager
def fastest_attention(
    bench: Bench, config: TransformerConfig, batch: int, length: int, *, backward: bool
) -> Iterator[Result]:
    """Inside, scaled_dot_product_attention uses the kernel that is fastest for such rows; yields what that was."""
    if config.positions == "alibi" or not bench.cuda:
        yield {"attention": "FlexAttention" if bench.cuda else "SDPA"}
        return
    try:
        times = {kernel: _time_of(bench, kernel, config, batch, length, backward) for kernel in KERNELS}
        best = min(times, key=lambda kernel: times[kernel] or math.inf)
        allow_only(best)
        yield {"attention": f"SDPA, {best}", "attention_milliseconds": times}
    finally:
        allow_only(*KERNELS)


def fastest_whole(bench: Bench, times: Callable[[], Result]) -> Result:
    """What `times` finds of a whole compiled function with the kernel of attention that makes it fastest.

    What is compiled may gain more with one kernel than with the other, whichever is faster by itself.
    """
    found: dict[str, Result] = {}
    for kernel in KERNELS:
        if bench.cuda:
            allow_only(kernel)
        try:
            found[kernel] = times()
        except RuntimeError as error:
            if not no_such_kernel(error):
                raise
        bench.clear()  # what was compiled does not know which kernel was allowed then
    if not found:
        raise RuntimeError(f"scaled_dot_product_attention has none of its kernels for this: {', '.join(KERNELS)}")
    best = min(found, key=lambda kernel: found[kernel]["milliseconds"])
    return {
        **found[best],
        "attention": f"SDPA, {best}" if bench.cuda else "SDPA",
        "whole_milliseconds": {kernel: result["milliseconds"] for kernel, result in found.items()},
    }


def _time_of(
    bench: Bench, kernel: str, config: TransformerConfig, batch: int, length: int, backward: bool
) -> float | None:
    """Milliseconds of one layer's attention, without what launches cost; None where the GPU has no such kernel."""
    packed = bench.randn(batch, length, 3, config.num_heads, config.embed_width // config.num_heads)  # as the model's
    # Apart from what they were cut from: a backward pass that is captured must not reach what was made before.
    rows = tuple(one.detach().requires_grad_(backward) for one in packed.transpose(1, 3).unbind(2))

    def attention(_: Tensor) -> Outputs:
        attended = F.scaled_dot_product_attention(*rows, is_causal=True)
        return torch.autograd.grad(attended, rows, attended) if backward else attended

    nothing = bench.randn(1)  # a graph copies what it is given, which would count
    allow_only(kernel)
    try:
        milliseconds: float = bench.time(bench.captured(attention, ours=False), [(nothing,)])["milliseconds"]
    except RuntimeError as error:
        if not no_such_kernel(error):
            raise
        return None
    return milliseconds


def no_such_kernel(error: RuntimeError) -> bool:
    """Whether the kernel that is allowed is not for such rows. Any other error would hand the choice over unseen."""
    return "No available kernel" in str(error)


def allow_only(*kernels: str) -> None:
    torch.backends.cuda.enable_flash_sdp("flash" in kernels)
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in kernels)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
