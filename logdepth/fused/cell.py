"""What there must be of an operator for its merges to be swept by kernels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

Kept = TypeVar("Kept", bound=tuple[Tensor, ...])
Spare = TypeVar("Spare", bound=tuple[Tensor, ...])
Sums = TypeVar("Sums")


class Spacing(NamedTuple):
    """Of operands at equal distances."""

    first: int
    """The row of the first left one."""
    apart: int
    """From each left one to its right one."""
    step: int
    """From each left one to the next."""


class Operands(NamedTuple):
    """Of some merges."""

    states: Tensor
    """All states of a scan."""
    left: Tensor
    """Rows of the left operands."""
    right: Tensor
    first: int
    """Numbers the first of the merges among all of a scan."""
    spacing: Spacing | None = None
    """Where they lie at equal distances."""

    def as_they_lie(self) -> Tensor | None:
        """The pairs `[merges, 2, width]`, where they lie at equal distances."""
        if self.spacing is None:
            return None
        (first, apart, step), width = self.spacing, self.states.shape[1]
        return self.states[first:].as_strided((len(self.left), 2, width), (step * width, apart * width, 1))

    def side_by_side(self) -> Tensor | None:
        """The pairs `[merges, 2 · width]`, where no copy is needed for them."""
        pairs = self.as_they_lie()
        return pairs.view(len(pairs), -1) if pairs is not None and pairs.is_contiguous() else None


class Cell(ABC, Generic[Kept, Spare, Sums]):
    """An operator's merges, from its weights in a fixed order, of which matrix products read all but the last two.

    Each merge has a row in every tensor of Kept: what the forward pass leaves for the backward pass, which makes
    gradients of it. And in every tensor of Spare: what the backward pass makes besides.
    """

    in_place: ClassVar[bool] = False
    """Whether results can take the places of operands."""

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
    def spare(self, states: Tensor, count: int) -> Spare:
        """Likewise."""

    @abstractmethod
    def sums(self, states: Tensor) -> Sums:
        """What gradients of the weights are added up in."""

    @abstractmethod
    def forward(self, kept: Kept | None, at: Operands, merged: Tensor, to: Tensor | None = None) -> None:
        """Fills `kept`, where there is to be a backward pass, and `merged`.

        `merged` may have fewer rows than there are merges: the results of the first ones. Where `to` is given, it names
        the row of each result, or −1 for none: these may be those of right operands.
        """

    @abstractmethod
    def backward(self, kept: Kept, spare: Spare, at: Operands, grad: Tensor, grads: Tensor, sums: Sums) -> None:
        """From gradients of results, `grad`, to those of operands, which are added to `grads`, as long as `states`."""

    @abstractmethod
    def add_products(self, kept: Kept, spare: Spare, grad: Tensor, sums: Sums) -> None:
        """Adds the gradients of matrices, by merges that `backward` has seen; `grad` of their results."""

    @abstractmethod
    def weight_grads(self, grad: Tensor, sums: Sums) -> tuple[Tensor | None, ...]:
        """In the order of the weights, when all merges are done; `grad` of all their results."""
