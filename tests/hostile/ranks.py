"""SIGKILL of random ranks at random instants of a run that torchrun restarts. It ends in the same bits.

    python -m tests.hostile.ranks --count 4 --seed 1

Each case is one run on two ranks with KILLS kills: while the processes start, meet, train, measure or save.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.hostile.outcomes import DONE, MESSY, SILENT, Case, numbers_of, parser, run_cases
from tests.ranks import ended, ranks_of, start, torchrun, train_command
from tests.run_folders import same_files
from tests.tiny_corpus import write_corpus

KILLS = 5
"""Kills per run."""
LONGEST = 12.0
"""Most seconds from one kill to the next. Processes take some of them to start again."""
FLAGS = ("--train.max-steps", "300", "--train.checkpoint-minutes", "0.01")


def one(base: Path, seed: int, number: int) -> Case:
    """Trains a run whose ranks are killed, and compares it with one that nothing disturbs."""
    chance = random.Random(f"ranks {seed} {number}")
    corpus, out = base / "corpus", base / f"run-{number}"
    words = chance.choice(["replicate", "shard"])
    undisturbed = base / words
    command = [*FLAGS, "--train.parallel", words]
    if not undisturbed.exists():
        assert all(code == 0 for code, _, _ in ended(start(2, train_command(corpus, undisturbed, *command)), 600))
    process = torchrun("--max-restarts", str(KILLS), *train_command(corpus, out, *command))
    instants = []
    for _ in range(KILLS):
        until = time.monotonic() + chance.uniform(0, LONGEST)
        while process.poll() is None and (time.monotonic() < until or not ranks_of(process)):
            time.sleep(0.01)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(ranks_of(process)), signal.SIGKILL)
            instants.append(_step(out))
    try:
        ((code, said, _),) = ended([process], 600)
    except subprocess.TimeoutExpired:
        return Case(f"{words}, killed at steps {instants}", MESSY, "it hangs")
    what = f"{words}, {len(instants)} kills, at steps {', '.join(instants)}"
    if code != 0:
        return Case(what, MESSY, f"exit code {code}: {said[-600:]}")
    try:
        same_files(undisturbed, out)
    except AssertionError as error:
        return Case(what, SILENT, str(error)[:300])
    return Case(what, DONE)


def _step(out: Path) -> str:
    file = out / "metrics.jsonl"
    return str(file.read_text().count('"train"')) if file.exists() else "-"


def main() -> int:
    arguments = parser(__doc__, count=4).parse_args()
    with tempfile.TemporaryDirectory(prefix="logdepth-ranks-") as folder:
        base = arguments.keep or Path(folder)
        os.environ["LOGDEPTH_CACHE"] = str(base / "cache")
        write_corpus(base / "corpus")
        return run_cases("ranks", numbers_of(arguments), partial(one, base, arguments.seed), arguments)


if __name__ == "__main__":
    sys.exit(main())
