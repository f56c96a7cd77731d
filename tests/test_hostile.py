"""Short runs of the hostile programs, with fixed seeds; `make hostile` is the long run."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile import corpora, edits
from tests.hostile.commands import Commands
from tests.hostile.flips import Flips
from tests.hostile.kills import Kills
from tests.hostile.outcomes import FAILURES, HARMLESS, SEVERITY, Case, judged, remarks
from tests.hostile.project import CHECKS, Project
from tests.hostile.requests import ODD, mutate, requests_in
from tests.hostile.worker import Said, Worker

SEED = 1


@pytest.fixture(name="worker", scope="module")
def one_worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.fixture(name="project", scope="module")
def small_project(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("hostile"), worker)


def no_failures(one: Callable[[int], Case], numbers: range) -> None:
    cases = {number: one(number) for number in numbers}
    failed = {number: case for number, case in cases.items() if case.outcome in FAILURES}
    assert not failed, "\n".join(f"{number}: {case}" for number, case in failed.items())


def test_without_damage_every_verb_repeats_itself(project: Project) -> None:
    for check in [check for check in CHECKS if not check.is_slow][::2]:
        case = project.after(check, lambda _: None, [])
        assert case.outcome == HARMLESS, case


def test_flips_change_nothing_silently(project: Project) -> None:
    flips = Flips(project, SEED)
    no_failures(lambda number: flips.one(number, few=True), range(1, 26))


def test_edits_change_nothing_silently(project: Project) -> None:
    no_failures(lambda number: edits.one(project, number, few=True), range(1, len(edits.EDITS) + 1, 11))


def test_commands_end_well(project: Project) -> None:
    no_failures(Commands(project, SEED).one, range(1, 21))


def test_corpora_end_well(worker: Worker, tmp_path: Path) -> None:
    no_failures(corpora.Corpora(tmp_path, worker, SEED).one, range(1, 26))


def test_requests_end_well(tmp_path: Path) -> None:
    with requests_in(tmp_path, SEED) as requests:
        no_failures(requests.one, range(1, 41))


def test_a_killed_prepare_leaves_the_same_stores(worker: Worker, tmp_path: Path) -> None:
    case = Kills(tmp_path, worker, SEED).killed("prepare", 0.7)
    assert case.outcome not in FAILURES, case


def test_what_is_wrong_is_seen(project: Project) -> None:
    """The judges tell outcomes apart."""
    check = next(check for check in CHECKS if check.name == "evaluate")
    expected = project.undamaged(check)
    project.expected[check.name] = expected._replace(stdout={"results": []})
    case = project.after(check, lambda _: None, [])
    project.expected[check.name] = expected
    assert case.outcome == "silent", case
    missing = project.after(check, lambda world: (world / "run" / "config.json").unlink(), ["run/config.json"])
    assert missing.outcome == "refused", missing


@pytest.mark.parametrize(
    ("outcome", "code", "err", "settings"),
    [
        ("refused", 2, "logdepth train: no\n", {}),
        ("refused", 2, "run: LM of 1,000 parameters on cpu; text\nlogdepth train: no\n", {}),
        ("messy", 2, "logdepth train: no\nmore\n", {}),
        ("messy", 2, "odd\nlogdepth train: no\n", {}),
        ("messy", 2, "logdepth sweep: no\n", {}),
        ("messy", 2, "", {}),
        ("traceback", 1, "Traceback (most recent call last):\nValueError: x\n", {}),
        ("traceback", 0, "Exception ignored in: x\nTraceback (most recent call last):\nOSError: x\n", {}),
        ("crash", None, "", {"signal": 11}),
        ("hang", None, "", {"signal": 9, "hung": True}),
        ("done", 0, "step 6 (epoch 0.10): validation perplexity 73.71, 1.6 bits per byte\n", {}),
    ],
)
def test_outcomes_of_calls(outcome: str, code: int | None, err: str, settings: dict[str, int]) -> None:
    said = Said(**({"code": code, "signal": None, "hung": False, "seconds": 1.0, "out": "", "err": err} | settings))
    assert judged(said, "train")[0] == outcome
    assert outcome in SEVERITY


def test_mutations_of_one_request_do_not_reach_the_next() -> None:
    before = repr(ODD)
    for number in range(300):
        chance, body = random.Random(number), {"messages": [{"role": "user"}], "n": 1}
        for _ in range(6):
            mutate(chance, body)
    assert repr(ODD) == before


def test_progress_of_a_slow_machine_is_no_remark() -> None:
    progress = "sweep: 86 %, trial 2: loss 4.2, 1 s left\nout: 0.04/1 runs, 43 s left\nx: 3/9 steps, 2 s left\n"
    said = Said(0, None, hung=False, seconds=1.0, out="", err=progress + "x: removed 1 line\n")
    assert remarks(said) == {"x: removed 1 line"}


def test_a_worker_sees_how_a_call_ends(worker: Worker) -> None:
    def call(code: str, **settings: float) -> Said:
        return worker.call([code], function="builtins:exec", **settings)

    assert call("import time; time.sleep(60)", limit=0.2).hung
    assert call("import time; time.sleep(60)", kill_after=0.2).signal == 9
    assert call("import os; os.kill(os.getpid(), 11)").signal == 11
    raised = call("print('before'); raise ValueError('odd')")
    assert (raised.code, raised.out) == (1, "before\n")
    assert raised.err.startswith("Traceback (most recent call last)")
    full = worker.call(["print(1)"], function="builtins:exec", stdout="/dev/full")
    assert full.code == 120
    assert call("raise SystemExit(3)").code == 3
