"""Runs as the model `logdepth` of lm-eval, the evaluation harness of EleutherAI.

    python -m logdepth.lm_eval --model logdepth --model_args path=RUN --tasks lambada_openai,piqa --batch_size auto

This is lm-eval's own command line, after `import logdepth.lm_eval`, which registers the model.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from logdepth.acceleration import kernels_as_asked
from logdepth.data import CORPORA
from logdepth.errors import UserError, did_you_mean
from logdepth.evaluate import BATCH_TOKENS
from logdepth.generate import SamplingConfig, generate
from logdepth.models import LM, LMState
from logdepth.ops.cross_entropy import CHUNK_LOGITS, IGNORED
from logdepth.ops.precision import Precision, arithmetic
from logdepth.runs import PRETRAINED, RunFolder, Weights, device_named

SHARED = 32
"""What contexts share is read once where they begin with the same tokens, so many."""
MAX_GENERATED = 256
"""Tokens that are generated after a context unless its task says otherwise, as in lm-eval's other models."""
DEFAULT_DEVICE = "cuda:0"
"""What lm-eval's command line says where the user says nothing."""
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
"""Settings of a task that mean the same here."""


class Request(NamedTuple):
    """A continuation to score after a context, as tokens."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """What lm-eval wants to know of a continuation."""

    log_likelihood: float
    is_greedy: bool
    """Whether each token is the likeliest after those before it."""


@dataclass(frozen=True)
class _Reading:
    """Contexts as states: what has been read of each."""

    contexts: list[tuple[int, ...]]
    state: LMState
    """After all tokens of each context but the last."""


@register_model("logdepth")
class LogDepthLM(TemplateLM):
    """A run of logdepth. Contexts that several requests share are read once, and their state is continued."""

    def __init__(
        self,
        path: str = str(PRETRAINED),
        weights: Weights = "best",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        device: str = "auto",
        precision: Precision = "auto",
        accelerate: bool = True,
        max_batch_size: int | None = None,
    ) -> None:
        """
        Args:
            path: the folder of a run; by default that of the small model that comes with the library.
            weights: those with the lowest validation loss ("best"), or those of the last checkpoint ("last").
            batch_size: rows of a batch; auto: as many as have 16,384 tokens.
            max_length: tokens that the model reads at most; contexts lose their first tokens. By default all tokens of
                a context are read, and rolling log-likelihoods have windows of the training length.
            device: cpu, cuda, cuda:1, and so on; auto: a GPU if there is one.
            precision: of the arithmetic; auto: bfloat16 on CUDA and float32 elsewhere.
            accelerate: on a GPU, use kernels and CUDA graphs.
            max_batch_size: rows of a batch at most.
        """
        super().__init__()
        if device == DEFAULT_DEVICE and not torch.cuda.is_available():
            device = "cpu"
        loaded = RunFolder(path).load(weights, device_named(device, "device"))
        assert isinstance(loaded.model, LM)
        if max_length is not None and max_length < 1:
            raise UserError(f"max_length must be at least 1; got {max_length}")
        self.model, self.run_tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.config
        self.separated = CORPORA[loaded.config.data.corpus].separated
        self.batch_size = _rows_of_a_batch(batch_size, max_batch_size)
        self.given_length, self.precision, self.accelerate = max_length, precision, accelerate
        self._device = next(loaded.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """The token after a document."""
        return self.run_tokenizer.end_of_document

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text; None for a model of one stream of text, which then does not predict the first."""
        return self.eot_token_id if self.separated else None

    @property
    def max_length(self) -> int:
        """The window of rolling log-likelihoods."""
        return self.given_length or self.config.train.context

    @property
    def tokenizer_name(self) -> str:
        """By which lm-eval names the requests that it keeps."""
        return f"logdepth-{self.run_tokenizer.hash}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, without any other."""
        del add_special_tokens
        return self.run_tokenizer.encode(string)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether it is what greedy decoding gives."""
        pairs = [self._tokens_of(*one.args) for one in tqdm(requests, "tokens of requests", disable=disable_tqdm)]
        tokens = [((None, None), list(one.context), list(one.continuation)) for one in pairs]
        found = self._loglikelihood_tokens(tokens, disable_tqdm=disable_tqdm)
        for request, score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, score)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        given = [Request(self._shortened(one, len(more)), tuple(more)) for _, one, more in requests]
        scores: dict[Request, Score] = {}
        by_context: dict[tuple[int, ...], list[Request]] = {}
        for one in dict.fromkeys(given):
            if one.context and one.continuation:
                by_context.setdefault(one.context, []).append(one)
            else:  # the tokenizer may add nothing for a continuation, or a stream of text may start with it
                scores[one] = Score(0.0, True)
        with self._computing(), tqdm(total=len(by_context), desc="contexts", disable=disable_tqdm) as progress:
            for reading in self._readings(list(by_context)):
                rows, asked = [], []
                for row, context in enumerate(reading.contexts):
                    asked += by_context[context]
                    rows += [row] * len(by_context[context])
                for some in self._batches([len(one.continuation) for one in asked]):
                    inputs = [(asked[at].context[-1], *asked[at].continuation[:-1]) for at in some]
                    targets = [asked[at].continuation for at in some]
                    found = self._scores(inputs, targets, reading.state.select([rows[at] for at in some]))
                    scores |= {asked[at]: score for at, score in zip(some, found, strict=True)}
                progress.update(len(reading.contexts))
        return [(scores[one].log_likelihood, scores[one].is_greedy) for one in given]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows side by side, as `logdepth evaluate` measures it."""
        windows: list[tuple[int, tuple[int, ...]]] = []
        for number, request in enumerate(requests):
            first = [] if self.prefix_token_id is None else [self.prefix_token_id]
            tokens = (*first, *self.tok_encode(request.args[0]))
            starts = range(0, len(tokens) - 1, self.max_length)
            windows += [(number, tokens[start : start + self.max_length + 1]) for start in starts]
        totals = [0.0] * len(requests)
        with self._computing(), tqdm(total=len(windows), desc="windows", disable=disable_tqdm) as progress:
            for some in self._batches([len(tokens) for _, tokens in windows]):
                texts = [windows[at][1] for at in some]
                found = self._scores([one[:-1] for one in texts], [one[1:] for one in texts], None)
                for at, score in zip(some, found, strict=True):
                    totals[windows[at][0]] += score.log_likelihood
                progress.update(len(some))
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to one of the texts at which its task ends."""
        texts = [""] * len(requests)
        by_settings: dict[SamplingConfig, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(_sampling_of(request.args[1]), []).append(number)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm) as progress:
            for settings, numbers in by_settings.items():
                prompts = [self._shortened_text(requests[number].args[0], settings.max_tokens) for number in numbers]
                for some in self._batches([len(prompt) for prompt in prompts]):
                    pieces = generate(
                        self.model,
                        self.run_tokenizer,
                        [prompts[at] for at in some],
                        settings,
                        separated=self.separated,
                        precision=self.precision,
                        accelerate=self.accelerate,
                    )
                    for piece in pieces:
                        texts[numbers[some[piece.row]]] += piece.text
                    progress.update(len(some))
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _tokens_of(self, context: str, continuation: str) -> Request:
        """A request as tokens. Without a context, the text starts where the model's texts do."""
        if context:
            return Request(*map(tuple, self._encode_pair(context, continuation)))
        tokens = tuple(self.tok_encode(continuation))
        if self.prefix_token_id is None:
            return Request(tokens[:1], tokens[1:])
        return Request((self.prefix_token_id,), tokens)

    def _shortened(self, context: Sequence[int], more: int) -> tuple[int, ...]:
        """The end of a context that leaves room for so many more tokens."""
        if self.given_length is None:
            return tuple(context)
        return tuple(context[-max(1, self.given_length - more) :])

    def _shortened_text(self, context: str, more: int) -> str:
        tokens = self.tok_encode(context)
        kept = self._shortened(tokens, more)
        return context if len(kept) == len(tokens) else self.run_tokenizer.decode(kept)

    def _readings(self, contexts: list[tuple[int, ...]]) -> Iterator[_Reading]:
        """The states of all contexts, batch by batch. Tokens that several contexts start with are read once."""
        groups = [list(alike) for _, alike in itertools.groupby(sorted(contexts), key=lambda one: one[:SHARED])]
        beginnings = [_shared(group[0][:-1], group[-1][:-1]) for group in groups]  # the first and the last differ most
        for some in self._batches([len(one) for one in beginnings]):
            begun = self._read([beginnings[at] for at in some], self.model.init_state(len(some)))
            rows = [(row, context) for row, at in enumerate(some) for context in groups[at]]
            rest = [context[len(beginnings[some[row]]) : -1] for row, context in rows]
            for few in self._batches([len(one) for one in rest]):
                state = self._read([rest[at] for at in few], begun.select([rows[at][0] for at in few]))
                yield _Reading([rows[at][1] for at in few], state)

    def _read(self, rows: Sequence[Sequence[int]], state: LMState) -> LMState:
        """The state after further tokens of each row."""
        for tokens, lengths, _ in self._parts(rows, BATCH_TOKENS):
            _, state = self.model.continued(tokens, state, lengths)
        return state

    def _scores(
        self, inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], state: LMState | None
    ) -> list[Score]:
        """How likely the targets are after the inputs, which continue the state, or start rows."""
        nats = torch.zeros(len(inputs), dtype=torch.float64, device=self._device)
        greedy = torch.ones(len(inputs), dtype=torch.bool, device=self._device)
        parts = list(self._parts(inputs, max(len(inputs), CHUNK_LOGITS // self.model.vocab_size)))
        if state is None and len(parts) > 1:
            state = self.model.init_state(len(inputs))
        for tokens, lengths, columns in parts:
            if state is None:
                features = self.model.features(tokens, lengths=lengths)
            else:
                features, state = self.model.continued(tokens, state, lengths)
            logits = self.model.logits(features)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            expected = self._padded([one[columns] for one in targets], IGNORED)
            losses = F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=IGNORED, reduction="none")
            nats += losses.view_as(expected).double().sum(1)
            greedy &= ((logits.argmax(-1) == expected) | (expected == IGNORED)).all(1)
        return [Score(-lost, best) for lost, best in zip(nats.tolist(), greedy.tolist(), strict=True)]

    def _parts(self, rows: Sequence[Sequence[int]], num_tokens: int) -> Iterator[tuple[Tensor, list[int], slice]]:
        """Rows padded on the right, in parts of at most so many tokens: the tokens, their lengths, and the columns."""
        longest = max((len(one) for one in rows), default=0)
        width = max(1, num_tokens // max(1, len(rows)))
        for start in range(0, longest, width):
            columns = slice(start, start + width)
            some = [one[columns] for one in rows]
            yield self._padded(some, 0), [len(one) for one in some], columns

    def _padded(self, rows: Sequence[Sequence[int]], padding: int) -> Tensor:
        padded = torch.full((len(rows), max(map(len, rows))), padding, dtype=torch.int64)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return padded.to(self._device)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The numbers of all rows, the longest first, so that rows of a batch have about one length."""
        order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
        while order:
            count = self.batch_size or max(1, BATCH_TOKENS // max(1, lengths[order[0]]))
            yield order[:count]
            order = order[count:]

    def _computing(self) -> ExitStack:
        """The scope in which the model computes."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(arithmetic(self.precision, self._device))
        stack.enter_context(kernels_as_asked(self.accelerate))
        stack.enter_context(self.model.frozen_weights())
        return stack


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """What both begin with."""
    pairs = zip(one, other, strict=False)
    return tuple(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _rows_of_a_batch(batch_size: int | str, most: int | None) -> int | None:
    """The number of rows; None: tokens decide."""
    if str(batch_size).startswith("auto"):
        return most
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise UserError(f"batch_size must be auto or at least 1; got {batch_size}")
    return int(batch_size) if most is None else min(int(batch_size), most)


def _sampling_of(settings: dict[str, Any]) -> SamplingConfig:
    """The settings of a task for generating text."""
    rest = dict(settings)
    until = rest.pop("until", None) or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    lengths = [rest.pop(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in rest]
    fields = {name: rest.pop(name) for name in SAMPLING & rest.keys() if rest[name] is not None}
    if not rest.pop("do_sample", False):
        fields["temperature"] = 0.0
    for name, value in rest.items():
        raise UserError(f"the model logdepth does not know the setting {name}={value}{did_you_mean(name, SAMPLING)}")
    return SamplingConfig(
        max_tokens=lengths[0] if lengths else MAX_GENERATED, stop=tuple(one for one in stop if one), **fields
    )


def main() -> None:
    """Run lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"lm_eval: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
