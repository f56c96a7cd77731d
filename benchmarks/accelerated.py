"""Checks whether acceleration changes results: trains with and without it, and evaluates one checkpoint both ways.

    python benchmarks/accelerated.py --data-dir DIR     # two minutes on a GPU; results/accelerated-<gpu>.json

DIR contains wikitext-2/wiki.*.tokens. Both runs of a seed start from the same weights and see the same batches. Their
dropout masks and the order of their sums differ. The difference between seeds of the plain path is the noise to compare
with. Seeds run in parallel, each in its own process, because a GPU without acceleration mostly waits for its host.
"""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # runs uninstalled too

from benchmarks import program
from logdepth.atomic import read_json, write_json
from logdepth.data import prepare
from logdepth.errors import UserError
from logdepth.evaluate import evaluate
from logdepth.recipes import recipe
from logdepth.runs import RunConfig, RunFolder, device_named
from logdepth.runs.environment import environment
from logdepth.training import prepared_for, train


def trained(config: RunConfig, out: Path) -> dict[str, Any]:
    """Train a run and return its loss curves."""
    train(config, out)
    lines = RunFolder(out).read_metrics()
    return {
        "seed": config.seed,
        "accelerated": config.train.accelerate,
        "loss": [[line["step"], line["loss"]] for line in lines if line["kind"] == "train"],
        "valid_perplexity": [[line["step"], line["valid_perplexity"]] for line in lines if line["kind"] == "valid"],
    }


def evaluated(out: Path, contexts: tuple[int, ...], device: torch.device) -> list[dict[str, float]]:
    """Return the test perplexity of a run's last weights, plain and accelerated."""
    test = prepared_for(RunFolder(out)).stores["test"]
    found = []
    for context in contexts:
        numbers = {}
        for accelerated in (False, True):
            model = RunFolder(out).load("last", device).model
            result = evaluate(model, test, context=context, accelerate=accelerated)
            numbers["accelerated" if accelerated else "plain"] = result.token_perplexity
        found.append({"context": context, **numbers, "ratio": numbers["accelerated"] / numbers["plain"]})
        print(found[-1], flush=True)
    return found


def one_seed(arguments: argparse.Namespace, device: torch.device) -> None:
    """Write the runs of a seed, and the evaluations if it is the first seed."""
    base, seed = recipe(arguments.recipe), arguments.only_seed
    runs, evaluations = [], []
    with tempfile.TemporaryDirectory() as folder:
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
            runs.append(trained(config, Path(folder) / str(accelerated)))
            print(f"seed {seed}, accelerated {accelerated}: {runs[-1]['valid_perplexity']}", flush=True)
        if seed == 0:
            evaluations = evaluated(Path(folder) / str(False), tuple(arguments.contexts), device)
    write_json(arguments.out, {"runs": runs, "evaluations": evaluations})


def each_by_itself(seeds: int, together: int) -> list[dict[str, Any]]:
    """Run each seed in a process of its own; all are ended when this process ends or one of them fails."""
    processes: list[subprocess.Popen[bytes]] = []

    def by_itself(seed: int) -> Any:
        out = Path(folder) / f"{seed}.json"
        process = subprocess.Popen([sys.executable, *sys.argv, "--only-seed", str(seed), "--out", str(out)])
        processes.append(process)
        if process.wait():
            raise UserError(f"seed {seed} failed, as it says above")
        return read_json(out)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(together) as threads:
        try:
            return list(threads.map(by_itself, range(seeds)))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for one in processes:
                one.terminate()
            raise


def what_is_measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that determine what is measured."""
    others = ("data_dir", "device", "out", "together", "only_seed")
    return {name: value for name, value in vars(arguments).items() if name not in others}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = program.Parser(__doc__)
    parser.add_argument("--recipe", default="wikitext2-ar-grc", help="recipe to train (default: %(default)s)")
    parser.add_argument(
        "--steps", type=program.at_least(1), default=300, help="training steps of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=program.at_least(0),
        default=100,
        help="warm-up steps of the learning rate (default: %(default)s)",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seeds", type=program.at_least(1), default=4, help="number of seeds (default: %(default)s)")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 2976],
        help="evaluation context lengths, in tokens (default: 512 2976)",
    )
    parser.add_argument(
        "--together", type=program.at_least(1), default=4, help="seeds that run in parallel (default: %(default)s)"
    )
    parser.add_argument("--data-dir", type=Path, help="root data directory (default: $LOGDEPTH_DATA)")
    parser.add_argument(
        "--device", default="auto", help="device; cpu takes hours at the default sizes (default: a GPU)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: results/accelerated-<gpu>.json)")
    parser.add_argument("--only-seed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed(sys.argv[1:])
    if arguments.out is None and what_is_measured(arguments) != what_is_measured(parsed([])):
        raise UserError("results/ holds the runs as they are by default; give others an --out of their own")
    device = device_named(arguments.device, "--device")
    if arguments.device == "auto" and device.type != "cuda":
        raise UserError(
            "no GPU here, and hours of work without; a small one, if you mean it: "
            "--device cpu --recipe pydocs-ar-grc --seeds 1 --steps 4 --contexts 64 --out FILE"
        )
    if arguments.data_dir is not None:
        os.environ["LOGDEPTH_DATA"] = str(arguments.data_dir)
    if arguments.only_seed is not None:
        program.signal_when_parent_ends(signal.SIGTERM)
        one_seed(arguments, device)
        return
    prepare(recipe(arguments.recipe).data)  # before several would at once
    program.exit_when_terminated()
    found = each_by_itself(arguments.seeds, arguments.together)
    out = arguments.out
    if out is None and device.type == "cuda":
        out = ROOT / "results" / f"accelerated-{program.name_of_gpu()}.json"
    results = {
        "environment": environment(device),
        "recipe": arguments.recipe,
        "steps": arguments.steps,
        "runs": [run for one in found for run in one["runs"]],
        "evaluations": found[0]["evaluations"],
    }
    if out is not None:
        write_json(out, results)


if __name__ == "__main__":
    program.run(main)
