"""Dropout inside kernels: what is dropped is a hash of position and seed, so the backward pass needs no mask."""

import triton
import triton.language as tl


@triton.jit
def keep(values, seed, place, site: tl.constexpr, rate: tl.constexpr):
    """`values` with dropout: `place` numbers them, `site` (at most 6) tells one use of a seed from another."""
    if rate > 0.0:
        bits = place.to(tl.uint32) * 0x9E3779B9 + tl.load(seed).to(tl.uint32) + site * 0x2545F491
        bits = bits ^ (bits >> 16)
        bits = bits * 0x7FEB352D
        bits = bits ^ (bits >> 15)
        bits = bits * 0x846CA68B
        least: tl.constexpr = int(rate * 4294967296.0)
        values = tl.where(bits >= least, values / (1.0 - rate), 0.0)
    return values
