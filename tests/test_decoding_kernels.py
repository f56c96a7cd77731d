"""The decoder's steps by kernels: the model's answers, where there are kernels for it."""

import pytest
import torch

from logdepth.decoding import Decoder
from logdepth.kernels import usable_on
from tests.decoders import SCAN_MODELS, as_graphs, built, check_steps, decoder_of, prefilled, random_tokens
from tests.small_models import SCAN, VOCAB


def needs_interpreter() -> None:
    if not usable_on(torch.device("cpu")):
        pytest.skip("kernels do not run on the CPU here: Triton's interpreter is not on")


def steps_by_kernels(name: str, lengths: list[int], count: int, graphs: bool, leaf_table: bool) -> Decoder:
    """Some steps by kernels, in float32, against the model's."""
    torch.manual_seed(1)
    model = SCAN_MODELS[name].build(VOCAB).eval()
    state = prefilled(model, lengths)
    decoder = decoder_of(model, state, graphs, leaf_table=leaf_table, kernels=True)
    for tokens in random_tokens(count, len(lengths)):
        with torch.no_grad():
            logits, state = model.step(tokens[:, None], state)
        torch.testing.assert_close(decoder.step(tokens), logits[:, 0], rtol=1e-3, atol=1e-4)
    for one, other in zip(decoder.state().layers, state.layers, strict=True):
        torch.testing.assert_close(one.blocks, other.blocks, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.prefixes, other.prefixes, rtol=1e-3, atol=1e-4)
    return decoder


@as_graphs
@pytest.mark.parametrize("leaf_table", [False, True], ids=["leaves", "table"])
def test_one_row_by_kernels(graphs: bool, leaf_table: bool) -> None:
    needs_interpreter()
    assert steps_by_kernels("ar-grc", [0], 12, graphs, leaf_table)._weights.few_rows


@pytest.mark.parametrize(
    ("lengths", "count"), [([3], 3), ([2] * 3, 3), ([6, 3, 7], 2), ([3] * 65, 1)], ids=["one", "few", "apart", "many"]
)
@pytest.mark.parametrize("name", ["ar-grc", "plain", "every-merge", "deep"])
def test_kernels_give_the_models_answers(name: str, lengths: list[int], count: int) -> None:
    needs_interpreter()
    assert steps_by_kernels(name, lengths, count, graphs=False, leaf_table=True)._weights.few_rows


def test_kernels_keep_to_autocast() -> None:
    needs_interpreter()
    torch.manual_seed(1)
    model = SCAN.build(VOCAB).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = prefilled(model, [6])
        decoder = Decoder(model, state, kernels=True)
        for tokens in random_tokens(4, 1):
            with torch.no_grad():
                logits, state = model.step(tokens[:, None], state)
            found = decoder.step(tokens)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, logits[:, 0], rtol=0.03, atol=0.03)
    assert decoder._weights.few_rows
    assert decoder.state().layers[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["ar-mlp-ldru", "affine"])
def test_operators_without_kernels_for_few_rows_do_without(name: str) -> None:
    assert steps_by_kernels(name, [5, 5], 4, graphs=False, leaf_table=True)._weights.few_rows is None


def test_float64_does_without_kernels() -> None:
    model = built()
    state = prefilled(model, [5, 5])
    decoder = Decoder(model, state, kernels=True)
    check_steps(model, state, decoder, 4)
    assert decoder._weights.few_rows is None
