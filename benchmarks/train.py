"""Measures the training speed of every model in tokens per second, and the share of a step spent outside the model.

    python benchmarks/train.py                   # two CPU threads: pydocs recipes, and WikiText-2's at batch size 4
    python benchmarks/train.py --device cuda --steps 200    # WikiText-2's and OpenWebText2's; see also --no-accelerate

It runs the real training loop, including logging, on random tokens in a real token store. The model's share is the
forward pass, the backward pass, clipping and AdamW, synchronised with the device. The rest (drawing batches, copying
them, metrics, progress) is the share outside the model. The target for that share is 3 %. Where a step is one CUDA
graph, its parts cannot be timed, and the host prepares the next steps while the GPU computes: so a quarter of all
steps is timed together, and only then is the device waited for. The time of a checkpoint is reported too.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # runs uninstalled too

from benchmarks import program
from logdepth.atomic import write_json
from logdepth.data import Prepared, StoreInfo, TokenStore
from logdepth.errors import UserError
from logdepth.models import num_parameters
from logdepth.recipes import RECIPES, recipe
from logdepth.runs import RunConfig, RunFolder, device_named
from logdepth.runs.environment import environment
from logdepth.timing import attention_of
from logdepth.training import Trainer

BAR = 0.03
STRETCHES = 4
"""Into which captured steps are divided to be timed. Waiting for the device after each would delay the next."""
TOKENS = {"train": 2_000_000, "valid": 2_000, "test": 2_000}


class TimedTrainer(Trainer):
    """The training loop with timers: at the boundaries of the model, or around many captured steps."""

    def __init__(self, warmups: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.warmups = warmups
        self.step_seconds: list[float] = []
        """Of each timed step, or the mean of captured steps that were timed together."""
        self.model_seconds: list[float] = []
        self.checkpoint_seconds = 0.0
        self.together = -(-(self.total_steps - warmups) // STRETCHES)
        if self.captured is None:
            self._untimed_step, self.training_step = self.training_step, self._timed_step
            self.together = 1

    def _step(self) -> None:
        timed = self.state.step - self.warmups
        if timed >= 0 and timed % self.together == 0:
            self.in_model, self.first, self.start = 0.0, timed, self._now()
        super()._step()
        done = timed + 1
        if done > 0 and (done % self.together == 0 or self.state.step == self.total_steps):
            self.step_seconds.append((self._now() - self.start) / (done - self.first))
            self.model_seconds.append(self.in_model)

    def _timed_step(self, windows: Tensor, rate: float | Tensor) -> tuple[Tensor, Tensor]:
        start = self._now()
        loss_and_norm = self._untimed_step(windows, rate)
        self.in_model = self._now() - start
        return loss_and_norm

    def _save(self) -> None:
        start = self._now()
        super()._save()
        self.checkpoint_seconds = self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def random_stores(folder: Path, vocab_size: int) -> Prepared:
    """Return token stores of random tokens, memory-mapped like real ones."""
    stores = {}
    for split, count in TOKENS.items():
        tokens = np.random.default_rng(0).integers(vocab_size, size=count).astype("<u2")
        tokens.tofile(folder / f"{split}.bin")
        facts = dict.fromkeys(("documents", "words", "line_ends", "bytes", "unknown"), 1)
        info = StoreInfo(
            corpus="random", split=split, dtype="<u2", vocab_size=vocab_size, tokenizer_hash="", text_sha256="",
            tokens=count, separator=None, **facts,
        )  # fmt: skip
        stores[split] = TokenStore(np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r"), info)
    tokenizer: Any = SimpleNamespace(vocab_size=vocab_size, model=b"", hash="random")
    return Prepared("random", folder, tokenizer, stores, [], None)


def measure(
    name: str, config: RunConfig, device: torch.device, steps: int, warmups: int, accelerate: bool
) -> dict[str, Any]:
    train = dataclasses.replace(
        config.train,
        max_steps=steps + warmups,
        evaluate_every=steps + warmups,
        device=str(device),
        accelerate=accelerate,
    )
    config = dataclasses.replace(config, train=train)
    with tempfile.TemporaryDirectory() as folder:
        prepared = random_stores(Path(folder), config.data.tokenizer.vocab_size)
        out = RunFolder(Path(folder) / "run")
        trainer = TimedTrainer(warmups, out, config, prepared, device)
        out.create(config, prepared, device)
        trainer.run()
    wall, model = trainer.step_seconds, trainer.model_seconds
    tokens = train.batch_size * train.context
    return {
        "recipe": name,
        "parameters": num_parameters(trainer.model),
        "batch_size": train.batch_size,
        "context": train.context,
        "accelerate": train.accelerate,
        "compile": train.compile,
        "tokens_per_second": tokens * len(wall) / sum(wall),
        "milliseconds": 1e3 * statistics.median(wall),
        "quartiles": [1e3 * one for one in statistics.quantiles(wall, n=4, method="inclusive")[::2]],
        # A captured step cannot be timed in parts.
        "not_in_model": None if trainer.captured else 1 - sum(model) / sum(wall),
        "checkpoint_seconds": trainer.checkpoint_seconds,
        "attention": attention_of(trainer.model, train.precision),
    }


def cases(device: torch.device) -> dict[str, RunConfig]:
    if device.type == "cuda":
        return {name: recipe(name) for name in RECIPES if name.startswith(("wikitext2-", "openwebtext2-"))}
    small = {name: recipe(name) for name in RECIPES if name.startswith("pydocs")}
    large = {name: recipe(name) for name in RECIPES if name.startswith("wikitext2-")}
    return small | {
        name: dataclasses.replace(one, train=dataclasses.replace(one.train, batch_size=4))
        for name, one in large.items()
    }


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("--device", default="auto", help="device (default: a GPU if there is one)")
    parser.add_argument("--threads", type=program.at_least(1), default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--steps", type=program.at_least(8), default=20, help="timed steps per recipe (default: %(default)s)"
    )
    parser.add_argument(
        "--warmups",
        type=program.at_least(3),
        default=3,
        help="untimed steps before them; the third step is captured (default: %(default)s)",
    )
    parser.add_argument("--only", default="", help="only recipes whose name contains this text (default: all)")
    parser.add_argument("--no-accelerate", action="store_true", help="train with --train.no-accelerate")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: none)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = device_named(arguments.device, "--device")
    chosen = {name: config for name, config in cases(device).items() if arguments.only in name}
    if not chosen:
        raise UserError(f"no recipe's name contains '{arguments.only}'; recipes are {', '.join(cases(device))}")
    results = {"date": program.today(), "environment": environment(device), "bar": BAR, "rows": []}
    print(f"{'recipe':<36} {'batch':>8} {'ms/step':>10} {'tokens/s':>10}  outside the model")
    for name, config in chosen.items():
        row = measure(name, config, device, arguments.steps, arguments.warmups, not arguments.no_accelerate)
        results["rows"].append(row)
        shape, share = f"{row['batch_size']}×{row['context']}", "–"
        if row["not_in_model"] is not None:
            verdict = "met" if row["not_in_model"] <= BAR else "MISSED"
            share = f"{100 * row['not_in_model']:.2f} % ≤ 3 % {verdict}"
        print(
            f"{name:<36} {shape:>8} {row['milliseconds']:>10.1f} {row['tokens_per_second']:>10,.0f}  "
            f"{share}; checkpoint {row['checkpoint_seconds']:.2f} s",
            flush=True,
        )
        if arguments.out:
            write_json(arguments.out, results)


if __name__ == "__main__":
    program.run(main)
