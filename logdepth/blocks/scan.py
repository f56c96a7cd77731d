"""Pre-norm scan block: x + W_out(gate ∘ scan(⊙, conv(W_in · norm(x)))), with one operator per head."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.blocks.block import Block, StaticTensors, TensorState
from logdepth.blocks.layout import Layout
from logdepth.blocks.scan_layer import scanned
from logdepth.blocks.short_conv import ShortConv
from logdepth.operators import OPERATORS, PostMergeConfig
from logdepth.ops import LayerNorm, Linear, NormName, norm_named, use_kernels
from logdepth.ranges import check_dropouts
from logdepth.scanning import Operator, OperatorPair, ScanState
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


class ScanBlockState(NamedTuple):
    """One scan state per head, and the last inputs of the convolution."""

    scans: tuple[ScanState, ...]
    conv: TensorState | None

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.scans) + (0 if self.conv is None else self.conv.nbytes)

    def select(self, rows: Sequence[int] | Tensor) -> "ScanBlockState":
        conv = None if self.conv is None else self.conv.select(rows)
        return ScanBlockState(tuple(one.select(rows) for one in self.scans), conv)

    def detach(self) -> "ScanBlockState":
        return ScanBlockState(
            tuple(one.detach() for one in self.scans), None if self.conv is None else self.conv.detach()
        )


class StaticScanBlockState(NamedTuple):
    """The same in memory of fixed size."""

    scans: tuple[StaticScanState, ...]
    conv: StaticTensors | None

    @property
    def steps_differ(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.scans) + (0 if self.conv is None else self.conv.nbytes)

    def make_room(self, longest: int) -> bool:
        moved = [one.make_room(longest) for one in self.scans]  # each of them, not only up to the first that moved
        return any(moved)

    def update(self, state: Any) -> None:
        if self.conv is not None:
            self.conv.update(state.conv)  # scans have changed already

    def state(self, lengths: Ints, rows: Ints) -> ScanBlockState:
        conv = None if self.conv is None else self.conv.state(lengths, rows)
        return ScanBlockState(tuple(one.state(lengths, rows) for one in self.scans), conv)


class ScanBlock(Block):
    """Projection, short convolution, a scan per head, output gate, projection; its state is O(log n)."""

    def __init__(self, dim: int, config: ScanConfig) -> None:
        super().__init__()
        width = config.state_width or dim
        if width % config.heads:
            raise ValueError(f"a state of width {width} does not divide into {config.heads} heads")
        self.config = config
        self.head_width = width // config.heads
        self.norm = norm_named(config.norm, dim)
        self.into_state = Linear(dim, width, bias=False)
        self.conv = ShortConv(width, config.conv) if config.conv else None
        self.leaf_norm = LayerNorm(self.head_width)
        self.operators = nn.ModuleList(self._operator() for _ in range(config.heads))
        self.gate = Linear(dim, width, bias=False) if config.gate else None
        self.out = Linear(width, dim, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        normed = self.norm(x)
        inputs = self.into_state(normed)
        conv_state = None
        if self.conv is not None:
            inputs, conv_state = self.conv(inputs, None if state is None else state.conv, layout)
        leaves = self.leaf_norm(inputs.unflatten(-1, (self.config.heads, self.head_width)))
        prefixes, states = [], []
        for number, operator in enumerate(self.operators):
            before = None if state is None else state.scans[number]
            one = leaves[..., number, :]
            if before is not None or not use_kernels(one):
                one = one.to(self.out.weight.dtype if before is None else before.dtype)
            recompute = self.config.recompute and torch.is_grad_enabled()
            some, after = scanned(self._pair(operator), one, before, layout, recompute=recompute)
            prefixes.append(some)
            states.append(after)
        mixed = prefixes[0] if len(prefixes) == 1 else torch.cat(prefixes, dim=-1)
        if self.gate is not None:
            mixed = mixed * F.silu(self.gate(normed))
        return x + self.dropout(self.out(mixed)), ScanBlockState(tuple(states), conv_state)

    def init_state(self, batch: int) -> ScanBlockState:
        weight = self.out.weight
        empty = ScanState.empty(batch, self.head_width, dtype=weight.dtype, device=weight.device)
        conv = None if self.conv is None else self.conv.init_state(batch)
        return ScanBlockState((empty,) * self.config.heads, conv)

    def static_state(self, state: ScanBlockState) -> StaticScanBlockState:
        conv = None if state.conv is None else StaticTensors(state.conv)
        return StaticScanBlockState(tuple(StaticScanState.of(one) for one in state.scans), conv)

    def residual_outputs(self) -> Sequence[nn.Linear]:
        return (self.out,)

    def initialise(self, deviation: float) -> None:
        """The projections; operators keep their own initialisation."""
        for linear in (self.into_state, self.gate, self.out):
            if linear is not None:
                nn.init.normal_(linear.weight, std=deviation)

    def scan_operators(self) -> list[Operator | OperatorPair]:
        return [self._pair(operator) for operator in self.operators]

    def _operator(self) -> nn.Module:
        config, width = self.config, self.head_width
        kind = OPERATORS[config.operator]
        has_dropout = "dropout" in (field.name for field in fields(kind))
        operator: nn.Module = kind(width=width, **({"dropout": config.merge_dropout} if has_dropout else {})).build()
        if config.post_merge == "none":
            return operator
        return PostMergeConfig(width=width, dropout=config.merge_dropout).build(operator)

    def _pair(self, operator: Any) -> Operator | OperatorPair:
        return (operator, operator.operator) if self.config.post_merge == "up" else operator
