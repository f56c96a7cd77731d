"""What is told of a model: the size of its state at any length, and the weights of the blocks that a token reads."""

import pytest
import torch
from torch import Tensor

from logdepth.blocks import memory
from logdepth.models import LM
from logdepth.serve.anatomy import anatomy_of, recorded_slopes, weighted_memories, weights_read
from tests.decoders import built, every_model, random_tokens
from tests.small_models import HYBRID, VOCAB


@every_model
def test_the_size_of_the_state_is_told_exactly(name: str) -> None:
    model = built(name)
    anatomy = anatomy_of(model)
    state, length = model.init_state(1), 0
    for count in (1, 1, 2, 3, 9, 16, 33, 60):
        with torch.no_grad():
            _, state = model.step(random_tokens(1, count), state)
        length += count
        assert anatomy.state_bytes(length) == state.nbytes


def test_a_model_is_told_in_plain_data() -> None:
    model = HYBRID.build(VOCAB)
    body = anatomy_of(model).body()
    (tree,) = body["trees"]
    assert tree == {
        "kind": "scan", "chunk": 1, "weighted": False, "blocks": [0, 3], "block_bytes": 2 * 2 * 2 * 6 * 4,
    }  # fmt: skip
    assert body["caches"] == [{"token_bytes": 2 * 12 * 4, "most": 4}] * 2
    assert body["kv_token_bytes"] == 4 * 2 * 12 * 4
    assert anatomy_of(model, low=True).body()["caches"][0]["token_bytes"] == 2 * 12 * 2


@pytest.mark.parametrize("name", ["memory-chunk-4", "memory-window", "memory-bare"])
def test_weights_are_those_with_which_blocks_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with what a decoding step uses, which computes the weights of all levels at each token."""
    from logdepth.decoding import Decoder

    model, tokens = built(name), random_tokens(1, 45)
    (layer,) = weighted_memories(model)
    with torch.no_grad(), recorded_slopes(model) as slopes:
        model.step(tokens, model.init_state(1))
    (found,) = slopes
    assert found.shape == (45, layer.heads, 2)
    weights = weights_read(layer, found, 0)
    used: list[float] = []
    original = memory.level_weights

    def recording(level: int, slopes: Tensor, bias: Tensor, summaries: Tensor) -> Tensor:
        result = original(level, slopes, bias, summaries)
        used.append(float(result.mean()))
        return result

    monkeypatch.setattr(memory, "level_weights", recording)
    decoder = Decoder(model, model.init_state(1))
    for place, token in enumerate(tokens[0]):
        used.clear()
        decoder.step(token[None])
        read = [weight for level, weight in enumerate(used) if place // layer.chunk >> level & 1]
        assert weights[place] == pytest.approx(read, abs=1e-3)
    with torch.no_grad(), recorded_slopes(model) as slopes:  # from the middle on
        state = model.step(tokens[:, :21], model.init_state(1))[1]
        slopes.clear()
        model.step(tokens[:, 21:], state)
    for one, other in zip(weights_read(layer, slopes[0], 21), weights[21:], strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_memories_that_weigh_blocks_by_content_have_no_weights_of_levels() -> None:
    assert not weighted_memories(built("memory-summary"))


def test_hooks_are_gone_afterwards() -> None:
    model = built("memory-window")
    assert isinstance(model, LM)
    with recorded_slopes(model):
        pass
    assert not weighted_memories(model)[0].level_slopes._forward_hooks
    with recorded_slopes(model, False) as slopes, torch.no_grad():
        model(random_tokens(1, 5))
    assert slopes == []
