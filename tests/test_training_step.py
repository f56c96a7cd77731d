"""One optimizer step: micro-batches, packed documents, clipping, and steps that a CUDA graph may capture."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from logdepth.data import Batches
from logdepth.runs import TrainConfig
from logdepth.training import NextTokenLoss, train
from logdepth.training.optimizer import ModelOptimizer, learning_rate
from logdepth.training.step import TrainingStep
from tests.run_folders import measured, run_config, same_files
from tests.small_models import SCAN, SMALL_MODELS, VOCAB
from tests.tiny_corpus import store_of


def test_micro_batches_give_the_gradient_of_the_batch(corpus: Path, tmp_path: Path) -> None:
    for number, micro_batch in enumerate((None, 4, 3, 1)):
        config = run_config(corpus, SMALL_MODELS["deep"], max_steps=3, micro_batch=micro_batch)
        train(config, tmp_path / str(number))
        left, right = (load_file(tmp_path / name / "last.safetensors") for name in ("0", str(number)))
        for key in left:
            torch.testing.assert_close(left[key], right[key], rtol=1e-3, atol=1e-4)


def test_a_captured_step_is_a_step(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPU work of a step is one function of windows and rate; what a failed capture leaves does not count."""
    config = run_config(corpus, dataclasses.replace(SCAN, leaf_dropout=0.1))
    train(config, tmp_path / "plain")
    original, rates = TrainingStep.__call__, []

    def after_a_failure(self: TrainingStep, windows: torch.Tensor, rate: float) -> Any:
        rates.append(rate)
        for parameter in self.loss.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)  # as a failed capture leaves them
        return original(self, windows, rate)

    monkeypatch.setattr(TrainingStep, "__call__", after_a_failure)
    train(config, tmp_path / "captured")
    assert rates == [learning_rate(config.train, step, 24) for step in range(24)]
    same_files(tmp_path / "plain", tmp_path / "captured")


@pytest.mark.parametrize("name", ["ar-grc", "transformer-alibi"])
def test_documents_that_start_anew_train_as_if_alone(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original = TrainingStep._loss

    def looking(self: TrainingStep, windows: torch.Tensor) -> torch.Tensor:
        windows[:, 5] = self.separator  # a document ends there
        loss = original(self, windows)
        with torch.no_grad():
            parts = [self.loss.model(windows[:, :6]), self.loss.model(windows[:, 6:-1])]
            apart = nn.functional.cross_entropy(torch.cat(parts, dim=1).flatten(0, 1), windows[:, 1:].flatten())
        seen.append((loss.item(), apart.item()))
        return loss

    monkeypatch.setattr(TrainingStep, "_loss", looking)
    train(run_config(corpus, SMALL_MODELS[name], max_steps=3, reset_at_documents=True), tmp_path / "run")
    for loss, apart in seen:
        assert loss == pytest.approx(apart, rel=1e-5)


def test_gradients_are_clipped(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    original = torch.optim.AdamW.step

    def looking(self: torch.optim.AdamW, *arguments: Any) -> Any:
        grads = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norms.append(torch.stack([grad.norm() for grad in grads]).norm().item())
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", looking)
    train(run_config(corpus, max_steps=4, clip=0.01), tmp_path / "run")
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)
    before = [line["gradient_norm"] for line in measured(tmp_path / "run") if line["kind"] == "train"]
    assert before[-1] > 0.05


@pytest.mark.parametrize("name", ["ar-grc", "transformer-sinusoidal"])
def test_bfloat16_learns_too(name: str, corpus: Path, tmp_path: Path) -> None:
    state = train(run_config(corpus, SMALL_MODELS[name], max_steps=40, precision="bfloat16"), tmp_path)
    assert state.best_loss < math.log(96) - 1
    assert {tensor.dtype for tensor in load_file(tmp_path / "last.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("separator", [None, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_mean_gradient_of_all_ranks_is_that_of_the_batch(separator: int | None, world_size: int) -> None:
    """So that averaging over ranks, as DDP and FSDP do, trains as one rank alone."""
    model = SMALL_MODELS["sinusoidal-untied"].build(VOCAB)
    config = TrainConfig(device="cpu")
    step = TrainingStep(NextTokenLoss(model), ModelOptimizer(model, config), config, separator)
    store = store_of(torch.randint(VOCAB, (600,)).tolist(), separator=2)

    def loss_and_gradients(rank: int, world_size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        batches = Batches(store, batch_size=8, context=16, seed=0, rank=rank, world_size=world_size)
        loss = step._accumulate_gradients(torch.from_numpy(batches.at(3)))
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad(set_to_none=True)
        return loss, found

    loss, whole = loss_and_gradients(0, 1)
    losses, parts = zip(*(loss_and_gradients(rank, world_size) for rank in range(world_size)), strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss)
    assert len(whole) == len(list(model.parameters()))
    for one, shares in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(shares).mean(dim=0), one, rtol=1e-4, atol=1e-6)
