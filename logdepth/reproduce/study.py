"""The definition of a study: its runs, and the context lengths at which they are evaluated and timed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from logdepth.config import flattened, override, to_dict
from logdepth.data import CORPORA
from logdepth.errors import UserError, did_you_mean
from logdepth.evaluate import PAPER_CONTEXTS
from logdepth.recipes import changes_in, recipe, rows_of_study
from logdepth.runs import RunConfig
from logdepth.tasks import FAMILIES
from logdepth.training import with_absolute_paths

SMALL_CONTEXTS = (32, 64, 128, 256, 512, 1024)
SMALL_TIMES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SMALL_TIME_TOKENS, TIME_TOKENS = 4_096, 65_536
TEXT_CONTEXTS = (32, 128, 512, 2048)
"""Lengths of a study of your own text, which are few so that measuring does not take longer than training."""
LONG_CONTEXTS = (512, 2_048, 8_192, 32_768)
WITH_ONE_SEED = {"pydocs", "text"}
PROMPTS = {"ptb": "the company said", "pydocs": "This function returns"}
FLAG_OF_A_FIELD = re.compile(r"--(?!data\.paths)((?:data|model|train)(?:\.[a-z-]+)+)")


@dataclass(frozen=True, kw_only=True)
class Study:
    """The models of one corpus: those of the paper, or others that are to be compared."""

    corpus: str
    rows: Mapping[str, RunConfig]
    """Maps each row of the tables to its config with seed 0. It contains all models of the corpus."""
    models: tuple[str, ...]
    """The selected rows."""
    seeds: tuple[int, ...]
    """The seeds of each model."""
    contexts: tuple[int, ...]
    """Context lengths at which perplexity is measured. At the longest one, loss by position is measured too."""
    time_contexts: tuple[int, ...]
    """Context lengths at which models are timed."""
    time_tokens: int
    """Tokens per timed batch, at every length."""
    prompt: str
    """The prompt of the samples."""
    others: Mapping[str, Path]
    """Maps names to files or folders of other text. Runs are also evaluated on all of it."""
    other_contexts: tuple[int, ...] = ()
    """Context lengths at which runs are evaluated on other text; if empty, the training length and the longest one."""

    def contexts_of_others(self, trained: int) -> list[int]:
        """Return the context lengths at which a run is evaluated on other text, ascending.

        Args:
            trained: the training length of the run.
        """
        return sorted({*(self.other_contexts or self.contexts[-1:]), trained})

    def runs(self) -> list[tuple[str, RunConfig]]:
        """Return all runs, seed by seed, so that an unfinished study covers all models."""
        return [(row, replace(self.rows[row], seed=seed)) for seed in self.seeds for row in self.models]

    def recipe(self, row: str) -> str:
        """Return the name of a row's recipe."""
        return f"{self.corpus}-{row}"


def study_of(
    name: str,
    models: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[Path] = (),
    *,
    contexts: Sequence[int] = (),
    paths: Sequence[Path] = (),
    others: Sequence[str] = (),
    other_contexts: Sequence[int] = (),
    accelerate: bool = True,
    compiled: bool = False,
) -> Study:
    """Create a study.

    Args:
        name: name of a corpus, for the paper's models on it; or `architectures`.
        models: rows of the tables; by default all.
        seeds: by default 0 for pydocs and text, and 0, 1, 2 for the other corpora.
        overrides: JSON files with changes to configs.
        contexts: context lengths to evaluate at, besides the training length; by default those of the corpus.
        paths: files or folders of the corpus text.
        others: other text to evaluate on, each as NAME=PATH.
        other_contexts: context lengths to evaluate on it at, besides the training length; by default the longest one.
        accelerate: clear `TrainConfig.accelerate` for all models if False.
        compiled: set `TrainConfig.compile` for all models.
    """
    if name not in (*CORPORA, "architectures"):
        known = [*CORPORA, "architectures", *FAMILIES]  # the studies of tasks are asked for in the same way
        raise UserError(f"there is no corpus or study '{name}'{did_you_mean(name, known)}")
    corpus, of_study = rows_of_study(name)
    rows = {row: recipe(f"{corpus}-{row}") for row in of_study}
    for model in models:
        if model not in rows:
            raise UserError(f"there is no model '{model}' in the study of {name}{did_you_mean(model, rows)}")
    if len(set(seeds)) < len(seeds) or any(not 0 <= seed < 2**63 for seed in seeds):
        raise UserError(f"--seeds must be different non-negative integers; got {' '.join(map(str, seeds))}")
    for flag, lengths in (("--contexts", contexts), ("--other-contexts", other_contexts)):
        if lengths and not (len(set(lengths)) == len(lengths) and 1 <= min(lengths) <= max(lengths) < 2**63):
            raise UserError(f"{flag} must be different lengths of at least 1; got {' '.join(map(str, lengths))}")
    if other_contexts and not others:
        raise UserError("--other-contexts needs other text: give it with --others NAME=PATH")
    if paths and corpus != "text":
        raise UserError(f"corpus '{corpus}' takes no --data.paths; use them with `logdepth reproduce text`")
    asked = [row for row in rows if not models or row in models]
    rows = _overridden(corpus, rows, asked, overrides)
    if paths:
        rows = {row: replace(config, data=replace(config.data, paths=tuple(paths))) for row, config in rows.items()}
    rows = {row: with_absolute_paths(config) for row, config in rows.items()}
    rows = {row: _with_acceleration(config, accelerate, compiled) for row, config in rows.items()}
    if corpus == "text" and not all(rows[row].data.paths for row in asked):
        raise UserError("the corpus 'text' needs files or folders of text: give them, for example --data.paths my.txt")
    measured, times, time_tokens = PAPER_CONTEXTS, PAPER_CONTEXTS, TIME_TOKENS
    if corpus == "pydocs":
        measured, times, time_tokens = SMALL_CONTEXTS, SMALL_TIMES, SMALL_TIME_TOKENS
    elif corpus == "text":
        measured = times = TEXT_CONTEXTS
    elif name == "architectures":
        measured = times = LONG_CONTEXTS
    trained_at = {config.train.context for config in rows.values()}
    return Study(
        corpus=corpus,
        rows=rows,
        models=tuple(asked),
        seeds=tuple(seeds) or ((0,) if corpus in WITH_ONE_SEED else (0, 1, 2)),
        contexts=tuple(sorted({*(contexts or measured), *trained_at})),
        time_contexts=times,
        time_tokens=time_tokens,
        prompt=PROMPTS.get(corpus, "The"),
        others=_named_paths(others),
        other_contexts=tuple(other_contexts),
    )


def flags_as_fields(advice: str) -> str:
    """Rewrite advice that names flags of `logdepth train` for a study, whose configs only files can change."""
    advice = re.sub(r"--data\.corpus (\w+)", r"`logdepth reproduce \1`", advice)
    first = FLAG_OF_A_FIELD.search(advice)
    if first is None:
        return advice
    names = first[1].replace("-", "_").split(".")
    example = "".join(f'{{"{name}": ' for name in names) + "…" + "}" * len(names)
    rewritten = FLAG_OF_A_FIELD.sub(lambda flag: flag[1].replace("-", "_"), advice)
    return f"{rewritten} (--config FILE with {example})"


def _named_paths(others: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for one in others:
        name, equals, path = one.partition("=")
        if not equals or not name or not path:
            raise UserError(f"--others needs NAME=PATH, such as openwebtext=pages/test.jsonl; got {one}")
        if name in found:
            raise UserError(f"--others has two texts named '{name}'; rename one")
        found[name] = Path(path)
        if not found[name].exists():
            raise UserError(f"--others {name}: {path} does not exist; correct the path")
    return found


def _with_acceleration(config: RunConfig, accelerate: bool, compiled: bool) -> RunConfig:
    train = config.train
    train = replace(train, accelerate=train.accelerate and accelerate, compile=train.compile or compiled)
    return replace(config, train=train)


def _overridden(
    corpus: str, rows: dict[str, RunConfig], asked: Sequence[str], overrides: Sequence[Path]
) -> dict[str, RunConfig]:
    """Apply override files to the rows.

    A file that names a recipe, such as a sweep's best.json, changes only that row. Any other file changes all rows.
    If a change is invalid for a row that was not selected, the row keeps its config.
    """
    for file in overrides:
        changes = changes_in(file)
        of_recipe = changes.get("recipe")
        fields = changes.get("config", {name: value for name, value in changes.items() if name != "recipe"})
        named = [row for row in rows if of_recipe in (None, f"{corpus}-{row}")]
        if not named:
            raise UserError(
                f"{file} is for the recipe '{of_recipe}', which is not part of this study of {corpus}; remove the file"
            )
        for row in named:
            try:
                changed = override(rows[row], fields, str(file))
                _refuse_another_row(row, rows[row], changed, file)
            except UserError as error:
                if row in asked:
                    raise UserError(f'{error} (for {row}; a file with a "recipe" changes only that recipe)') from None
                continue
            rows = rows | {row: changed}
    return rows


def _refuse_another_row(row: str, before: RunConfig, after: RunConfig, file: Path) -> None:
    """Raise a UserError if an override changes what a row's name states: corpus, model, operator or positions."""
    was, now = flattened(to_dict(before)), flattened(to_dict(after))
    for name in ("data.corpus", "model.kind", "model.operator.kind", "model.positions", "seed"):
        if was.get(name) != now.get(name):
            raise UserError(
                f"{file} would change {name} of '{row}' from {was.get(name)!r} to {now.get(name)!r}; remove that field"
            )
