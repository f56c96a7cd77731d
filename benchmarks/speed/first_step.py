"""A process of its own that trains a few steps, and prints how many seconds after its start each of them had ended."""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs uninstalled too

import torch

from benchmarks.speed.sizes import BOTH_NETS, smoke
from benchmarks.train import random_stores
from logdepth.recipes import recipe
from logdepth.runs import RunFolder
from logdepth.training import Trainer

STEPS = 4
"""Two plain ones, one that is captured, and a replay."""


class ClockedTrainer(Trainer):
    """The training loop, with the time after each step; it ends with the last of them, without validation."""

    process_started: float

    def _step(self) -> None:
        super()._step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = [*getattr(self, "seconds", []), time.time() - self.process_started]
        if len(self.seconds) == STEPS:
            print(json.dumps({"first_step_seconds": self.seconds[0], "all_steps_seconds": self.seconds}))
            sys.exit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("--started", type=float, required=True, help="when this process was started, in Unix time")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    config = recipe("wikitext2-ar-grc")
    train = dataclasses.replace(
        config.train, max_steps=STEPS, evaluate_every=STEPS, device=str(arguments.device), accelerate=True
    )
    model = config.model
    if arguments.smoke:
        model, train = smoke().ours[BOTH_NETS], dataclasses.replace(train, batch_size=2, context=16)
    config = dataclasses.replace(config, model=model, train=train)
    with tempfile.TemporaryDirectory() as folder:
        prepared = random_stores(Path(folder), config.data.tokenizer.vocab_size)
        out = RunFolder(Path(folder) / "run")
        trainer = ClockedTrainer(out, config, prepared, arguments.device)
        trainer.process_started = arguments.started
        out.create(config, prepared, arguments.device)
        trainer.run()


if __name__ == "__main__":
    main()
