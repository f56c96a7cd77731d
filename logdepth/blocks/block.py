"""The contract of everything between embedding and head: `block(x, state, layout) -> (x, state)`.

The same call takes whole sequences, padded batches, packed documents, continued chunks and single tokens; the layout
says which. A state is explicit and never changed in place, so it can be continued twice. The exception is a static
state, which has memory of fixed size and is changed in place by each decoded token, so that a step can be a CUDA graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from logdepth.blocks.layout import Layout
from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Ints


class BlockState(Protocol):
    """What a block remembers of the tokens before, for every row of a batch. Never changed in place."""

    @property
    def nbytes(self) -> int: ...

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given rows, in the given order; a row may be repeated or left out."""
        ...

    @classmethod
    def concatenate(cls, states: Sequence[Self]) -> Self:
        """One state with the rows of all `states`, at least one, in order."""
        ...

    def detach(self) -> Self:
        """The same state, cut from the graph."""
        ...


class StaticState(Protocol):
    """A state in memory of fixed size, which a block changes in place by one token at a time."""

    @property
    def steps_differ(self) -> bool:
        """Whether what a step computes depends on the lengths of the rows, as the merges of a scan do."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def capacity(self) -> int:
        """The length up to which there is room for rows."""
        ...

    def make_room(self, longest: int) -> None:
        """Moves to memory with room for rows of this length, so that recorded graphs are void."""
        ...

    def update(self, state: Any) -> None:
        """Takes what the block returned as its state after a token."""
        ...

    def replace(self, rows: Ints, state: Any) -> None:
        """Puts the rows of an ordinary state, for which there is room, in place of the given rows, which all differ."""
        ...

    def state(self, lengths: Ints, rows: Ints) -> BlockState:
        """The given rows as an ordinary state; `lengths` are those of all rows."""
        ...

    def exported(self, longest: int) -> dict[str, Tensor]:
        """What it holds as named tensors `[batch, …]`, with room for rows of this length."""
        ...

    def on(self, exported: Mapping[str, Tensor]) -> Self:
        """A state on tensors that `exported` returned, which stay as they are, for steps of the shape `AnyLength`."""
        ...


class Block(nn.Module, ABC):
    """A layer of a language model."""

    accepts_lookup = False
    """Whether `x` may be a TokenLookup, which is what the first block of a model gets where it accepts one."""

    @abstractmethod
    def forward(self, x: Any, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The new residual stream, shaped as `x`, and the state after the new tokens.

        Args:
            x: the residual stream, `[batch, length, dim]`, or `[total, dim]` where documents are packed.
            state: what `init_state` or an earlier call returned, or a static state; None: the rows start here.
            layout: how the tokens are arranged.
        """

    def init_state(self, batch: int) -> Any:
        """The state of `batch` rows that have absorbed nothing; None for a block that remembers nothing."""
        del batch
        return None

    def static_state(self, state: Any) -> StaticState | None:
        """A copy of `state` for decoding. A state made of tensors of fixed size needs nothing else than this."""
        if state is None:
            return None
        if not isinstance(state, TensorState):
            raise NotImplementedError(
                f"{type(self).__name__} has a state of its own kind: it must override `static_state`"
            )
        return StaticTensors(state)

    def scan_operators(self) -> Sequence[Any]:
        """The operators of the block's scans: one for both sweeps, or a pair for each scan."""
        return ()

    def residual_outputs(self) -> Sequence[nn.Linear]:
        """The linear maps that write to the residual stream, which may have an initialisation of their own."""
        return ()

    def reset_buffers(self) -> None:
        """Computes buffers that are not saved, for a block whose memory was allocated without values."""

    def refuse_training_on(self, device: torch.device) -> None:
        """Raises a ValueError if the block has no gradients on a device."""
        del device

    def initialise(self, deviation: float) -> None:
        """Draws the weights of all linear maps from a normal distribution, and sets biases to zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=deviation)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class TensorState(NamedTuple):
    """A state of tensors whose first dimension is the batch and whose shapes do not depend on the tokens absorbed."""

    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(one.untyped_storage().nbytes() for one in self.tensors)

    def select(self, rows: Sequence[int] | Tensor) -> "TensorState":
        index = torch.as_tensor(rows, dtype=torch.int64).to(self.tensors[0].device)
        return TensorState(tuple(one.index_select(0, index) for one in self.tensors))

    @classmethod
    def concatenate(cls, states: Sequence["TensorState"]) -> "TensorState":
        return TensorState(tuple(torch.cat(alike) for alike in zip(*(one.tensors for one in states), strict=True)))

    def detach(self) -> "TensorState":
        return TensorState(tuple(one.detach() for one in self.tensors))


class StaticTensors(TensorState):
    """The static form of a TensorState: the block returns a new one, which is copied into place."""

    steps_differ = False
    capacity = 2**62

    def __new__(cls, state: TensorState) -> "StaticTensors":
        return super().__new__(cls, tuple(one.detach().clone() for one in state.tensors))

    def make_room(self, longest: int) -> None:
        """Nothing: rows of any length need the same memory."""

    def update(self, state: TensorState) -> None:
        for mine, new in zip(self.tensors, state.tensors, strict=True):
            mine.copy_(new)

    def replace(self, rows: Ints, state: TensorState) -> None:
        index = index_on(self.tensors[0].device, rows)
        for mine, new in zip(self.tensors, state.tensors, strict=True):
            mine.index_copy_(0, index, new.to(mine.dtype))

    def state(self, lengths: Ints, rows: Ints) -> TensorState:
        del lengths
        return TensorState(self.tensors).select(torch.from_numpy(rows))

    def exported(self, longest: int) -> dict[str, Tensor]:
        del longest
        return {str(number): one for number, one in enumerate(self.tensors)}

    def on(self, exported: Mapping[str, Tensor]) -> "StaticTensors":
        return StaticTensors(TensorState(tuple(exported.values())))


def with_names(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of named parts, as `part.tensor`."""
    return {f"{part}.{name}": one for part, tensors in parts.items() for name, one in tensors.items()}


def part_named(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a part, from what `with_names` made."""
    start = f"{part}."
    return {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}


class BlockConfig(Protocol):
    """The config of a block: frozen, keyword-only, strict about its values."""

    def build(self, dim: int) -> Block:
        """The block for a residual stream of width `dim`."""
        ...
