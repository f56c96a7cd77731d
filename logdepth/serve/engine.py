"""The engine: many texts at once, from prompts of any lengths that come at any time.

A step of the engine reads a stretch of some prompts and then adds one token to every text, so that a long prompt does
not keep the others waiting. A text depends on its prompt, its settings and its number only: whoever else is there
changes no more than the last bits of the logits, and tokens are chosen from random numbers of the text's own.

`submit` and `cancel` may be called from any thread; everything else belongs to the thread that steps.
"""

import itertools
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from logdepth.acceleration import kernels_as_asked
from logdepth.data import Tokenizer
from logdepth.decoding import Slots
from logdepth.decoding.continuation import Continuation, Detokenizer, NotFiniteError, choose_next
from logdepth.decoding.sampling import likeliest
from logdepth.decoding.slots import bytes_per_slot, num_slots
from logdepth.models import LM, LMState
from logdepth.ops import FrozenTable
from logdepth.ops.precision import Precision, arithmetic, rounds_products
from logdepth.serve.anatomy import recorded_slopes
from logdepth.serve.jobs import Event, Failed, Job, PromptRead, Scored, TextAdded
from logdepth.serve.snapshots import Prefix, PrefixCache, Snapshot

WORTH_KEEPING = 64
"""A snapshot is kept where it spares at least so many tokens of reading."""
MOST_PROMPTS = 64
"""Prompts of which stretches are read in one step at most."""
LEAST_LOG_PROBABILITY = -9999.0
"""What stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of an engine."""

    max_texts: int = 1024
    """Maximum number of texts that grow at the same time; others wait."""
    state_bytes: int = 4 * 2**30
    """Maximum bytes of the states of these texts. One text is always let in."""
    cache_bytes: int = 2**30
    """Maximum bytes of the states that are kept for prompts that begin like earlier ones; 0: none are kept."""
    stretch: int | None = None
    """Tokens of a prompt that are read at once, and between the states that are kept; by default 256 on a CPU and
    2,048 on a GPU."""
    step_tokens: int | None = None
    """Tokens of all prompts that are read between two tokens of the texts; by default twice the stretch."""

    def __post_init__(self) -> None:
        counts = {"max_texts": self.max_texts, "stretch": self.stretch, "step_tokens": self.step_tokens}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        for name, value in (("state_bytes", self.state_bytes), ("cache_bytes", self.cache_bytes)):
            if value < 0:
                raise ValueError(f"{name} must not be negative; got {value}")


@dataclass
class Totals:
    """What an engine has done since its start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Those of them that were not read, because an earlier state was there."""
    text_tokens: int = 0
    steps: int = 0
    failures: int = 0


@dataclass(eq=False)
class _Reading:
    """A prompt that is being read."""

    job: Job
    prefix: Prefix
    num_read: int
    num_cached: int
    snapshot: Snapshot | None
    """The latest one, with which the next shares blocks."""
    state: LMState | None
    """After what was read; None where nothing was."""
    features: Tensor | None
    """What the head reads after the last token that was read, `[1, dim]`."""
    detokenizer: Detokenizer | None
    """Where the prompt's tokens are scored."""

    @property
    def is_read(self) -> bool:
        return self.num_read == len(self.job.tokens)


@dataclass(eq=False)
class _Text:
    """A text that is growing."""

    job: Job
    continuation: Continuation
    snapshot: Snapshot | None
    token: int = 0
    """The newest token, which the model has not read yet."""
    failed: bool = False
    pending: list[tuple[int, Scored]] = field(default_factory=list)
    """Scored tokens whose text is not certain yet, and where it begins."""
    num_characters: int = 0
    """Of the text of all tokens so far."""
    num_given: int = 0
    """Of what was given out."""


class Engine:
    """Texts from one model, many at once."""

    def __init__(
        self,
        model: LM,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        separated: bool = True,
        precision: Precision = "auto",
        accelerate: bool = True,
        on_warning: Callable[[str], None] = warnings.warn,
    ) -> None:
        """
        Args:
            model: any LM. Its weights must stay as they are.
            tokenizer: the model's.
            config: limits.
            separated: whether the model knows the end of a document, which then ends a text.
            precision: of the arithmetic.
            accelerate: on a GPU, use kernels, and record steps as CUDA graphs.
            on_warning: called with one line, once, if steps cannot be recorded.
        """
        self.model, self.tokenizer, self.separated = model.eval(), tokenizer, separated
        self.config = config or EngineConfig()
        self.device = model.embedding.weight.device
        self.stretch = self.config.stretch or (2048 if self.device.type == "cuda" else 256)
        self.step_tokens = self.config.step_tokens or 2 * self.stretch
        self.cache = PrefixCache(self.config.cache_bytes, self.stretch)
        self.totals = Totals()
        self._precision, self._accelerate = precision, accelerate
        self._inbox: SimpleQueue[tuple[str, Job | None]] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._reading: deque[_Reading] = deque()
        self._slots: Slots[_Text] = Slots(model, graphs=accelerate, on_warning=on_warning)
        self._table = FrozenTable(always=self.device.type == "cuda")
        self._slot_bytes: dict[int, int] = {}
        self._stopped = False

    def submit(self, job: Job) -> None:
        """Take a job; a later step begins it."""
        if not len(job.tokens):
            raise ValueError("a job needs at least one token")
        if job.sampling is not None and not 1 <= job.count <= self.config.max_texts:
            raise ValueError(f"count must be from 1 to max_texts = {self.config.max_texts}; got {job.count}")
        start = job.start
        if start is not None and (start.length > len(job.tokens) or start.features is None):
            raise ValueError("start must be the state after the first tokens of the job, with what the head reads")
        self._inbox.put(("submit", job))

    def cancel(self, job: Job) -> None:
        """End a job without another event, except those that are under way."""
        self._inbox.put(("cancel", job))

    def stop(self) -> None:
        """End `run`, whatever is left to do."""
        self._inbox.put(("stop", None))

    def run(self, notify: Callable[[list[Event]], None]) -> None:
        """Step until `stop` is called. The events of each step are passed on together."""
        while True:
            if self.idle:
                self._take(*self._inbox.get())
            events = [] if self._stopped else self.step()
            if self._stopped:
                return
            if events:
                notify(events)

    def start(self, notify: Callable[[list[Event]], None]) -> threading.Thread:
        """`run` in a thread of its own."""
        thread = threading.Thread(target=self.run, args=(notify,), name="engine", daemon=True)
        thread.start()
        return thread

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, except what has just been submitted."""
        return not (self._waiting or self._busy)

    @property
    def low(self) -> bool:
        """Whether products are computed in 16 bits."""
        return rounds_products(self._precision, self.device)

    @property
    def num_texts(self) -> int:
        """Texts that are growing."""
        return len(self._slots.members)

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    @property
    def state_bytes(self) -> int:
        """Bytes of the memory for the states of texts."""
        return self._slots.nbytes

    def step(self) -> list[Event]:
        """Read a stretch of some prompts, add one token to every text, and return what has come of it."""
        events: list[Event] = []
        try:
            while not self._inbox.empty():
                self._take(*self._inbox.get())
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode())
                stack.enter_context(arithmetic(self._precision, self.device))
                stack.enter_context(kernels_as_asked(self._accelerate))
                self._let_in()
                if self._reading:
                    events += self._read()
                if self._slots.members:
                    events += self._grow()
        except Exception as error:
            # Nobody else is to wait for ever, and the next job may well succeed.
            traceback.print_exc(file=sys.stderr)
            events += self._fail(f"{type(error).__name__}: {error}")
        self.totals.steps += 1
        return events

    def _take(self, what: str, job: Job | None) -> None:
        if job is None:
            self._stopped = True
        elif what == "submit":
            self._waiting.append(job)
        else:
            self._waiting = deque(one for one in self._waiting if one is not job)
            self._reading = deque(one for one in self._reading if one.job is not job)
            self._slots.leave([text for text in self._slots.members if text.job is job])

    def _fail(self, reason: str) -> list[Event]:
        """End all jobs that have begun."""
        jobs = dict.fromkeys(self._begun_jobs())
        if not jobs and self._waiting:
            jobs = dict.fromkeys([self._waiting.popleft()])  # its beginning has failed
        self._reading.clear()
        self._slots.clear()
        self.totals.failures += len(jobs)
        return [Failed(job, reason) for job in jobs]

    def _let_in(self) -> None:
        """Begin with the jobs that have waited longest, as far as there is room for their texts."""
        if not self._waiting:
            return
        begun = self._begun_jobs()
        texts = len(self._slots.members) + self._num_coming()
        longest = max((one.longest for one in begun), default=0)
        while self._waiting:
            job = self._waiting[0]
            texts, longest = texts + _num_texts(job), max(longest, job.longest)
            if self._busy and not self._fits(texts, longest):
                return
            self._reading.append(self._begun(job))
            self._waiting.popleft()

    def _begun_jobs(self) -> list[Job]:
        return [one.job for one in self._reading] + [text.job for text in self._slots.members]

    @property
    def _busy(self) -> bool:
        return bool(self._reading or self._slots.members)

    def _fits(self, texts: int, longest: int) -> bool:
        """Whether there is room for so many texts, and for states of the longest of them in all slots."""
        if texts > self.config.max_texts or len(self._reading) >= self.config.max_texts:
            return False
        return num_slots(texts) * self._bytes_of_slot(longest) <= self.config.state_bytes

    def _bytes_of_slot(self, longest: int) -> int:
        room = (1 << longest.bit_length()) - 1  # one of few
        if room not in self._slot_bytes:
            self._slot_bytes[room] = bytes_per_slot(self.model, room)
        return self._slot_bytes[room]

    def _num_coming(self) -> int:
        """The number of texts that the prompts that are being read will have."""
        return sum(_num_texts(one.job) for one in self._reading)

    def _begun(self, job: Job) -> _Reading:
        prefix = Prefix(job.tokens, self.stretch)
        found = job.start
        scores = job.prompt_alternatives is not None
        if not scores or job.known:
            cached = self.cache.find(Prefix(prefix.tokens[: job.known], self.stretch) if scores else prefix)
            longer = cached is not None and (found is None or cached.length > found.length)
            if cached is not None and longer and not (scores and cached.features is None):
                found = cached
        reading = _Reading(job, prefix, 0, 0, None, None, None, None)
        if found is not None:
            reading.num_read = reading.num_cached = found.length
            reading.snapshot, reading.state = found, found.state()
            reading.features = None if found.features is None else found.features[None]
        if job.prompt_alternatives is not None:
            reading.detokenizer = Detokenizer(self.tokenizer, prefix.tokens[: reading.num_read].tolist())
        self.totals.prompt_tokens += len(job.tokens)
        self.totals.cached_tokens += reading.num_cached
        return reading

    def _read(self) -> list[Event]:
        """Read a stretch of each of some prompts, and begin the texts of those that have been read."""
        events: list[Event] = [_prompt_read(one) for one in self._reading if one.is_read]  # by an earlier job
        chosen = self._stretches()
        if chosen:
            with recorded_slopes(self.model, any(reading.job.slopes for reading, _ in chosen)) as slopes:
                features = self._read_stretches(chosen)
            places = itertools.accumulate((count for _, count in chosen), initial=0)
            for place, (reading, count), some in zip(places, chosen, features, strict=False):
                scored = self._scored(reading, count, some)
                reading.num_read += count
                reading.features = some[-1:].clone()
                self._keep(reading)
                if scored or reading.is_read:
                    own = tuple(one[place : place + count] for one in slopes) if reading.job.slopes else ()
                    events.append(_prompt_read(reading, scored, own))
        read = [one for one in self._reading if one.is_read]
        self._reading = deque(one for one in self._reading if not one.is_read)
        # Those that had a turn and need another wait until all have had one.
        self._reading.rotate(-sum(not one.is_read for one, _ in chosen))
        return events + self._begin_texts([one for one in read if one.job.sampling is not None])

    def _stretches(self) -> list[tuple[_Reading, int]]:
        """Of which prompts how many tokens are read now."""
        left, chosen = self.step_tokens, []
        for reading in itertools.islice(self._reading, MOST_PROMPTS):
            rest = len(reading.job.tokens) - reading.num_read
            count = min(rest, self.stretch - reading.num_read % self.stretch, left)
            if count:
                chosen.append((reading, count))
                left -= count
        return chosen

    def _read_stretches(self, chosen: list[tuple[_Reading, int]]) -> Sequence[Tensor]:
        """Read all of them as packed documents; what the head reads at their tokens."""
        counts = [count for _, count in chosen]
        tokens = np.concatenate(
            [reading.prefix.tokens[reading.num_read : reading.num_read + count] for reading, count in chosen]
        )
        if all(reading.state is None for reading, _ in chosen):
            state = self.model.init_state(len(chosen))
        else:
            states = [self.model.init_state(1) if one.state is None else one.state for one, _ in chosen]
            state = LMState.concatenate(states) if len(states) > 1 else states[0]
        with self.model.frozen_weights(self._table):
            features, after = self.model.continued(
                torch.from_numpy(tokens).long().to(self.device), state, cu_seqlens=np.cumsum([0, *counts])
            )
        for place, (reading, _) in enumerate(chosen):
            reading.state = after if len(chosen) == 1 else after.select([place])
        stretches: Sequence[Tensor] = torch.split(features, counts)
        return stretches

    def _keep(self, reading: _Reading) -> None:
        """Keep the state at the end of a stretch, and of the prompt."""
        job, length = reading.job, reading.num_read
        since = length - (0 if reading.snapshot is None else reading.snapshot.length)
        whole = length == len(job.tokens)
        caches = self.config.cache_bytes > 0 and (length % self.stretch == 0 or (whole and since >= WORTH_KEEPING))
        if caches or (whole and job.keep):
            assert reading.state is not None
            assert reading.features is not None
            reading.snapshot = Snapshot.of(reading.state, reading.features[0], earlier=reading.snapshot)
        if caches and reading.snapshot is not None:
            self.cache.add(reading.prefix, reading.snapshot)

    def _scored(self, reading: _Reading, count: int, features: Tensor) -> tuple[Scored, ...]:
        """The tokens of the stretch that has been read with their probabilities, where the job wants them."""
        wanted, detokenizer = reading.job.prompt_alternatives, reading.detokenizer
        if wanted is None or detokenizer is None:
            return ()
        end = reading.num_read + count
        tokens = reading.prefix.tokens[reading.num_read : end].tolist()
        texts = [detokenizer.add(token) for token in tokens]
        if end == len(reading.job.tokens):
            texts[-1] += detokenizer.finish()
        first = reading.features is None  # nothing predicts the first token of all
        before = features[:-1] if reading.features is None else torch.cat([reading.features, features[:-1]])
        logs = self.model.logits(before).double().log_softmax(dim=-1)
        index = torch.tensor(tokens[first:], dtype=torch.int64, device=logs.device)
        own = logs.gather(1, index[:, None])[:, 0].tolist()
        best = logs.topk(min(wanted, logs.shape[1]), dim=-1)
        scored = [
            Scored(token, text, _finite(one), tuple(zip(places, map(_finite, values), strict=True)))
            for token, text, one, places, values in zip(
                tokens[first:], texts[first:], own, best.indices.tolist(), best.values.tolist(), strict=True
            )
        ]
        return (*([Scored(tokens[0], texts[0], None)] if first else []), *scored)

    def _begin_texts(self, readings: list[_Reading]) -> list[Event]:
        """The first tokens of all texts of these prompts; those that go on get a slot."""
        if not readings:
            return []
        rows = [place for place, reading in enumerate(readings) for _ in range(reading.job.count)]
        texts = [self._text(reading, number) for reading in readings for number in range(reading.job.count)]
        features = torch.cat([reading.features for reading in readings if reading.features is not None])
        logits = self.model.logits(features)
        events = self._choose(texts, logits[torch.tensor(rows, device=logits.device)])
        going = [place for place, text in enumerate(texts) if text.continuation.ended is None and not text.failed]
        if going:
            states = [reading.state for reading in readings if reading.state is not None]
            state = LMState.concatenate(states).select([rows[place] for place in going])
            self._slots.join([texts[place] for place in going], state, coming=self._num_coming())
        return events

    def _text(self, reading: _Reading, number: int) -> _Text:
        job = reading.job
        assert job.sampling is not None
        tokens = reading.prefix.tokens.tolist()
        continuation = Continuation(self.tokenizer, tokens, job.sampling, number, separated=self.separated)
        return _Text(job, continuation, reading.snapshot)

    def _grow(self) -> list[Event]:
        """One more token of every text."""
        texts = list(self._slots.members)
        logits = self._slots.step([text.token for text in texts])
        events = self._choose(texts, logits)
        ended = [text for text in texts if text.continuation.ended is not None and not text.failed]
        self._keep_ended(ended)
        self._slots.leave(ended)
        return events

    def _choose(self, texts: list[_Text], logits: Tensor) -> list[Event]:
        """The next token of each text, from the logits of each."""
        try:
            chosen = choose_next([text.continuation for text in texts], logits)
        except NotFiniteError as error:
            # Other texts may well be all right.
            failed = dict.fromkeys(texts[row].job for row in error.rows)
            self._slots.leave([text for text in self._slots.members if text.job in failed])
            rest = [row for row, text in enumerate(texts) if text.job not in failed]
            for text in texts:
                text.failed = text.failed or text.job in failed
            self.totals.failures += len(failed)
            failures: list[Event] = [Failed(job, str(error)) for job in failed]
            return failures + (self._choose([texts[row] for row in rest], logits[rest]) if rest else [])
        self.totals.text_tokens += len(chosen)
        return [
            self._added(text, token, logits[row]) for row, (text, token) in enumerate(zip(texts, chosen, strict=True))
        ]

    def _added(self, text: _Text, token: int, logits: Tensor) -> Event:
        continuation = text.continuation
        num_chosen = continuation.num_chosen
        given = continuation.add(token)
        text.token = token
        text.num_given += len(given)
        scored: tuple[Scored, ...] = ()
        if text.job.alternatives is not None:
            if num_chosen < continuation.num_chosen:  # it is not the end of the document
                one = _scored_choice(token, continuation.added, logits, text.job.alternatives)
                text.pending.append((text.num_characters, one))
            text.num_characters += len(continuation.added)
            scored = _certain(text)
        return TextAdded(text.job, continuation.number, given, scored, continuation.num_chosen, continuation.ended)

    def _keep_ended(self, texts: list[_Text]) -> None:
        """Keep the states of texts that have ended, for prompts that go on from there."""
        worth = [
            text
            for text in texts
            if len(text.continuation.tokens) - (text.snapshot.length if text.snapshot else 0) > WORTH_KEEPING
        ]
        if not worth or not self.config.cache_bytes:
            return
        states = self._slots.states(worth)
        for place, text in enumerate(worth):
            snapshot = Snapshot.of(states.select([place]), earlier=text.snapshot)
            self.cache.add(Prefix(text.continuation.tokens[: snapshot.length], self.stretch), snapshot)


def _num_texts(job: Job) -> int:
    return 0 if job.sampling is None else job.count


def _prompt_read(reading: _Reading, scored: tuple[Scored, ...] = (), slopes: tuple[Tensor, ...] = ()) -> PromptRead:
    snapshot = reading.snapshot if reading.is_read and reading.job.keep else None
    state_bytes = 0 if reading.state is None else reading.state.nbytes
    return PromptRead(reading.job, scored, reading.num_read, reading.num_cached, state_bytes, snapshot, slopes)


def _scored_choice(token: int, text: str, logits: Tensor, count: int) -> Scored:
    """A chosen token with its log-probability, and with those of the `count` likeliest tokens."""
    scores = logits.double().cpu().numpy()
    logs = scores - scores.max()
    logs -= np.log(np.exp(logs).sum())
    best: list[int] = likeliest(logs, count)[:count].tolist() if count else []
    return Scored(token, text, _finite(float(logs[token])), tuple((one, _finite(float(logs[one]))) for one in best))


def _certain(text: _Text) -> tuple[Scored, ...]:
    """The scored tokens whose text begins within what was given out. Those of a stop text never are."""
    certain = []
    while text.pending and (text.pending[0][0] < text.num_given or not text.pending[0][1].text):
        certain.append(text.pending.pop(0)[1])
    return tuple(certain)


def _finite(log_probability: float) -> float:
    return max(log_probability, LEAST_LOG_PROBABILITY) if log_probability == log_probability else LEAST_LOG_PROBABILITY
