"""Part: what the GPU reaches on large matrix products in bfloat16, and on a copy."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.speed.bench import Bench, Piece, Result
from benchmarks.speed.products import Product


def measure(bench: Bench) -> Iterator[Piece]:
    for shape in bench.sizes.products:
        yield partial(bench.attempt, partial(_rate, bench, Product(*shape)), what="product", shape=list(shape))
    yield partial(bench.attempt, partial(_bandwidth, bench), what="copy")


def _rate(bench: Bench, product: Product) -> Result:
    pairs = [
        (bench.randn(product.rows, product.inputs), bench.randn(product.inputs, product.outputs)) for _ in range(2)
    ]
    out = bench.randn(product.rows, product.outputs)
    times = bench.time(lambda left, right: torch.mm(left, right, out=out), pairs)
    return {**times, "flops_per_second": product.flops / (1e-3 * times["milliseconds"])}


def _bandwidth(bench: Bench) -> Result:
    source = torch.randint(256, (bench.sizes.copied_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    times = bench.time(lambda: target.copy_(source), [()])
    return {**times, "bytes_per_second": 2 * source.nbytes / (1e-3 * times["milliseconds"])}
