"""How much code a reader crosses to follow one training step: the files that it executes, and their lines.

    python benchmarks/step_files.py                 # plain, and by kernels in Triton's interpreter

Every function of the package that runs during one optimizer step is noted; a file counts with all of its lines. The
step is the third of a run, when everything lazy is set up. `--list` prints the files.
"""

import contextlib
import dataclasses
import io
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # runs uninstalled too
os.environ.setdefault("TRITON_INTERPRET", "1")  # on a machine without a GPU; before any kernel is imported

import torch

from benchmarks import program
from benchmarks.train import random_stores
from logdepth.models import LMConfig, ScanLMConfig, TransformerConfig
from logdepth.operators import GRCConfig
from logdepth.ops import kernels
from logdepth.recipes import recipe
from logdepth.runs import RunFolder
from logdepth.training import Trainer

COUNTED_STEP, VOCAB_SIZE = 1, 32
PACKAGE = ROOT / "logdepth"
MODELS = {
    "scan": ScanLMConfig(embed_width=16, operator=GRCConfig(width=16)),
    "transformer": TransformerConfig(embed_width=16, num_layers=2, num_heads=2),
    "hybrid": LMConfig(dim=16, blocks=("scan:heads=2", "attention:window=8,heads=2", "mlp")),
}


class CountedError(Exception):
    """Ends a run when its step was counted."""


class CountingTrainer(Trainer):
    """Notes the files that the third step executes."""

    by_kernels: bool
    files: set[Path]

    def _step(self) -> None:
        if self.state.step < COUNTED_STEP:
            super()._step()
            return
        with kernels(self.by_kernels):
            super()._step()  # once, for what is set up lazily
            self._count()
        raise CountedError

    def _count(self) -> None:
        self.files = found = set[Path]()

        def note(frame: FrameType, event: str, _argument: Any) -> None:
            if event == "call":
                found.add(Path(frame.f_code.co_filename))

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            super()._step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def files_of(model: str, accelerated: bool) -> list[Path]:
    """The files of the package that one training step executes."""
    config = recipe("pydocs-ar-grc")
    train = dataclasses.replace(
        config.train, max_steps=4, evaluate_every=4, batch_size=2, context=16, device="cpu", log_every=100
    )
    config = dataclasses.replace(config, model=MODELS[model], train=train)
    with tempfile.TemporaryDirectory() as folder:
        prepared = random_stores(Path(folder), VOCAB_SIZE)
        out = RunFolder(Path(folder) / "run")
        trainer = CountingTrainer(out, config, prepared, torch.device("cpu"))
        trainer.by_kernels = accelerated
        out.create(config, prepared, torch.device("cpu"))
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(CountedError):
            trainer.run()
    return sorted(one for one in trainer.files if one.is_relative_to(PACKAGE))


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the files, with their lines")
    arguments = parser.parse_args()
    for model in MODELS:
        for accelerated in (False, True):
            files = files_of(model, accelerated)
            lines = {one: len(one.read_text(encoding="utf-8").splitlines()) for one in files}
            how = "kernels" if accelerated else "plain"
            print(f"{model}, {how}: {len(files)} files, {sum(lines.values()):,} lines")
            if arguments.list:
                for one, count in lines.items():
                    print(f"  {count:5} {one.relative_to(ROOT)}")


if __name__ == "__main__":
    program.run(main)
