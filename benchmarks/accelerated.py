"""Does acceleration change results? The same runs with it and without, and one checkpoint evaluated both ways.

    python benchmarks/accelerated.py --data-dir DIR     # six minutes on a GPU; results/accelerated-<gpu>.json

Runs of one seed see the same batches from the same weights; dropout drops other numbers, and sums are made in another
order. What is left between two seeds of the plain path is the noise to compare with.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # runs uninstalled too

from benchmarks import program
from logdepth.atomic import write_json
from logdepth.errors import UserError
from logdepth.evaluate import evaluate
from logdepth.recipes import recipe
from logdepth.runs import RunConfig, RunFolder, device_named
from logdepth.runs.environment import environment
from logdepth.train import prepared_for, train


def trained(config: RunConfig, out: Path) -> dict[str, Any]:
    """Trains, and returns its curve."""
    train(config, out)
    lines = RunFolder(out).read_metrics()
    return {
        "seed": config.seed,
        "accelerated": config.train.accelerate,
        "loss": [[line["step"], line["loss"]] for line in lines if line["kind"] == "train"],
        "valid_perplexity": [[line["step"], line["valid_perplexity"]] for line in lines if line["kind"] == "valid"],
    }


def evaluated(out: Path, contexts: tuple[int, ...], device: torch.device) -> list[dict[str, float]]:
    """Test perplexity of a run's last weights, plain and accelerated."""
    test = prepared_for(RunFolder(out)).stores["test"]
    found = []
    for context in contexts:
        numbers = {}
        for accelerated in (False, True):
            model = RunFolder(out).load("last", device).model
            if accelerated:
                model.accelerate()
            result = evaluate(model, test, context=context, accelerate=accelerated)
            numbers["accelerated" if accelerated else "plain"] = result.token_perplexity
        found.append({"context": context, **numbers, "ratio": numbers["accelerated"] / numbers["plain"]})
        print(found[-1], flush=True)
    return found


def what_is_measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that decides what is measured."""
    return {name: value for name, value in vars(arguments).items() if name not in ("data_dir", "device", "out")}


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("--recipe", default="wikitext2-ar-grc")
    parser.add_argument("--steps", type=program.at_least(1), default=300)
    parser.add_argument(
        "--warmup", type=program.at_least(0), default=100, help="steps in which the learning rate rises"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=program.at_least(1), default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2976])
    parser.add_argument("--data-dir", type=Path, help="the folder above those of the corpora (default: $LOGDEPTH_DATA)")
    parser.add_argument("--device", default="auto", help="cpu: hours at the default sizes (default: a GPU)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: in results/, by the GPU's name)")
    arguments = parser.parse_args()
    base = recipe(arguments.recipe)
    if arguments.out is None and what_is_measured(arguments) != what_is_measured(parser.parse_args([])):
        raise UserError("results/ holds the runs as they are by default; give others an --out of their own")
    device = device_named(arguments.device, "--device")
    if arguments.device == "auto" and device.type != "cuda":
        raise UserError("no GPU here, and hours of work without; --device cpu and fewer --steps if you mean it")
    if arguments.data_dir is not None:
        os.environ["LOGDEPTH_DATA"] = str(arguments.data_dir)
    out = arguments.out
    if out is None and device.type == "cuda":
        out = ROOT / "results" / f"accelerated-{program.name_of_gpu()}.json"
    facts = environment(device)
    results: dict[str, Any] = {"environment": facts, "recipe": arguments.recipe, "steps": arguments.steps, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for accelerated in (False, True):
                settings = dataclasses.replace(
                    base.train,
                    max_steps=arguments.steps,
                    evaluate_every=max(1, arguments.steps // 3),
                    warmup_steps=arguments.warmup,
                    learning_rate=arguments.learning_rate,
                    device=str(device),
                    accelerate=accelerated,
                )
                config = dataclasses.replace(base, seed=seed, train=settings)
                run = trained(config, Path(folder) / f"{seed}-{accelerated}")
                results["runs"].append(run)
                print(f"seed {seed}, accelerated {accelerated}: {run['valid_perplexity']}")
        results["evaluations"] = evaluated(Path(folder) / "0-False", tuple(arguments.contexts), device)
    if out is not None:
        write_json(out, results)


if __name__ == "__main__":
    program.run(main)
