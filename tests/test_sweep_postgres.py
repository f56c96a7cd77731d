"""A sweep on PostgreSQL: two workers, one of them killed in the middle of a trial."""

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import psycopg2
import pytest

from logdepth.cli import main
from logdepth.sweep.storage import open_storage
from tests.postgres_server import PASSWORD, need_postgres, postgres_server
from tests.sweep_processes import (
    each_done_once,
    flags,
    killed_in_a_trial,
    record_own_trials,
    start,
    steps_in,
    trials_of,
    wait_for_step,
)

STEPS = 40
TRIALS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    need_postgres()
    with postgres_server() as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    """An empty database."""
    name = f"test_{secrets.token_hex(4)}"
    connection = psycopg2.connect(server.replace("+psycopg2", ""))
    connection.autocommit = True
    connection.cursor().execute(f"CREATE DATABASE {name}")
    connection.close()
    return server.removesuffix("postgres") + name


@pytest.mark.parametrize("folders", ["one folder", "a folder each"])
def test_two_workers_one_killed(
    folders: str,
    url: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one folder the trial goes on from its checkpoint; from afar only its pulse is seen, and it starts anew."""
    more = ["--storage", url, "--trials", str(TRIALS), "--train.max-steps", str(STEPS), "--no-prune", "--grace", "2"]
    ours, theirs = tmp_path / "ours", tmp_path / ("ours" if folders == "one folder" else "theirs")
    victim = start(corpus, theirs, *more)
    wait_for_step(victim, theirs, 0, 3)
    own = record_own_trials(monkeypatch)
    with killed_in_a_trial(victim, theirs, STEPS, not_its=own):
        assert main(flags(corpus, ours, *more)) == 0
    errors = capsys.readouterr().err

    trials = trials_of(ours, url)
    origins = each_done_once(trials, TRIALS)
    assert all(trial.state.is_finished() for trial in trials)
    (retry,) = (trial for trial in trials if "retry of" in trial.user_attrs)
    killed = retry.user_attrs["origin"]
    assert retry.user_attrs["deaths"] == 1
    assert killed in own
    record = json.loads((ours / "sweep.json").read_text())
    assert [row["trial"] for row in record["trials"]] == origins
    assert {row["steps"] for row in record["trials"]} == {STEPS}
    assert {row["trial"]: row["attempts"] for row in record["trials"]} == dict.fromkeys(origins, 1) | {killed: 2}
    whole = list(range(1, STEPS + 1))
    for origin in origins:
        assert steps_in(ours if origin in own else theirs, origin) == whole
    if ours != theirs:
        assert len(steps_in(theirs, killed)) < STEPS
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or PASSWORD.encode() not in file.read_bytes(), file
    assert PASSWORD not in errors


def test_workers_that_make_the_tables_at_the_same_time(url: str, tmp_path: Path) -> None:
    def join(_: int) -> int:
        study = optuna.create_study(study_name="one", storage=open_storage(url, tmp_path), load_if_exists=True)
        return study.ask().number

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(join, range(6))) == list(range(6))


def test_a_wrong_password_is_one_line(
    url: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = url.replace(PASSWORD, "a-wrong-one")
    assert main(flags(corpus, tmp_path / "sweep", "--storage", wrong)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "password authentication failed" in line
    assert "a-wrong-one" not in line
