"""The studies of docs/results.md as a list of jobs: commands, and the files that results/ keeps of them.

The models of a study are trained either with their recipes or with the best trial of their own sweep. In the second
case the sweep's record in results/ is their --config. The most important jobs come first, in each group of studies.
Timing jobs come last, because nothing else may run at the same time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from logdepth.reproduce.tasks import LONG_TASKS, TASK_STUDIES
from logdepth.tasks import LDRU_LANGUAGES

RESULTS = Path("results")
SCAN_MODELS = ("ar-grc", "ar-mlp-ldru")
TRANSFORMERS = ("transformer-alibi", "transformer-sinusoidal")
ROWS = (*SCAN_MODELS, *TRANSFORMERS)
IN_THE_PAPER = ("ar-grc", *TRANSFORMERS)
"""The models that the paper trains on OpenWebText2, for which webmix is our substitute."""
SEEDS = (0, 1, 2)
SHORT = ("experiments/webmix-short.json",)

ARCHITECTURES = ("memory-window", "rope", "delta-window", "alibi", "memory", "window", "delta", "grc-window", "grc")
"""Models of the study of architectures, those that its questions need first."""
TASK_MODELS = ("grc-dropout", "grc-memory", "delta-twice", "rope", "grc", "memory-twice", "alibi", "window")
"""Models of tasks of state tracking, the most important first."""
RECALL_MODELS = ("memory-window", "grc-memory", "memory", "rope", "delta", "memory-twice", "delta-twice", "alibi")
"""Models of tasks of recall, likewise."""
ENCODERS = ("encoder-mlp-ldru", "encoder-grc")
ONE_THREAD, TO_THE_END = "experiments/one-thread.json", "experiments/to-the-end.json"
"""Configs of jobs that share a GPU, and of those that do not stop when checks find the task solved."""
QUICK = "experiments/groups-quick.json"
MILLISECONDS = {"groups": 1.5, "regular-languages": 2.0, "context-free": 2.5, "recall": 6.0}
"""Time of a training step beside others on one H200, by family: a guess, which no measurement supports yet."""
START_MINUTES, TEST_MINUTES = 0.5, 0.5
"""Likewise of the start of a job, and of the test of a run."""
LARGE_CHECKPOINTS = ("mqar",)
"""Tasks with a vocabulary so large that checkpoints of 20 to 30 MB are not worth keeping for a run of minutes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command, run in the project's root folder."""

    name: str
    """Name of the job, such as ptb/ar-grc/sweep."""
    command: tuple[str, ...]
    """Arguments of `logdepth`."""
    keeps: Mapping[Path, Path]
    """Maps files that the command writes to their places in results/. Unknown parts of both names are written as *."""
    inputs: Mapping[Path, Path] = field(default_factory=dict)
    """Maps files in results/ to the places where the command finds and reuses them. Names may contain *."""
    journals: Mapping[Path, Path] = field(default_factory=dict)
    """Maps files to which the command appends lines to their places in results/. They are kept there until the job is
    done, so that any machine can resume it."""
    unfinished: Mapping[Path, Path] = field(default_factory=dict)
    """Maps folders of runs on tasks to folders in results/, where the last checkpoint of a run that has begun is kept
    until its result is there, so that any machine can resume it."""
    minutes: float | None = None
    """Estimated time, beside other jobs on one H200."""
    after: tuple[str, ...] = ()
    """Names of the jobs whose kept files this job reads."""
    keep_incomplete: bool = False
    """Whether a kept file is valid as soon as it exists, even if the command fails later."""
    exclusive: bool = False
    """Whether no other job may run at the same time."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The hyperparameter search of a study, with the same number of trials for each model."""

    trials: int
    """Number of trials per model."""
    flags: tuple[str, ...] = ()
    """Flags for all models."""
    spaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Maps rows to search spaces. A row that is not listed has the default space of `logdepth sweep`."""
    row_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Maps rows to flags for that model only."""


def _spaces(common: Sequence[str], inside: str, around: str) -> dict[str, tuple[str, ...]]:
    """Return the search space of each model: the common fields and two of its own.

    For scan models these are the dropout inside ⊙ and the dropout around the scan. For Transformers they are the
    dropout and whether the output head is tied to the embedding.
    """
    outer = f"model.embed_dropout+model.leaf_dropout+model.output_dropout={around}"
    transformer = (*common, f"model.dropout={around}", "model.tied=true,false")
    return {
        "ar-grc": (*common, f"model.operator.dropout+model.post_merge_dropout={inside}", outer),
        "ar-mlp-ldru": (*common, f"model.post_merge_dropout={inside}", outer),
        **dict.fromkeys(TRANSFORMERS, transformer),
    }


NET_EVERYWHERE = dict.fromkeys(SCAN_MODELS, ("--model.post-merge", "every"))
WIKITEXT2_TUNED = Sweep(
    trials=12,
    flags=("--train.shift-windows",),
    row_flags=NET_EVERYWHERE,
    spaces=_spaces(
        ("train.learning_rate=6e-4:2e-3:log", "train.weight_decay=0.2:2:log", "train.epochs=12,24,40"),
        inside="0.05:0.3:0.05",
        around="0.2:0.45:0.05",
    ),
)
PTB_TUNED = Sweep(
    trials=12,
    flags=("--train.shift-windows", "--train.warmup-steps", "200"),
    row_flags=NET_EVERYWHERE,
    spaces=_spaces(
        ("train.learning_rate=6e-4:8e-3:log", "train.weight_decay=0.01:1:log", "train.epochs=24,48,72"),
        inside="0.05:0.35:0.05",
        around="0.1:0.5:0.05",
    ),
)
ARCHITECTURES_TUNED = Sweep(
    trials=10,
    spaces=dict.fromkeys(
        ARCHITECTURES,
        (
            "train.learning_rate=1e-3,2e-3,4e-3,8e-3",
            "train.weight_decay=0.05,0.1,0.2",
            "train.optimizer=adamw,muon",
            "model.initialisation=zero-output,gpt2",
        ),
    ),
)
"""The same values for all models. Prototypes did best at 2e-3 or 4e-3, so that both ends are past the optimum."""
PTB = Sweep(trials=10)
"""The paper gives no hyperparameters for PTB, so the fields that it searches elsewhere are searched."""


def jobs(data: Path = Path("data")) -> list[Job]:
    """Return all jobs. `data` is the root data directory."""
    pages = f"openwebtext={data / 'openwebtext-sample' / 'test.jsonl.xz'}"
    return [
        *_runs("wikitext2", "wikitext2"),
        *_runs("wikitext2", "wikitext2-post-merge", ["experiments/post-merge-every.json"], ["ar-grc"], seeds=(0,)),
        *_searched("wikitext2", "wikitext2-tuned", WIKITEXT2_TUNED),
        *_searched("ptb", "ptb", PTB),
        *_with_best("ptb", "ptb-1k", "ptb", ["experiments/ptb-1k.json"]),
        *_searched("ptb", "ptb-tuned", PTB_TUNED),
        *_deeper("wikitext2"),
        *_deeper("ptb"),
        *_architectures(data),
        *_state_tracking_and_recall(),
        *_runs("webmix", "webmix", SHORT, IN_THE_PAPER, seeds=(0,), flags=("--others", pages)),
        _times("wikitext2"),
        _times("ptb", [str(_record("ptb", "ptb", row)) for row in ROWS]),
        _times("webmix", SHORT, IN_THE_PAPER, seeds=(0,)),
    ]


def _searched(corpus: str, study: str, sweep: Sweep) -> Iterator[Job]:
    """Return the jobs of a study whose models are trained with the best trials of their own sweeps."""
    for row in ROWS:
        yield _sweep(corpus, study, row, sweep)
        yield from _with_best(corpus, study, study, rows=[row])


def _deeper(corpus: str) -> Iterator[Job]:
    """Return the jobs of AR-GRC with several layers and as many parameters, with the best trial for one layer."""
    study = f"{corpus}-tuned"
    for depth in (2, 3):
        config = f"experiments/{corpus}-deep-{depth}.json"
        yield from _with_best(corpus, f"{study}-deep-{depth}", study, [config], ["ar-grc"])


def _with_best(
    corpus: str, study: str, searched: str, configs: Sequence[str] = (), rows: Sequence[str] = ROWS
) -> Iterator[Job]:
    """Return jobs that train models with the best trials of the sweeps of the study `searched`, then with `configs`."""
    for row in rows:
        best = (str(_record(corpus, searched, row)), *configs)
        yield from _runs(corpus, study, best, [row], after=(f"{searched}/{row}/sweep",))


def _architectures(data: Path) -> Iterator[Job]:
    """Return the jobs of the study of architectures: each model's sweep, then its best trial on all of webmix.

    The sweeps train on 39M tokens in windows of 2,048. The runs train for one epoch, in windows of 2,048 tokens, and
    the first models also in windows of 512, the paper's length.
    """
    texts = {"openwebtext": data / "openwebtext-sample" / "test.jsonl.xz", "longdoc": data / "longdoc"}
    others = [f"{name}={path}" for name, path in texts.items()]
    study, flags = "architectures", ("--others", *others, "--other-contexts", "65536")
    for row in ARCHITECTURES:
        yield _sweep("webmix", study, row, ARCHITECTURES_TUNED)
    for name, rows, config in (
        (study, ARCHITECTURES, "experiments/architectures-whole.json"),
        (f"{study}-512", ARCHITECTURES[:4], "experiments/architectures-512.json"),
    ):
        for seed, row in product(SEEDS, rows):
            best = (str(_record("webmix", study, row)), config)
            after = (f"{study}/{row}/sweep",)
            yield from _runs(study, name, best, [row], seeds=(seed,), flags=flags, after=after, corpus="webmix")


def _record(corpus: str, study: str, row: str) -> Path:
    return RESULTS / "sweeps" / study / f"{corpus}-{row}.json"


def _sweep(corpus: str, study: str, row: str, sweep: Sweep) -> Job:
    name = f"{study}-{row}-sweep"  # differs from the default folder, which may hold another sweep
    flags = [*sweep.flags, *sweep.row_flags.get(row, ()), *_faster(row, "--train.")]
    space = ("--space", *sweep.spaces[row]) if row in sweep.spaces else ()
    command = ("sweep", f"{corpus}-{row}", "--study", name, "--trials", str(sweep.trials), *flags, *space)
    return Job(
        name=f"{study}/{row}/sweep",
        command=command,
        keeps={Path("sweeps") / name / "sweep.json": _record(corpus, study, row)},
        journals={Path("sweeps") / name / "journal.log": _record(corpus, study, row).with_suffix(".journal")},
    )


def _runs(
    reproduced: str,
    study: str,
    configs: Sequence[str] = (),
    rows: Sequence[str] = ROWS,
    *,
    seeds: Sequence[int] = SEEDS,
    flags: Sequence[str] = (),
    after: tuple[str, ...] = (),
    corpus: str | None = None,
) -> Iterator[Job]:
    """Return one job per model and seed. Small jobs fill the lanes evenly. Each has its own folder.

    Args:
        reproduced: what `logdepth reproduce` is given.
        study: the folder in results/.
        configs: JSON files with changes.
        rows: the models.
        seeds: the seeds of each.
        flags: more flags of `logdepth reproduce`.
        after: names of the jobs whose kept files these jobs read.
        corpus: the corpus, if it is not `reproduced`.
    """
    for row, seed in product(rows, seeds):
        out = Path("studies") / f"{study}-{row}-{seed}"
        name = f"{corpus or reproduced}-{row}-{seed}.json"
        yield Job(
            name=f"{study}/{row}/{seed}",
            command=(*_reproduce(reproduced, out, configs, [row], [seed]), *_faster(row, "--"), "--untimed", *flags),
            keeps={out / "results" / name: RESULTS / study / name},
            after=after,
            keep_incomplete=True,
        )


def _state_tracking_and_recall() -> Iterator[Job]:
    """Return the jobs on tasks, in the order of what they can show."""
    yield from _tasks("groups", ["s5"], TASK_MODELS, configs=[TO_THE_END])
    yield from _tasks("regular-languages", ["parity", "modular-arithmetic-precedence"], TASK_MODELS)
    yield from _tasks("context-free", ["bracket-arithmetic"], TASK_MODELS)
    yield from _tasks("recall", ["mqar", "passkey"], RECALL_MODELS)
    yield from _tasks("regular-languages", [one for one in LDRU_LANGUAGES if one not in LONG_TASKS], ENCODERS)
    yield from _tasks("regular-languages", [one for one in LDRU_LANGUAGES if one != "parity"], ["grc-dropout"])
    yield from _tasks("regular-languages", [one for one in LDRU_LANGUAGES if one in LONG_TASKS], ENCODERS)
    yield from _tasks("groups", ["s5-held-out", "a5", "z60", "s4", "s3"], TASK_MODELS[:4])
    yield from _tasks("regular-languages", ["modular-arithmetic", "d4", "tomita-3", "p-4-2"], TASK_MODELS[1:])
    yield from _tasks("recall", ["selective-copying"], RECALL_MODELS)
    yield from _tasks("context-free", ["listops", "stack", "reverse", "bucket-sort"], TASK_MODELS[:4])
    quick = [*TASK_MODELS[:3], "window", "rope", "alibi", "grc", "memory-twice"]
    yield from _tasks("groups", ["s3", "s4"], quick, study="groups-quick", seeds=(0,), longest=1024, configs=[QUICK])


def _tasks(
    family: str,
    tasks: Sequence[str],
    models: Sequence[str],
    *,
    study: str | None = None,
    seeds: Sequence[int] = SEEDS,
    longest: int | None = None,
    configs: Sequence[str] = (),
) -> Iterator[Job]:
    """Return one job per task and model, which trains all seeds, one after the other."""
    study = study or family
    for task, model in product(tasks, models):
        out = Path("studies") / "tasks" / f"{study}-{task}-{model}"
        names = [f"{task}-{model}-{seed}" for seed in seeds]
        selected = ("--tasks", task, "--models", model, "--seeds", *map(str, seeds))
        tested = () if longest is None else ("--longest", str(longest))
        changed = ("--config", *configs, ONE_THREAD)
        steps = TASK_STUDIES[family].settings(task, model).steps
        keeps = {out / "results" / f"{name}.json": RESULTS / "tasks" / study / f"{name}.json" for name in names}
        is_small = task not in LARGE_CHECKPOINTS
        yield Job(
            name=f"{study}/{task}/{model}",
            command=("reproduce", family, *selected, *tested, *changed, "--out", str(out)),
            keeps=keeps,
            inputs={kept: written for written, kept in keeps.items()},
            unfinished={out / "runs" / name: RESULTS / "unfinished" / f"{study}-{name}" for name in names if is_small},
            minutes=START_MINUTES + len(seeds) * (steps * MILLISECONDS[family] / 60_000 + TEST_MINUTES),
            keep_incomplete=True,
        )


def _times(
    corpus: str, configs: Sequence[str] = (), rows: Sequence[str] = ROWS, *, seeds: Sequence[int] = SEEDS
) -> Job:
    """Return the job that times all models of a study together, once all are trained."""
    out, kept = Path("studies") / f"{corpus}-times", RESULTS / corpus
    timing = "timing-*-compiled.json"
    return Job(
        name=f"{corpus}/times",
        command=(*_reproduce(corpus, out, configs, rows, seeds), "--accelerate", "--compile"),
        keeps={out / "results" / timing: kept / timing},
        inputs={kept / f"{corpus}-*.json": out / "results" / f"{corpus}-*.json"},
        after=tuple(f"{corpus}/{row}/{seed}" for row, seed in product(rows, seeds)),
        exclusive=True,
    )


def _reproduce(
    corpus: str, out: Path, configs: Sequence[str], rows: Sequence[str], seeds: Sequence[int]
) -> tuple[str, ...]:
    command = ("reproduce", corpus, "--models", *rows, "--seeds", *map(str, seeds), "--out", str(out))
    return (*command, "--config", *configs) if configs else command


def _faster(row: str, prefix: str) -> list[str]:
    """Return the flags that make a model fastest on a GPU: fused kernels for scan models, torch.compile for others."""
    return [f"{prefix}accelerate", *([f"{prefix}compile"] if row in TRANSFORMERS else [])]
