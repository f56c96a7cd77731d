"""Runs in several processes on the CPU: equal to one process, killed, stopped, resumed, and refused in one line."""

import os
import random
import signal
import socket
import subprocess
import time
from ast import literal_eval
from pathlib import Path

import pytest
import torch

from logdepth.errors import UserError
from logdepth.parallel import degrees
from logdepth.runs import RunFolder
from logdepth.training import resume, train
from tests.ranks import (
    RUNS,
    config_of,
    ended,
    measured_evaluation,
    one_of,
    ranks_of,
    start,
    torchrun,
    train_command,
)
from tests.run_folders import measured, same_files


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


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nothing disturbs."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    first, second = ended(start(2, train_command(corpus, out, "--json")))
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert '"finished": "all steps done"' in first[1]
    assert second[1:] == ("", "")  # only the first rank prints
    assert "60 steps of 8 × 16 tokens on 2 ranks (replicate 2), from the start" in first[2]
    return out


def wait_for_step(process: "subprocess.Popen[str]", out: Path, step: int) -> None:
    file = out / "metrics.jsonl"
    while (file.read_text().count('"train"') if file.exists() else 0) < step and process.poll() is None:
        time.sleep(0.005)


def test_a_killed_rank_is_restarted_and_changes_no_bit(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = torchrun("--max-restarts", "2", *train_command(corpus, out))
    for kill, step in enumerate(random.Random(0).sample(range(1, 55), 2)):
        wait_for_step(process, out, step)
        while not (ranks := ranks_of(process)):
            time.sleep(0.005)
        os.kill(ranks[kill % len(ranks)], signal.SIGKILL)
        wait_for_step(process, out, step - step % 10)
    ((code, said, _),) = ended([process])
    assert code == 0, said
    assert said.count("all steps done after 60 steps") == 1
    same_files(undisturbed, out)
    assert said.count("another process of this run has ended") == 2  # one line each time, from the rank that is left
    assert "Traceback" not in said


def test_a_preempted_job_saves_and_resumes_on_fewer_ranks(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    processes = start(2, train_command(corpus, out))
    wait_for_step(processes[0], out, 13)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # as from torchrun and from the scheduler
        for process in processes:
            process.send_signal(number)
        time.sleep(0.01)
    first, second = ended(processes)
    assert first[0] == second[0] == 128 + signal.SIGTERM, first[2]
    assert first[2].count("; saved. Resume with: logdepth train --resume") == 1
    assert second[2] == ""
    stopped = RunFolder(out).load("last").step
    assert 13 <= stopped < 60
    state = resume(out)  # one process
    assert state.step == 60
    assert measured(out)[-1]["valid_loss"] == pytest.approx(measured(undisturbed)[-1]["valid_loss"], rel=0.02)


def refused(processes: "list[subprocess.Popen[str]]") -> str:
    """The one line that all ranks together say when they refuse."""
    found = ended(processes, seconds=60)
    assert all(code in (1, 2) for code, _, _ in found)
    assert all(out == "" for _, out, _ in found)
    lines = [line for _, _, errors in found for line in errors.splitlines()]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.batch-size", "9"], "--train.batch-size 9 is not a multiple of 2, the number of ranks"),
        (["--train.parallel", "shard:3"], "--train.parallel shard:3 needs 3 ranks, and there are 2"),
        (
            ["--train.parallel", "both"],
            "parallel must be words such as replicate, shard or replicate:2 shard:4; got both",
        ),
    ],
)
def test_a_mistake_is_one_line_from_one_rank(flags: list[str], message: str, corpus: Path, tmp_path: Path) -> None:
    assert message in refused(start(2, train_command(corpus, tmp_path / "run", *flags)))
    assert not (tmp_path / "run" / "config.json").exists()


def test_other_versions_and_verbs_are_refused() -> None:
    main = "from logdepth.cli import main; main()"
    old = ["-c", f"import logdepth.version; logdepth.version.__version__ = '0.0.1'; {main}", "recipes"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [one_of(2, 0, port, ["-m", "logdepth", "recipes"]), one_of(2, 1, port, old)]
    assert "rank 1 runs logdepth 0.0.1, and rank 0 " in refused(processes)
    assert "this verb runs in one process; start it without torchrun" in refused(
        start(2, ["-m", "logdepth", "recipes"])
    )


def test_a_missing_rank_is_waited_for_and_then_told() -> None:
    impatient = "import logdepth.parallel; logdepth.parallel.ARRIVAL_SECONDS = 4; from logdepth.cli import main; main()"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [one_of(3, rank, port, ["-c", impatient, "recipes"]) for rank in (0, 1)]
    line = refused(processes)
    assert "rank 0 of 3 did not reach the others at 127.0.0.1" in line
    assert "2/3 clients joined" in line


@pytest.mark.parametrize(
    ("words", "ranks", "sizes"),
    [
        ((), 4, (4, 1)),
        (("shard",), 4, (1, 4)),
        (("replicate:2", "shard"), 8, (2, 4)),
        (("replicate", "shard:4"), 8, (2, 4)),
        (("replicate:2", "shard:3"), 6, (2, 3)),
        (("shard:8",), 1, (1, 1)),
    ],
)
def test_words_make_a_mesh(words: tuple[str, ...], ranks: int, sizes: tuple[int, int]) -> None:
    assert tuple(degrees(words, ranks).values()) == sizes


@pytest.mark.parametrize(("words", "ranks"), [(("shard:3",), 4), (("replicate:3", "shard"), 4), (("shard:2",), 4)])
def test_a_mesh_must_fit_the_ranks(words: tuple[str, ...], ranks: int) -> None:
    with pytest.raises(UserError, match=rf"needs .* ranks, and there are {ranks}"):
        degrees(words, ranks)
