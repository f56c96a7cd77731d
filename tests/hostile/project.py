"""A small project on disk: runs, the cache, a study and a sweep; and every verb that reads its files, as checks.

The project is built once. Before each check it is copied to the same path again, so a check that trains or writes
tables cannot change the next one. A check's facts are what it printed and wrote, without times.
"""

import fnmatch
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from logdepth.atomic import PARTIAL
from logdepth.errors import UserError
from logdepth.runs.tensors import load_tensors
from tests.hostile.outcomes import DONE, HARMLESS, MESSY, SILENT, WARNED, Case, judged, remarks, worst
from tests.hostile.worker import MAIN, Said, Worker
from tests.sweep_processes import TINY
from tests.tiny_corpus import write_corpus
from tests.tiny_study import override_files

BUILD_SECONDS = 300.0
RECIPE = "pydocs-ar-grc"
LOSSY, LOSSLESS = 96, 320
"""Vocabulary sizes, which are part of the names in the cache."""
TEXT = ("--data.paths", "corpus")
TRAIN = (RECIPE, *TINY, *TEXT)
LOSSLESS_TEXT = (
    "--data.corpus",
    "text",
    *TEXT,
    "--data.tokenizer.lossless",
    "--data.tokenizer.vocab-size",
    str(LOSSLESS),
)
LOSSLESS_MODEL = "--model.embed-width 16 --model.num-layers 1 --model.num-heads 2 --train.optimizer muon"
LOSSLESS_STEPS = (
    "--train.max-steps 12 --train.evaluate-every 6 --train.batch-size 4 --train.context 16 --train.log-every 1 "
    "--train.device cpu"
)
LOSSLESS_TRAIN = ("pydocs-transformer-alibi", *LOSSLESS_TEXT, *LOSSLESS_MODEL.split(), *LOSSLESS_STEPS.split())
HYBRID = "memory:heads=2,chunk=4 scan:heads=2 attention:heads=2,window=8 memory:heads=2,chunk=4,reading=fold mlp"
HYBRID_MODEL = ("--model.dim", "16", "--model.repeats", "1", "--model.blocks", *HYBRID.split())
TEXT_LOSSY = ("--data.corpus", "text", *TEXT, "--data.tokenizer.no-lossless", "--data.tokenizer.vocab-size", str(LOSSY))
HYBRID_TRAIN = ("webmix-memory-window", *TEXT_LOSSY, *HYBRID_MODEL, *LOSSLESS_STEPS.split())
"""A model of all kinds of blocks with states of their own."""
CONFIGS = [f"overrides/{name}.json" for name in ("everyone", "ar-grc", "transformer-alibi")]
STUDY = ("text", "--models", "ar-grc", "transformer-alibi", "--seeds", "0", "--config", *CONFIGS, "--out", "study")
SWEEP = (*TRAIN, "--space", "train.learning_rate=1e-3:1e-2:log", "--out", "sweep")
TASKS = (
    *("groups", "--tasks", "s3", "--models", "grc", "--seeds", "0", "--longest", "64"),
    *("--config", "tasks.json", "--out", "tasks"),
)
TASK_SETTINGS = {
    "solver": {"dim": 8},
    "train": {"steps": 20, "batch_tokens": 64, "check_every": 10, "device": "cpu", "threads": 1},
}
BEGUN = (*TASKS[:-1], "begun")
"""A study of tasks that was stopped in the middle of its run."""
STOPPED_AT = 8
OUTPUTS = (
    *("study/tables/*", "study/figures/*", "study/report.html", "sweep/*.csv", "sweep/*.svg", "sweep/*.png"),
    *("tasks/tables/*", "tasks/figures/*", "tasks/report.html", "begun/lock", "tasks/lock"),
)
"""Files that nothing reads back."""
STORE, LOSSLESS_STORE = f"cache/stores/text-{LOSSY}-*", f"cache/stores/text-{LOSSLESS}-*"
TOKENIZERS = "cache/tokenizers/*"


class Check(NamedTuple):
    """A verb that reads some files of the project."""

    name: str
    arguments: tuple[str, ...]
    reads: tuple[str, ...]
    """Patterns of the files that it reads."""
    writes: tuple[str, ...] = ()
    """Patterns of the files that it writes and whose content is part of its result."""
    function: str = MAIN
    removes: str | None = None
    """A file to remove first, so that it is made again."""

    @property
    def is_slow(self) -> bool:
        """Whether it draws more than a report, or trains and measures as well."""
        return self.verb in ("reproduce", "associativity")

    @property
    def verb(self) -> str:
        others = {"tests.hostile.calls:load_run": "load", "tests.hostile.calls:serve_run": "serve"}
        return others.get(self.function, self.arguments[0])


def _trained(out: str) -> tuple[str, ...]:
    return (f"{out}/*.safetensors", f"{out}/metrics.jsonl", f"{out}/tokenizer.model")


def _evaluate(run: str, *more: str) -> tuple[str, ...]:
    return ("evaluate", run, "--json", "--contexts", "16", "40", *more)


def _generate(run: str) -> tuple[str, ...]:
    return ("generate", run, "--prompt", "the cat", "--max-tokens", "12", "--temperature", "0", "--json")


REPORT = ("study/tables/*", "study/figures/*.svg", "study/report.html")
TASK_REPORT = ("tasks/tables/*", "tasks/figures/*.svg", "tasks/report.html")
NEW = ("--out", "new", "--json")
TWO_STEPS = ("--train.max-steps", "2", *NEW)
CHECKS = (
    Check("evaluate", _evaluate("run"), ("run/*", f"{STORE}/*")),
    Check("evaluate train", _evaluate("run", "--split", "train"), (f"{STORE}/*",)),
    Check("evaluate valid", _evaluate("run", "--split", "valid"), (f"{STORE}/*",)),
    Check("evaluate last", _evaluate("run", "--weights", "last"), ("run/*",)),
    Check("generate", _generate("run"), ("run/*",)),
    Check("export", ("export", "run", "new", "--to", "hf"), ("run/*",), ("new/*.safetensors", "new/*.json")),
    Check("load", ("run",), ("run/*",), function="tests.hostile.calls:load_run"),
    Check("serve", ("run",), ("run/*",), function="tests.hostile.calls:serve_run"),
    Check("associativity", ("associativity", "run", "--windows", "2", "--seeds", "0", "--json"), ("run/*",)),
    Check("resume a finished run", ("train", "--resume", "run", "--json"), ("run/*",), _trained("run")),
    Check("start from a run", ("train", *TRAIN, "--train.init-from", "run", *TWO_STEPS), ("run/*",), _trained("new")),
    Check(
        "train the config of a run",
        ("train", "--config", "run/config.json", *TWO_STEPS),
        ("run/config.json",),
        _trained("new"),
    ),
    Check("evaluate, lossless", _evaluate("lossless"), ("lossless/*", f"{LOSSLESS_STORE}/*")),
    Check("generate, lossless", _generate("lossless"), ("lossless/*",)),
    Check("resume, lossless", ("train", "--resume", "lossless", "--json"), ("lossless/*",), _trained("lossless")),
    Check("evaluate, hybrid", _evaluate("hybrid"), ("hybrid/*",)),
    Check("generate, hybrid", _generate("hybrid"), ("hybrid/*",)),
    Check("resume, hybrid", ("train", "--resume", "hybrid", "--json"), ("hybrid/*",), _trained("hybrid")),
    Check("resume", ("train", "--resume", "stopped", "--json"), ("stopped/*", f"{STORE}/*"), _trained("stopped")),
    Check("evaluate a stopped run", _evaluate("stopped", "--weights", "last"), ("stopped/*",)),
    Check(
        "prepare",
        ("prepare", "text", *TEXT, "--data.tokenizer.no-lossless", "--data.tokenizer.vocab-size", str(LOSSY), "--json"),
        (f"{STORE}/*", f"cache/tokenizers/text-{LOSSY}-*", "cache/census/*"),
        (f"{STORE}/*",),
    ),
    Check(
        "prepare, lossless",
        ("prepare", *LOSSLESS_TEXT, "--json"),
        (f"{LOSSLESS_STORE}/*", f"cache/tokenizers/text-{LOSSLESS}-*", "cache/census/*"),
        (f"{LOSSLESS_STORE}/*",),
    ),
    Check(
        "train",
        ("train", *TRAIN, *TWO_STEPS),
        (f"{STORE}/*", f"cache/tokenizers/text-{LOSSY}-*", "cache/census/*"),
        _trained("new"),
    ),
    Check("reproduce", ("reproduce", *STUDY, "--json"), ("study/*",), ("study/results/*.json", *REPORT)),
    Check(
        "measure again",
        ("reproduce", *STUDY, "--json"),
        ("study/runs/ar-grc-0/*", f"{STORE}/*"),
        ("study/results/*.json", *REPORT),
        removes="study/results/text-ar-grc-0.json",
    ),
    Check("report", ("report", "study"), ("study/results/*", *OUTPUTS[:3]), REPORT),
    Check("study of tasks", ("reproduce", *TASKS, "--json"), ("tasks/*",), ("tasks/results/*.json", *TASK_REPORT)),
    Check(
        "test a solver again",
        ("reproduce", *TASKS, "--json"),
        ("tasks/runs/s3-grc-0/*",),
        ("tasks/results/*.json", *TASK_REPORT),
        removes="tasks/results/s3-grc-0.json",
    ),
    Check(
        "resume a solver",
        ("reproduce", *BEGUN, "--json"),
        ("begun/*",),
        ("begun/results/*.json", "begun/runs/*/*.safetensors", "begun/tables/*"),
    ),
    Check("report of tasks", ("report", "tasks"), ("tasks/results/*", *OUTPUTS[-3:]), TASK_REPORT),
    Check("evaluate in a study", _evaluate("study/runs/transformer-alibi-0"), ("study/runs/transformer-alibi-0/*",)),
    Check("sweep", ("sweep", *SWEEP, "--trials", "2", "--json"), ("sweep/*",), ("sweep/*.json",)),
    Check(
        "sweep, one more",
        ("sweep", *SWEEP, "--trials", "3", "--json"),
        ("sweep/journal.log", "sweep/trials/*", f"{STORE}/*"),
        ("sweep/*.json", "sweep/trials/*/metrics.jsonl"),
    ),
    Check(
        "train best.json", ("train", "--config", "sweep/best.json", *TWO_STEPS), ("sweep/best.json",), _trained("new")
    ),
    Check(
        "train sweep.json",
        ("train", "--config", "sweep/sweep.json", *TWO_STEPS),
        ("sweep/sweep.json",),
        _trained("new"),
    ),
)


class Facts(NamedTuple):
    """What a check said and wrote."""

    said: Said
    files: dict[str, Any]
    stdout: Any


class Project:
    """The project in a folder, and its checks."""

    def __init__(self, base: Path, worker: Worker) -> None:
        base = base.resolve()
        self.world, self.pristine, self.worker = base / "world", base / "pristine", worker
        self.expected: dict[str, Facts] = {}
        if not self.pristine.is_dir():
            self._build()

    def _build(self) -> None:
        shutil.rmtree(self.world, ignore_errors=True)
        write_corpus(self.world / "corpus", count=160)
        write_corpus(self.world / "elsewhere", count=150)
        override_files(self.world / "overrides", self.world / "corpus")
        (self.world / "tasks.json").write_text(json.dumps(TASK_SETTINGS))
        other = (RECIPE, *TINY, "--data.paths", "elsewhere", "--seed", "1", "--out", "other")
        commands: list[tuple[str, ...]] = [
            ("train", *TRAIN, "--out", "run"),
            ("train", *LOSSLESS_TRAIN, "--out", "lossless"),
            ("train", *HYBRID_TRAIN, "--out", "hybrid"),
            ("reproduce", *STUDY, "--json"),  # as it is run again, because the page shows the command
            ("sweep", *SWEEP, "--trials", "2"),
            ("reproduce", *TASKS, "--json"),
        ]
        for command in commands:
            said = self.call(command, limit=BUILD_SECONDS)
            assert said.code == 0, (command, said)
        other_cache = {"LOGDEPTH_CACHE": str(self.world / "cache-of-other")}
        assert self.call(("train", *other), env=other_cache).code == 0
        for stopping in (("train", *TRAIN, "--out", "stopped"), ("reproduce", *BEGUN)):
            assert self.call((STOPPED_AT, *stopping), function="tests.hostile.calls:stop_at").code == 128 + 15
        self.world.rename(self.pristine)

    def call(self, arguments: Sequence[Any], **settings: Any) -> Said:
        """Run a verb in the project."""
        env = {"LOGDEPTH_CACHE": str(self.world / "cache"), "HOME": str(self.world), "HF_HUB_OFFLINE": "1"}
        env["LOGDEPTH_DATA"] = ""  # to measure a corpus of this machine takes longer than a hang may
        return self.worker.call(arguments, cwd=self.world, env=env | settings.pop("env", {}), **settings)

    def restore(self) -> None:
        """Make the world as it was built, with the same times of files, which the cache looks at."""
        shutil.rmtree(self.world, ignore_errors=True)
        shutil.copytree(self.pristine, self.world)

    @cached_property
    def files(self) -> list[str]:
        """The files that something may read back, and not the corpus, which is the user's."""
        found = (file for file in sorted(self.pristine.rglob("*")) if file.is_file() and file.stat().st_size)
        names = (file.relative_to(self.pristine).as_posix() for file in found)
        parts = ("run", "stopped", "lossless", "hybrid", "cache", "study", "sweep", "tasks", "begun")
        return [name for name in names if name.split("/")[0] in parts and not _matches(name, OUTPUTS)]

    @cached_property
    def outputs(self) -> list[str]:
        found = (file for file in sorted(self.pristine.rglob("*")) if file.is_file() and file.stat().st_size)
        names = (file.relative_to(self.pristine).as_posix() for file in found)
        return [name for name in names if _matches(name, OUTPUTS)]

    def checks_of(self, name: str, few: bool = False) -> list[Check]:
        """The checks that read a file, or only the first that does not take seconds."""
        found = [check for check in CHECKS if _matches(name, check.reads)]
        return [check for check in found if not check.is_slow][:1] if few else found

    def undamaged(self, check: Check) -> Facts:
        """The facts of a check of the project as it was built."""
        if check.name not in self.expected:
            self.restore()
            found = self._facts(check, {})
            assert found.said.code == 0, (check, found.said)
            self.expected[check.name] = found
        return self.expected[check.name]

    def after(self, check: Check, damage: Callable[[Path], None], touched: list[str]) -> Case:
        """Judge a check after damage to files, whose names are `touched`."""
        expected = self.undamaged(check)
        self.restore()
        damage(self.world)
        damaged = {name: (self.world / name).read_bytes() for name in touched if (self.world / name).is_file()}
        found = self._facts(check, damaged)
        outcome, detail = judged(found.said, check.verb)
        if partial := [str(file) for file in self.world.rglob(f"{PARTIAL}*")]:
            return Case(check.name, MESSY, f"left {partial[0]}; {detail}")
        if outcome != DONE:
            return Case(check.name, outcome, detail)
        if found.said.code != 0:
            return Case(check.name, MESSY, f"{detail}; stderr {found.said.err.splitlines()[-3:]}")
        new = sorted(remarks(found.said) - remarks(expected.said))
        if different := _difference(expected, found):
            return Case(check.name, SILENT, different + (f"{IT_SAYS}{new}" if new else ""))
        if len(new) > 1:
            return Case(check.name, MESSY, f"lines on stderr: {new}")
        return Case(check.name, WARNED if new else HARMLESS, "".join(new))

    def after_all(
        self,
        what: str,
        checks: list[Check],
        damage: Callable[[Path], None],
        touched: list[str],
        allowed: Sequence[str] = (),
    ) -> Case:
        """The worst outcome of several checks after the same damage.

        The results of the checks named in `allowed` may change. That is harmless, or a warning if one line says so.
        """
        cases = [(check, self.after(check, damage, touched)) for check in checks]
        found = worst(_allowed(case) if check.name in allowed else case for check, case in cases)
        return Case(what, found.outcome, f"{found.what}: {found.detail}" if found.detail else found.what)

    def _facts(self, check: Check, damaged: dict[str, bytes]) -> Facts:
        if check.removes is not None:
            (self.world / check.removes).unlink(missing_ok=True)
        said = self.call(check.arguments, function=check.function)
        files = {}
        for pattern in check.writes:
            for file in sorted(self.world.glob(pattern)):
                name = file.relative_to(self.world).as_posix()
                if file.is_file() and (name not in damaged or file.read_bytes() != damaged[name]):
                    files[name] = content_of(file)
        untouched = damaged.keys() - files.keys()
        return Facts(said, files | dict.fromkeys(untouched), _printed(said.out))


def _allowed(case: Case) -> Case:
    if case.outcome != SILENT:
        return case
    _, _, said = case.detail.partition(IT_SAYS)
    return case._replace(outcome=WARNED if said else HARMLESS, detail=said or "allowed")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"{pattern}/*") for pattern in patterns)


def _difference(expected: Facts, found: Facts) -> str:
    """Say what differs first; nothing if nothing does. A file that is still as it was damaged is not compared."""
    if expected.stdout != found.stdout:
        return f"stdout {_where(expected.stdout, found.stdout)}"
    for name in sorted(expected.files.keys() | found.files.keys()):
        if name in found.files and found.files[name] is None:
            continue
        one, other = expected.files.get(name), found.files.get(name)
        if one != other:
            return f"{name}: {_where(one, other)}"
    return ""


def _where(one: Any, other: Any) -> str:
    left, right = (json.dumps(value, default=str, ensure_ascii=False) for value in (one, other))
    place = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    start = max(0, place - 30)
    return f"…{left[start : place + 40]}… became …{right[start : place + 40]}…"


def content_of(file: Path) -> Any:
    """The content of a file without times and checksums, which cover times."""
    if file.suffix == ".safetensors":
        try:
            tensors, record = load_tensors(file)
        except UserError:  # an exported model has no record of ours
            return hashlib.sha256(file.read_bytes()).hexdigest()
        values = {name: hashlib.sha256(one.numpy().tobytes()).hexdigest() for name, one in tensors.items()}
        return {"tensors": values, "record": _timeless(record)}
    try:
        if file.suffix == ".jsonl":
            return [_timeless(json.loads(line)) for line in file.read_text().splitlines()]
        if file.suffix == ".json":
            return _timeless(json.loads(file.read_text()))
        return _without_durations(file.read_text())
    except ValueError:
        return hashlib.sha256(file.read_bytes()).hexdigest()


IT_SAYS = "; it says: "
"""Between the difference that a check found and the lines on stderr."""
COVER_TIMES = {"sha256", "metrics"}
"""Fields at the top with checksums of times: that of a sealed file, and the mark of the metrics in a checkpoint."""
HOW_MADE = {"made", "command", "tokens_per_second", "seconds", "checkpoint_seconds", "attempts"}
"""Fields that say how a result was made and not what it is."""


def _timeless(value: Any, top: bool = True) -> Any:
    if isinstance(value, dict):
        dropped = HOW_MADE | (COVER_TIMES if top else set())
        return {key: _timeless(inner, False) for key, inner in value.items() if key not in dropped}
    return [_timeless(inner, False) for inner in value] if isinstance(value, list) else value


def _printed(out: str) -> Any:
    """What a verb printed, without times."""
    try:
        return _timeless(json.loads(out))
    except ValueError:
        return _without_durations(out)


def _without_durations(text: str) -> str:
    text = re.sub(r"\b(\d+ h )?(\d+ min )?\d+ s\b", "T", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\dT[\d:.]+(\+00:00)?", "T", text)
    return re.sub(r'("seconds": )[\d.e+-]+', r"\1T", text)
