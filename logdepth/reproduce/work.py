"""Working through a study: what is done is not done again, what was stopped or killed goes on.

STUDY/runs/ROW-SEED/           the run's folder
STUDY/results/RECIPE-SEED.json written when the run is trained and measured: from then on the run is done
STUDY/results/timing-DEVICE.json
"""

import time
from collections.abc import Callable
from pathlib import Path

from logdepth.config import to_dict
from logdepth.data import Prepared, prepare
from logdepth.errors import UserError
from logdepth.progress import Part, Progress
from logdepth.recipes import parameters_of
from logdepth.reproduce.measure import measure_run, measure_times
from logdepth.reproduce.study import Study
from logdepth.results import RunResult, TimingResult, read_result, write_result
from logdepth.runs import RunConfig, RunFolder, device_named
from logdepth.runs.environment import environment
from logdepth.train import Interrupted, Standing, Watch, resume, train

FREE_TO_DIFFER = {
    "data.paths",
    *(f"train.{name}" for name in ("device", "threads", "trackers", "checkpoint_minutes", "log_every", "compile")),
}
"""What may differ between machines that share a study; that their text is the same is checked by its hash."""


class BudgetSpentError(Exception):
    """The minutes given to a study are over; everything is saved."""


def work_on(study: Study, out: Path, data_dir: Path | None = None, budget_minutes: float | None = None) -> bool:
    """Does all that is not done yet; returns whether the study is finished. It ends early when its budget is spent."""
    return _Work(study, out, data_dir, budget_minutes).run()


class _Work:
    def __init__(self, study: Study, out: Path, data_dir: Path | None, budget_minutes: float | None) -> None:
        self.study, self.out, self.data_dir = study, out, data_dir
        self.deadline = None if budget_minutes is None else time.monotonic() + 60 * budget_minutes
        first = next(iter(study.configs.values()))
        self.device = device_named(first.train.device)
        self.missing = [(row, config) for row, config in study.runs() if not self._is_done(row, config)]
        self.must_time = self._must_time()
        for row, config in self.missing:
            self._refuse_other_run(row, config)
        self.prepared: dict[str, Prepared] = {}

    def run(self) -> bool:
        for row, config in self.missing:  # all corpora and tokenizers before any training
            self.prepared[row] = prepare(config.data, self.data_dir)
        shares = self._shares()
        done = 100 - sum(shares.values())
        with Progress(f"{self.study.corpus} study", 100, unit="%", done=done) as self.progress:
            try:
                for row, config in self.missing:
                    self._do_run(row, config, shares[row, config.seed])
                if self.must_time:
                    self._do_times(shares["timing", 0])
            except BudgetSpentError:
                self.progress.say("the budget is spent; the same command goes on")
                return False
        return True

    def _do_run(self, row: str, config: RunConfig, share: float) -> None:
        label = f"{row} seed {config.seed}"
        folder = RunFolder(self._folder(row, config))
        watch = _StudyWatch(self.progress, label, 0.8 * share, self._is_spent)
        try:
            if folder.exists:
                standing = resume(folder.path, self.data_dir, watch)
            else:
                standing = train(config, folder.path, self.data_dir, watch)
        except Interrupted as stopped:
            if stopped.signal_number is None:
                raise BudgetSpentError from None
            raise
        self._measure(row, config, folder, standing, Part(self.progress, f"{label}, measuring", 1, 0.2 * share))

    def _measure(self, row: str, config: RunConfig, folder: RunFolder, standing: Standing, part: Part) -> None:
        def on_progress(done: float) -> None:
            part.update(done)
            if self._is_spent():
                raise BudgetSpentError

        result = measure_run(self.study, row, folder, standing, self.prepared[row], self.device, on_progress)
        write_result(self._file(row, config), result)
        main = result.main
        part.update(1)
        part.say(
            f"test perplexity {main.token_perplexity:.2f}, {main.bits_per_byte:.4f} bits per byte "
            f"at {main.context} tokens"
        )

    def _do_times(self, share: float) -> None:
        part = Part(self.progress, "timing", 1, share)

        def on_progress(done: float) -> None:
            part.update(done)
            if self._is_spent():
                raise BudgetSpentError

        vocab_size = next(iter(self.study.configs.values())).data.tokenizer.vocab_size
        write_result(self._timing_file(), measure_times(self.study, self.device, vocab_size, on_progress))

    def _is_spent(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _shares(self) -> dict[tuple[str, int], float]:
        """Per cent of the whole study that each piece of missing work takes, by parameters."""
        sizes = {row: parameters_of(config) for row, config in self.study.configs.items()}
        costs: dict[tuple[str, int], float] = {(row, config.seed): sizes[row] for row, config in self.study.runs()}
        costs["timing", 0] = 0.05 * sum(costs.values()) / len(self.study.seeds)
        whole = sum(costs.values())
        wanted = [(row, config.seed) for row, config in self.missing] + [("timing", 0)] * self.must_time
        return {key: 100 * costs[key] / whole for key in wanted}

    def _is_done(self, row: str, config: RunConfig) -> bool:
        """Whether there is a result of just this run; one of another run in its place is an error."""
        file = self._file(row, config)
        if not file.exists():
            return False
        result = read_result(file)
        if not isinstance(result, RunResult):
            raise UserError(f"{file} is not the result of a run; move it away")
        _refuse_other_config(result.config, config, file)
        if missing := [context for context in self.study.contexts if result.at(context) is None]:
            raise UserError(f"{file} was not measured at {missing[0]} tokens; remove it to measure that run again")
        return True

    def _refuse_other_run(self, row: str, config: RunConfig) -> None:
        folder = RunFolder(self._folder(row, config))
        if folder.exists:
            _refuse_other_config(folder.config(), config, folder.path)
        else:
            folder.refuse_if_taken()

    def _must_time(self) -> bool:
        file = self._timing_file()
        if not file.exists():
            return True
        result = read_result(file)
        if not isinstance(result, TimingResult):
            raise UserError(f"{file} is not a result of timing; move it away")
        return not {model.row for model in result.models} >= set(self.study.configs)

    def _folder(self, row: str, config: RunConfig) -> Path:
        return self.out / "runs" / f"{row}-{config.seed}"

    def _file(self, row: str, config: RunConfig) -> Path:
        return self.out / "results" / f"{self.study.recipe(row)}-{config.seed}.json"

    def _timing_file(self) -> Path:
        device = "-".join(str(environment(self.device)["device"]).lower().split())
        return self.out / "results" / f"timing-{device}.json"


class _StudyWatch(Watch):
    """A run within a study: its steps are steps of the whole, and the study's budget is its own."""

    def __init__(self, whole: Progress, label: str, share: float, is_spent: Callable[[], bool]) -> None:
        self.whole, self.label, self.share, self.is_spent = whole, label, share, is_spent

    def progress(self, total_steps: int, done: int) -> Part:
        del done
        return Part(self.whole, self.label, total_steps, self.share)

    def must_stop(self) -> bool:
        return self.is_spent()


def _refuse_other_config(found: RunConfig, wanted: RunConfig, where: Path) -> None:
    left, right = (_decisive(config) for config in (found, wanted))
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            raise UserError(
                f"{where} was made with {name} {left.get(name)!r}, not {right.get(name)!r} as asked for now; "
                "move it away, or choose another --out"
            )


def _decisive(config: RunConfig) -> dict[str, object]:
    """The config, flat, without what does not decide a run's numbers."""
    flat: dict[str, object] = {}

    def flatten(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                flatten(f"{prefix}.{name}" if prefix else name, item)
        else:
            flat[prefix] = value

    flatten("", to_dict(config))
    return {name: value for name, value in flat.items() if name not in FREE_TO_DIFFER}
