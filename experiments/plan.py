"""Every study of docs/results.md as jobs: a command each, and what of it results/ keeps. It runs nothing.

A study's models are either trained as their recipes say, or with the best of a sweep of their own, whose kept record
is then their --config. Most important first; times last, because nothing else may run beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

RESULTS = Path("results")
SCAN_MODELS = ("ar-grc", "ar-mlp-ldru")
TRANSFORMERS = ("transformer-alibi", "transformer-sinusoidal")
ROWS = (*SCAN_MODELS, *TRANSFORMERS)
IN_THE_PAPER = ("ar-grc", *TRANSFORMERS)
"""On OpenWebText2, in whose place there is webmix."""
SEEDS = (0, 1, 2)
SHORT = ("experiments/webmix-short.json",)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command, typed in the project's folder."""

    name: str
    command: tuple[str, ...]
    keeps: Mapping[Path, Path]
    """A file that the command writes → its place in results/. Both names may have the same *, where it is not known."""
    starts_from: Mapping[Path, Path] = field(default_factory=dict)
    """A kept file → where the command looks for it, so that it is not made again. Names may have a *."""
    begun: Mapping[Path, Path] = field(default_factory=dict)
    """A file of lines, to which the command adds → its place in results/ until all is done: any machine can go on."""
    after: tuple[str, ...] = ()
    """Jobs whose kept files this one reads."""
    in_parts: bool = False
    """Whether what it keeps is worth keeping as soon as it is there, however the command ends."""
    alone: bool = False
    """Whether nothing may run beside it."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How the hyperparameters of each model of a study are searched: as many trials for each."""

    trials: int
    flags: tuple[str, ...] = ()
    """Of all models."""
    spaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Row → what to search; a row that is not here has the default of `logdepth sweep`."""
    row_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Row → flags of that model alone."""


def _spaces(common: Sequence[str], inside: str, around: str) -> dict[str, tuple[str, ...]]:
    """The numbers that all models share, and two of each model's own: how much is dropped inside ⊙ and around the
    scan; how much in a Transformer, and whether its head is its embedding."""
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
PTB = Sweep(trials=10)
"""The paper gives no numbers for PTB: those that it searched elsewhere, with everything else as it has it."""


def jobs(data: Path = Path("data")) -> list[Job]:
    """All of them; `data` is the folder above those of the corpora."""
    pages = f"openwebtext={data / 'openwebtext-sample'}"
    return [
        *_runs("wikitext2", "wikitext2"),
        *_runs("wikitext2", "wikitext2-post-merge", ["experiments/post-merge-every.json"], ["ar-grc"], seeds=(0,)),
        *_searched("wikitext2", "wikitext2-tuned", WIKITEXT2_TUNED),
        *_searched("ptb", "ptb", PTB),
        *_with_best("ptb", "ptb-1k", "ptb", ["experiments/ptb-1k.json"]),
        *_searched("ptb", "ptb-tuned", PTB_TUNED),
        *_deeper("wikitext2"),
        *_deeper("ptb"),
        *_runs("webmix", "webmix", SHORT, IN_THE_PAPER, seeds=(0,), flags=("--others", pages)),
        _times("wikitext2"),
        _times("ptb", [str(_record("ptb", "ptb", row)) for row in ROWS]),
        _times("webmix", SHORT, IN_THE_PAPER, seeds=(0,)),
    ]


def _searched(corpus: str, study: str, sweep: Sweep) -> Iterator[Job]:
    """Every model with the best of a sweep of its own."""
    for row in ROWS:
        yield _sweep(corpus, study, row, sweep)
        yield from _with_best(corpus, study, study, rows=[row])


def _deeper(corpus: str) -> Iterator[Job]:
    """AR-GRC with several layers and no more parameters, with the best of the sweep for one layer."""
    study = f"{corpus}-tuned"
    for depth in (2, 3):
        config = f"experiments/{corpus}-deep-{depth}.json"
        yield from _with_best(corpus, f"{study}-deep-{depth}", study, [config], ["ar-grc"])


def _with_best(
    corpus: str, study: str, searched: str, configs: Sequence[str] = (), rows: Sequence[str] = ROWS
) -> Iterator[Job]:
    """Models with the best of their sweeps, which were made for the study `searched`; `configs` come after it."""
    for row in rows:
        best = (str(_record(corpus, searched, row)), *configs)
        yield from _runs(corpus, study, best, [row], after=(f"{searched}/{row}/sweep",))


def _record(corpus: str, study: str, row: str) -> Path:
    return RESULTS / "sweeps" / study / f"{corpus}-{row}.json"


def _sweep(corpus: str, study: str, row: str, sweep: Sweep) -> Job:
    name = f"{study}-{row}-sweep"  # no name that `logdepth sweep` gives by itself: someone may have searched there
    flags = [*sweep.flags, *sweep.row_flags.get(row, ()), *_faster(row, "--train.")]
    space = ("--space", *sweep.spaces[row]) if row in sweep.spaces else ()
    command = ("sweep", f"{corpus}-{row}", "--study", name, "--trials", str(sweep.trials), *flags, *space)
    return Job(
        name=f"{study}/{row}/sweep",
        command=command,
        keeps={Path("sweeps") / name / "sweep.json": _record(corpus, study, row)},
        begun={Path("sweeps") / name / "journal.log": _record(corpus, study, row).with_suffix(".journal")},
    )


def _runs(
    corpus: str,
    study: str,
    configs: Sequence[str] = (),
    rows: Sequence[str] = ROWS,
    *,
    seeds: Sequence[int] = SEEDS,
    flags: Sequence[str] = (),
    after: tuple[str, ...] = (),
) -> Iterator[Job]:
    """A job a model and seed: the finer they are, the better lanes are filled; two processes need two folders."""
    for row, seed in product(rows, seeds):
        out = Path("studies") / f"{study}-{row}-{seed}"
        name = f"{corpus}-{row}-{seed}.json"
        yield Job(
            name=f"{study}/{row}/{seed}",
            command=(*_reproduce(corpus, out, configs, [row], [seed]), *_faster(row, "--"), "--untimed", *flags),
            keeps={out / "results" / name: RESULTS / study / name},
            after=after,
            in_parts=True,
        )


def _times(
    corpus: str, configs: Sequence[str] = (), rows: Sequence[str] = ROWS, *, seeds: Sequence[int] = SEEDS
) -> Job:
    """Of all models in one sitting: what the study still has to do once all are trained."""
    out, kept = Path("studies") / f"{corpus}-times", RESULTS / corpus
    timing = "timing-*-compiled.json"
    return Job(
        name=f"{corpus}/times",
        command=(*_reproduce(corpus, out, configs, rows, seeds), "--accelerate", "--compile"),
        keeps={out / "results" / timing: kept / timing},
        starts_from={kept / f"{corpus}-*.json": out / "results" / f"{corpus}-*.json"},
        after=tuple(f"{corpus}/{row}/{seed}" for row, seed in product(rows, seeds)),
        alone=True,
    )


def _reproduce(
    corpus: str, out: Path, configs: Sequence[str], rows: Sequence[str], seeds: Sequence[int]
) -> tuple[str, ...]:
    command = ("reproduce", corpus, "--models", *rows, "--seeds", *map(str, seeds), "--out", str(out))
    return (*command, "--config", *configs) if configs else command


def _faster(row: str, prefix: str) -> list[str]:
    """What makes each model fastest on a GPU: scans have kernels of their own, the rest is compiled."""
    return [f"{prefix}accelerate", *([f"{prefix}compile"] if row in TRANSFORMERS else [])]
