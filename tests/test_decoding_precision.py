"""The decoder's numbers: autocast is the caller's, states keep their dtype, the model's weights stay as they are."""

import numpy as np
import pytest
import torch
from logdepth.decoding.counter import next_step
from logdepth.decoding.tables import Tables
from torch import Tensor

from logdepth.decoding import Decoder
from logdepth.models.scan_lm import ScanLMState
from logdepth.scanning import ScanState, scan
from tests.decoders import SCAN_MODELS, as_graphs, built, check_steps, decoder_of, prefilled, random_tokens
from tests.small_models import SCAN, VOCAB


@pytest.mark.parametrize("config", ["ar-grc", "ar-mlp-ldru", "deep", "affine"])
@pytest.mark.parametrize("leaf_table", [False, True], ids=["leaves", "table"])
def test_autocast_is_the_callers(config: str, leaf_table: bool) -> None:
    torch.manual_seed(1)
    model = SCAN_MODELS[config].build(VOCAB).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = prefilled(model, [5, 0, 14, 7])
        decoder, plain = Decoder(model, state, leaf_table=leaf_table), state
        for tokens in random_tokens(8, 4):
            with torch.no_grad():
                logits, plain = model.step(tokens[:, None], plain)
            found = decoder.step(tokens)
            assert found.dtype == logits.dtype == torch.bfloat16
            torch.testing.assert_close(found, logits[:, 0], rtol=0.03, atol=0.03)
    assert decoder.state().layers[0].dtype == torch.float32
    for one, other in zip(decoder.state().layers, plain.layers, strict=True):
        torch.testing.assert_close(one.blocks, other.blocks, rtol=0.03, atol=0.03)
    # and without it, from the same decoder
    tokens = random_tokens(4, seed=5)
    expected = model.step(tokens[:, None], decoder.state())[0][:, 0]
    torch.testing.assert_close(decoder.step(tokens), expected.detach(), rtol=1e-5, atol=1e-5)


@as_graphs
def test_autocast_may_change_between_steps(graphs: bool) -> None:
    model = SCAN.build(VOCAB).eval()
    state = prefilled(model, [5, 5, 5])
    decoder = decoder_of(model, state, graphs)
    for number, tokens in enumerate(random_tokens(24, 3)):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=number // 8 == 1):
            logits, state = model.step(tokens[:, None], state)
            found = decoder.step(tokens)
        assert found.dtype == logits.dtype
        torch.testing.assert_close(found, logits[:, 0], rtol=0.03, atol=0.03)


def test_autocast_leaves_float64_alone() -> None:
    model = built("deep")
    state = prefilled(model, [5, 0, 14])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_steps(model, state, Decoder(model, state), 6)


def test_states_keep_the_dtype_that_they_came_in() -> None:
    model = SCAN.build(VOCAB).eval()
    state = prefilled(model, [5, 0, 14, 7])
    low = ScanLMState(tuple(layer.to(torch.bfloat16) for layer in state.layers))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, rounded = Decoder(model, state), Decoder(model, low)
        for tokens in random_tokens(12, 4):
            torch.testing.assert_close(rounded.step(tokens), whole.step(tokens), rtol=0.05, atol=0.05)
    assert [layer.dtype for layer in rounded.state().layers] == [torch.bfloat16]
    assert rounded.nbytes * 2 == whole.nbytes


@pytest.mark.parametrize("lengths", [[3, 3], [3, 11], [3, 4]])
def test_operators_may_answer_in_another_dtype(lengths: list[int]) -> None:
    """As they do under autocast, where a norm gives float32."""
    state = ScanState.empty(2, 3)
    leaves = torch.randn(max(lengths), 2, 3)
    _, state = scan(torch.add, leaves.transpose(0, 1).contiguous(), state, lengths=lengths)
    tables, step = Tables.of(state, levels=4), next_step(np.array(lengths), padded=False)

    def upcasting(left: Tensor, right: Tensor) -> Tensor:
        assert left.dtype == right.dtype == torch.float32
        return left.double() + right

    prefixes = tables.advance(upcasting, upcasting, torch.ones(2, 3), step.shape, torch.from_numpy(step.lists))
    sums = [leaves[:length, row].sum(0) + 1 for row, length in enumerate(lengths)]
    torch.testing.assert_close(prefixes, torch.stack(sums))


def test_weights_are_cast_once_and_the_models_stay() -> None:
    model = SCAN.build(VOCAB).eval()
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    decoder = Decoder(model, prefilled(model, [2, 3]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoder.step(random_tokens(2))
    twin = decoder._weights.layers[0]
    assert twin.operator.operator.gates.weight.dtype == decoder._weights.head.dtype == torch.bfloat16
    assert twin.operator.operator.norm.weight is model.layers[0].operator.operator.norm.weight
    assert twin.into_state.weight.dtype == torch.float32
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key]), key
