"""Runs that were written before models were made of blocks: they load, evaluate and resume as they always did.

`tests/old_runs` holds a small run per preset, interrupted after six steps, and what the code that wrote it measured.
"""

import dataclasses
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from logdepth.data import prepare
from logdepth.errors import UserError
from logdepth.evaluate import evaluate
from logdepth.generate import SamplingConfig, generate
from logdepth.runs import RunFolder
from logdepth.runs.tensors import load_tensors, save_tensors
from logdepth.training import Trainer, resume, train
from tests.tiny_corpus import tiny_data

OLD_RUNS = Path(__file__).parent / "old_runs"
every_run = pytest.mark.parametrize("name", sorted(file.stem for file in OLD_RUNS.glob("*.json")))


@pytest.fixture
def copied(corpus: Path, tmp_path: Path) -> Any:
    """A function that copies the old run of a name to where it may be changed, on the corpus of the tests."""

    def copy(name: str) -> RunFolder:
        path = tmp_path / name
        shutil.copytree(OLD_RUNS / name, path)
        (path / "tokenizer.model").write_bytes(lzma.decompress((OLD_RUNS / "tokenizer.model.xz").read_bytes()))
        saved = json.loads((path / "config.json").read_text())
        assert saved["config"]["data"]["paths"] == ["corpus"]
        saved["config"]["data"]["paths"] = [str(corpus)]
        (path / "config.json").write_text(json.dumps(saved))
        return RunFolder(path)

    return copy


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OLD_RUNS / f"{name}.json").read_text())
    return found


def test_there_is_a_run_of_every_preset() -> None:
    names = {file.stem for file in OLD_RUNS.glob("*.json")}
    assert names == {"ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal", "deep"}


@every_run
@pytest.mark.parametrize("which", ["best", "last"])
def test_perplexities_are_what_they_were(name: str, which: Any, copied: Any, corpus: Path) -> None:
    run = copied(name)
    loaded = run.load(which)
    assert loaded.step == {"best": 5, "last": 6}[which]
    store = prepare(tiny_data(corpus), None, loaded.tokenizer).stores["test"]
    for context, perplexity in measured(name)["test_perplexity"][which].items():
        found = evaluate(loaded.model, store, context=int(context)).token_perplexity
        assert found == pytest.approx(perplexity, rel=1e-5)


@every_run
def test_a_resumed_run_has_the_losses_that_it_would_have_had(
    name: str, copied: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, expected = copied(name), measured(name)
    state = resume(run.path)
    assert state.step == 26
    lines = [line for line in run.read_metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [*range(1, 27)]
    assert [line["loss"] for line in lines[6:]] == pytest.approx(expected["losses"], rel=1e-5)
    assert [line["gradient_norm"] for line in lines[6:]] == pytest.approx(expected["gradient_norms"], rel=1e-3)
    assert state.best_loss == pytest.approx(expected["best_loss"], rel=1e-5)
    said = capsys.readouterr().err
    assert "the environment has changed" in said
    assert said.count("carry no checksums") == 1
    # and its files are of today
    assert load_tensors(run.checkpoint)[1]["names"] == 2
    assert run.load("best").step == state.best_step


@every_run
def test_moments_belong_to_the_weights_that_they_belonged_to(name: str, copied: Any) -> None:
    """The weight and its moments are found by their values, whatever their names are now."""
    run = copied(name)
    saved, _ = load_tensors(run.checkpoint)
    old = {key.removeprefix("model/") for key in saved if f"optimizer/{key.removeprefix('model/')}/exp_avg" in saved}
    trainer = Trainer(run, run.config(), prepare(run.config().data, None, run.tokenizer()), torch.device("cpu"))
    assert trainer.state.step == 6
    moments = trainer.optimizer.tensors()
    parameters = dict(trainer.model.named_parameters())
    assert len(moments) == 3 * len(parameters) == 3 * len(old)
    for weight_name in old:
        weight = saved[f"model/{weight_name}"]
        same = [key for key, one in parameters.items() if torch.equal(one, weight)]
        assert same, weight_name
        for key in same:  # two where the gradients of two weights are always equal
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(moments[f"{key}/{moment}"], saved[f"optimizer/{weight_name}/{moment}"])


@every_run
def test_old_runs_give_text(name: str, copied: Any) -> None:
    loaded = copied(name).load()
    settings = SamplingConfig(max_tokens=5, temperature=0.0)
    pieces = list(generate(loaded.model, loaded.tokenizer, ["the cat"], settings, separated=False))
    assert pieces[-1].last
    assert "".join(piece.text for piece in pieces)


def test_a_new_run_may_start_from_an_old_one(copied: Any, tmp_path: Path) -> None:
    old = copied("deep")
    config = old.config()
    settings = dataclasses.replace(config.train, init_from=old.path, max_steps=1)
    state = train(dataclasses.replace(config, train=settings), tmp_path / "new")
    weights = old.load().model.state_dict()
    assert state.step == 1
    for key, weight in RunFolder(tmp_path / "new").load("last").model.state_dict().items():
        torch.testing.assert_close(weight, weights[key], rtol=0, atol=0.02)  # one step away
        assert weight.std() > 0 or weight.numel() == 1


def test_a_weight_that_is_missing_is_still_an_error(copied: Any) -> None:
    run = copied("transformer-alibi")
    tensors, record = load_tensors(run.weights("best"))
    del tensors["blocks.1.mlp_out.bias"]
    save_tensors(run.weights("best"), tensors, record)
    with pytest.raises(UserError, match=r"it has no weight 'blocks\.3\.out\.bias'"):
        run.load()
