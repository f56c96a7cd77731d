"""Decoders of small models for tests: their steps beside the model's, their graphs rehearsed without a GPU."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from logdepth.blocks.attention import StaticKeyValues
from logdepth.blocks.block import StaticTensors
from logdepth.decoding import Decoder
from logdepth.models import LM, LMState
from logdepth.ops import FrozenTable
from logdepth.scanning.static_state import StaticTreeState
from tests.block_states import close, same_state
from tests.small_models import SMALL_MODELS, VOCAB, small_model

every_model = pytest.mark.parametrize("name", SMALL_MODELS)
as_graphs = pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])


class Rehearsed:
    """In place of CUDA graphs: what came first under a key runs again, whatever comes later, on the same memory."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.recorded: dict[Hashable, tuple[Callable[[], Tensor], list[int]]] = {}
        self.replays = 0

    def memory(self) -> list[int]:
        decoder = self.decoder
        own = (decoder._row_tokens, decoder._index, decoder._positions)
        weights = [*decoder.model.parameters(), *(decoder._casts._copies.values() if decoder._casts else ())]
        return [one.data_ptr() for one in (*own, *static_tensors(decoder._states), *weights)]

    def forget(self) -> None:
        self.recorded.clear()

    def run(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        self.replays += key in self.recorded
        recorded, memory = self.recorded.setdefault(key, (compute, self.memory()))
        assert memory == self.memory()
        logits = recorded()
        assert memory == self.memory()  # a step changes what is there and moves nothing
        return logits


def static_tensors(state: Any) -> Iterator[Tensor]:
    """The memory of static states."""
    if isinstance(state, StaticTreeState):
        yield from state.tables
    elif isinstance(state, StaticKeyValues):
        yield from (state.keys, state.values, state.positions)
    elif isinstance(state, StaticTensors):
        yield from state.tensors
    elif isinstance(state, Iterable):
        for part in state:
            yield from static_tensors(part)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def built(name: str = "ar-grc", vocab_size: int = VOCAB) -> LM:
    """The small model of this name, which is an LM."""
    model = small_model(name, vocab_size)
    assert isinstance(model, LM)
    return model


def prefilled(model: LM, lengths: list[int]) -> LMState:
    tokens = random_tokens(len(lengths), max(lengths), seed=7)
    with torch.no_grad():
        return model.step(tokens, model.init_state(len(lengths)), lengths=lengths)[1]


def decoder_of(model: LM, state: LMState, graphs: bool, leaf_table: bool = False) -> Decoder:
    """With `graphs`, steps that recur are rehearsed; with `leaf_table`, leaves of all tokens are made at once."""
    decoder = Decoder(model, state)
    if leaf_table:
        decoder._table = FrozenTable(always=True)
    if graphs:
        decoder._graphs = Rehearsed(decoder)
    return decoder


def check_steps(model: LM, state: LMState, decoder: Decoder, count: int, seed: int = 0) -> LMState:
    """Some steps by the model and by the decoder; the state after them."""
    for tokens in random_tokens(count, len(state.lengths), seed=seed):
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        close(decoder.step(tokens), logits[:, 0])
    same_state(decoder.state(), state)
    return state
