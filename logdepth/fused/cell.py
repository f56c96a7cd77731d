"""What there must be of an operator for its merges to be swept by kernels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

Kept = TypeVar("Kept", bound=tuple[Tensor, ...])
Spare = TypeVar("Spare", bound=tuple[Tensor, ...])
Sums = TypeVar("Sums")


class Operands(NamedTuple):
    """Of some merges."""

    states: Tensor
    """All states of a scan."""
    left: Tensor
    """Rows of the left operands."""
    right: Tensor
    first: int
    """Numbers the first of the merges among all of a scan."""
    side_by_side: int | None = None
    """The row of the first left operand where all operands lie in order, each left one before its right one."""


class Cell(ABC, Generic[Kept, Spare, Sums]):
    """An operator's merges, from its weights in a fixed order.

    Each merge has a row in every tensor of Kept, for the backward pass, which makes gradients of what it finds there,
    and in every tensor of Spare, for what is computed twice rather than kept.
    """

    num_weights: ClassVar[int]
    num_of_products: ClassVar[int]
    """How many of the weights, the first ones, matrix products read."""

    @classmethod
    @abstractmethod
    def refusal(cls, operator: Any) -> str | None:
        """Why there are no kernels for this one, if so."""

    @classmethod
    @abstractmethod
    def settings_of(cls, operator: Any) -> Any:
        """All that is needed beside the weights."""

    @classmethod
    @abstractmethod
    def weights_of(cls, operator: Any) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def __init__(self, settings: Any, weights: Sequence[Tensor], seed: Tensor) -> None:
        """From weights of which those of products are in the dtype of the states; `seed` is that of dropout."""

    @abstractmethod
    def kept(self, states: Tensor, count: int) -> Kept:
        """Room for so many merges."""

    @abstractmethod
    def spare(self, states: Tensor, count: int) -> Spare: ...

    @abstractmethod
    def sums(self, states: Tensor) -> Sums:
        """What gradients of the weights are added up in."""

    @abstractmethod
    def forward(self, kept: Kept, spare: Spare | None, at: Operands, merged: Tensor) -> None:
        """Fills `kept`, and `merged` with the results of as many merges, the first ones, as it has rows.

        Without `spare`, what is in `kept` afterwards serves nobody.
        """

    @abstractmethod
    def backward(self, kept: Kept, spare: Spare, at: Operands, grad: Tensor, grads: Tensor, sums: Sums) -> None:
        """From gradients of results, `grad`, to those of operands, which are added to `grads`, as long as `states`."""

    @abstractmethod
    def add_products(self, kept: Kept, spare: Spare, grad: Tensor, sums: Sums) -> None:
        """Adds the gradients of matrices, after the backward pass of these merges; there may be several calls of it."""

    @abstractmethod
    def weight_grads(self, sums: Sums) -> tuple[Tensor | None, ...]:
        """In the order of the weights."""
