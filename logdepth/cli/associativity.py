"""`logdepth associativity`: measure how far a run's operator is from associative."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from logdepth import drawing
from logdepth.associativity import Associativity, Distance, Untrained, draw, study
from logdepth.atomic import readable_disk_errors, write_json
from logdepth.checksums import seal
from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.config import to_dict
from logdepth.errors import UserError
from logdepth.models import LM, ScanLMConfig
from logdepth.ops.precision import Precision
from logdepth.report.table import Spread
from logdepth.runs import RunFolder, Weights, device_named
from logdepth.runs.environment import environment, typed_command
from logdepth.training import prepared_for


@dataclass(frozen=True, kw_only=True)
class AssociativityCommand:
    """Measure how far (a ⊙ b) ⊙ c is from a ⊙ (b ⊙ c) on a run's own states, and its perplexity with other merge trees.

    Distances are relative to those of unrelated texts: 0 means associative, 1 means as different as states of two
    texts. The influence is the change of the result if a comes from another text. An operator that forgets a is
    trivially associative, so only a distance below the influence indicates more than forgetting. If the two sweeps have
    different operators, the laws are up, down and mixed: (a ⊙down b) ⊙down c = a ⊙down (b ⊙up c).
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run. Its model must be a scan model."""
    context: int | None = None
    """Tokens per window of test text; by default the training length."""
    offsets: tuple[int, ...] = ()
    """Numbers of leaves by which to shift the tree; by default those of 1, 2, 4, 8, 16 and 32 below the context."""
    windows: int = 64
    """Number of windows from which blocks are taken, spread evenly over the test text."""
    seeds: int = 3
    """Number of untrained models to compare distances with."""
    weights: Weights = "best"
    """Weights to load: those with the lowest validation loss (best) or those of the latest checkpoint (last)."""
    device: str = "auto"
    """Device, such as cpu or cuda:0; auto selects a GPU if one is available."""
    precision: Precision = "auto"
    """Precision of the perplexities; auto is bfloat16 on CUDA and float32 elsewhere. Distances always use float32."""
    data_dir: Path | None = None
    """Root data directory; by default $LOGDEPTH_DATA."""
    out: Path | None = None
    """Folder for associativity.json and the figure; by default RUN/associativity."""
    json: Switch = False
    """Print the results as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(AssociativityCommand, arguments, "associativity")
    if command.windows < 2 or command.seeds < 0 or min(command.offsets, default=1) < 1:
        raise UserError(
            f"--windows must be at least 2, --seeds at least 0 and --offsets at least 1; got {command.windows}, "
            f"{command.seeds} and {' '.join(map(str, command.offsets)) or 'none'}"
        )
    drawing.require_matplotlib()
    folder = RunFolder(command.run)
    config = folder.config()
    if not isinstance(config.model, ScanLMConfig):
        raise UserError(f"{command.run} contains a model without an operator; choose a run of a scan model")
    device = device_named(command.device, "--device")
    loaded = folder.load(command.weights, device)
    assert isinstance(loaded.model, LM)
    store = prepared_for(folder, command.data_dir).stores["test"]
    out = command.out or command.run / "associativity"
    with readable_disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)  # fail before the work, not after it
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
    record = seal(found.as_dict() | facts)
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
        ("tree", "token perplexity", "ratio to scan", "±", "bits per byte"),
        [_tree_row(tree, found) for tree in found.trees],
    )
    print(f"\n{out / 'associativity'}.json, .svg, .png")


def _row(one: Distance, untrained: Untrained | None) -> tuple[Any, ...]:
    trained = (one.distance, one.error, one.influence, one.relative, one.cosine)
    baseline = (None,) * 3 if untrained is None else (untrained.distance, untrained.deviation, untrained.influence)
    rounded = (None if value is None else round(value, 4) for value in (*trained, *baseline))
    return (one.layer + 1, one.law, 1 << one.level, one.triples, *rounded)


def _tree_row(tree: str, found: Associativity) -> tuple[str, ...]:
    whole, error = found.trees[tree].whole, found.error_over_scan(tree)
    over_scan = (f"{found.over_scan(tree):.4f}", "–" if error is None else f"{error:.4f}")
    return tree, f"{whole.token_perplexity:,.2f}", *over_scan, str(Spread(whole.bits_per_byte, None, 4))
