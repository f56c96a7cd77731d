"""What kernels need of an operator to sweep its merges, and the products that such merges share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from logdepth.ops import few_rows_kernel
from logdepth.ops.activation_kernel import activate, activate_backward
from logdepth.ops.linear import matrix_grad
from logdepth.ops.linear_kernel import fits, linear_activated

Kept = TypeVar("Kept", bound=tuple[Tensor, ...])
Spare = TypeVar("Spare", bound=tuple[Tensor, ...])
Sums = TypeVar("Sums")


class Operands(NamedTuple):
    """The operands of some merges: rows of the matrix of all states of a scan."""

    states: Tensor
    left: Tensor
    """Rows of the left operands."""
    right: Tensor
    first: int
    """The number of the first of these merges among all merges of the scan."""
    adjacent_from: int | None = None
    """The row of the first left operand, where each pair follows the one before without a gap."""

    def side_by_side(self) -> Tensor | None:
        """The pairs `[merges, 2 · width]` as a view, where no copy is needed for them."""
        if self.adjacent_from is None:
            return None
        num_rows = 2 * len(self.left)
        return self.states[self.adjacent_from : self.adjacent_from + num_rows].view(len(self.left), -1)


class Cell(ABC, Generic[Kept, Spare, Sums]):
    """The merges of an operator by kernels, from its weights in a fixed order; products read all but the last two.

    The forward pass leaves a row of every tensor of Kept for each merge. The backward pass turns them into gradients,
    and fills a row of every tensor of Spare.
    """

    @classmethod
    @abstractmethod
    def refusal(cls, operator: Any) -> str | None:
        """Why there are no kernels for this operator, or None."""

    @classmethod
    @abstractmethod
    def settings_of(cls, operator: Any) -> Any:
        """Everything that the merges need besides the weights."""

    @classmethod
    @abstractmethod
    def weights_of(cls, operator: Any) -> tuple[Tensor, ...]:
        """The weights in their order."""

    @abstractmethod
    def __init__(self, settings: Any, weights: Sequence[Tensor], seed: Tensor) -> None:
        """`weights` of products are in the dtype of the states; `seed` is the seed of dropout."""

    @abstractmethod
    def kept(self, states: Tensor, count: int) -> Kept:
        """Memory for this many merges."""

    @abstractmethod
    def spare(self, states: Tensor, count: int) -> Spare:
        """Memory for this many merges in the backward pass."""

    @abstractmethod
    def sums(self, states: Tensor) -> Sums:
        """Where the gradients of the weights are summed."""

    @abstractmethod
    def forward(self, kept: Kept | None, at: Operands, merged: Tensor) -> None:
        """Fills `merged`, and `kept` where there will be a backward pass.

        `merged` may have fewer rows than there are merges: then it gets the results of the first ones.
        """

    @abstractmethod
    def backward(self, kept: Kept, spare: Spare, at: Operands, grad: Tensor, grads: Tensor, sums: Sums) -> None:
        """Adds the operands' gradients to `grads`, which is as long as `states`; `grad` holds those of the results."""

    @abstractmethod
    def add_products(self, kept: Kept, spare: Spare, grad: Tensor, sums: Sums) -> None:
        """Adds the gradients of matrices, for merges that `backward` has seen; `grad` holds those of their results."""

    @abstractmethod
    def weight_grads(self, grad: Tensor, sums: Sums) -> tuple[Tensor | None, ...]:
        """Gradients in the order of the weights, when all merges are done; `grad` holds those of all results."""


class Totals:
    """Gradients of matrices by name, summed in float32."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """None where nothing was added."""
        return self._totals.get(name)

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Adds leftᵀ · right."""
        self._totals[name] = matrix_grad(left, right, self.get(name))


def linear_and_activation(
    x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, hidden: Tensor, **activation: Any
) -> None:
    """before = x · Wᵀ + b, hidden = dropout(act(before)), by whichever kernels are fastest for this many rows.

    Where `before` and `hidden` are one tensor, it holds `hidden` afterwards.
    """
    if hidden is before and fits(x, weight):
        linear_activated(x, weight, bias, hidden, **activation)
    elif hidden is before and few_rows_kernel.fits(x) and not activation["rate"]:
        # In a small level it is the number of kernels that takes time.
        few_rows_kernel.linear([x], weight, bias, hidden, activation=activation["activation"])
    else:
        torch.addmm(bias, x, weight.t(), out=before)
        activate(before, hidden, **activation)


def linear_and_slope(
    grad: Tensor, weight: Tensor, before: Tensor, hidden: Tensor, sums: Tensor, **activation: Any
) -> None:
    """From `grad` of what `weight` made of `hidden`: `before` becomes its gradient, and `hidden` is computed again."""
    torch.mm(grad, weight, out=hidden)
    activate_backward(before, hidden, sums, **activation)
