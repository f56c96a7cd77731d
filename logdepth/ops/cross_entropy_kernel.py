"""Cross-entropy of rows of logits, and its gradient in their place: the kernel behind `logdepth.ops.cross_entropy`."""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.dispatch import on_device_of

MOST_COLUMNS_AT_ONCE = 8192
"""Of a row. A longer one is gone through twice in turns; the second time it still lies in the L2 cache."""

LEAST = tl.constexpr(-3.0e38)
"""Where maxima start: finite, for −inf less −inf would be NaN."""


def cross_entropy_(logits: Tensor, targets: Tensor, losses: Tensor, *, with_gradient: bool, ignored: int) -> None:
    """Write each row's nats into `losses`; with the gradient, its softmax less the one-hot target over `logits`.

    Args:
        logits: `[rows, vocab]` in float32, bfloat16 or float16; rows may lie further apart than they are long.
        targets: `[rows]`, contiguous. One outside the vocabulary makes its loss NaN.
        losses: `[rows]`, contiguous, float32: what the kernel computes in.
        ignored: the target of rows without loss and gradient.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 and vocab > 1:
        raise ValueError(f"the logits of a row must lie side by side, not {logits.stride(1)} apart")
    block = min(triton.next_power_of_2(vocab), MOST_COLUMNS_AT_ONCE)
    # A row that is gone through once stays in registers, many numbers a thread; else many threads hide the loads.
    warps = max(1, block // 2048) if vocab <= block else 16
    with on_device_of(logits):
        _rows[(rows,)](
            logits, targets, losses, logits.stride(0), ignored, vocab, block, with_gradient, num_warps=warps
        )  # fmt: skip


@triton.jit
def _rows(
    logits, targets, losses, row_stride, ignored, vocab: tl.constexpr, block: tl.constexpr, with_gradient: tl.constexpr
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)  # a large chunk's offsets do not fit in 32 bits
    logits += row * row_stride
    target = tl.load(targets + row)
    target_is_there = (target >= 0) & (target < vocab)
    at_target = tl.load(logits + target, mask=target_is_there, other=float("nan")).to(tl.float32)

    kept = target != ignored
    if vocab <= block:
        columns = tl.arange(0, block)
        some = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(tl.max(some, 0), LEAST)
        powers = tl.exp(some - largest)
        total = tl.sum(powers, 0)
        tl.store(losses + row, tl.where(kept, largest + tl.log(total) - at_target, 0.0))
        if with_gradient:
            gradient = powers / total - tl.where(columns == target, 1.0, 0.0)
            tl.store(logits + columns, tl.where(kept, gradient, 0.0), mask=columns < vocab)
    else:
        largest = LEAST
        total = 0.0
        for start in range(0, vocab, block):
            columns = start + tl.arange(0, block)
            some = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(some, 0))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(some - larger), 0)
            largest = larger
        log_total = largest + tl.log(total)
        tl.store(losses + row, tl.where(kept, log_total - at_target, 0.0))
        if with_gradient:
            for start in range(0, vocab, block):
                columns = start + tl.arange(0, block)
                some = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(some - log_total) - tl.where(columns == target, 1.0, 0.0)
                tl.store(logits + columns, tl.where(kept, gradient, 0.0), mask=columns < vocab)
