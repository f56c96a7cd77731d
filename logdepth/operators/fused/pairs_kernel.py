"""The operands of merges: rows of one matrix of states, laid side by side, and their gradients added back.

pairs[i] = [states[left[i]]; states[right[i]]]          [rows, 2 · width], with dropout
"""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.dropout_kernel import keep
from logdepth.ops.launch import block_of, warps_of

SITE = 1


def gather_pairs(
    states: Tensor, left: Tensor, right: Tensor, pairs: Tensor, *, first: int, rate: float, seed: Tensor
) -> None:
    """Fills `pairs`; `first` numbers the first of them among all of a pass."""
    width = states.shape[1]
    _gather[(len(left),)](
        states, left, right, pairs, seed, first, width, block_of(width), rate, SITE, num_warps=warps_of(width, 4)
    )


def add_pair_gradients(
    grads: Tensor, left: Tensor, right: Tensor, pair_grads: Tensor, *, first: int, rate: float, seed: Tensor
) -> None:
    """Adds the gradients of pairs to those of states. No row occurs twice among `left` and `right`."""
    width = grads.shape[1]
    _add[(len(left),)](
        grads, left, right, pair_grads, seed, first, width, block_of(width), rate, SITE, num_warps=warps_of(width, 4)
    )


@triton.jit(do_not_specialize=["first"])
def _gather(
    states, left, right, pairs, seed, first, width, block: tl.constexpr, rate: tl.constexpr, site: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    one = tl.load(states + tl.load(left + row).to(tl.int64) * width + column, mask=inside)
    other = tl.load(states + tl.load(right + row).to(tl.int64) * width + column, mask=inside)
    place = (first + row) * 2 * width + column
    one = keep(one, seed, place, site, rate)
    other = keep(other, seed, place + width, site, rate)
    tl.store(pairs + row * 2 * width + column, one, mask=inside)
    tl.store(pairs + row * 2 * width + width + column, other, mask=inside)


@triton.jit(do_not_specialize=["first"])
def _add(
    grads, left, right, pair_grads, seed, first, width, block: tl.constexpr, rate: tl.constexpr, site: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    left_grads = grads + tl.load(left + row).to(tl.int64) * width + column
    right_grads = grads + tl.load(right + row).to(tl.int64) * width + column
    place = (first + row) * 2 * width + column
    one = tl.load(pair_grads + row * 2 * width + column, mask=inside).to(tl.float32)
    other = tl.load(pair_grads + row * 2 * width + width + column, mask=inside).to(tl.float32)
    one = keep(one, seed, place, site, rate) + tl.load(left_grads, mask=inside).to(tl.float32)
    other = keep(other, seed, place + width, site, rate) + tl.load(right_grads, mask=inside).to(tl.float32)
    tl.store(left_grads, one, mask=inside)
    tl.store(right_grads, other, mask=inside)
