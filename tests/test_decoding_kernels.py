"""The decoder's steps by kernels: the answers of the model without them, where there are kernels for it."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth.decoding import Decoder
from logdepth.models import LM, LMState, ScanLMConfig
from logdepth.operators import AffineConfig, GRCConfig, MLPLDRUConfig
from logdepth.operators.fused import inference as of_net
from logdepth.operators.grc import inference as of_grc
from logdepth.ops import kernels
from tests.fused_models import DEVICE, shaken

VOCAB = 13
PAPER = ScanLMConfig(embed_width=12, operator=GRCConfig(width=8))
CONFIGS = {
    "paper": PAPER,
    "plain": dataclasses.replace(PAPER, embedding_net=False, post_merge="none", leaf_norm=False, input_residual=0.0),
    "every-merge": dataclasses.replace(PAPER, post_merge="every", embedding_net=False),
    "deep": dataclasses.replace(PAPER, depth=3, tied=False, embedding_net=False),
    "mlp-ldru": dataclasses.replace(PAPER, operator=MLPLDRUConfig(width=8)),
    "affine": dataclasses.replace(PAPER, operator=AffineConfig(width=8)),
}


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each merge of a GRC by kernels had, and each net after a merge."""
    rows: list[int] = []

    def watch(module: Any, name: str) -> None:
        original: Callable[..., Tensor] = getattr(module, name)

        def watched(operator: Any, left: Tensor, *right: Tensor) -> Tensor:
            rows.append(len(left))
            return original(operator, left, *right)

        monkeypatch.setattr(module, name, watched)

    watch(of_grc, "merged_by_kernels")
    watch(of_net, "refined_by_kernels")
    return rows


class Repeated:
    """In place of CUDA graphs: what came first under a key runs again, whatever comes later, on the same memory."""

    def __init__(self) -> None:
        self.recorded: dict[Hashable, Callable[[], Tensor]] = {}
        self.replays = 0

    def forget(self) -> None:
        self.recorded.clear()

    def run(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        self.replays += key in self.recorded
        return self.recorded.setdefault(key, compute)()


def built(name: str) -> LM:
    torch.manual_seed(1)
    model = CONFIGS[name].build(VOCAB)
    shaken(model, 0.1)
    return model.to(DEVICE).eval()


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def prefilled(model: LM, lengths: list[int]) -> LMState:
    tokens = random_tokens(len(lengths), max(lengths), seed=7)
    with torch.no_grad(), kernels(False):
        return model.step(tokens, model.init_state(len(lengths)), lengths=lengths)[1]


def assert_steps(
    model: LM, lengths: list[int], count: int, graphs: Any = None, *, table: bool = True, tolerance: float = 1e-3
) -> None:
    """Some steps by kernels against the model's without them, and the state after them."""
    state = prefilled(model, lengths)
    decoder = Decoder(model, state, graphs=False)
    decoder._graphs, decoder._table.always = graphs, table
    for tokens in random_tokens(count, len(lengths)):
        with torch.no_grad(), kernels(False):
            logits, state = model.step(tokens[:, None], state)
        with kernels(True):
            found = decoder.step(tokens)
        torch.testing.assert_close(found, logits[:, 0], rtol=tolerance, atol=tolerance / 10)
    after = decoder.state()
    assert after.lengths.tolist() == state.lengths.tolist()
    for one, other in zip(after.blocks, state.blocks, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.blocks, other.blocks, rtol=tolerance, atol=tolerance / 10)
        torch.testing.assert_close(one.prefixes, other.prefixes, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize(("table", "lengths", "count"), [(False, [4], 3), (True, [0], 12)], ids=["leaves", "table"])
def test_one_row(graphs: bool, table: bool, lengths: list[int], count: int, merges: list[int]) -> None:
    repeated = Repeated()
    assert_steps(built("paper"), lengths, count, repeated if graphs else None, table=table)
    assert set(merges) == {1}
    assert (repeated.replays > 0) == graphs


@pytest.mark.parametrize(
    ("lengths", "count"), [([3], 3), ([2] * 3, 3), ([6, 3, 7], 2), ([3] * 65, 1)], ids=["one", "few", "apart", "many"]
)
@pytest.mark.parametrize("name", ["paper", "plain", "every-merge", "deep"])
def test_kernels_give_the_models_answers(name: str, lengths: list[int], count: int, merges: list[int]) -> None:
    assert_steps(built(name), lengths, count)
    assert 0 < max(merges) <= len(lengths)


@pytest.mark.parametrize(("name", "nets"), [("mlp-ldru", True), ("affine", False)])
def test_operators_without_kernels_for_few_rows_merge_by_themselves(name: str, nets: bool, merges: list[int]) -> None:
    """The net after an MLP-LDRU has kernels all the same."""
    assert_steps(built(name), [5, 5], 4)
    assert bool(merges) == nets


def test_kernels_keep_to_autocast(merges: list[int]) -> None:
    model = built("paper")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert_steps(model, [6], 4, tolerance=0.1)
        decoder = Decoder(model, prefilled(model, [6]), graphs=False)
        with kernels(True):
            assert decoder.step(random_tokens(1)).dtype == torch.bfloat16
    assert merges
    assert decoder.state().blocks[0].dtype == torch.float32


def test_double_precision_does_without_kernels(merges: list[int]) -> None:
    assert_steps(built("paper").double(), [5, 5], 4, tolerance=1e-10)
    assert not merges


def test_an_operator_that_is_modified_does_without_kernels(merges: list[int]) -> None:
    model = built("plain")
    model.blocks[0].operator.gates.register_forward_hook(lambda _module, _inputs, result: 2 * result)
    assert_steps(model, [5, 5], 4)
    assert not merges
