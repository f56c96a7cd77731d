"""Parts: whole training steps (forward, backward, clipping, AdamW) in one CUDA graph, their time and memory.

Weights are float32, arithmetic is bfloat16 by autocast, as in `logdepth.training`; dropout is that of the recipes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.speed.baselines import Function, fastest_attention, loss_functions
from benchmarks.speed.bench import Bench, Piece, Result, in_short
from benchmarks.speed.products import forward_products, run_of, total_flops
from benchmarks.speed.sizes import LARGE, SINUSOIDAL_8
from logdepth.acceleration import acceleration_in_words
from logdepth.models import ScanLMConfig

LEARNING_RATE, CLIP = 1e-4, 1.0


def measure(bench: Bench) -> Iterator[Piece]:
    sizes = bench.sizes
    for batch, context in sizes.training:
        for name, config in sizes.ours.items():
            yield partial(_measure_ours, bench, name, config, sizes.vocab_size, batch, context)
    for name in sizes.theirs:
        for batch, context in sizes.training:
            yield partial(_measure_theirs, bench, name, batch, context)
    for batch, context in sizes.training_between:
        for name, config in sizes.ours.items():
            yield partial(_measure_ours, bench, name, config, sizes.vocab_size, batch, context, recomputed_too=False)
        yield partial(_measure_theirs, bench, SINUSOIDAL_8, batch, context)


def measure_large(bench: Bench) -> Iterator[Piece]:
    yield partial(
        _measure_ours, bench, LARGE, bench.sizes.large, bench.sizes.large_vocab_size, *bench.sizes.large_training
    )


def _measure_ours(
    bench: Bench,
    name: str,
    config: ScanLMConfig,
    vocab_size: int,
    batch: int,
    context: int,
    *,
    recomputed_too: bool = True,
) -> None:
    """`recomputed_too`: also where merges are computed again in the backward pass."""
    for recompute in (False, True) if recomputed_too else (False,):
        work = partial(_ours, bench, replace(config, recompute=recompute), vocab_size, batch, context)
        bench.attempt(work, model=name, batch=batch, context=context, tokens=batch * context, recompute=recompute)


def _measure_theirs(bench: Bench, name: str, batch: int, context: int) -> None:
    config, vocab_size = bench.sizes.theirs[name], bench.sizes.vocab_size
    facts = {"model": name, "batch": batch, "context": context, "tokens": batch * context}
    before = bench.allocated()
    torch.manual_seed(0)
    model = config.build(vocab_size).to(bench.device)
    try:
        with fastest_attention(bench, config, batch, context, backward=True) as attention:
            for loss, function in loss_functions(bench, model, context).items():
                work = partial(_step_times, bench, model, function, vocab_size, batch, context, before, ours=False)
                bench.attempt(work, keep_compiled=True, **facts, loss=loss, **attention)
    except Exception as error:  # of the choice of attention: the other Transformers are still worth having
        bench.record({**facts, "failed": in_short(error)})
    del model
    bench.clear()


def _ours(bench: Bench, config: ScanLMConfig, vocab_size: int, batch: int, context: int) -> Result:
    before = bench.allocated()
    torch.manual_seed(0)
    model = config.build(vocab_size).to(bench.device)
    result = _step_times(bench, model, model.loss, vocab_size, batch, context, before, ours=True)
    result["backend"] = acceleration_in_words(model, True)
    del model
    bench.clear()
    for each_token in (False, True):
        products = forward_products(config, vocab_size, batch, context, each_token=each_token)
        kind = "every_token" if each_token else "as_run"
        result[f"flops_{kind}"] = 3 * total_flops(products)
        if not config.recompute:
            products_run = run_of(products, bench.randn, backward=True)
            result[f"products_{kind}"] = bench.time(products_run, [()])
    return result


def _step_times(
    bench: Bench,
    model: nn.Module,
    loss: Function,
    vocab_size: int,
    batch: int,
    context: int,
    before: int,
    *,
    ours: bool,
) -> Result:
    """`before`: bytes that something else has left allocated when there was no model yet; its peak is without them."""
    model.train()
    inputs = [(windows,) for windows in bench.tokens(vocab_size, batch, context + 1)]
    step = bench.captured(training_step(bench, model, loss), ours=ours)
    bench.forget_peak()
    step(*inputs[0])
    whole = bench.peak()
    bench.forget_peak()
    # A plain step and the capture: a replay does not show in the allocator's count, the capture does as a step would.
    for number in (1, 2):
        step(*inputs[number])
    peak = bench.peak()
    times = bench.time(step, inputs)
    final = float(step(*inputs[0]))
    if not final < float("inf"):
        raise ArithmeticError(f"the loss is {final}")
    return {
        **times,
        "peak_bytes": None if peak is None else peak - before,
        "peak_bytes_with_first_step": None if whole is None or peak is None else max(whole, peak) - before,
        "bytes_before": before,
        "reserved_bytes": torch.cuda.max_memory_reserved() if bench.cuda else None,
        "tokens_per_second": batch * context / (1e-3 * times["milliseconds"]),
        "final_loss": final,
    }


def training_step(bench: Bench, model: nn.Module, loss_of: Function) -> Callable[[Tensor], Tensor]:
    """Windows of tokens to their loss, after which the weights have changed."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": 1e-4},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ],
        lr=torch.tensor(LEARNING_RATE, device=bench.device),
        fused=True,
        capturable=bench.cuda,
    )

    def step(windows: Tensor) -> Tensor:
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.cuda):
            loss = loss_of(windows[:, :-1], windows[:, 1:])
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
