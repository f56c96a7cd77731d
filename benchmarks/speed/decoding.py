"""Part: tokens a second, and bytes of state, of rows that have read much already; the next token is the likeliest."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.speed.baselines import compiled, fastest_whole
from benchmarks.speed.bench import Bench, Piece, Result, spread_of
from benchmarks.speed.kv_cache import CachedTransformer
from benchmarks.speed.sizes import BOTH_NETS, SINUSOIDAL, SINUSOIDAL_8, Decoding
from logdepth.acceleration import acceleration_in_words
from logdepth.decoding import Decoder
from logdepth.models import LM, LMState

SLOW_CHUNK = 0.25
"""Seconds of the fastest chunk from which on half of them must do: the whole benchmark has six minutes."""
WARM_CHUNKS = {"ours": 16, "theirs": 1}
"""Chunks of steps before the clock runs: each kind of step is captured in the first of them, and ours has several."""


def measure(bench: Bench) -> Iterator[Piece]:
    sizes = bench.sizes
    for case in (*sizes.decoding, *sizes.decoding_early):
        yield partial(bench.attempt, partial(_ours, bench, case), model=BOTH_NETS, **vars(case))
    theirs = [case for case in sizes.decoding if not case.spread]  # a cache is as large wherever rows stand
    for name in (SINUSOIDAL_8, SINUSOIDAL):  # the faster first, should the time run out
        for case in (*theirs, *sizes.decoding_early) if name == SINUSOIDAL_8 else theirs:
            yield partial(bench.attempt, partial(_theirs, bench, name, case), model=name, **vars(case))


@torch.inference_mode()
def _ours(bench: Bench, case: Decoding) -> Result:
    torch.manual_seed(0)
    model = bench.sizes.ours[BOTH_NETS].build(bench.sizes.vocab_size)
    bench.low(model)
    state = _prefilled(bench, model, case)
    decoder = Decoder(model, state, graphs=bench.cuda, on_warning=bench.note)

    def step(tokens: Tensor) -> Tensor:
        return torch.argmax(decoder.step(tokens), -1, out=decoder.tokens)

    result = _timed(bench, step, case.batch, WARM_CHUNKS["ours"])
    return {**result, "state_bytes": decoder.nbytes, "backend": acceleration_in_words(model, True)}


def _prefilled(bench: Bench, model: LM, case: Decoding) -> LMState:
    """The state after random tokens, in parts that fit: logits of a part are made too."""
    state = model.init_state(case.batch)
    together = case.absorbed - case.spread
    part = max(1, bench.sizes.prefill_tokens // case.batch)
    for start in range(0, together, part):
        _, state = model.step(_random(bench, case.batch, min(part, together - start)), state)
    if case.spread:
        further = torch.randint(2 * case.spread + 1, (case.batch,), generator=bench.generator)
        for start in range(0, 2 * case.spread, part):
            lengths = (further - start).clamp(0, min(part, 2 * case.spread - start))
            tokens = _random(bench, case.batch, min(part, 2 * case.spread - start))
            _, state = model.step(tokens, state, lengths=lengths)
    return state


@torch.inference_mode()
def _theirs(bench: Bench, name: str, case: Decoding) -> Result:
    torch.manual_seed(0)
    model = bench.sizes.theirs[name].build(bench.sizes.vocab_size)
    bench.low(model)
    cached = CachedTransformer(model, case.batch, case.absorbed)

    def times() -> Result:
        step = bench.captured(compiled(bench, cached.step), ours=False)
        return _timed(bench, step, case.batch, WARM_CHUNKS["theirs"])

    return {**fastest_whole(bench, times), "state_bytes": cached.nbytes}


def _timed(bench: Bench, step: Callable[[Tensor], Tensor], batch: int, warm_chunks: int) -> Result:
    """Milliseconds of a step, over chunks of them, each step reading what the last one wrote."""
    tokens = _random(bench, batch, 1)[:, 0]
    times = []
    sizes = bench.sizes
    for chunk in range(-warm_chunks if bench.cuda else 0, sizes.chunks):
        bench.wait()
        start = time.perf_counter()
        for _ in range(sizes.chunk_steps):
            tokens = step(tokens)
        bench.wait()
        if chunk >= 0:
            times.append(1e3 * (time.perf_counter() - start) / sizes.chunk_steps)
        if 2 * len(times) >= sizes.chunks and min(times) * sizes.chunk_steps > 1e3 * SLOW_CHUNK:
            break
    # Once in 128 steps one carries through seven levels or more: once a chunk. In some chunks it is being captured.
    spread = spread_of(times)
    mean = sum(times) / len(times)
    return {**spread, "mean_milliseconds": mean, "tokens_per_second": batch / (1e-3 * spread["milliseconds"])}


def _random(bench: Bench, *shape: int) -> Tensor:
    return torch.randint(bench.sizes.vocab_size, shape, generator=bench.generator).to(bench.device)
