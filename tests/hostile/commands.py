"""Random command lines over all verbs: flags of the real parsers with good and bad values, and random configs.

    python -m tests.hostile.commands --count 2000 --seed 1
    python -m tests.hostile.commands --only 137

Each command runs in a copy of the project of `flips`. What would train trains two steps of a tiny model, unless a flag
says otherwise. The exit code must be 0, 1, 2, 3 or 130; 2 comes with one line, and with nothing half-written.
"""

import contextlib
import dataclasses
import json
import os
import random
import socket
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from logdepth.cli import VERBS
from logdepth.cli.associativity import AssociativityCommand
from logdepth.cli.check import CheckCommand
from logdepth.cli.completion import CompletionCommand
from logdepth.cli.corpora import CorporaCommand
from logdepth.cli.evaluate import EvaluateCommand
from logdepth.cli.export import ExportCommand
from logdepth.cli.generate import GenerateCommand
from logdepth.cli.prepare import PrepareCommand
from logdepth.cli.recipes import RecipesCommand
from logdepth.cli.report import ReportCommand
from logdepth.cli.reproduce import ReproduceCommand, TaskStudyCommand
from logdepth.cli.serve import ServeCommand
from logdepth.cli.sweep import SweepCommand
from logdepth.cli.tasks import TasksCommand
from logdepth.cli.time import TimeCommand
from logdepth.cli.train import ResumeCommand, TrainCommand
from logdepth.config import to_dict
from logdepth.data import CORPORA
from logdepth.models import LMConfig, ScanLMConfig
from logdepth.recipes import RECIPES, recipe
from logdepth.reproduce import TASK_STUDIES
from logdepth.runs import RunConfig
from tests.hostile.flips import project_in
from tests.hostile.outcomes import DONE, MESSY, REFUSED, Case, judged, numbers_of, parser, run_cases
from tests.hostile.project import LOSSY, TASK_SETTINGS, Project
from tests.hostile.worker import HANG_SECONDS, Said

MEMORY = 12 * 2**30
EXIT_CODES = (0, 1, 2, 3, 130)
COMMANDS: dict[str, type] = {
    "train": TrainCommand,
    "train --resume": ResumeCommand,
    "sweep": SweepCommand,
    "reproduce": ReproduceCommand,
    "reproduce tasks": TaskStudyCommand,
    "report": ReportCommand,
    "prepare": PrepareCommand,
    "evaluate": EvaluateCommand,
    "time": TimeCommand,
    "associativity": AssociativityCommand,
    "generate": GenerateCommand,
    "export": ExportCommand,
    "serve": ServeCommand,
    "corpora": CorporaCommand,
    "tasks": TasksCommand,
    "recipes": RecipesCommand,
    "check": CheckCommand,
    "completion": CompletionCommand,
}
WEIGHTS = {"train": 6, "train --resume": 2, "sweep": 3, "reproduce": 2, "prepare": 2, "evaluate": 3, "generate": 3}
"""How often a verb is drawn, instead of once."""
HUGE = ("1000000000000", "9223372036854775808", "1" + "0" * 400, "9" * 6000)
INTEGERS = (
    "0",
    "-1",
    "-5",
    "1",
    "2",
    "3",
    "7",
    "16",
    "1e3",
    "0x10",
    "1_0",
    "٣",
    " 5",
    "",
    "nan",
    "None",
    "2.5",
    "--",
    *HUGE,
)
FLOATS = (
    "0",
    "-0.0",
    "-1",
    "1e-3",
    "0.5",
    "1",
    "2",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "",
    "0,5",
    "½",
    "None",
    *HUGE,
)
TEXTS = (
    *(
        "",
        " ",
        "-",
        "--",
        "-x",
        "a",
        "None",
        "*",
        "%s%n",
        "{x}",
        "$(id)",
        "'\"",
        "a\nb",
        "\x1b[31m",
        "\u202e",
        "../world/x",
    ),
    *("x" * 300, "ü☃漢字", "\udcff\udc80", "\U0001f600" * 80, "a/" * 200 + "b", "1" * 5000),
)
PATHS = (
    *(
        "run",
        "stopped",
        "study",
        "sweep",
        "corpus",
        "corpus/train.txt",
        "cache",
        "missing",
        "missing/x",
        "empty",
        "loop",
    ),
    *(
        "fifo",
        "fifo.txt",
        "socket",
        "one.txt",
        "latin-1.txt",
        "odd-\udcff.txt",
        "broken.json",
        "deep.json",
        "number.json",
    ),
    *("/dev/null", "/dev/full", "/dev/full/x", "/dev/zero", "/dev/stdin", "/proc/none", "/proc/self/mem", ".", "~"),
)
UNBOUNDED = {"max_tokens", "samples", "trials", "windows", "repeats", "warmups", "batch_tokens", "seeds"}
"""Fields that say how much work to do, of which any amount is meant."""
SLOW = {"compile", "lanes"}
"""Fields whose effect takes long: a compiler runs, or many processes start."""
LEFT_OUT = {("time", "grid"), ("serve", "port")}
"""Fields of a verb that are not drawn. A server would run until a signal: `_caps` gives all a port that is none."""
GOOD_VALUES: dict[str, tuple[str, ...]] = {
    "out": ("new",),
    "config": ("config.json", "overrides/everyone.json", "sweep/best.json", "run/config.json", "broken.json"),
    "resume": ("stopped", "run"),
    "data_dir": ("corpus",),
    "paths": ("corpus", "corpus/train.txt"),
    "init_from": ("run",),
    "run": ("run", "stopped", "lossless", "study/runs/ar-grc-0"),
    "study": ("study", "x"),
    "name": (*CORPORA, "pydocs-ar-grc"),
    "model": ("pydocs-ar-grc", "run"),
    "corpus": ("text", "ptb"),  # pydocs would be prepared and measured, which takes longer than a hang may
    "tasks": ("s3", "s4"),
    "longest": ("64", "128", "16"),
    "task": ("parity", "d3", "s5-held-out", "mqar", "listops"),
    "length": ("12", "64/4", "40/0", "65536", "0", "100000000"),
    "space": (
        "train.learning_rate=1e-3:1e-2:log",
        "dropout=0:0.4:0.1",
        "train.batch_size=2,4",
        "=",
        "a=1:2",
        "seed=1:3",
    ),
    "storage": ("sqlite:///x.db", "sqlite:////dev/full/x", "postgresql://127.0.0.1:1/x", "nonsense", "sqlite:///"),
    "others": ("a=corpus/test.txt", "a=missing", "=", "a=", "corpus"),
    "models": ("ar-grc", "transformer-alibi"),
    "stop": (".", "the"),
    "prompt": ("the cat", "", "-"),
    "device": ("cpu", "cuda:99", "meta", "mps"),
    "blocks": (
        *("scan", "scan:heads=2", "mlp", "attention:window=0", "mlp:multiple=1000000000000", "scan:x=1", "x"),
        *("memory:heads=2,chunk=4", "memory:heads=2,chunk=8,reading=fold,write-strength=2", "memory:heads=2,levels=1"),
        *("memory:chunk=3", "memory:heads=3", "memory:heads=2,key-width=1", "memory:heads=" + "[" * 100_000),
        *("memory:heads=" + "9" * 6000, "attention:heads=2,backend=flex", "attention:heads=2,qk_norm=true", "memory:"),
        *("mlp:multiple=1e308", "memory:heads=2,conv=0,gate=false", "memory:heads=2,dropout=nan", "memory:chunk=-1"),
    ),
}
STUDIES = ("groups", *TASK_STUDIES, "architectures", "group")
GOOD_OF: dict[Any, tuple[str, ...]] = {
    int: ("1", "2", "3", "8", "16"),
    float: ("0.5", "1", "0.001", "0"),
    Path: ("corpus", "run"),
}


class Flag(NamedTuple):
    """A field of a command, as a flag or a positional argument."""

    name: str
    """The dotted name of the field."""
    hint: Any

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def field(self) -> str:
        return self.name.rsplit(".", 1)[-1]


class Command(NamedTuple):
    """A command line and how it is run."""

    arguments: list[str]
    settings: dict[str, Any]
    """Arguments of Worker.call: where stdout goes, and the like."""

    def __str__(self) -> str:
        words = " ".join(repr(word if len(word) < 60 else f"{word[:40]}…({len(word)})") for word in self.arguments)
        return words + (f" {self.settings}" if self.settings else "")


def fields_of(config: Any, prefix: str = "") -> Iterator[Flag]:
    """Walk over the fields of a command or config, which may be an instance or a class."""
    hints = typing.get_type_hints(config if isinstance(config, type) else type(config), include_extras=True)
    for one in dataclasses.fields(config):
        if hasattr(config, one.name):
            value = getattr(config, one.name)
        else:
            value = one.default_factory() if one.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(value):
            nameless = one.name in ("run", "sampling")  # tyro.conf.arg(name="")
            yield from fields_of(value, "" if nameless else f"{prefix}{one.name}.")
        else:
            yield Flag(prefix + one.name, hints[one.name])


def _is_positional(flag: Flag) -> bool:
    return "Positional" in str(flag.hint)


def _plain(hint: Any) -> list[Any]:
    """The types that a field may have, without annotations, None and tuples."""
    if typing.get_origin(hint) is typing.Annotated:
        return _plain(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Literal, dict) or not typing.get_args(hint):
        return [hint]
    return [one for inner in typing.get_args(hint) if inner not in (type(None), ...) for one in _plain(inner)]


class Commands:
    """The command lines of a seed."""

    def __init__(self, project: Project, seed: int) -> None:
        self.project, self.seed = project, seed

    def one(self, number: int) -> Case:
        chance = random.Random(f"commands {self.seed} {number}")
        command = self.drawn(chance)
        self.project.restore()
        self._add_odd_files(random_config(chance), random_solver(chance))
        before = self._files()
        said = self.project.call(
            [2, *command.arguments],
            function="tests.hostile.calls:steps_at_most",
            memory=MEMORY,
            limit=HANG_SECONDS,
            **command.settings,
        )
        outcome, detail = self._judged(said, command, before)
        return Case(str(command), outcome, detail)

    def _judged(self, said: Said, command: Command, before: set[Path]) -> tuple[str, str]:
        outcome, detail = judged(said, command.arguments[0])
        if outcome == DONE and said.code not in EXIT_CODES:
            return MESSY, f"{detail}, stderr {said.err.splitlines()[-3:]}"
        if outcome == REFUSED and (left := self._half_written(before)):
            return MESSY, f"left {left}; {detail}"
        return outcome, detail

    def _files(self) -> set[Path]:
        return {file for file in self.project.world.rglob("*") if not file.is_dir()}

    def _half_written(self, before: set[Path]) -> list[str]:
        """New files outside the cache, unless they are part of a run."""
        new = self._files() - before
        world = self.project.world
        parts = [file for file in new if ".partial-" in file.name or world / "cache" not in file.parents]
        return sorted(
            file.relative_to(world).as_posix()
            for file in parts
            if not any((folder / "config.json").exists() for folder in file.parents)
        )[:4]

    def _add_odd_files(self, config: str, solver: str) -> None:
        world = self.project.world
        (world / "empty").mkdir()
        (world / "loop").symlink_to("loop")
        for name in ("fifo", "fifo.txt"):
            os.mkfifo(world / name)
        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(world):  # a socket's path must be short
            one.bind("socket")
        for name, data in (
            ("config.json", config.encode("utf-8", "surrogatepass")),
            ("solver.json", solver.encode("utf-8", "surrogatepass")),
            ("one.txt", b"the cat sees a dog"),
            ("latin-1.txt", "Küche\n".encode("latin-1") * 40),
            ("odd-\udcff.txt", b"the cat sees a dog .\n" * 200),
            ("broken.json", b'{"train": {"max_steps": 2,'),
            ("deep.json", b"[" * 100_000 + b"]" * 100_000),
            ("number.json", b'{"seed": ' + b"9" * 6000 + b"}"),
        ):
            (world / name).write_bytes(data)

    def drawn(self, chance: random.Random) -> Command:
        """Draw a command line."""
        if chance.random() < 0.04:
            words = [chance.choice([*VERBS, *TEXTS, "trian", "--version", "--help", "-h"]) for _ in range(2)]
            return Command(words, _setting(chance))
        kind = chance.choices(list(COMMANDS), [WEIGHTS.get(name, 1) for name in COMMANDS])[0]
        verb = kind.split()[0]
        name = chance.choice(sorted(RECIPES))
        config = small(recipe(name))
        flags = list(fields_of(_command(kind, config)))
        chosen = chance.sample(flags, min(len(flags), chance.choice((0, 1, 2, 2, 3, 4, 6))))
        bad = chance.choice((0.1, 0.3, 0.6, 0.9))
        positional = [] if kind == "train --resume" else self._positional(chance, kind, name, flags)
        words: list[str] = []
        for flag in chosen:
            if not _is_positional(flag) and flag.field not in SLOW and (kind, flag.field) not in LEFT_OUT:
                words += self._words(chance, flag, bad)
        if kind == "reproduce tasks" and chance.random() < 0.5:
            words += ["--config", "tasks.json", "solver.json"]
        if kind in ("train", "sweep") and chance.random() < 0.3:
            words += ["--config", chance.choice((*["config.json"] * 60, *PATHS))]
            if chance.random() < 0.5:
                return Command([verb, *chance.choice(([name], [])), *words, "--out", "new"], _setting(chance))
        given = {word.split("=")[0].replace("_", "-") for word in words}
        caps = [[flag, *values] for flag, *values in _caps(kind, config) if flag not in given]
        parts = [positional, words, [word for cap in caps for word in cap]]
        if chance.random() < 0.1:
            chance.shuffle(parts)
        if flags and chance.random() < 0.03:
            parts.append([_mistyped(chance, chance.choice(flags).flag), "1"])
        return Command([verb, *(word for part in parts for word in part)], _setting(chance))

    def _positional(self, chance: random.Random, kind: str, name: str, flags: list[Flag]) -> list[str]:
        if kind in ("train", "sweep"):
            found = [name]
        elif kind == "reproduce tasks":
            found = [chance.choice(STUDIES) if chance.random() < 0.2 else "groups"]
        else:
            found = [chance.choice(GOOD_VALUES.get(one.field, ("bash",))) for one in flags if _is_positional(one)]
        if chance.random() < 0.1:
            found = [chance.choice((*TEXTS, *PATHS))]
        return found * chance.choice((*[1] * 30, 0, 2))

    def _words(self, chance: random.Random, flag: Flag, bad: float) -> list[str]:
        """A flag with values, of which a share is bad; sometimes twice or without a value."""
        kinds = _plain(flag.hint)
        if bool in kinds:
            off = flag.flag.replace("--", "--no-", 1) if "." not in flag.name else _off(flag.flag)
            on_only = "FlagCreatePairsOff" in str(flag.hint)
            return [f"{flag.flag}=True" if chance.random() < 0.2 * bad else flag.flag if on_only else off]
        several = "tuple" in str(flag.hint)
        values = [self._value(chance, flag, kinds, bad) for _ in range(chance.choice((1, 1, 2, 3)) if several else 1)]
        if chance.random() < 0.1 * bad:
            values = []
        joined = len(values) == 1 and (chance.random() < 0.3 or values[0].startswith("-"))
        words = [f"{flag.flag}={values[0]}"] if joined else [flag.flag, *values]
        return words * (2 if chance.random() < 0.1 * bad else 1)

    def _value(self, chance: random.Random, flag: Flag, kinds: list[Any], bad: float) -> str:
        kind = chance.choice(kinds)
        good = GOOD_VALUES.get(flag.field) or GOOD_OF.get(kind, ("a",))
        if typing.get_origin(kind) is Literal:
            good = tuple(map(str, typing.get_args(kind)))
        if chance.random() >= bad:
            return chance.choice(good)
        pool = {int: INTEGERS, float: FLOATS, Path: PATHS}.get(kind, TEXTS) if chance.random() < 0.9 else TEXTS
        return chance.choice([one for one in pool if not (flag.field in UNBOUNDED and one in HUGE)])


def _off(flag: str) -> str:
    """The negated form of a nested flag: --train.no-accelerate."""
    parent, _, name = flag.rpartition(".")
    return f"{parent}.no-{name}"


def _command(kind: str, config: RunConfig) -> Any:
    """The class of a verb, or its default with a config, whose model decides which flags there are."""
    if kind in ("train", "sweep"):
        return COMMANDS[kind](run=config)
    return PrepareCommand(data=config.data) if kind == "prepare" else COMMANDS[kind]


def small(config: RunConfig) -> RunConfig:
    """A recipe on the project's corpus; sizes are set by flags."""
    tokenizer = dataclasses.replace(config.data.tokenizer, vocab_size=LOSSY, lossless=False)
    data = dataclasses.replace(config.data, corpus="text", paths=(Path("corpus"),), tokenizer=tokenizer)
    return dataclasses.replace(config, data=data)


def _caps(kind: str, config: RunConfig) -> list[list[str]]:
    """Flags that keep the work small."""
    text = ["--data.corpus text", "--data.paths corpus", f"--data.tokenizer.vocab-size {LOSSY}"]
    text.append("--data.tokenizer.no-lossless")
    train = ["--train.max-steps 2", "--train.batch-size 2", "--train.context 16", "--train.device cpu"]
    if isinstance(config.model, LMConfig):
        model = ["--model.dim 16", "--model.blocks scan:heads=2 mlp"]
    elif isinstance(config.model, ScanLMConfig):
        model = ["--model.embed-width 16", "--model.operator.width 16"]
    else:
        model = ["--model.embed-width 16", "--model.num-layers 1", "--model.num-heads 2"]
    flags = {
        "train": [*text, *train, *model],
        "sweep": [*text, *train, *model, "--trials 1"],
        "train --resume": ["--resume stopped"],
        "reproduce": ["--config overrides/everyone.json overrides/ar-grc.json", "--models ar-grc", "--out new"],
        "reproduce tasks": [
            *("--config tasks.json", "--tasks s3", "--models grc", "--seeds 0", "--longest 64", "--out new")
        ],
        "prepare": text,
        "time": ["--contexts 16", "--batch-tokens 64", "--repeats 1", "--warmups 0"],
        "associativity": ["--windows 2", "--seeds 0"],
        "generate": ["--max-tokens 5"],
        "serve": ["--port 70000"],
    }
    return [flag.split() for flag in flags.get(kind, [])]


def _setting(chance: random.Random) -> dict[str, Any]:
    odd: tuple[dict[str, Any], ...] = ({"stdout": "/dev/full"}, {"stdin": None}, {"encoding": "ascii"})
    return chance.choice(odd) if chance.random() < 0.08 else {}


def _mistyped(chance: random.Random, flag: str) -> str:
    place = chance.randrange(2, len(flag))
    return flag[:place] + chance.choice("abc.-é") + flag[place + 1 :]


def random_config(chance: random.Random) -> str:
    """The text of a config with up to three mutations; sometimes damaged as a text."""
    config = to_dict(small(recipe(chance.choice(sorted(RECIPES)))))
    config["train"] |= {"max_steps": 2, "batch_size": 2, "context": 16}
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        _mutate(chance, config)
    whole: Any = chance.choice((config, {"config": config}, {"version": 1, "store": "x", "config": config}, [config]))
    text = json.dumps(whole, ensure_ascii=False, indent=chance.choice((None, 2)))
    if chance.random() < 0.1:
        place = chance.randrange(len(text))
        text = chance.choice((text[:place], text + "]", text[:place] + "\0" + text[place:], "\ufeff" + text, ""))
    return text


def random_solver(chance: random.Random) -> str:
    """The text of a config of a run of the study of tasks, with up to three mutations."""
    solver = chance.choice(("grc", "memory", "rope", "grc-memory", "encoder-grc"))
    config = to_dict(TASK_STUDIES["regular-languages"].run("s3", solver, 0))
    config["train"] |= TASK_SETTINGS["train"]
    for _ in range(chance.choice((1, 1, 2, 3))):
        _mutate(chance, config)
    return json.dumps(config, ensure_ascii=False)


def _mutate(chance: random.Random, config: Any) -> None:
    """Change one field at any depth to something of any type, remove it, or add an unknown one."""
    inner = config
    while True:
        name = chance.choice(list(inner))
        if not isinstance(inner[name], dict) or not inner[name] or chance.random() < 0.15:
            break
        inner = inner[name]
    deep: Any = []
    for _ in range(chance.choice((1, 3, 400))):
        deep = [deep]
    odd = (
        *(None, True, 0, -1, 2**64, 10**400, 1.5, float("nan"), float("inf"), "", "x", "a\0b", "\ud800", "x" * 300),
        *([], [1, "a", None], {}, {"x": 1}, deep, [[]], ["corpus"], "corpus", "/dev/full"),
    )
    action = chance.random()
    if action < 0.8:
        inner[name] = chance.choice(odd)
    elif action < 0.9:
        del inner[name]
    else:
        inner[chance.choice(("unknown", f"{name}s", "", "\0", "kind"))] = chance.choice(odd)


def main() -> int:
    arguments = parser(__doc__, count=2000).parse_args()
    with project_in(arguments.keep) as project:
        return run_cases("commands", numbers_of(arguments), Commands(project, arguments.seed).one, arguments)


if __name__ == "__main__":
    sys.exit(main())
