"""Runs in several processes on the CPU: equal to one process, killed, stopped, resumed, and refused in one line."""

from ast import literal_eval
from pathlib import Path

import pytest
import torch

from logdepth.training import train
from tests.ranks import RUNS, config_of, ended, measured_evaluation, start
from tests.run_folders import measured, same_files
from tests.tiny_corpus import VOCAB

FLAGS = (
    f"pydocs-ar-grc --data.corpus text --data.tokenizer.vocab-size {VOCAB} --model.embed-width 16 "
    "--model.operator.width 16 --model.leaf-dropout 0.1 --train.max-steps 60 --train.evaluate-every 10 "
    "--train.batch-size 8 --train.context 16 --train.log-every 1 --train.device cpu --train.warmup-steps 5"
).split()


def command(corpus: Path, out: Path, *flags: str) -> list[str]:
    return ["-m", "logdepth", "train", *FLAGS, "--data.paths", str(corpus), "--out", str(out), *flags]


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run as a single process trains it."""
    folder = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks, and faster for small models on a busy machine
    for name in RUNS:
        train(config_of(name, corpus, "replicate"), folder / name)
    torch.set_num_threads(threads)
    return folder


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_as_one_process_does(world_size: int, corpus: Path, alone: Path, tmp_path: Path) -> None:
    for code, out, errors in ended(start(world_size, ["-m", "tests.ranks", str(tmp_path), str(corpus)])):
        assert code == 0, out + errors
    trained = [one for one in tmp_path.iterdir() if one.is_dir() and not one.name.startswith("parts")]
    assert len(trained) == (6 if world_size == 2 else 3)
    for run in trained:
        _same_numbers(alone / run.name.split("-")[0], run)
    for words in ("replicate", "shard") if world_size == 2 else ():
        same_files(tmp_path / f"muon-{words}", tmp_path / f"parts-{words}")  # a stop changes no bit
    # Each rank has measured a share of the test split, and all know the whole.
    whole = measured_evaluation(tmp_path / "plain-shard")
    for rank in range(world_size):
        nats, tokens = literal_eval((tmp_path / f"nats-{rank}").read_text())
        assert tokens == whole.tokens
        assert nats == pytest.approx(whole.nats, rel=1e-9)


def _same_numbers(one: Path, other: Path) -> None:
    left, right = measured(one), measured(other)
    assert [(line["kind"], line["step"]) for line in left] == [(line["kind"], line["step"]) for line in right]
    for before, after in zip(left, right, strict=True):
        for name in {"loss", "valid_loss"} & before.keys():
            assert after[name] == pytest.approx(before[name], rel=1e-5), (before, after)
