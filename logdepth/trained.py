"""Trained models from Python: `load` a run, generate text, measure perplexity; `train` a config in a script."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from logdepth.data import CORPORA, StoreInfo, Tokenizer, TokenStore
from logdepth.data.store import dtype_for
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation, evaluate
from logdepth.generate import SamplingConfig, generate
from logdepth.models import LanguageModel
from logdepth.runs import PRETRAINED, RunConfig, RunFolder, Weights, device_named
from logdepth.training import train as train_run


class TrainedModel:
    """A trained language model with its tokenizer and the config that it was trained with."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, config: RunConfig, step: int) -> None:
        self.model, self.tokenizer, self.config, self.step = model, tokenizer, config, step

    @overload
    def generate(self, prompt: str = "", **sampling: Any) -> str: ...

    @overload
    def generate(self, prompt: Sequence[str], **sampling: Any) -> list[str]: ...

    def generate(
        self, prompt: str | Sequence[str] = "", *, on_warning: Callable[[str], None] = warnings.warn, **sampling: Any
    ) -> str | list[str]:
        """The text that follows a prompt, or those that follow several prompts, which are generated as one batch.

        Args:
            prompt: the text to continue, or a list of texts.
            on_warning: called with one line, once, if steps cannot be recorded as CUDA graphs.
            sampling: fields of SamplingConfig, such as max_tokens=100, temperature=0.8, top_p=0.9, seed=0,
                min_p=0.05, repetition_penalty=1.1.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts = [""] * len(prompts)
        separated = CORPORA[self.config.data.corpus].separated
        precision, accelerate = self.config.train.precision, self.config.train.accelerate
        pieces = generate(
            self.model,
            self.tokenizer,
            prompts,
            SamplingConfig(**sampling),
            separated=separated,
            precision=precision,
            accelerate=accelerate,
            on_warning=on_warning,
        )
        for piece in pieces:
            texts[piece.row] += piece.text
        return texts[0] if isinstance(prompt, str) else texts

    def evaluate(self, text: str, *, context: int | None = None) -> Evaluation:
        """The loss on a text, in windows of `context` tokens, by default as long as in training."""
        tokens = np.asarray(self.tokenizer.encode(text))
        if len(tokens) < 2:
            raise UserError("the text has fewer than two tokens: there is nothing to predict")
        encoded = text.encode()
        info = StoreInfo(
            corpus="text",
            split="test",
            dtype=dtype_for(self.tokenizer.vocab_size),
            vocab_size=self.tokenizer.vocab_size,
            tokenizer_hash=self.tokenizer.hash,
            text_sha256=hashlib.sha256(encoded).hexdigest(),
            tokens=len(tokens),
            unknown=int((tokens == self.tokenizer.unknown).sum()),
            documents=1,
            words=len(text.split()),
            line_ends=text.count("\n"),
            bytes=len(encoded),
            separator=None,
        )
        train = self.config.train
        return evaluate(
            self.model,
            TokenStore(tokens, info),
            context=context or train.context,
            precision=train.precision,
            accelerate=train.accelerate,
        )

    def perplexity(self, text: str, *, context: int | None = None) -> float:
        """The perplexity per token of a text. It depends on the tokenizer; `evaluate` has bits per byte, too."""
        return self.evaluate(text, context=context).token_perplexity


def load(path: Path | str = PRETRAINED, *, weights: Weights = "best", device: str = "auto") -> TrainedModel:
    """The trained model in a run's folder.

    Args:
        path: the folder of a run; by default that of the small model that comes with the library.
        weights: those with the lowest validation loss ("best"), or those of the last checkpoint ("last").
        device: cpu, cuda, cuda:1, and so on; auto: a GPU if there is one.
    """
    found = RunFolder(path).load(weights, device_named(device, "device"))
    return TrainedModel(found.model, found.tokenizer, found.config, found.step)


def train(config: RunConfig, out: Path | str | None = None, *, data_dir: Path | None = None) -> TrainedModel:
    """Trains a new run and returns its best model.

    Args:
        config: what to train, for example `recipe("pydocs-ar-grc")`.
        out: folder of the run; by default runs/CORPUS-SEED.
        data_dir: root data directory; by default $LOGDEPTH_DATA.
    """
    folder = Path("runs") / f"{config.data.corpus}-{config.seed}" if out is None else Path(out)
    train_run(config, folder, data_dir)
    return load(folder, device=config.train.device)
