"""The net after a merge, without gradients and by kernels: for decoding."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logdepth.ops import few_rows_kernel
from logdepth.ops.activation import name_of
from logdepth.ops.activation_kernel import activate
from logdepth.ops.dispatch import on_device_of
from logdepth.ops.norm_kernel import fill_normed, residual_normed
from logdepth.ops.precision import cast, product_dtype
from logdepth.shapes import Rows

if TYPE_CHECKING:
    from logdepth.operators.post_merge import PostMerge


def refined_by_kernels(post: "PostMerge", merged: Rows) -> Rows:
    """LN(merged + fc(merged)), in the dtype of `merged`. Nothing is dropped."""
    dtype, activation = product_dtype(merged), name_of(post.activation)
    into, into_bias = cast(post.hidden.weight, dtype), cast(post.hidden.bias, dtype)
    back, back_bias = cast(post.out.weight, dtype), cast(post.out.bias, dtype)
    norm = post.norm.weight, post.norm.bias
    out = torch.empty_like(merged)
    with on_device_of(merged):
        if 0 < len(merged) <= few_rows_kernel.MAX_ROWS:
            hidden = merged.new_empty(len(merged), len(into), dtype=dtype)
            few_rows_kernel.linear([merged], into, into_bias, hidden, activation=activation)
            refined = torch.empty_like(merged, dtype=torch.float32)
            few_rows_kernel.linear([hidden], back, back_bias, refined, residual=merged)
            fill_normed(refined, *norm, None, out, eps=post.norm.eps, silu=False)
        elif len(merged):
            hidden = torch.addmm(into_bias, merged.to(dtype), into.t())
            unused: Tensor = hidden  # nothing is random
            activate(hidden, hidden, activation=activation, first=0, rate=0.0, seed=unused, site=0)
            added = torch.addmm(back_bias, hidden, back.t())
            residual_normed(merged, added, *norm, out, eps=post.norm.eps, first=0, rate=0.0, seed=unused)
    return out
