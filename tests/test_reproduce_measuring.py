"""Studies: what is measured, how long it takes, and how a budget interrupts it."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logdepth.cli import main
from logdepth.evaluate import Evaluation, evaluate
from logdepth.reproduce import measure, study_of, work
from logdepth.reproduce.study import TEXT_CONTEXTS
from logdepth.results import TimingResult, read_results, write_result
from tests.command_line import refused
from tests.study_commands import flags_of_a_small_study, results_of, shorten_lengths  # noqa: F401 (fixtures)
from tests.tiny_corpus import write_corpus
from tests.tiny_study import CONTEXTS, override_files

ESTIMATE = re.compile(
    r"text study: 1 run with (\d+) steps to train, evaluated at 16, 32, 64 tokens; roughly .* at most: "
    r"(?:training .*, )?evaluation .*, timing .*"
)


class OnePieceASitting:
    """Counts evaluations and timed lengths. The budget of each sitting is spent after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evaluated: list[int] = []
        self.timed: list[int] = []
        self.before = 0

        def counted_evaluate(*arguments: Any, context: int, **settings: Any) -> Evaluation:
            self.evaluated.append(context)
            return evaluate(*arguments, context=context, **settings)

        def counted_times(*arguments: Any, **settings: Any) -> Iterator[TimingResult]:
            for result in times(*arguments, **settings):
                self.timed.append(result.models[0].timings[0].context)
                yield result

        times = measure.measure_times
        monkeypatch.setattr("logdepth.report.write.can_draw", lambda: False)  # the report of each sitting takes long
        monkeypatch.setattr(measure, "evaluate", counted_evaluate)
        monkeypatch.setattr(work, "measure_times", counted_times)
        monkeypatch.setattr(work._Work, "_is_spent", lambda _: self.done > self.before)

    @property
    def done(self) -> int:
        return len(self.evaluated) + len(self.timed)

    def run(self, *arguments: str) -> int:
        self.before = self.done
        return main(["reproduce", "text", *arguments])


def test_a_budget_is_kept_while_measuring_and_nothing_is_measured_twice(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = [*flags, "--models", "ar-grc"]
    assert main(["reproduce", "text", *part, "--untimed", "--out", str(tmp_path / "whole")]) == 0
    counted, out = OnePieceASitting(monkeypatch), tmp_path / "parts"
    capsys.readouterr()
    codes, steps = [], []
    for _ in range(6):
        codes.append(counted.run(*part, "--out", str(out)))
        steps += ESTIMATE.findall(capsys.readouterr().err)
        if len(codes) == 4:
            (timed,) = read_results(out / "results").timings
            assert [one.context for one in timed.models[0].timings] == [CONTEXTS[0]]
    assert codes == [3] * 5 + [0]
    assert (counted.evaluated, counted.timed) == (list(CONTEXTS), list(CONTEXTS))
    assert results_of(out) == results_of(tmp_path / "whole")
    (timed,) = read_results(out / "results").timings
    assert [one.context for one in timed.models[0].timings] == list(CONTEXTS)
    assert not list(out.rglob("measurements.json"))
    assert steps == ["30", "0", "0", "0"], "the run is trained in the first sitting, and measured in the fourth"


def test_measurements_that_are_damaged_are_one_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = OnePieceASitting(monkeypatch)
    arguments = [*flags, "--models", "ar-grc", "--out", str(tmp_path)]
    assert counted.run(*arguments) == 3
    file = tmp_path / "runs" / "ar-grc-0" / "measurements.json"
    saved = json.loads(file.read_text())
    remedy = "remove it to measure the run again"
    for damaged, said in (
        (file.read_text().replace('"context": 16', '"context": 17'), "does not match its checksum"),
        ("[]", "is damaged"),
        (json.dumps({name: value for name, value in saved.items() if name != "sha256"}), "has lost its checksum"),
    ):
        file.write_text(damaged)
        counted.before = counted.done
        monkeypatch.setattr("logdepth.reproduce.work._Work._shares", lambda *_: {("ar-grc", 0): 1.0, work.TIMING: 1.0})
        line = refused(capsys, "reproduce", "text", *arguments)
        assert said in line
        assert str(file) in line
        assert line.endswith(remedy)


def test_times_of_other_software_are_not_completed_but_taken_again(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = OnePieceASitting(monkeypatch)
    arguments = [*flags, "--models", "ar-grc", "--out", str(tmp_path)]
    codes = [counted.run(*arguments) for _ in range(4)]
    assert codes == [3] * 4
    (file,) = (tmp_path / "results").glob("timing-*.json")
    (timed,) = read_results(tmp_path / "results").timings
    write_result(file, dataclasses.replace(timed, environment=timed.environment | {"torch": "1"}))
    monkeypatch.setattr(work._Work, "_is_spent", lambda _: False)
    assert counted.run(*arguments) == 0
    assert counted.timed == [CONTEXTS[0], *CONTEXTS]
    (timed,) = read_results(tmp_path / "results").timings
    assert timed.environment["torch"] != "1"
    write_result(file, dataclasses.replace(timed, environment=timed.environment | {"torch": "1"}))
    assert counted.run(*arguments) == 0
    assert counted.timed == [CONTEXTS[0], *CONTEXTS], "complete times stay"


def test_own_text_needs_two_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, elsewhere = write_corpus(tmp_path / "my text"), write_corpus(tmp_path / "elsewhere")
    small = override_files(tmp_path, elsewhere)
    part = ["reproduce", "text", *small, "--models", "ar-grc", "--untimed", "--out", str(tmp_path / "study")]
    assert main([*part, "--data.paths", str(text), "--contexts", "8,24"]) == 0
    (run,) = read_results(tmp_path / "study" / "results").runs
    assert run.config.data.paths == (text,), "the flag takes precedence over a file"
    assert [one.context for one in run.test] == [8, 24, 32], "the training length is always among them"
    assert run.positions.context == 32
    capsys.readouterr()
    assert main([*part, "--data.paths", str(text), "--contexts", "24"]) == 0
    said = refused(capsys, *part, "--data.paths", str(text), "--contexts", "16", "24")
    assert "was not measured at 16 tokens; remove it to measure that run again" in said


def test_the_study_of_own_text_is_small() -> None:
    study = study_of("text", paths=[Path("my.txt")])
    assert study.seeds == (0,)
    assert (study.contexts, study.time_contexts) == ((*CONTEXTS, 512), CONTEXTS)
    assert len(TEXT_CONTEXTS) < 6
    assert all(config.data.paths == (Path("my.txt").resolve(),) for config in study.rows.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ptb", "--data.paths", "x"], "corpus 'ptb' takes no --data.paths; use them with `logdepth reproduce text`"),
        (["text", "--data.paths"], "--data.paths has no value; give at least one file or folder"),
        (["text", "--data.paths", "nowhere"], "nowhere does not exist; correct --data.paths"),
        (["pydocs", "--contexts", "32,x"], "--contexts: expected an integer; got 'x'"),
        (["pydocs", "--contexts", ","], "--contexts has no value"),
        (["pydocs", "--contexts", "0"], "--contexts must be different lengths of at least 1; got 0"),
        (["pydocs", "--contexts", "8", "8"], "--contexts must be different lengths of at least 1; got 8 8"),
        (["pydocs", "--contexts", "9" * 30], "--contexts must be different lengths of at least 1; got 999"),
    ],
)
def test_wrong_flags_are_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "reproduce", *arguments, "--out", str(tmp_path / "study"))
    assert not (tmp_path / "study").exists()


def test_a_loss_that_is_not_finite_is_reported_with_its_length(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, context: int, **settings: Any) -> Evaluation:
        found = evaluate(*arguments, context=context, **settings)
        return dataclasses.replace(found, nats=float("nan")) if context == CONTEXTS[-1] else found

    monkeypatch.setattr(measure, "evaluate", broken)
    part = ["reproduce", "text", *flags, "--models", "ar-grc", "--untimed", "--out", str(tmp_path), "--json"]
    assert main(part) == 3
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert failed == "ar-grc seed 0: the loss on the test split at 64 tokens is nan; choose other --contexts"
