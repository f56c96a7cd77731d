"""Cross-entropy of a linear head, without all its logits in memory at once.

Few logits on a CPU take the plain way. All others are computed a chunk of rows at a time. The gradients are computed
with them, in the forward pass, so that no logits are kept. This path can be differentiated once, not twice.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.ops.dispatch import DTYPES, outside_compiled_graphs, use_kernels

CHUNK_LOGITS = 2**26
"""Logits that are there at the same time, at most: 128 MiB in bfloat16."""
ROW_TILE = 128
"""Chunks have a multiple of this many rows where they can: matrix products are computed in such tiles."""
COLUMN_TILE = 64
"""Rows of logits start this many entries apart, or a multiple: an odd vocabulary would leave them unaligned."""
IGNORED = -100
"""The target of rows that do not count, as in `torch.nn.functional.cross_entropy`."""


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean nats of `targets` `[rows]` under the logits `features · weightᵀ`, `[rows, width]` and `[vocab, width]`.

    Targets of -100 do not count, as in `torch.nn.functional.cross_entropy`; where all are, the mean is nan.
    """
    return _linear_cross_entropy(features, weight, targets, use_kernel=_kernel_pays(features))


@torch.no_grad()
def token_losses(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Nats of each of the `targets` `[rows]` under the logits `features · weightᵀ`, without gradients; 0 at −100."""
    _check_rows(features, targets)
    rows, use_kernel = features.shape[0], _kernel_pays(features)
    if (rows * weight.shape[0] <= CHUNK_LOGITS and not use_kernel) or rows == 0:
        logits = F.linear(features, weight)
        logits = logits.to(_statistics_dtype(logits.dtype))
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return _losses_in_chunks(features, weight, targets, use_kernel, False, False)[0]


def _check_rows(features: Tensor, targets: Tensor) -> None:
    if features.ndim != 2:
        raise ValueError(
            f"features must be [rows, width]; got shape {tuple(features.shape)}: flatten them, and targets"
        )
    if targets.shape != (len(features),):
        raise ValueError(f"{len(features)} rows of features need as many targets, not {tuple(targets.shape)}")


def _linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor, *, use_kernel: bool) -> Tensor:
    _check_rows(features, targets)
    rows, vocab = features.shape[0], weight.shape[0]
    few = rows * vocab <= CHUNK_LOGITS and not use_kernel
    if few or rows == 0 or torch._C._are_functorch_transforms_active():
        logits = F.linear(features, weight)
        return F.cross_entropy(logits.to(_statistics_dtype(logits.dtype)), targets, ignore_index=IGNORED)
    return _cross_entropy_in_chunks(features, weight, targets, use_kernel)


@outside_compiled_graphs
def _kernel_pays(features: Tensor) -> bool:
    return use_kernels(features) and _computed_in(features) in DTYPES


@outside_compiled_graphs
def _cross_entropy_in_chunks(features: Tensor, weight: Tensor, targets: Tensor, use_kernel: bool) -> Tensor:
    # Asked here: inside a Function gradients are always off, and `needs_input_grad` knows nothing of torch.no_grad.
    features_learn, weight_learns = (torch.is_grad_enabled() and one.requires_grad for one in (features, weight))
    arguments = (features, weight, targets, use_kernel, features_learn, weight_learns)
    if features_learn or weight_learns:
        return _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    losses, _, _ = _losses_in_chunks(*arguments)
    return losses.sum() / (targets != IGNORED).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        targets: Tensor,
        use_kernel: bool,
        features_learn: bool,
        weight_learns: bool,
    ) -> Tensor:
        losses, features_grad, weight_grad = _losses_in_chunks(
            features, weight, targets, use_kernel, features_learn, weight_learns
        )
        count = (targets != IGNORED).sum()
        ctx.use_kernel = use_kernel
        ctx.save_for_backward(count, features_grad, weight_grad)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy does not support create_graph=True here: second derivatives would be lost; "
                "use the cross-entropy of the model's logits"
            )
        count, features_grad, weight_grad = ctx.saved_tensors
        # Only here are gradients made those of a mean: before, float16 would lose the small ones. A scale of few bits
        # would be no better. Autograd casts them to the dtypes of features and weight.
        scale = grad / count.clamp(min=1)  # without a row that counts, gradients are 0 as torch's are
        grads = (None if one is None else _scaled(one, scale, ctx.use_kernel) for one in (features_grad, weight_grad))
        return *grads, None, None, None, None


def _losses_in_chunks(
    features: Tensor, weight: Tensor, targets: Tensor, use_kernel: bool, features_learn: bool, weight_learns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The nats of each row, and the gradients of their sum where they are wanted."""
    rows, vocab = features.shape[0], weight.shape[0]
    dtype = _computed_in(features)
    statistics = _statistics_dtype(dtype)
    features_grad = torch.empty_like(features) if features_learn else None
    weight_grad = torch.empty_like(weight, dtype=statistics) if weight_learns else None
    losses = features.new_empty(rows, dtype=statistics)
    targets = targets.contiguous()
    chunk = _rows_of_a_chunk(rows, vocab)
    buffer = features.new_empty(chunk, _rounded_up(vocab, COLUMN_TILE), dtype=dtype)
    weight = weight.to(_computed_in(weight))
    for some in _slices(rows, chunk):
        some_features = features[some].to(dtype)
        logits = buffer[: some_features.shape[0], :vocab]
        torch.mm(some_features, weight.t(), out=logits)
        _replace_by_gradient(
            logits, targets[some], losses[some], with_gradient=features_learn or weight_learns, use_kernel=use_kernel
        )
        if features_grad is not None:
            _multiply(logits, weight, features_grad[some], added=False)
        if weight_grad is not None:
            _multiply(logits.t(), some_features, weight_grad, added=some.start > 0)
    return losses, features_grad, weight_grad


def _replace_by_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, *, with_gradient: bool, use_kernel: bool
) -> None:
    """Each row's nats into `losses`; with the gradient, softmax less one-hot target over `logits`."""
    if use_kernel:
        from logdepth.ops.cross_entropy_kernel import cross_entropy_  # Triton is imported where it is used

        cross_entropy_(logits, targets, losses, with_gradient=with_gradient, ignored=IGNORED)
        return
    kept = targets != IGNORED
    columns = targets.where(kept, 0)[:, None]
    values = logits.to(losses.dtype)
    log_totals = values.logsumexp(1)
    # gather: an index would take -1 for the last entry
    losses.copy_((log_totals - values.gather(1, columns)[:, 0]).where(kept, 0))
    if with_gradient:
        values.sub_(log_totals.where(kept, torch.inf)[:, None]).exp_()  # all 0 in rows that do not count
        values.scatter_add_(1, columns, -kept.to(values.dtype)[:, None])
        logits.copy_(values)


def _scaled(grads: Tensor, scale: Tensor, use_kernel: bool) -> Tensor:
    """The product, without losing bits of the scale."""
    if not use_kernel:
        return grads.to(scale.dtype) * scale
    from logdepth.ops.rows_kernel import scaled

    return scaled(grads, scale)


def _multiply(left: Tensor, right: Tensor, product: Tensor, *, added: bool) -> None:
    """`left · right` into `product`, or added to it, summed in its dtype or in float32."""
    beta = 1 if added else 0  # with 0, what lies there is never read
    if product.dtype == left.dtype:
        torch.addmm(product, left, right, beta=beta, out=product)
    elif product.device.type == "cuda" and product.dtype == torch.float32:
        torch.addmm(product, left, right, out_dtype=torch.float32, beta=beta, out=product)
    elif added:
        product.add_(left @ right)
    else:
        product.copy_(left @ right)


def _computed_in(operand: Tensor) -> torch.dtype:
    """The dtype in which a matrix product takes this operand: autocast leaves float64 alone."""
    device = operand.device.type
    if torch.is_autocast_enabled(device) and operand.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return operand.dtype


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rows_of_a_chunk(rows: int, vocab: int) -> int:
    """For chunks as few and as equal as CHUNK_LOGITS and ROW_TILE allow."""
    most = max(1, CHUNK_LOGITS // vocab)
    tile = ROW_TILE if most >= ROW_TILE else 1
    most -= most % tile
    number = -(-rows // most)
    return min(rows, _rounded_up(-(-rows // number), tile))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _slices(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
