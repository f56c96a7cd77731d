"""Text from a model, token by token: prompts of different lengths as one batch, each row's text as it comes.

A row's text depends on its prompt, its number and the seed only, not on the other rows.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from logdepth.acceleration import kernels_as_asked
from logdepth.data import Tokenizer
from logdepth.decoding import Decoder, SamplingConfig
from logdepth.decoding.continuation import Continuation, choose_next
from logdepth.errors import UserError
from logdepth.models import LM, LanguageModel, ModelState
from logdepth.ops.precision import Precision, arithmetic

__all__ = ["Piece", "SamplingConfig", "generate", "prompt_tokens"]


class Piece(NamedTuple):
    """A piece of the text of one row; the last piece of a row is marked."""

    row: int
    text: str
    last: bool


@torch.inference_mode()
def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    config: SamplingConfig,
    *,
    separated: bool = True,
    precision: Precision = "auto",
    accelerate: bool = True,
    on_warning: Callable[[str], None] = warnings.warn,
) -> Iterator[Piece]:
    """The texts that follow the prompts, in pieces as they come.

    Args:
        separated: whether the model knows the end of a document, which then ends a text and starts one without a
            prompt.
        accelerate: on a GPU, use kernels, and record steps as CUDA graphs.
        on_warning: called with one line, once, if steps cannot be recorded.
    """
    model.eval()
    device = next(model.parameters()).device
    rows = [
        Continuation(tokenizer, prompt_tokens(tokenizer, prompt, separated), config, number, separated=separated)
        for number, prompt in enumerate(prompts)
    ]
    if not rows:
        return
    with arithmetic(precision, device), kernels_as_asked(accelerate):
        lengths = [len(row.tokens) for row in rows]
        padded = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for number, row in enumerate(rows):
            padded[number, : lengths[number]] = torch.tensor(row.tokens)
        logits, state = model.step(padded.to(device), model.init_state(len(rows)), lengths=lengths)
        last = logits[torch.arange(len(rows)), torch.tensor(lengths) - 1]
    steps: Decoder | _ModelSteps
    if isinstance(model, LM):
        steps = Decoder(model, state, graphs=accelerate, on_warning=on_warning)
    else:
        steps = _ModelSteps(model, state)
    while True:
        # All tokens are chosen before the first piece goes out: the next step overwrites the scores.
        chosen = choose_next(rows, last)
        going = []
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            text = row.add(token)
            if text or row.ended:
                yield Piece(row.number, text, row.ended is not None)
            if not row.ended:
                going.append(place)
        if not going:
            return
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            steps.select(going)
        newest = torch.tensor([row.tokens[-1] for row in rows], device=device)
        with arithmetic(precision, device), kernels_as_asked(accelerate):
            last = steps.step(newest)


class _ModelSteps:
    """Tokens one by one through `model.step`, for models that are no LM."""

    def __init__(self, model: LanguageModel, state: ModelState) -> None:
        self.model, self.at = model, state

    def step(self, tokens: Tensor) -> Tensor:
        logits, self.at = self.model.step(tokens[:, None], self.at)
        return logits[:, -1]

    def select(self, rows: Sequence[int]) -> None:
        self.at = self.at.select(rows)


def prompt_tokens(tokenizer: Tokenizer, prompt: str, separated: bool) -> list[int]:
    """The tokens of a prompt. An empty one starts a document, in models that know where documents end."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"the prompt {prompt!r} is not text in UTF-8") from None
    tokens = tokenizer.encode(prompt)
    if tokens:
        return tokens
    if not separated:
        raise UserError("this model was trained on one stream of text and cannot start from nothing; give a --prompt")
    return [tokenizer.end_of_document]
