"""Runs in several processes: starting them as torchrun does, and what each of them does.

`python -m tests.ranks FOLDER CORPUS` is one of these processes; torchrun's variables say which.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from logdepth.evaluate import Evaluation, evaluate
from logdepth.models import LMConfig, ModelConfig, ScanLMConfig
from logdepth.operators import GRCConfig
from logdepth.parallel import joined, leave
from logdepth.runs import RunConfig, RunFolder
from logdepth.training import Interrupted, prepared_for, resume, train
from tests.run_folders import interrupted_at, run_config
from tests.tiny_corpus import VOCAB

ROOT = Path(__file__).parent.parent
HYBRID = LMConfig(dim=12, blocks=("memory:chunk=4,heads=2", "attention:heads=2,window=5", "mlp"), tied=False)
SCAN = ScanLMConfig(embed_width=32, operator=GRCConfig(width=32))  # much narrower ones amplify rounding
WITH_DROPOUT = dataclasses.replace(SCAN, leaf_dropout=0.2, output_dropout=0.2)
SHORT: dict[str, Any] = {"max_steps": 12, "evaluate_every": 6}
RUNS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "plain": (SCAN, {"max_steps": 100, "evaluate_every": 50, "learning_rate": 1e-3}),
    "dropout": (WITH_DROPOUT, {"micro_batch": 2, **SHORT}),
    "muon": (HYBRID, {"optimizer": "muon", **SHORT}),
}
"""Runs that must not depend on the number of ranks."""


def config_of(name: str, corpus: Path, *words: str) -> RunConfig:
    model, changes = RUNS[name]
    return run_config(corpus, model, parallel=words, **changes)


TRAIN = (
    f"pydocs-ar-grc --data.corpus text --data.tokenizer.vocab-size {VOCAB} --model.embed-width 16 "
    "--model.operator.width 16 --model.leaf-dropout 0.1 --train.max-steps 60 --train.evaluate-every 10 "
    "--train.batch-size 8 --train.context 16 --train.log-every 1 --train.device cpu --train.warmup-steps 5"
).split()


def train_command(corpus: Path, out: Path, *flags: str) -> list[str]:
    """What trains a small run."""
    return ["-m", "logdepth", "train", *TRAIN, "--data.paths", str(corpus), "--out", str(out), *flags]


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    """Starts a command on two ranks under torchrun."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=plain_environment(),
    )


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun has started."""
    found = []
    with contextlib.suppress(OSError):  # one has just ended
        for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if b"logdepth" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(int(one))
    return found


def start(world_size: int, command: Sequence[str], **variables: str) -> list[subprocess.Popen[str]]:
    """Starts a command once for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [one_of(world_size, rank, port, command, **variables) for rank in range(world_size)]


def one_of(world_size: int, rank: int, port: int, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """Starts one rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=plain_environment() | {name: str(value) for name, value in (place | address).items()} | variables,
    )


def plain_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float = 120) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process."""
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=seconds)
            found.append((process.returncode, out, errors))
    finally:
        for process in processes:
            process.kill()
    return found


def measured_evaluation(folder: Path) -> Evaluation:
    """The perplexity of a run on its test split, of which every rank measures a share, in odd windows."""
    loaded = RunFolder(folder).load("last")
    return evaluate(loaded.model, prepared_for(RunFolder(folder)).stores["test"], context=7, stride=5, ranks=joined())


def _work(folder: Path, corpus: Path) -> None:
    """Trains every run in every way; interrupts one, and resumes it. With four ranks, only what two cannot show."""
    ranks = joined()
    many = ranks.world_size > 2
    for words in ("replicate", "shard"):
        for name in ("plain",) if many else RUNS:
            train(config_of(name, corpus, words), folder / f"{name}-{words}")
        if many:
            continue
        parts = folder / f"parts-{words}"
        if ranks.rank == 1:  # one rank gets the signal, and all must stop at the same step
            with interrupted_at(7, signal.SIGTERM):
                train(config_of("muon", corpus, words), parts)
        else:
            with pytest.raises(Interrupted, match="SIGTERM at step 7"):
                train(config_of("muon", corpus, words), parts)
        resume(parts)
    if many:
        train(config_of("muon", corpus, "replicate:2", "shard"), folder / "muon-mesh")
    result = measured_evaluation(folder / "plain-shard")
    (folder / f"nats-{ranks.rank}").write_text(repr((result.nats, result.tokens)))


if __name__ == "__main__":
    _work(Path(sys.argv[1]), Path(sys.argv[2]))
    leave(0)
