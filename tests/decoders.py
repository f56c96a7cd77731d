"""Decoders of small scan models for tests: their steps beside the model's, their graphs rehearsed without a GPU."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from logdepth.decoding import Decoder
from logdepth.models import ScanLM, ScanLMConfig
from logdepth.models.scan_lm import ScanLMState
from tests.small_models import SMALL_MODELS, VOCAB

SCAN_MODELS = {name: config for name, config in SMALL_MODELS.items() if isinstance(config, ScanLMConfig)}
every_model = pytest.mark.parametrize("name", SCAN_MODELS)
as_graphs = pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])


class Rehearsed:
    """In place of CUDA graphs: what came first under a key runs again, whatever comes later, on the same memory."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.recorded: dict[Hashable, tuple[Callable[[], None], list[int]]] = {}
        self.replays = 0

    def memory(self) -> list[int]:
        decoder, weights = self.decoder, self.decoder._weights
        tables = [one for tables in decoder._tables for one in (tables.blocks, tables.prefixes)]
        layers = [weight for layer in weights.layers for weight in layer.parameters()]
        own = (decoder._row_tokens, decoder._index, decoder._logits)
        return [one.data_ptr() for one in (*own, *tables, weights.head, *layers)]

    def forget(self) -> None:
        self.recorded.clear()

    def run(self, key: Hashable, compute: Callable[[], None]) -> None:
        self.replays += key in self.recorded
        recorded, memory = self.recorded.setdefault(key, (compute, self.memory()))
        assert memory == self.memory()
        recorded()


def built(name: str = "ar-grc") -> ScanLM:
    torch.manual_seed(1)
    return SCAN_MODELS[name].build(VOCAB).double().eval()


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def same_state(actual: ScanLMState, expected: ScanLMState) -> None:
    assert actual.lengths.tolist() == expected.lengths.tolist()
    for one, other in zip(actual.layers, expected.layers, strict=True):
        close(one.blocks, other.blocks)
        close(one.prefixes, other.prefixes)


def prefilled(model: ScanLM, lengths: list[int]) -> ScanLMState:
    tokens = random_tokens(len(lengths), max(lengths), seed=7)
    with torch.no_grad():
        return model.step(tokens, model.init_state(len(lengths)), lengths=lengths)[1]


def decoder_of(model: ScanLM, state: ScanLMState, graphs: bool, **settings: Any) -> Decoder:
    decoder = Decoder(model, state, **settings)
    if graphs:
        decoder._graphs = Rehearsed(decoder)
    return decoder


def check_steps(model: ScanLM, state: ScanLMState, decoder: Decoder, count: int, seed: int = 0) -> ScanLMState:
    """Some steps by the model and by the decoder; the state after them."""
    for tokens in random_tokens(count, len(state.lengths), seed=seed):
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        close(decoder.step(tokens), logits[:, 0])
    same_state(decoder.state(), state)
    return state
