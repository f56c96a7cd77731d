"""The step of one token as a graph by torch.export: tensors in, tensors out, one graph for all lengths up to a maximum.

It is the model's own forward pass with static states, as in a `Decoder`. There, the host chooses the merges of a step.
Here, the lengths are tensors, and a loop in the graph merges level by level as long as a row needs it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from logdepth.blocks import StaticState, StepLayout
from logdepth.blocks.block import part_named, with_names
from logdepth.models import LM, LMState
from logdepth.scanning.step import AnyLength

LENGTH = "length"
"""The name of the tokens that each row has absorbed, among the tensors of a state."""


def export_step(model: LM, batch: int = 1, max_length: int = 4096) -> tuple[ExportedProgram, dict[str, Tensor]]:
    """Exports the step of one token of every row by `torch.export`, and returns its program and the first state.

        program, state = logdepth.export_step(model, batch=1, max_length=4096)
        step = program.module()
        with torch.no_grad():
            logits, state = step(tokens, state)         # tokens `[batch]`, logits `[batch, vocab]`

    All tensors of a state have fixed shapes that begin with the batch, and are not changed in place. `state["length"]`
    counts the tokens of each row, so rows may have different lengths. From `max_length` tokens on, logits are NaN.

    Args:
        model: in eval mode.
        batch: number of rows.
        max_length: tokens that a row may absorb. It decides the size of the caches of full attention, and the number of
            levels of trees.
    """
    if not isinstance(model, LM):
        raise TypeError(f"export_step takes an LM; got {type(model).__name__}")
    if model.training:
        raise ValueError("export_step needs a model in eval mode: call model.eval() first")
    if batch < 1 or max_length < 1:
        raise ValueError(f"batch and max_length must be at least 1; got {batch} and {max_length}")
    first = model.init_state(batch)
    state = exported_state(model, first, max_length)
    tokens = torch.zeros(batch, dtype=torch.int64, device=model.embedding.weight.device)
    with torch.no_grad():
        program = torch.export.export(_Step(model, _static_states(model, first), max_length).eval(), (tokens, state))
    return program, state


def exported_state(model: LM, state: LMState, max_length: int = 4096) -> dict[str, Tensor]:
    """The state of a model as that of an exported step, for example after a prompt that the model has read at once.

    Args:
        model: the model that was exported.
        state: what `model.step` returned.
        max_length: as for `export_step`.
    """
    longest = int(state.lengths.max()) if len(state.lengths) else 0
    if longest > max_length:
        raise ValueError(f"the state has {longest} tokens; give max_length {longest} or more")
    lengths = state.lengths.to(model.embedding.weight.device)
    with torch.no_grad():
        tensors = _tensors(_static_states(model, state), max_length)
        return {LENGTH: lengths.clone()} | {name: one.contiguous() for name, one in tensors.items()}


class _Step(nn.Module):
    def __init__(self, model: LM, states: Sequence[StaticState | None], max_length: int) -> None:
        super().__init__()
        self.model, self.max_length = model, max_length
        # Functions, because torch.export takes tuples of tensors apart, as some states are.
        self.states_on = [None if one is None else one.on for one in states]

    def forward(self, tokens: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        lengths = state[LENGTH]
        layout = StepLayout(lengths[:, None], AnyLength(lengths), lengths[:0])
        before = [
            None if state_on is None else state_on(part_named(f"block{number}", state))
            for number, state_on in enumerate(self.states_on)
        ]
        features, after = self.model.run(tokens[:, None], before, layout)
        for mine, new in zip(before, after, strict=True):
            if mine is not None:
                mine.update(new)
        logits = self.model.logits(features[:, 0]).masked_fill(lengths[:, None] >= self.max_length, torch.nan)
        return logits, {LENGTH: lengths + 1} | _tensors(before, self.max_length)


def _static_states(model: LM, state: LMState) -> list[StaticState | None]:
    states = []
    for block, one in zip(model.blocks, state.blocks, strict=True):
        static = None if one is None else block.static_state(one)
        if static is not None and not hasattr(static, "on"):
            raise NotImplementedError(
                f"{type(block).__name__} cannot be exported: its static state must have `exported` and `on`"
            )
        states.append(static)
    return states


def _tensors(states: Sequence[StaticState | None], max_length: int) -> dict[str, Tensor]:
    parts = {f"block{n}": one.exported(max_length) for n, one in enumerate(states) if one is not None}
    return with_names(parts)
