"""Which parts of a model are compiled, and what is said of its acceleration."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from logdepth.acceleration import acceleration_in_words, compile_model, kernels_as_asked
from logdepth.models import LM
from logdepth.operators import GRC
from logdepth.ops import kernels, use_kernels
from logdepth.training import NextTokenLoss
from tests.small_models import SCAN, SMALL_MODELS


def test_what_a_scan_model_is_made_of_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, *, dynamic: compiled.append(module))
    config = dataclasses.replace(SCAN, embedding_net=True, post_merge="up")
    model = config.build(96)
    compile_model(model)
    (layer,) = model.blocks
    assert compiled == [*layer.operators(), layer.embedding_net]
    compiled.clear()
    compile_model(dataclasses.replace(config, embedding_net=False).build(96))
    assert [type(one).__name__ for one in compiled] == ["PostMerge", "GRC"]


@pytest.mark.parametrize("name", ["transformer-sinusoidal", "transformer-alibi"])
def test_the_forward_pass_of_a_model_without_scans_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, evaluation and logits all go through it."""
    calls: list[bool | None] = []

    def as_if_compiled(function: Any, *, dynamic: bool | None) -> Any:
        return lambda *arguments: calls.append(dynamic) or function(*arguments)

    monkeypatch.setattr(torch, "compile", as_if_compiled)
    for any_length, dynamic in ((False, None), (True, True)):
        model, tokens = SMALL_MODELS[name].build(13).eval(), torch.tensor([[1, 2, 3]])
        names, logits, loss = set(model.state_dict()), model(tokens), model.loss(tokens, tokens)
        compile_model(model, any_length=any_length)
        assert set(model.state_dict()) == names
        assert torch.equal(model(tokens), logits)
        assert NextTokenLoss(model)(tokens, tokens) == loss
        model.token_losses(tokens, tokens)
        assert calls == [dynamic] * 3
        calls.clear()


@pytest.mark.filterwarnings("default")  # the compiler warns of its own insides
@pytest.mark.parametrize("name", ["transformer-sinusoidal", "transformer-alibi", "windows"])
def test_compiled_models_give_the_same_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    windows = {"dim": 8, "blocks": ("attention:heads=2,window=3", "mlp"), "initialisation": "gpt2"}
    model = LM(13, **windows) if name == "windows" else SMALL_MODELS[name].build(13)
    tokens = torch.randint(13, (2, 9))
    loss, logits = model.loss(tokens, tokens), model(tokens)
    padded, packed = model(tokens, lengths=[9, 4]), model(tokens.flatten(), cu_seqlens=[0, 5, 18])
    compile_model(model)
    torch.testing.assert_close(model.loss(tokens, tokens), loss)
    torch.testing.assert_close(model(tokens), logits)
    torch.testing.assert_close(model(tokens, lengths=[9, 4])[1, :4], padded[1, :4])
    torch.testing.assert_close(model(tokens.flatten(), cu_seqlens=[0, 5, 18]), packed)
    state, parts = model.init_state(2), []
    for part in tokens.split(4, dim=1):
        some, state = model.step(part, state)
        parts.append(some)
    torch.testing.assert_close(torch.cat(parts, dim=1), logits)


@pytest.mark.filterwarnings("default")
def test_models_compiled_before_do_not_use_up_the_recompilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a sweep compile the same code for other rates of dropout."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    tokens = torch.tensor([[1, 2, 3]])
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for dropout in (0.1, 0.2, 0.3):
            model = dataclasses.replace(SMALL_MODELS["transformer-sinusoidal"], dropout=dropout).build(13)
            compile_model(model)
            assert NextTokenLoss(model)(tokens, tokens).isfinite()


def test_on_a_cpu_nothing_is_accelerated_and_that_is_said() -> None:
    model = SCAN.build(13)
    assert acceleration_in_words(model, True) == "acceleration: none on the cpu; it is for CUDA"
    assert acceleration_in_words(model, False) == "acceleration: off"


def test_no_acceleration_turns_kernels_off_where_they_were_on() -> None:
    x = torch.zeros(1)
    with kernels(True):
        asked = use_kernels(x)
        with kernels_as_asked(False):
            assert not use_kernels(x)
        with kernels_as_asked(True):
            assert not use_kernels(x)  # on a GPU only
        assert use_kernels(x) == asked


def test_what_does_not_run_by_kernels_says_why() -> None:
    class Own(GRC):
        pass

    own, plain, x = Own(4), GRC(4), torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    assert plain.why_plain(plain, x) is None
    assert own.why_plain(own, x) == ("kernels are for operators as they are built; a part of this Own was changed")
    assert "one operator for both sweeps" in str(plain.why_plain(own, x))
    assert "torch.float64" in str(plain.why_plain(plain, x.double()))
