"""The decoder's numbers: autocast is the caller's, states keep their dtype, the model's weights stay as they are."""

import numpy as np
import pytest
import torch
from torch import Tensor

from logdepth.decoding import Decoder
from logdepth.models import LMState
from logdepth.ops import kernels
from logdepth.ops.dispatch import runnable_on
from logdepth.scanning import ScanState, scan
from logdepth.scanning.static_state import StaticScanState
from logdepth.scanning.step import next_step
from tests.block_states import tensors_of
from tests.decoders import as_graphs, built, check_steps, decoder_of, prefilled, random_tokens
from tests.small_models import SCAN, VOCAB, small_model

SCANS = ["ar-grc", "ar-mlp-ldru", "deep", "affine"]
OTHERS = ["scan-heads", "transformer-alibi", "rope", "rope-window-5", "plain-backend", "hybrid"]


@pytest.mark.parametrize("name", SCANS + OTHERS)
@pytest.mark.parametrize("leaf_table", [False, True], ids=["leaves", "table"])
def test_autocast_is_the_callers(name: str, leaf_table: bool) -> None:
    model = small_model(name).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = prefilled(model, [5, 0, 14, 7])
        decoder, plain = decoder_of(model, state, graphs=False, leaf_table=leaf_table), state
        for tokens in random_tokens(8, 4):
            with torch.no_grad():
                logits, plain = model.step(tokens[:, None], plain)
            found = decoder.step(tokens)
            assert found.dtype == logits.dtype == torch.bfloat16
            torch.testing.assert_close(found, logits[:, 0], rtol=0.03, atol=0.03)
    kept = [one for one in tensors_of(decoder.state().blocks) if one.is_floating_point()]
    assert [one.dtype for one in kept] == [one.dtype for one in tensors_of(state.blocks) if one.is_floating_point()]
    if name in SCANS:
        assert {one.dtype for one in kept} == {torch.float32}
        others = [one for one in tensors_of(plain.blocks) if one.is_floating_point()]
        for one, other in zip(kept, others, strict=True):
            torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)
    # and without it, from the same decoder
    tokens = random_tokens(4, seed=5)
    expected = model.step(tokens[:, None], decoder.state())[0][:, 0]
    found = decoder.step(tokens)
    assert found.dtype == torch.float32
    tolerance = 1e-5 if name in SCANS else 0.03  # keys and values stay in the dtype that they came in
    torch.testing.assert_close(found, expected.detach(), rtol=tolerance, atol=tolerance)


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
    low = LMState(tuple(one.to(torch.bfloat16) for one in state.blocks), state.lengths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, rounded = Decoder(model, state), Decoder(model, low)
        for tokens in random_tokens(12, 4):
            torch.testing.assert_close(rounded.step(tokens), whole.step(tokens), rtol=0.05, atol=0.05)
    assert [one.dtype for one in rounded.state().blocks] == [torch.bfloat16]
    assert rounded.nbytes * 2 == whole.nbytes


@pytest.mark.parametrize("lengths", [[3, 3], [3, 11], [3, 4]])
def test_operators_may_answer_in_another_dtype(lengths: list[int]) -> None:
    """As they do under autocast, where a norm gives float32."""
    state = ScanState.empty(2, 3)
    leaves = torch.randn(max(lengths), 2, 3)
    _, state = scan(torch.add, leaves.transpose(0, 1).contiguous(), state, lengths=lengths)
    tables, step = StaticScanState.of(state, levels=4), next_step(np.array(lengths), padded=False)

    def upcasting(left: Tensor, right: Tensor) -> Tensor:
        assert left.dtype == right.dtype == torch.float32
        return left.double() + right

    prefixes = tables.advance((upcasting, upcasting), torch.ones(2, 3), step.shape, torch.from_numpy(step.lists))
    sums = [leaves[:length, row].sum(0) + 1 for row, length in enumerate(lengths)]
    torch.testing.assert_close(prefixes, torch.stack(sums))


@pytest.mark.parametrize("name", ["ar-grc", "transformer-alibi", "hybrid"])
def test_kernels_read_weights_that_are_cast_once_and_the_models_stay(name: str) -> None:
    if not runnable_on(torch.device("cpu")):
        pytest.skip("kernels do not run on the CPU here: Triton's interpreter is not on")
    model = small_model(name).float()
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    decoder = Decoder(model, prefilled(model, [2, 3]))
    with kernels(True), torch.autocast("cpu", dtype=torch.bfloat16):
        decoder.step(random_tokens(2))
        casts = decoder._casts
        decoder.step(random_tokens(2))
    assert decoder._casts is casts
    for weight in (*model.product_weights(), model.head_weight):
        copy = casts.get(weight)
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy, weight.bfloat16())
    norms = [one for key, one in model.named_parameters() if "norm" in key]
    assert norms
    assert all(casts.get(one) is None for one in norms)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key]), key


def test_without_kernels_no_weight_is_cast() -> None:
    model = SCAN.build(VOCAB).eval()
    decoder = Decoder(model, prefilled(model, [2, 3]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoder.step(random_tokens(2))
    assert not decoder._casts._copies
