"""On a GPU: sequences that come and go, memories with summaries, and Hugging Face models give the plain answers."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.decoding import Decoder, Slots
from logdepth.models import LM, LMConfig, LMState
from logdepth.ops import kernels
from tests.block_states import tensors_of
from tests.decoders import built, random_tokens
from tests.small_models import SMALL_MODELS, VOCAB, shake

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler warns of its own insides
]

NAMES = ("ar-grc", "hybrid", "memory-window", "memory-fold", "memory-summary", "transformer-alibi")
every_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Products of float32 in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(name: str) -> LM:
    return built(name).float().cuda()


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu().float(), expected.cpu().float(), rtol=2e-3, atol=2e-3)


def states_of(model: LM, lengths: list[int]) -> LMState:
    tokens = random_tokens(len(lengths), max(lengths), seed=7).cuda()
    with torch.no_grad():
        return model.step(tokens, model.init_state(len(lengths)), lengths=lengths)[1]


@every_name
def test_sequences_join_and_leave_slots(name: str) -> None:
    model, chance = on_gpu(name), np.random.default_rng(1)
    slots: Slots[str] = Slots(model)
    alone: dict[str, LMState] = {}
    sizes = set()
    for number in range(80):
        wanted = 17 if number < 45 else 3
        if len(alone) < wanted and chance.random() < 0.5:
            some = [f"{number}-{one}" for one in range(chance.integers(1, 5))]
            states = states_of(model, chance.integers(1, 40, len(some)).tolist())
            slots.join(some, states, coming=int(chance.integers(3)))
            alone |= {member: states.select([place]) for place, member in enumerate(some)}
        leaving = [member for member in alone if chance.random() < (0.02 if number < 45 else 0.1)]
        slots.leave(leaving)
        for member in leaving:
            del alone[member]
        if not alone:
            continue
        sizes.add(slots.count)
        tokens = random_tokens(len(alone), seed=number)
        logits = slots.step(tokens.tolist()).clone()
        for member, token, row in zip(slots.members, tokens, logits, strict=True):
            with torch.no_grad(), kernels(False):
                expected, alone[member] = model.step(token.view(1, 1).cuda(), alone[member])
            near(row, expected[0, 0])
    assert len(sizes) >= 3
    member = slots.members[-1]
    found, expected = (list(tensors_of(one.blocks)) for one in (slots.states([member]), alone[member]))
    assert len(found) == len(expected)


@every_name
def test_rows_are_replaced_and_cleared_between_recorded_steps(name: str) -> None:
    model = on_gpu(name)
    lengths = [5, 30, 12, 1]
    states = states_of(model, lengths)
    decoder, others = Decoder(model, states), states_of(model, [23, 3])
    alone: list[LMState | None] = [states.select([row]) for row in range(4)]
    for number, column in enumerate(random_tokens(90, 4).cuda()):
        if number == 40:
            decoder.replace([2, 0], others)
            alone[2], alone[0] = others.select([0]), others.select([1])
        if number == 60:
            decoder.clear([1])
            alone[1] = None
        logits = decoder.step(column)
        for row, state in enumerate(alone):
            if state is not None:
                with torch.no_grad(), kernels(False):
                    expected, alone[row] = model.step(column[row].view(1, 1), state)
                near(logits[row], expected[0, 0])
    assert decoder._graphs is not None
    assert decoder._graphs.graphs  # steps were recorded


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("options", ["", ",summary=16", ",summary=16,summary_merge=grc,merge_gate=true"])
def test_memories_give_the_cpus_logits_and_gradients(options: str, chunk: int) -> None:
    config = LMConfig(dim=64, blocks=(f"memory:chunk={chunk},heads=2{options}", "mlp"))
    torch.manual_seed(0)
    model = config.build(VOCAB).double()
    shake(model, 0.05)
    copied = config.build(VOCAB).cuda()
    copied.load_state_dict(model.state_dict())
    tokens = random_tokens(2, 5 * chunk + 3)
    found = {}
    for where, one in (("cpu", model), ("cuda", copied)):
        logits = one(tokens.to(where))
        F.cross_entropy(logits.flatten(0, 1), tokens.to(where).flatten()).backward()
        found[where] = logits
    near(found["cuda"], found["cpu"])
    for (key, left), right in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        assert left.grad is not None
        assert right[1].grad is not None
        difference = (right[1].grad.cpu().double() - left.grad).norm()
        assert difference <= 1e-2 * left.grad.norm() + 1e-6, key


@pytest.mark.parametrize("options", ["window=128", "positions=alibi,window=128"])
def test_windows_of_long_sequences(options: str) -> None:
    """FlexAttention's masks, made from blocks, against attention in plain torch."""
    config = {
        backend: LMConfig(dim=64, blocks=(f"attention:heads=2,backend={backend},{options}",))
        for backend in ("flex", "sdpa")
    }
    torch.manual_seed(0)
    model = config["flex"].build(VOCAB).cuda().eval()
    shake(model, 0.2)
    other = config["sdpa"].build(VOCAB).cuda().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for length in (129, 4_096, 9_999):
            tokens = random_tokens(1, length).cuda()
            near(model(tokens), other(tokens))


@pytest.mark.parametrize("name", ["ar-grc", "memory-window", "hybrid"])
def test_hugging_face_models_generate_what_the_decoder_does(name: str) -> None:
    pytest.importorskip("transformers")
    from logdepth.hf import LogDepthConfig, LogDepthForCausalLM

    inner = on_gpu(name)
    model = LogDepthForCausalLM(LogDepthConfig(vocab_size=VOCAB, model=SMALL_MODELS[name])).cuda().eval()
    model.model.load_state_dict(inner.state_dict(), strict=False)
    rows = random_tokens(3, 9).cuda()
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9, [0] + [1] * 8]).cuda()
    found = model.generate(rows, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)[:, 9:]
    assert found.shape == (3, 24)
    for row, kept, tokens in zip(rows, mask, found, strict=True):
        with torch.no_grad():
            logits, state = inner.step(row[kept != 0][None], inner.init_state(1))
            decoder, last = Decoder(inner, state), logits[:, -1].clone()
            for token in tokens:
                # Where two logits are equal to rounding, either may be chosen.
                assert float(last.max() - last[0, token]) < 1e-3
                last = decoder.step(token.view(1)).clone()
