"""ScanLayer, a scan as a layer of any model, and ScanBlock, which puts it into a residual stream.

y = W_out (SiLU(W_gate · x) ∘ scan(⊙, LN(conv(W_in · x))))        one operator and one scan per head
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.blocks.block import Block, StaticTensors, TensorState, part_named, with_names
from logdepth.blocks.layout import Layout
from logdepth.blocks.paper_layer import as_elements, scanned
from logdepth.blocks.short_conv import ShortConv
from logdepth.operators import OPERATORS, PostMergeConfig
from logdepth.ops import LayerNorm, Linear, NormName, norm_named
from logdepth.ranges import check_dropouts
from logdepth.scanning import LengthsLike, Operator, OperatorPair, ScanState
from logdepth.scanning.lengths import Ints
from logdepth.scanning.static_state import StaticScanState


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """A scan with a learnable operator, in a residual stream."""

    operator: str = "grc"
    """Name of the operator ⊙: grc, mlp-ldru, …; see logdepth.operators.OPERATORS."""
    heads: int = 1
    """Number of heads, which share the state evenly; each has an operator and a scan of its own."""
    state_width: int | None = None
    """Width of the state over all heads; by default the model's width."""
    conv: int = 4
    """Tokens that a causal depthwise convolution before the scan reads; 0: no convolution."""
    gate: bool = True
    """Whether the output is multiplied by SiLU(W_gate · norm(x))."""
    post_merge: Literal["none", "up", "every"] = "none"
    """Which merges a net LN(x + fc(x)) follows: none, those of the up-sweep, or every one."""
    norm: NormName = "rms"
    """Norm before the block: layer or rms."""
    merge_dropout: float = 0.0
    """Dropout inside the operator, where it has any."""
    dropout: float = 0.0
    """Dropout on what the block adds to the residual stream."""
    recompute: bool = False
    """Whether the backward pass recomputes merges instead of storing them, which takes less memory and more time."""

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise ValueError(f"operator '{self.operator}' is unknown; choose from {', '.join(OPERATORS)}")
        if self.heads < 1 or self.conv < 0 or (self.state_width is not None and self.state_width < 1):
            raise ValueError("heads and state_width must be at least 1, and conv at least 0")
        check_dropouts(self)

    def build(self, dim: int) -> "ScanBlock":
        return ScanBlock(dim, self)


class ScanLayerState(NamedTuple):
    """One scan state per head, and the last inputs of the convolution."""

    scans: tuple[ScanState, ...]
    conv: TensorState | None

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.scans) + (0 if self.conv is None else self.conv.nbytes)

    def select(self, rows: Sequence[int] | Tensor) -> "ScanLayerState":
        conv = None if self.conv is None else self.conv.select(rows)
        return ScanLayerState(tuple(one.select(rows) for one in self.scans), conv)

    @classmethod
    def concatenate(cls, states: Sequence["ScanLayerState"]) -> "ScanLayerState":
        scans = tuple(ScanState.concatenate(alike) for alike in zip(*(one.scans for one in states), strict=True))
        windows = [one.conv for one in states if one.conv is not None]
        return cls(scans, TensorState.concatenate(windows) if windows else None)

    def detach(self) -> "ScanLayerState":
        return ScanLayerState(
            tuple(one.detach() for one in self.scans), None if self.conv is None else self.conv.detach()
        )


class StaticScanLayerState(NamedTuple):
    """The same in memory of fixed size."""

    scans: tuple[StaticScanState, ...]
    conv: StaticTensors | None

    @property
    def steps_differ(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.scans) + (0 if self.conv is None else self.conv.nbytes)

    @property
    def capacity(self) -> int:
        return min(one.capacity for one in self.scans)

    def make_room(self, longest: int) -> None:
        for one in self.scans:
            one.make_room(longest)

    def update(self, state: Any) -> None:
        if self.conv is not None:
            self.conv.update(state.conv)  # scans have changed already

    def replace(self, rows: Ints, state: ScanLayerState) -> None:
        for mine, new in zip(self.scans, state.scans, strict=True):
            mine.replace(rows, new)
        if self.conv is not None and state.conv is not None:
            self.conv.replace(rows, state.conv)

    def state(self, lengths: Ints, rows: Ints) -> ScanLayerState:
        conv = None if self.conv is None else self.conv.state(lengths, rows)
        return ScanLayerState(tuple(one.state(lengths, rows) for one in self.scans), conv)

    def exported(self, longest: int) -> dict[str, Tensor]:
        parts = {f"scan{number}": one.exported(longest) for number, one in enumerate(self.scans)}
        return with_names(parts | ({} if self.conv is None else {"conv": self.conv.exported(longest)}))

    def on(self, exported: Mapping[str, Tensor]) -> "StaticScanLayerState":
        scans = [one.on(part_named(f"scan{number}", exported)) for number, one in enumerate(self.scans)]
        conv = None if self.conv is None else self.conv.on(part_named("conv", exported))
        return StaticScanLayerState(tuple(scans), conv)


class ScanLayer(nn.Module):
    """A scan with a learnable operator as a layer: `y = layer(x)` for `x` `[batch, length, dim]`.

    It maps a sequence to a sequence of the same shape, as attention does, and is causal. Its state is O(log n).

        layer = ScanLayer(512, operator="grc")
        y = layer(x)                              # whole sequences
        state = layer.init_state(batch)
        y, state = layer.step(x, state)           # one token or many; the state is never changed in place

    Args:
        dim: width of the input and the output.
        operator: the name of an operator in `OPERATORS`.
        heads: heads share the state evenly; each has an operator and a scan of its own.
        state_width: width of the state over all heads; by default `dim`.
        conv: tokens that a causal depthwise convolution before the scan reads; 0: no convolution.
        gate: whether the output is multiplied by SiLU(W_gate · x).
        post_merge: which merges a net LN(x + fc(x)) follows: none, those of the up-sweep, or every one.
        merge_dropout: dropout inside the operator and the net, where they have any.
        recompute: recompute merges in the backward pass instead of storing them: less memory, more time.
    """

    def __init__(
        self,
        dim: int,
        operator: str = "grc",
        *,
        heads: int = 1,
        state_width: int | None = None,
        conv: int = 4,
        gate: bool = True,
        post_merge: Literal["none", "up", "every"] = "none",
        merge_dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if operator not in OPERATORS:
            raise ValueError(f"operator '{operator}' is unknown; choose from {', '.join(OPERATORS)}")
        width = state_width or dim
        if width % heads:
            raise ValueError(f"a state of width {width} does not divide into {heads} heads")
        self.dim, self.heads, self.head_width = dim, heads, width // heads
        self.post_merge, self.recompute = post_merge, recompute
        self.into_state = Linear(dim, width, bias=False)
        self.conv = ShortConv(width, conv) if conv else None
        self.leaf_norm = LayerNorm(self.head_width)
        self.operators = nn.ModuleList(
            _operator(operator, self.head_width, post_merge, merge_dropout) for _ in range(heads)
        )
        self.gate = Linear(dim, width, bias=False) if gate else None
        self.out = Linear(width, dim, bias=False)

    def forward(
        self, x: Tensor, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        """The output for whole sequences, shaped as `x`.

        Args:
            x: `[batch, length, dim]`, or with `cu_seqlens` packed documents `[total, dim]`.
            lengths: valid positions of each row of a batch padded on the right.
            cu_seqlens: where each packed document starts, and last the total.
        """
        return self.run(x, None, Layout(x.shape[:-1], lengths=lengths, cu_seqlens=cu_seqlens))[0]

    def step(
        self, x: Tensor, state: ScanLayerState, *, lengths: LengthsLike | None = None
    ) -> tuple[Tensor, ScanLayerState]:
        """The output for any number of further positions `[batch, length, dim]`, and the state after them."""
        y, after = self.run(x, state, Layout(x.shape[:-1], lengths=lengths))
        return y, after

    def run(self, x: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The output and the state after it, for any layout, as blocks have it."""
        inputs = self.into_state(x)
        conv_state = None
        if self.conv is not None:
            inputs, conv_state = self.conv(inputs, None if state is None else state.conv, layout)
        leaves = self.leaf_norm(inputs.unflatten(-1, (self.heads, self.head_width)))
        prefixes, states = [], []
        for number, operator in enumerate(self.scan_operators()):
            before = None if state is None else state.scans[number]
            one = as_elements(operator, leaves[..., number, :], before, self.out.weight.dtype)
            recompute = self.recompute and torch.is_grad_enabled()
            some, after = scanned(operator, one, before, layout, recompute=recompute)
            prefixes.append(some)
            states.append(after)
        mixed = prefixes[0] if len(prefixes) == 1 else torch.cat(prefixes, dim=-1)
        if self.gate is not None:
            mixed = mixed * F.silu(self.gate(x))
        return self.out(mixed), ScanLayerState(tuple(states), conv_state)

    def init_state(self, batch: int) -> ScanLayerState:
        """The state of `batch` rows that have absorbed nothing."""
        weight = self.out.weight
        empty = ScanState.empty(batch, self.head_width, dtype=weight.dtype, device=weight.device)
        return ScanLayerState((empty,) * self.heads, None if self.conv is None else self.conv.init_state(batch))

    def scan_operators(self) -> list[Operator | OperatorPair]:
        """What each head's scan is given: one operator, or one for each sweep."""
        operators: list[Any] = list(self.operators)
        return [(one, one.operator) if self.post_merge == "up" else one for one in operators]


def _operator(name: str, width: int, post_merge: str, dropout: float) -> nn.Module:
    kind = OPERATORS[name]
    has_dropout = "dropout" in (field.name for field in fields(kind))
    operator: nn.Module = kind(width=width, **({"dropout": dropout} if has_dropout else {})).build()
    return operator if post_merge == "none" else PostMergeConfig(width=width, dropout=dropout).build(operator)


class ScanBlock(Block):
    """x + dropout(ScanLayer(norm(x))); its state is O(log n)."""

    def __init__(self, dim: int, config: ScanConfig) -> None:
        super().__init__()
        self.norm = norm_named(config.norm, dim)
        self.layer = ScanLayer(
            dim,
            config.operator,
            heads=config.heads,
            state_width=config.state_width,
            conv=config.conv,
            gate=config.gate,
            post_merge=config.post_merge,
            merge_dropout=config.merge_dropout,
            recompute=config.recompute,
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        added, state = self.layer.run(self.norm(x), state, layout)
        return x + self.dropout(added), state

    def init_state(self, batch: int) -> ScanLayerState:
        return self.layer.init_state(batch)

    def static_state(self, state: ScanLayerState) -> StaticScanLayerState:
        conv = None if state.conv is None else StaticTensors(state.conv)
        return StaticScanLayerState(tuple(StaticScanState.of(one) for one in state.scans), conv)

    def residual_outputs(self) -> Sequence[nn.Linear]:
        return (self.layer.out,)

    def scan_operators(self) -> list[Operator | OperatorPair]:
        return self.layer.scan_operators()

    def initialise(self, deviation: float) -> None:
        """The projections; operators keep their own initialisation."""
        for linear in (self.layer.into_state, self.layer.gate, self.layer.out):
            if linear is not None:
                nn.init.normal_(linear.weight, std=deviation)
