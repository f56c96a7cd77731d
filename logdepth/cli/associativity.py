"""`logdepth associativity`: how far a run's operator is from associative, and what other trees cost it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from logdepth import drawing
from logdepth.associativity import Associativity, Distance, Untrained, draw, study
from logdepth.atomic import readable_disk_errors, write_json
from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.config import to_dict
from logdepth.errors import UserError
from logdepth.models import LM, ScanLMConfig
from logdepth.report.table import Spread
from logdepth.runs import Precision, RunFolder, Weights, device_named
from logdepth.runs.environment import environment, typed_command
from logdepth.training import prepared_for


@dataclass(frozen=True, kw_only=True)
class AssociativityCommand:
    """How far (a ⊙ b) ⊙ c is from a ⊙ (b ⊙ c) in a run's own states, and its perplexity where another tree merges them.

    Distances are over those of unrelated texts: 0 is associative, 1 is as far apart as the states of two texts. The
    influence is the distance that another text's a would make: an operator that forgets is associative for free, and
    only a distance below the influence is more than that. Where each sweep has its operator, the laws are up, down and
    mixed: (a ⊙down b) ⊙down c = a ⊙down (b ⊙up c).
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run; its model must be a scan model."""
    context: int | None = None
    """Tokens in a window of test text; by default the length that the run was trained at."""
    offsets: tuple[int, ...] = ()
    """Leaves by which the tree is shifted; by default 1, 2, 4, 8, 16 and 32, where the context is longer."""
    windows: int = 64
    """Windows from which blocks are taken, spread over the test text."""
    seeds: int = 3
    """Untrained models to compare distances with."""
    weights: Weights = "best"
    """Those of the lowest validation loss, or of the last checkpoint."""
    device: str = "auto"
    """cpu, cuda, …; auto: a GPU if there is one."""
    precision: Precision = "auto"
    """Of the perplexities; auto: bfloat16 on CUDA, float32 elsewhere. Distances are always measured in float32."""
    data_dir: Path | None = None
    """The folder above those of the corpora; by default $LOGDEPTH_DATA."""
    out: Path | None = None
    """Folder for associativity.json and the figure; by default RUN/associativity."""
    json: Switch = False
    """Print the results as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(AssociativityCommand, arguments, "associativity")
    if command.windows < 2 or command.seeds < 0 or min(command.offsets, default=1) < 1:
        raise UserError("--windows must be at least 2, --seeds at least 0 and --offsets at least 1")
    drawing.require_matplotlib()
    folder = RunFolder(command.run)
    config = folder.config()
    if not isinstance(config.model, ScanLMConfig):
        raise UserError(f"{command.run} holds a model without an operator; give the run of a scan model")
    device = device_named(command.device, "--device")
    loaded = folder.load(command.weights, device)
    assert isinstance(loaded.model, LM)
    store = prepared_for(folder, command.data_dir).stores["test"]
    out = command.out or command.run / "associativity"
    with readable_disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)  # an error now, not after the work
    found = study(
        loaded.model,
        store,
        context=config.train.context if command.context is None else command.context,
        offsets=command.offsets,
        num_windows=command.windows,
        num_seeds=command.seeds,
        precision=command.precision,
        reset_at_documents=config.train.reset_at_documents,
    )
    facts = {
        "run": str(command.run),
        "weights": command.weights,
        "step": loaded.step,
        "model": to_dict(config)["model"],
        "environment": environment(device),
        "command": typed_command(),
    }
    record = found.as_dict() | facts
    write_json(out / "associativity.json", record)
    draw(found, out / "associativity")
    if command.json:
        print_json(record)
    else:
        _print(found, command, out)
    return 0


def _print(found: Associativity, command: AssociativityCommand, out: Path) -> None:
    print(f"{command.run}: {found.num_windows} windows of {found.context:,} tokens; untrained models: {command.seeds}")
    trained = ("distance", "±", "influence", "relative", "cosine")
    heads = ("layer", "law", "block", "triples", *trained, "untrained: distance", "±", "influence")
    rows = [_row(one, found.over_seeds(one)) for one in found.distances]
    first = 0 if found.num_layers > 1 else 1
    print_table(heads[first:], [row[first:] for row in rows])
    print()
    print_table(
        ("tree", "token perplexity", "over the scan's", "±", "bits per byte"),
        [_tree_row(tree, found) for tree in found.trees],
    )
    print(f"\n{out / 'associativity'}.json, .svg, .png")


def _row(one: Distance, untrained: Untrained | None) -> tuple[Any, ...]:
    trained = (one.distance, one.error, one.influence, one.relative, one.cosine)
    beside = (None,) * 3 if untrained is None else (untrained.distance, untrained.deviation, untrained.influence)
    rounded = (None if value is None else round(value, 4) for value in (*trained, *beside))
    return (one.layer + 1, one.law, 1 << one.level, one.triples, *rounded)


def _tree_row(tree: str, found: Associativity) -> tuple[str, ...]:
    whole, error = found.trees[tree].whole, found.error_over_scan(tree)
    over_scan = (f"{found.over_scan(tree):.4f}", "–" if error is None else f"{error:.4f}")
    return tree, f"{whole.token_perplexity:,.2f}", *over_scan, str(Spread(whole.bits_per_byte, None, 4))
