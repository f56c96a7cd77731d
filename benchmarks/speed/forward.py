"""Part: forward passes of as many tokens in rows of growing length, ours and the Transformers'."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.speed.baselines import fastest_attention, fastest_whole, forward_function
from benchmarks.speed.bench import Bench, Piece, Result
from benchmarks.speed.products import forward_products, run_of, total_flops
from benchmarks.speed.sizes import SINUSOIDAL_8
from logdepth.acceleration import acceleration_in_words


def measure(bench: Bench) -> Iterator[Piece]:
    sizes = bench.sizes
    shapes = [(sizes.tokens // context, context) for context in sizes.contexts]
    for name in sizes.ours:
        for batch, context in (*shapes, (1, sizes.long_context)):
            yield partial(bench.attempt, partial(_ours, bench, name, batch, context), **_facts(name, batch, context))
    for batch, context in shapes:
        for name in sizes.theirs:
            yield partial(bench.attempt, partial(_theirs, bench, name, batch, context), **_facts(name, batch, context))


def _facts(name: str, batch: int, context: int) -> Result:
    return {"model": name, "batch": batch, "context": context, "tokens": batch * context}


def _ours(bench: Bench, name: str, batch: int, context: int) -> Result:
    config, vocab_size = bench.sizes.ours[name], bench.sizes.vocab_size
    torch.manual_seed(0)
    model = bench.low(config.build(vocab_size))
    inputs = [(tokens,) for tokens in bench.tokens(vocab_size, batch, context)]
    with model.frozen_weights():  # as in an evaluation: leaves are computed once, and kept
        times = bench.time(bench.captured(_inference(model), ours=True), inputs)
    result = {**times, "backend": acceleration_in_words(model, True)}
    del model
    bench.clear()
    for each_token in (False, True):
        products = forward_products(
            config, vocab_size, batch, context, each_token=each_token, leaves_kept=not each_token
        )
        kind = "every_token" if each_token else "as_run"
        result[f"flops_{kind}"] = total_flops(products)
        if context < bench.sizes.long_context:
            products_run = run_of(products, bench.randn, backward=False)
            result[f"products_{kind}"] = bench.time(products_run, [()])
    return result


def _theirs(bench: Bench, name: str, batch: int, context: int) -> Result:
    config, vocab_size = bench.sizes.theirs[name], bench.sizes.vocab_size
    torch.manual_seed(0)
    model = bench.low(config.build(vocab_size))
    inputs = [(tokens,) for tokens in bench.tokens(vocab_size, batch, context)]

    def times() -> Result:
        function = forward_function(bench, model, context)
        return bench.time(bench.captured(_inference(function), ours=False), inputs)

    with fastest_attention(bench, config, batch, context, backward=False) as attention:
        # Of the fastest one whole passes by each: most people will ask for FlashAttention.
        return {**attention, **(fastest_whole(bench, times) if name == SINUSOIDAL_8 else times())}


def _inference(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        return function(tokens)

    return logits
