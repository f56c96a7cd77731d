"""FusedOperator: the base of operators that sweep whole scans by kernels, where these apply."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from logdepth.ops import ACTIVATIONS, use_kernels, why_no_kernels
from logdepth.ops.dispatch import is_unmodified
from logdepth.scanning import Operator, SelfSweepingOperator, SweepFunction

if TYPE_CHECKING:  # it needs Triton
    from logdepth.operators.fused.cell import Cell


class FusedOperator(nn.Module, SelfSweepingOperator):
    """An operator with a cell of kernels. Kernels read its weights and call none of its parts.

    So they apply only where the operator is as it was built: a subclass, a replaced part or a hook runs plain.
    """

    width: int
    parts: ClassVar[Mapping[str, type]]
    """The classes of the operator and of everything inside it, as it is built, by name in `named_modules`."""

    @abstractmethod
    def cell(self) -> "type[Cell[Any, Any, Any]]":
        """The class that computes the operator's merges."""

    def parts_as_built(self) -> Mapping[str, type]:
        """`parts`, and those of an operator inside this one."""
        return self.parts

    def fused_pair(self, down: Operator) -> "tuple[FusedOperator, nn.Module | None, bool] | None":
        """The operator that merges, the net after its merges, and whether the net follows merges of the down-sweep too.

        None where this operator and `down` are not swept together by kernels.
        """
        return (self, None, False) if down is self else None

    def why_plain(self, down: Operator, x: Tensor) -> str | None:
        """None where a scan of elements like `x` runs by kernels; otherwise the reason in one line."""
        if (reason := why_no_kernels(x)) is not None:
            return reason
        pair = self.fused_pair(down)
        if pair is None:
            return "kernels need one operator for both sweeps, which a PostMerge may follow in one of them or in both"
        inner, net, _ = pair
        if (reason := inner.cell().refusal(inner)) is not None:
            return reason
        if not is_unmodified(self, self.parts_as_built()):
            return f"kernels are for operators as they are built; a part of this {type(self).__name__} was changed"
        if any(one.activation not in ACTIVATIONS.values() for one in (inner, net) if one is not None):
            return f"kernels know the activations {', '.join(ACTIVATIONS)}"
        return None

    def sweep_with(self, down: Operator, elements: Tensor) -> SweepFunction | None:
        if not use_kernels(elements) or self.why_plain(down, elements) is not None:
            return None
        from logdepth.operators.fused.sweep import fused_sweep

        pair = self.fused_pair(down)
        assert pair is not None
        return partial(fused_sweep, *pair)
