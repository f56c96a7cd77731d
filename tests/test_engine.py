"""The engine: whoever else is there, each text is the one that it would be alone; states are kept, shared and freed."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logdepth.data import Tokenizer, prepare
from logdepth.decoding import SamplingConfig
from logdepth.decoding.continuation import Continuation
from logdepth.decoding.slots import bytes_per_slot
from logdepth.generate import generate
from logdepth.models import LM
from logdepth.serve import Engine, EngineConfig, Event, Failed, Job, PromptRead, Scored, Snapshot, TextAdded
from tests.block_states import same_state
from tests.decoders import built
from tests.small_models import SMALL_MODELS
from tests.tiny_corpus import tiny_data

PROMPT = (
    "the cat sees a small dog in the garden . every bird follows the old clock under a tree . "
    "my neighbour draws every bird by the river . a small dog remembers the cat near the door . "
)
MODELS = ("ar-grc", "deep", "hybrid", "memory-window", "memory-fold", "transformer-alibi", "sinusoidal-untied")


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    return prepare(tiny_data(corpus)).tokenizer


def model_named(name: str, tokenizer: Tokenizer) -> LM:
    return built(name, tokenizer.vocab_size)


def engine_of(model: LM, tokenizer: Tokenizer, **limits: Any) -> Engine:
    """With stretches so short that prompts are read in several."""
    return Engine(model, tokenizer, EngineConfig(**{"stretch": 8, **limits}))


class Results:
    """What came of jobs."""

    def __init__(self) -> None:
        self.texts: dict[tuple[Job, int], str] = defaultdict(str)
        self.scored: dict[tuple[Job, int], list[Scored]] = defaultdict(list)
        self.ended: dict[tuple[Job, int], str] = {}
        self.num_tokens: dict[tuple[Job, int], int] = {}
        self.prompts: dict[Job, list[PromptRead]] = defaultdict(list)
        self.failed: dict[Job, str] = {}

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, PromptRead):
                self.prompts[event.job].append(event)
            elif isinstance(event, Failed):
                self.failed[event.job] = event.reason
            else:
                key = event.job, event.number
                assert key not in self.ended, "nothing follows the end"
                self.texts[key] += event.text
                self.scored[key] += event.scored
                self.num_tokens[key] = event.num_tokens
                if event.ended is not None:
                    self.ended[key] = event.ended

    def of(self, job: Job) -> list[str]:
        assert all((job, number) in self.ended for number in range(job.count))
        return [self.texts[job, number] for number in range(job.count)]


def finished(engine: Engine, *jobs: Job) -> Results:
    results = Results()
    for job in jobs:
        engine.submit(job)
    for _ in range(2000):
        results.take(engine.step())
        if engine.idle:
            return results
    raise AssertionError("the engine does not come to an end")


def alone(model: LM, tokenizer: Tokenizer, job: Job, number: int = 0) -> str:
    """The text by the model's own steps, one token at a time."""
    assert job.sampling is not None
    text, pieces = Continuation(tokenizer, job.tokens, job.sampling, number), ""
    with torch.no_grad():
        logits, state = model.step(torch.tensor([job.tokens]), model.init_state(1))
        while True:
            token = text.choose(logits[0, -1].double().numpy())
            pieces += text.add(token)
            if text.ended:
                return pieces
            logits, state = model.step(torch.tensor([[token]]), state)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_that_of_generate(name: str, tokenizer: Tokenizer) -> None:
    model, config = model_named(name, tokenizer), SamplingConfig(max_tokens=20, seed=5, stop=("tree",))
    prompts = [PROMPT[: 7 * number] or "my" for number in range(6)]
    jobs = [Job(tokens=tokenizer.encode(prompt), sampling=config) for prompt in prompts]
    results = finished(engine_of(model, tokenizer), *jobs)
    for prompt, job in zip(prompts, jobs, strict=True):
        expected = "".join(piece.text for piece in generate(model, tokenizer, [prompt], config))
        assert results.of(job) == [expected]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_as_alone_whoever_comes_and_goes(name: str, seed: int, tokenizer: Tokenizer) -> None:
    """Random prompts, settings and limits; jobs come at random steps, and some are cancelled."""
    model, chance = model_named(name, tokenizer), np.random.default_rng(seed)
    limits = [{"max_texts": 3}, {"cache_bytes": 0, "step_tokens": 11}, {"state_bytes": 60_000, "stretch": 4}][seed]
    engine = engine_of(model, tokenizer, **limits)
    tokens, results = tokenizer.encode(PROMPT), Results()
    begun: list[Job] = []
    cancelled: set[Job] = set()
    for number in range(120):
        if number < 60 and chance.random() < 0.3:
            start = int(chance.choice([0, 0, 9]))  # so that prompts have beginnings in common
            sampling = SamplingConfig(
                max_tokens=int(chance.integers(1, 25)),
                temperature=float(chance.choice([0.0, 0.7, 1.5])),
                top_k=[None, 5][chance.integers(2)],
                repetition_penalty=float(chance.choice([1.0, 1.3])),
                seed=int(chance.integers(1000)),
                stop=[(), ("dog", "r")][chance.integers(2)],
            )
            length = int(chance.integers(1, len(tokens) - start))
            job = Job(tokens=tokens[start : start + length], sampling=sampling, count=int(chance.integers(1, 4)))
            engine.submit(job)
            begun.append(job)
        if begun and chance.random() < 0.05:
            engine.cancel(victim := begun[chance.integers(len(begun))])
            cancelled.add(victim)
        results.take(engine.step())
        assert engine.num_texts <= limits.get("max_texts", 1024)
    while not engine.idle:
        results.take(engine.step())
    assert len(begun) > 8
    assert not results.failed
    for job in begun:
        for number in range(job.count):
            if (job, number) in results.ended:
                assert results.texts[job, number] == alone(model, tokenizer, job, number)
            else:
                assert job in cancelled


@pytest.mark.parametrize("name", MODELS)
def test_prompts_that_begin_alike_are_read_once(name: str, tokenizer: Tokenizer) -> None:
    model, tokens = model_named(name, tokenizer), tokenizer.encode(PROMPT)
    sampling = SamplingConfig(max_tokens=6, seed=1)
    engine = engine_of(model, tokenizer)
    first, second = (Job(tokens=tokens[:length], sampling=sampling) for length in (20, 40))
    results = finished(engine, first)
    again = finished(engine, second)
    assert results.prompts[first][-1].num_cached == 0
    assert again.prompts[second][-1].num_cached == 16
    assert again.of(second) == [alone(model, tokenizer, second)]
    assert engine.totals.cached_tokens == 16
    other = Job(tokens=[*tokens[:12], *tokens[:9]], sampling=sampling)
    found = finished(engine, other)
    assert found.prompts[other][-1].num_cached == 8
    assert found.of(other) == [alone(model, tokenizer, other)]


def test_the_same_prompt_is_not_read_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_named("hybrid", tokenizer)
    engine = engine_of(model, tokenizer)
    tokens = tokenizer.encode(PROMPT)[:24]
    job, again = (Job(tokens=tokens, sampling=SamplingConfig(max_tokens=6)) for _ in range(2))
    assert len(tokens) == 24
    expected = finished(engine, job).of(job)
    monkeypatch.setattr(model, "continued", None)
    results = finished(engine, again)
    assert results.of(again) == expected
    assert results.prompts[again][-1].num_cached == 24


def test_the_state_of_a_long_text_is_kept_for_what_follows_it(tokenizer: Tokenizer) -> None:
    model = model_named("memory-window", tokenizer)
    engine = engine_of(model, tokenizer)
    job = Job(tokens=tokenizer.encode("the cat"), sampling=SamplingConfig(max_tokens=90, temperature=0.0))
    results = finished(engine, job)
    assert results.ended == {(job, 0): "length"}
    assert max(engine.cache.lengths()) == len(job.tokens) + 89
    text = Continuation(tokenizer, job.tokens, job.sampling)
    with torch.no_grad():
        for _ in range(90):
            text.add(int(model(torch.tensor([text.tokens]))[0, -1].argmax()))
    more = Job(tokens=[*text.tokens, 7], sampling=SamplingConfig(max_tokens=3))
    found = finished(engine, more)
    assert found.prompts[more][-1].num_cached == len(job.tokens) + 89
    assert found.of(more) == [alone(model, tokenizer, more)]


@pytest.mark.parametrize("name", MODELS)
def test_states_are_given_back_and_continued(name: str, tokenizer: Tokenizer) -> None:
    model, tokens = model_named(name, tokenizer), tokenizer.encode(PROMPT)
    engine = engine_of(model, tokenizer, cache_bytes=0)
    keep = Job(tokens=tokens[:21], keep=True)
    results = finished(engine, keep)
    (read,) = results.prompts[keep]
    snapshot = read.snapshot
    assert isinstance(snapshot, Snapshot)
    assert snapshot.length == 21
    assert not results.texts
    with torch.no_grad():
        same_state(snapshot.state(), model.step(torch.tensor([tokens[:21]]), model.init_state(1))[1])
    sampling = SamplingConfig(max_tokens=9, seed=3)
    for length in (21, 30):  # the state alone, and something after it
        job = Job(tokens=tokens[:length], start=snapshot, sampling=sampling, count=2)
        found = finished(engine, job)
        assert found.prompts[job][-1].num_cached == 21
        assert found.of(job) == [alone(model, tokenizer, job, number) for number in range(2)]
    further = finished(engine, one := Job(tokens=tokens[:33], start=snapshot, keep=True)).prompts[one][-1].snapshot
    with torch.no_grad():
        same_state(further.state(), model.step(torch.tensor([tokens[:33]]), model.init_state(1))[1])


@pytest.mark.parametrize("name", ["ar-grc", "hybrid", "memory-window"])
def test_probabilities_of_prompts_and_texts(name: str, tokenizer: Tokenizer) -> None:
    model, tokens = model_named(name, tokenizer), tokenizer.encode(PROMPT)[:29]
    engine = engine_of(model, tokenizer)
    sampling = SamplingConfig(max_tokens=12, temperature=0.7, seed=2)
    job = Job(tokens=tokens, sampling=sampling, alternatives=3, prompt_alternatives=2)
    finished(engine, Job(tokens=tokens, sampling=sampling))  # the cache is not read
    results = finished(engine, job)
    assert results.prompts[job][-1].num_read == 29
    prompt = [one for event in results.prompts[job] for one in event.scored]
    assert [one.token for one in prompt] == tokens
    assert "".join(one.text for one in prompt) == tokenizer.decode(tokens)
    text = results.scored[job, 0]
    assert "".join(one.text for one in text) == results.texts[job, 0]
    assert len(text) == results.num_tokens[job, 0] == 12
    with torch.no_grad():
        logs = model(torch.tensor([[*tokens, *(one.token for one in text)]]))[0].log_softmax(dim=-1)
    assert prompt[0].log_probability is None
    for place, one in enumerate([*prompt[1:], *text]):
        assert one.log_probability == pytest.approx(float(logs[place, one.token]), abs=1e-6)
        count = 2 if place < 28 else 3
        best = logs[place].topk(count)
        assert [token for token, _ in one.alternatives] == best.indices.tolist()
        assert [value for _, value in one.alternatives] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_probabilities_after_a_state(tokenizer: Tokenizer) -> None:
    model, tokens = model_named("hybrid", tokenizer), tokenizer.encode(PROMPT)[:20]
    engine = engine_of(model, tokenizer)
    snapshot = finished(engine, keep := Job(tokens=tokens[:9], keep=True)).prompts[keep][-1].snapshot
    whole, after = Job(tokens=tokens, prompt_alternatives=0), Job(tokens=tokens, start=snapshot, prompt_alternatives=0)
    one, other = (
        [one for event in finished(engine, job).prompts[job] for one in event.scored] for job in (whole, after)
    )
    assert len(other) == 11
    for left, right in zip(one[9:], other, strict=True):
        assert left._replace(log_probability=0.0) == right._replace(log_probability=0.0)
        assert left.log_probability == pytest.approx(right.log_probability, abs=1e-9)


def test_tokens_of_a_stop_text_are_not_scored(tokenizer: Tokenizer) -> None:
    model = model_named("ar-grc", tokenizer)
    tokens, sampling = tokenizer.encode("the cat"), SamplingConfig(max_tokens=40, seed=1)
    whole = alone(model, tokenizer, Job(tokens=tokens, sampling=sampling))
    stop = whole[15:18]
    job = Job(tokens=tokens, sampling=replace(sampling, stop=(stop,)), alternatives=0)
    results = finished(engine_of(model, tokenizer), job)
    assert results.of(job) == [whole[: whole.index(stop)]]
    texts = [one.text for one in results.scored[job, 0]]
    assert results.texts[job, 0].startswith("".join(texts[:-1]))
    assert len("".join(texts)) <= whole.index(stop) + len(texts[-1])
    assert results.ended[job, 0] == "stop"


def test_the_end_of_a_document_ends_a_text_and_is_no_part_of_it(tokenizer: Tokenizer) -> None:
    model = model_named("ar-grc", tokenizer)
    with torch.no_grad():  # a head that always wants the end
        model.embedding.weight.zero_()
        model.blocks[0].out_of_state.bias.fill_(1.0)
        model.embedding.weight[tokenizer.end_of_document] = 1.0
    job = Job(tokens=[5, 6], sampling=SamplingConfig(temperature=0.0), alternatives=1)
    results = finished(engine_of(model, tokenizer), job)
    assert (results.of(job), results.scored[job, 0], results.num_tokens[job, 0]) == ([""], [], 0)


def test_a_long_prompt_does_not_stall_the_others(tokenizer: Tokenizer) -> None:
    model = model_named("ar-grc", tokenizer)
    engine, tokens = engine_of(model, tokenizer), tokenizer.encode(PROMPT * 5)
    short = [Job(tokens=tokens[:3], sampling=SamplingConfig(max_tokens=30)) for _ in range(3)]
    long = Job(tokens=tokens, sampling=SamplingConfig(max_tokens=2))
    later = Job(tokens=tokens[4:9], sampling=SamplingConfig(max_tokens=2))
    for job in (short[0], short[1], long, later, short[2]):
        engine.submit(job)
    order: list[Job] = []
    for _ in range(200):
        events = engine.step()
        growing = {event.job for event in events if isinstance(event, TextAdded)}
        order += [event.job for event in events if isinstance(event, PromptRead)]
        if len(growing) > 2:  # all that have been read grow in every step
            assert {short[0], short[1]} <= growing or order[-1] is long
    assert order.index(later) < order.index(long)
    assert order[-1] is long
    assert len(tokens) > 20 * 8


def test_cancelling_frees_the_slot(tokenizer: Tokenizer) -> None:
    model, tokens = model_named("hybrid", tokenizer), tokenizer.encode(PROMPT)
    engine = engine_of(model, tokenizer, max_texts=2)
    forever = SamplingConfig(max_tokens=100_000)
    growing = Job(tokens=tokens[:5], sampling=forever, count=2)
    reading = Job(tokens=tokens, sampling=SamplingConfig(max_tokens=4))
    engine.submit(growing)
    for _ in range(4):
        engine.step()
    engine.submit(reading)
    engine.step()
    assert (engine.num_texts, engine.num_waiting) == (2, 1)
    engine.cancel(growing)
    results = Results()
    results.take(engine.step())
    assert (engine.num_texts, engine.num_waiting) == (0, 0)
    while not engine.idle:
        results.take(engine.step())
    assert results.of(reading) == [alone(model, tokenizer, reading)]
    engine.cancel(reading)  # which has ended
    engine.submit(reading)
    engine.cancel(reading)
    assert engine.step() == []
    assert engine.idle


def test_texts_wait_for_room(tokenizer: Tokenizer) -> None:
    """States of long texts take more memory: as many run together as fit, and one always does."""
    model = model_named("memory-window", tokenizer)
    room = bytes_per_slot(model, 255)
    engine = engine_of(model, tokenizer, state_bytes=2 * room)
    jobs = [Job(tokens=[3, 4, 5], sampling=SamplingConfig(max_tokens=200, seed=seed)) for seed in range(5)]
    for job in jobs:
        engine.submit(job)
    most = 0
    while not engine.idle or not most:
        engine.step()
        most = max(most, engine.num_texts)
        assert engine.state_bytes <= 3 * room  # one slot more, which belongs to no text
    assert most == 2
    engine = engine_of(model, tokenizer, state_bytes=0)
    results = finished(engine, *jobs[:2])
    assert len(results.ended) == 2


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_bytes_of_a_slot_are_known_before(name: str, tokenizer: Tokenizer) -> None:
    model = built(name)
    states = [block.static_state(block.init_state(3)) for block in model.blocks]
    sizes = []
    for batch in (3, 7):
        states = [block.static_state(block.init_state(batch)) for block in model.blocks]
        for one in states:
            if one is not None:
                one.make_room(100)
        sizes.append(sum(one.nbytes for one in states if one is not None))
    assert sizes[1] - sizes[0] == 4 * bytes_per_slot(model, 100)


def test_a_failure_ends_all_jobs_and_the_next_one_succeeds(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokens = model_named("hybrid", tokenizer), tokenizer.encode(PROMPT)
    engine = engine_of(model, tokenizer)
    jobs = [Job(tokens=tokens[:length], sampling=SamplingConfig(max_tokens=9)) for length in (5, 40)]
    for job in jobs:
        engine.submit(job)
    engine.step()

    def failing(*_: object) -> None:
        raise MemoryError("no more")

    results = Results()
    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1], "forward", failing)
        results.take(engine.step())
    assert results.failed == dict.fromkeys(jobs, "MemoryError: no more")
    assert "MemoryError: no more" in capsys.readouterr().err
    assert engine.idle
    assert engine.totals.failures == 2
    assert finished(engine, jobs[1]).of(jobs[1]) == [alone(model, tokenizer, jobs[1])]


def test_jobs_that_make_no_sense_are_refused(tokenizer: Tokenizer) -> None:
    model = model_named("ar-grc", tokenizer)
    engine = engine_of(model, tokenizer, max_texts=4)
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit(Job(tokens=[], sampling=SamplingConfig()))
    with pytest.raises(ValueError, match="count must be from 1 to max_texts = 4; got 5"):
        engine.submit(Job(tokens=[1], sampling=SamplingConfig(), count=5))
    snapshot = finished(engine, keep := Job(tokens=[1, 2, 3], keep=True)).prompts[keep][-1].snapshot
    with pytest.raises(ValueError, match="start must be the state after the first tokens"):
        engine.submit(Job(tokens=[1, 2], start=snapshot))
    for wrong in ({"max_texts": 0}, {"stretch": 0}, {"cache_bytes": -1}):
        with pytest.raises(ValueError, match="must"):
            EngineConfig(**wrong)


def test_it_runs_in_a_thread(tokenizer: Tokenizer) -> None:
    model = model_named("hybrid", tokenizer)
    engine, results = engine_of(model, tokenizer), Results()
    thread = engine.start(results.take)
    jobs = [Job(tokens=[3, 4, seed], sampling=SamplingConfig(max_tokens=5), alternatives=1) for seed in range(4)]
    for job in jobs:
        engine.submit(job)
    for _ in range(600):
        if len(results.ended) == 4:
            break
        thread.join(0.05)
    assert [results.of(job) for job in jobs] == [[alone(model, tokenizer, job)] for job in jobs]
    engine.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_logits_that_are_not_finite_fail_only_the_jobs_that_have_them(tokenizer: Tokenizer) -> None:
    model = model_named("hybrid", tokenizer)
    jobs = [
        Job(tokens=[5, token, 7], sampling=SamplingConfig(max_tokens=9, seed=token), count=2, alternatives=0)
        for token in (6, 8, 9)
    ]
    before = finished(engine_of(model, tokenizer), *jobs)
    chosen = [{one.token for number in range(2) for one in before.scored[job, number]} for job in jobs]
    (poison, *_) = chosen[1] - chosen[0] - chosen[2] - {5, 6, 7, 8, 9}
    with torch.no_grad():
        model.embedding.weight[poison] = float("nan")  # the head is another matrix
    reading = Job(tokens=[5, poison, 7], prompt_alternatives=1)
    results = finished(engine_of(model, tokenizer), *jobs, Job(tokens=[poison], sampling=SamplingConfig()), reading)
    assert set(results.failed) > {jobs[1]}
    assert len(results.failed) == 2
    assert "not finite" in results.failed[jobs[1]]
    for job in (jobs[0], jobs[2]):
        assert results.of(job) == before.of(job)
    scored = [one.log_probability for event in results.prompts[reading] for one in event.scored]
    assert scored[2] == -9999.0
