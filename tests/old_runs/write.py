"""Writes the run folders here, with the code of the version whose files they stand for, and what it measures of them.

Usage, from the repository root: PYTHONPATH=<checkout of 8b9f737> python tests/old_runs/write.py <folder>. Weights had
other names then, and `logdepth.training` was `logdepth.train`. A run is interrupted after six of its steps. A file
beside its folder holds the losses of the later steps, as that code continues the run, and the test perplexity of both
weights.
"""

import json
import lzma
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for tests.tiny_corpus, behind the package that PYTHONPATH names

from logdepth.train import Interrupted, Trainer, resume, train

from logdepth.data import prepare
from logdepth.evaluate import evaluate
from logdepth.models import MODELS, ModelConfig, ScanLMConfig, Size
from logdepth.operators import GRCConfig
from logdepth.runs import RunConfig, RunFolder, TrainConfig
from tests.tiny_corpus import tiny_data, write_corpus

SIZE = Size(embed_width=8, state_width=6, layer_width=8, num_layers=2, num_heads=2)
NAMES = ("ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal")
DEEP = ScanLMConfig(embed_width=6, operator=GRCConfig(width=6), depth=2, embedding_net=False)
TRAIN = TrainConfig(
    learning_rate=2e-3,
    warmup_steps=3,
    max_steps=26,
    evaluate_every=5,
    batch_size=4,
    context=16,
    log_every=1,
    device="cpu",
    threads=1,
)
INTERRUPTED_AT = 6
CONTEXTS = (16, 64)


def models() -> dict[str, ModelConfig]:
    rows = {name: row for config in MODELS.values() for name, row in config.rows(SIZE).items()}
    return {**{name: rows[name] for name in NAMES}, "deep": DEEP}


def write(name: str, model: ModelConfig, folder: Path, corpus: Path) -> None:
    config = RunConfig(seed=3, data=tiny_data(corpus), model=model, train=TRAIN)
    original = Trainer._step

    def stopping(self: Trainer) -> None:
        original(self)
        if self.standing.step == INTERRUPTED_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer._step = stopping
    try:
        train(config, folder / name)
    except Interrupted:
        Trainer._step = original
    run, whole = RunFolder(folder / name), RunFolder(folder.parent / f"{name}-whole")
    shutil.copytree(run.path, whole.path)
    resume(whole.path)
    lines = [line for line in whole.read_metrics() if line["kind"] == "train" and line["step"] > INTERRUPTED_AT]
    store = prepare(config.data, None, run.tokenizer()).stores["test"]
    found = {
        "losses": [line["loss"] for line in lines],
        "gradient_norms": [line["gradient_norm"] for line in lines],
        "best_loss": min(line["valid_loss"] for line in whole.read_metrics() if line["kind"] == "valid"),
        "test_perplexity": {
            which: {
                str(context): evaluate(run.load(which).model, store, context=context).token_perplexity
                for context in CONTEXTS
            }
            for which in ("best", "last")
        },
    }
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    saved = json.loads((run.path / "config.json").read_text())
    saved["config"]["data"]["paths"] = ["corpus"]
    (run.path / "config.json").write_text(json.dumps(saved, indent=1) + "\n")
    of_the_code = ("logdepth", "code", "python", "torch")
    kept = {key: value for key, value in run.environment().items() if key in of_the_code}
    (run.path / "environment.json").write_text(json.dumps(kept, indent=1) + "\n")
    (run.path / "lock").unlink(missing_ok=True)
    tokenizer = (run.path / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model.xz").write_bytes(lzma.compress(tokenizer, preset=9))  # the same in every run, and large
    (run.path / "tokenizer.model").unlink()


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    corpus = write_corpus(folder.parent / "corpus")
    for name, model in models().items():
        write(name, model, folder, corpus)


if __name__ == "__main__":
    main()
