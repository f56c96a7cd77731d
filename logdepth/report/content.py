"""Build the tables of a study from its results. `table` writes them, and `figures` draws the figures."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from logdepth.architectures import TITLES
from logdepth.config import flattened, to_dict
from logdepth.evaluate import perplexity
from logdepth.models import ScanLMConfig, TransformerConfig
from logdepth.operators import OPERATORS
from logdepth.recipes import RECIPES, ordered_rows, parameters_of, recipe
from logdepth.report.paired import paired
from logdepth.report.paper import PERPLEXITY, VOCABULARIES
from logdepth.report.table import Cell, Spread, Table
from logdepth.results import Measured, Results, RunResult, TimingResult, slug

SHAPES_NOT_RANKING = (
    "These small models were trained briefly and show the shapes of the curves, not a ranking of models."
)
SPELLED = {"alibi": "ALiBi", "transformer": "Transformer"}


def title_of(row: str) -> str:
    """Return a model's name as tables print it, such as AR-GRC or Transformer (ALiBi)."""
    if row in TITLES:
        return TITLES[row]
    if row.startswith("ar-"):
        return row.upper()
    first, *rest = [SPELLED.get(word, word) for word in row.split("-")]
    return f"{first} ({' '.join(rest)})" if rest else first


def by_row(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Group runs by model. Models are in the order of the recipes."""
    rows = in_order((run.row for run in runs), runs[0].data.corpus) if runs else []
    return {row: [run for run in runs if run.row == row] for row in rows}


def in_order(rows: Iterable[str], corpus: str) -> list[str]:
    """Sort models in the order of a study's recipes, without duplicates. Models without a recipe come last."""
    here = set(rows)
    known = ordered_rows(corpus, here)
    return sorted(here, key=lambda row: (row not in known, known.index(row) if row in known else 0, row))


def tables(results: Results) -> list[Table]:
    """Return all tables of a study that have rows."""
    found = []
    if results.runs:
        found += [_perplexity(results.runs), _operators(results.runs), _hyperparameters(results.runs)]
        found += [_contexts(results.runs), _others(results.runs), paired(results.runs)]
    found += [_times(timing, number) for number, timing in enumerate(results.timings)]
    return [table for table in found if table.rows]


def caveat(runs: Sequence[RunResult]) -> str:
    """Return what a reader must know before comparing numbers, including which models are missing."""
    missing = missing_models(runs)
    return caveat_of_those_here(runs) + (f" Missing models: {', '.join(missing)}." if missing else "")


def caveat_of_those_here(runs: Sequence[RunResult]) -> str:
    """Return the caveat without the missing models, which differ between studies of the same text."""
    data = runs[0].data
    words = [SHAPES_NOT_RANKING] if data.corpus == "pydocs" else []
    test = data.splits["test"]
    words.append(
        f"Test split: {test.tokens:,} tokens, {test.words + test.line_ends:,} words with line ends, {test.bytes:,} "
        f"bytes; vocabulary {data.vocab_size:,}. Token perplexity depends on the tokenizer; word perplexity and bits "
        "per byte do not."
    )
    if data.corpus == "ptb":
        words.append(
            "The paper's vocabulary size on PTB is ambiguous, 1k or 1.5k pieces: its 14.34 is 1.316 or 1.202 bits per "
            "byte, respectively."
        )
    if data.corpus == "wikitext2":
        words.append("The text is the .tokens edition, which is not comparable with the paper's raw text.")
    if test.unknown:
        words.append(
            f"{test.unknown:,} test tokens are unknown to the tokenizer. Their text is lost, which lowers word "
            "perplexity and bits per byte."
        )
    return " ".join([*words, *_training_differences(runs)])


def missing_models(runs: Sequence[RunResult]) -> list[str]:
    """Return the printed names of models that have a recipe but no run."""
    there = {run.row for run in runs}
    return [title_of(row) for row in ordered_rows(runs[0].data.corpus, there) if row not in there]


def _training_differences(runs: Sequence[RunResult]) -> list[str]:
    """Return one sentence per training setting that differs between models but should not in a comparison."""
    found = []
    for name in ("max_steps", "epochs", "batch_size", "context"):
        values = {title_of(run.row): getattr(run.config.train, name) for run in runs}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{row} {value}" for row, value in values.items())
            found.append(f"Models differ in {name}: {listed}.")
    return found


def three_units(seeds: Sequence[RunResult]) -> tuple[Spread, Spread, Spread]:
    """Return a model's test token perplexity, word perplexity and bits per byte at the training length."""
    return _in_three_units([run.main for run in seeds])


def _in_three_units(measured: Sequence[Measured]) -> tuple[Spread, Spread, Spread]:
    return (
        Spread.of([one.token_perplexity for one in measured]),
        Spread.of([one.word_perplexity for one in measured]),
        Spread.of([one.bits_per_byte for one in measured], 4),
    )


def _perplexity(runs: Sequence[RunResult]) -> Table:
    paper = paper_numbers(runs)
    rows: list[tuple[Cell, ...]] = []
    for row, seeds in by_row(runs).items():
        cells: tuple[Cell, ...] = (title_of(row), *three_units(seeds), seeds[0].parameters, len(seeds))
        rows.append((*cells, paper.get(row, "–")) if paper else cells)
    heads = ("model", "token perplexity", "word perplexity", "bits per byte", "parameters", "seeds")
    at = " and ".join(f"{one:,}" for one in sorted({run.main.context for run in runs}))
    return Table(
        name="perplexity",
        title=f"Test perplexity on {runs[0].data.corpus} at {at} tokens",
        note=_spread_note(runs) + caveat(runs),
        heads=(*heads, "token perplexity in the paper") if paper else heads,
        rows=tuple(rows),
    )


def _operators(runs: Sequence[RunResult]) -> Table:
    paper = paper_numbers(runs)
    rows = []
    for row, seeds in by_row(runs).items():
        model = seeds[0].config.model
        if not isinstance(model, ScanLMConfig):
            continue
        cells: tuple[Cell, ...] = (
            next(name for name, kind in OPERATORS.items() if isinstance(model.operator, kind)).upper(),
            model.width,
            seeds[0].parameters,
            Spread.of([perplexity(run.valid_loss) for run in seeds]),
            Spread.of([run.main.token_perplexity for run in seeds]),
            Spread.of([run.main.bits_per_byte for run in seeds], 4),
        )
        rows.append((*cells, paper.get(row, "–")) if paper else cells)
    heads = ("operator", "width", "parameters", "validation perplexity", "test perplexity", "bits per byte")
    return Table(
        name="operators",
        title="Operators of the scan model",
        note=f"{_spread_note(runs)}The scan model with each operator. The hyperparameters list other differences.",
        heads=(*heads, "token perplexity in the paper") if paper else heads,
        rows=tuple(rows),
    )


def _hyperparameters(runs: Sequence[RunResult]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    warmed_up = any(run.config.train.warmup_steps for run in runs)
    for row, seeds in by_row(runs).items():
        run = seeds[0]
        train = run.config.train
        rows.append(
            (
                title_of(row),
                run.parameters,
                _shape(run),
                f"{train.learning_rate:g}",
                f"{train.weight_decay:g}",
                _dropout(run),
                train.warmup_steps,
                f"{train.batch_size} × {train.context}" + (", shifted" if train.shift_windows else ""),
                train.max_steps or f"{train.epochs} epochs",
                Spread.of([run.steps for run in seeds], 0),
                Spread.of([run.best_step for run in seeds], 0),
            )
        )
    return Table(
        name="hyperparameters",
        title="Hyperparameters and sizes",
        note=f"AdamW with {'linear warm-up and ' if warmed_up else ''}cosine decay to a thousandth of the peak "
        "learning rate; early stopping on validation loss.",
        heads=(
            "model",
            "parameters",
            "shape",
            "learning rate",
            "weight decay",
            "dropout",
            "warm-up",
            "batch × context",
            "planned",
            "steps",
            "best at step",
        ),
        rows=tuple(rows),
    )


def _contexts(runs: Sequence[RunResult]) -> Table:
    models = by_row(runs)
    contexts = sorted({one.context for run in runs for one in run.test})
    rows = []
    for context in contexts:
        cells: list[Cell] = [context]
        for seeds in models.values():
            found = [one.token_perplexity for run in seeds if (one := run.at(context)) is not None]
            cells.append(Spread.of(found) if found else None)
        rows.append(tuple(cells))
    trained = " and ".join(f"{one:,}" for one in sorted({run.config.train.context for run in runs}))
    return Table(
        name="contexts",
        title="Test perplexity by context length",
        note=f"{_spread_note(runs)}Trained at {trained} tokens. Mean over all positions of non-overlapping windows.",
        heads=("context", *map(title_of, models)),
        rows=tuple(rows),
    )


def _others(runs: Sequence[RunResult]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in dict.fromkeys(other.name for run in runs for other in run.others):
        for row, seeds in by_row(runs).items():
            found = [other for run in seeds for other in run.others if other.name == name]
            for context in sorted({one.context for other in found for one in other.test}):
                at = [one for other in found for one in other.test if one.context == context]
                rows.append((name, title_of(row), context, *_in_three_units(at), len(at)))
    heads = ("text", "model", "context", "token perplexity", "word perplexity", "bits per byte", "seeds")
    note = f"{_spread_note(runs)}The same weights on other text, with the same tokenizer."
    return Table(name="others", title="Test perplexity on other text", note=note, heads=heads, rows=tuple(rows))


def _times(result: TimingResult, number: int) -> Table:
    rows = []
    for place, first in enumerate(result.models[0].timings):
        microseconds = (1e6 / model.timings[place].tokens_per_second for model in result.models)
        rows.append((first.context, first.batch_size, *(round(one, 3) for one in microseconds)))
    device = device_of(result)
    attention = [
        f"{title_of(model.row)}: {model.timings[0].attention}" for model in result.models if model.timings[0].attention
    ]
    return Table(
        name=f"times-{slug(device)}" + (f"-{number + 1}" if number else ""),
        title=f"Microseconds per token by context length, {result.what} pass on {device}"
        + (", compiled" if result.compiled else ""),
        note=f"Medians of {result.models[0].timings[0].repeats} batches after warm-up; all models were timed together, "
        f"alternating; torch {result.environment.get('torch')}, precision {result.precision}, {how_timed(result)}. "
        f"Attention: {'; '.join(attention) or 'none'}.",
        heads=("context", "batch", *(title_of(model.row) for model in result.models)),
        rows=tuple(rows),
    )


def how_timed(result: TimingResult) -> str:
    """Describe the acceleration with which models were timed."""
    compiled = "compiled" if result.compiled else "not compiled"
    if result.accelerated:
        return f"CUDA graphs, and fused kernels where the model has them; other layers {compiled}"
    return f"operators and layers {compiled}"


def device_of(result: TimingResult) -> str:
    """Return the name of the device that models were timed on."""
    name = str(result.environment.get("device"))
    threads = result.environment.get("threads")
    return f"CPU ({threads} thread{'' if threads == 1 else 's'})" if name == "cpu" else name


def _shape(run: RunResult) -> str:
    model = run.config.model
    if isinstance(model, ScanLMConfig):
        nets = [f"post-merge net ({model.post_merge})"] * (model.post_merge != "none")
        nets = ["embedding net"] * model.embedding_net + nets
        return ", ".join([f"E {model.embed_width}", f"D {model.width}", f"depth {model.depth}", *nets])
    if isinstance(model, TransformerConfig):
        return f"{model.num_layers} × {model.embed_width}, {model.num_heads} heads"
    return type(model).__name__.removesuffix("Config")


def _dropout(run: RunResult) -> str:
    """Return all distinct dropout rates of the model."""
    fields = flattened(to_dict(run.config))
    rates = {value for name, value in fields.items() if name.startswith("model.") and name.endswith("dropout")}
    return ", ".join(f"{rate:g}" for rate in sorted(rates)) or "–"


def paper_numbers(runs: Sequence[RunResult]) -> dict[str, str]:
    """Return the paper's numbers if all runs match its recipes; they are not comparable with other sizes or texts."""
    numbers = PERPLEXITY.get(runs[0].data.corpus, {})
    for run in runs:
        if run.recipe in RECIPES:
            meant = recipe(run.recipe)
            data = run.config.data
            if data.tokenizer.vocab_size in VOCABULARIES.get(data.corpus, ()):
                tokenizer = replace(meant.data.tokenizer, vocab_size=data.tokenizer.vocab_size)
                meant = replace(meant, data=replace(meant.data, tokenizer=tokenizer))
            same = (parameters_of(meant), meant.data, meant.train.context)
            if (run.parameters, data, run.config.train.context) != same:
                return {}
    return numbers


def _spread_note(runs: Sequence[RunResult]) -> str:
    several = any(len(seeds) > 1 for seeds in by_row(runs).values())
    return "Mean ± standard deviation over seeds. " if several else ""
