"""Which parts of a model are compiled."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from logdepth.training import NextTokenLoss, compile_model, make_faster
from tests.small_models import SCAN, SMALL_MODELS


def test_what_a_scan_model_is_made_of_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, *, dynamic: compiled.append(module))
    config = dataclasses.replace(SCAN, embedding_net=True, post_merge="up")
    model = config.build(96)
    compile_model(model)
    (layer,) = model.layers
    assert compiled == [*layer.operators(), layer.embedding_net]
    compiled.clear()
    compile_model(dataclasses.replace(config, embedding_net=False).build(96))
    assert [type(one).__name__ for one in compiled] == ["PostMerge", "GRC"]


@pytest.mark.parametrize("name", ["transformer-sinusoidal", "transformer-alibi"])
def test_training_compiles_a_transformers_loss_for_its_steps_and_the_model_for_validation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[nn.Module, bool | None]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, *, dynamic: compiled.append((module, dynamic)))
    for any_length, dynamic in ((False, None), (True, True)):
        loss = NextTokenLoss(SMALL_MODELS[name].build(13))
        names = set(loss.state_dict())
        assert make_faster(loss, accelerate=False, compiled=True, any_length=any_length) is None
        assert compiled == [(loss.model, dynamic), (loss, dynamic)]
        assert set(loss.state_dict()) == names
        compiled.clear()


def test_the_loss_of_a_compiled_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a NextTokenLoss around it: it does not use `forward`, which is all that a module compiles by itself."""
    model, tokens = SMALL_MODELS["transformer-sinusoidal"].build(13), torch.tensor([[1, 2, 3]])
    names, loss, compiled = set(model.state_dict()), model.loss(tokens, tokens), []

    def as_if_compiled(function: Any, *, dynamic: bool | None) -> Any:
        assert dynamic is None
        return lambda *arguments: compiled.append(function.__name__) or function(*arguments)

    monkeypatch.setattr(torch, "compile", as_if_compiled)
    compile_model(model)
    assert model.loss(tokens, tokens) == loss
    assert compiled == ["loss"]
    assert set(model.state_dict()) == names


@pytest.mark.filterwarnings("default")  # the compiler warns of its own insides
def test_models_compiled_before_do_not_use_up_the_recompilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a sweep compile the same code for other rates of dropout."""
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    tokens = torch.tensor([[1, 2, 3]])
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for dropout in (0.1, 0.2, 0.3):
            model = dataclasses.replace(SMALL_MODELS["transformer-sinusoidal"], dropout=dropout).build(13)
            loss = NextTokenLoss(model)
            assert make_faster(loss, accelerate=False, compiled=True) is None
            assert model(tokens).isfinite().all()
            assert loss(tokens, tokens).isfinite()
