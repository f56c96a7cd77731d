"""What ranks cost on the CPU: processor time per step, of one process and of all ranks together.

    python benchmarks/ranks.py --ranks 2

Each way trains the same model on the same batches. The time of a short run is subtracted from that of a longer one, so
that neither the start nor other programs on the machine count. It also measures the message by which ranks agree at
every step. The result is a table; nothing is written.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = {"device": "cpu", "batch-size": "16", "context": "256", "log-every": "1000", "checkpoint-minutes": "1000"}
STEPS = (5, 45)
MESSAGES = 2_000


def seconds_per_step(ranks: int, words: str, folder: Path) -> float:
    """Processor seconds of a step, over all ranks."""
    spent = []
    for steps in STEPS:
        settings = SETTINGS | {"parallel": words, "max-steps": str(steps), "evaluate-every": "1000"}
        flags = [f"--train.{name}={value}" for name, value in settings.items()]
        run = ["-m", "logdepth", "train", "pydocs-ar-grc", *flags, "--out", str(folder / f"{ranks}-{words}-{steps}")]
        spent.append(_spent(run, ranks))
    return (spent[1] - spent[0]) / (STEPS[1] - STEPS[0])


def _spent(command: list[str], ranks: int) -> float:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launch, *command], check=True, env=environment, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_message_time() -> None:
    """Measures the message by which ranks agree; called in every rank."""
    from logdepth.parallel import joined, leave

    ranks = joined()
    for _ in range(100):
        ranks.highest(0, 0, 0)
    started, processor = time.perf_counter(), time.process_time()
    for _ in range(MESSAGES):
        ranks.highest(0, 0, 0)
    seconds, busy = time.perf_counter() - started, time.process_time() - processor
    if ranks.is_first:
        print(f"agreeing: {seconds / MESSAGES * 1e6:.0f} µs, {busy / MESSAGES * 1e6:.0f} µs of processor time per rank")
    leave(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--message", action="store_true", help="what this program starts under torchrun")
    arguments = parser.parse_args()
    if arguments.message:
        print_message_time()
    with tempfile.TemporaryDirectory() as folder:
        one = seconds_per_step(1, "replicate", Path(folder))
        print(f"one process: {one * 1e3:.0f} ms of processor time per step", flush=True)
        for words in ("replicate", "shard"):
            all_ranks = seconds_per_step(arguments.ranks, words, Path(folder))
            more = f"{all_ranks / one - 1:+.0%}"
            print(f"{arguments.ranks} ranks, {words}: {all_ranks * 1e3:.0f} ms together, {more}", flush=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launch, __file__, "--message"], check=True, env=environment)


if __name__ == "__main__":
    main()
