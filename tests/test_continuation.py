"""Continuations: text that is given out when it is certain, whole, and without what ends it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logdepth.data import DataConfig, Tokenizer, TokenizerConfig, prepare
from logdepth.decoding import SamplingConfig
from logdepth.decoding.continuation import Continuation, beginning_of_a_stop, choose_next
from tests.tiny_corpus import tiny_data


@pytest.fixture(scope="module", params=["lossy", "lossless"])
def tokenizer(request: pytest.FixtureRequest, corpus: Path) -> Tokenizer:
    if request.param == "lossy":
        return prepare(tiny_data(corpus)).tokenizer
    lossless = TokenizerConfig(vocab_size=400, lossless=True)
    return prepare(DataConfig(corpus="text", paths=(corpus,), tokenizer=lossless)).tokenizer


@given(text=st.text("abc", max_size=8), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    held = beginning_of_a_stop(text, tuple(stops))
    proper = [length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
    assert held == max(proper, default=0)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), prompt=st.integers(1, 40), count=st.integers(1, 30))
def test_pieces_join_to_the_text_of_all_tokens(tokenizer: Tokenizer, seed: int, prompt: int, count: int) -> None:
    """After prompts of any tokens, which may end within a character."""
    tokens = np.random.default_rng(seed).integers(3, tokenizer.vocab_size, prompt + count).tolist()
    text = Continuation(tokenizer, tokens[:prompt], SamplingConfig(max_tokens=count), separated=False)
    pieces = [text.add(token) for token in tokens[prompt:]]
    assert text.ended == "length"
    assert text.tokens == tokens
    assert text.num_chosen == count
    whole, before = tokenizer.decode(tokens), tokenizer.decode(tokens[:prompt])
    if whole.startswith(before):
        assert "".join(pieces) == whole[len(before) :]
    else:
        assert before.endswith("\ufffd")
        assert whole.endswith("".join(pieces))


def test_a_character_that_the_prompt_began_is_in_the_text(corpus: Path) -> None:
    lossless = TokenizerConfig(vocab_size=400, lossless=True)
    tokenizer = prepare(DataConfig(corpus="text", paths=(corpus,), tokenizer=lossless)).tokenizer
    *prompt, last = tokenizer.encode("the €")
    text = Continuation(tokenizer, prompt, SamplingConfig(max_tokens=2))
    assert text.add(last) == "€"


def test_a_long_prompt_is_not_decoded_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = Tokenizer.decode
    prompt = tokenizer.encode("the cat sees a small dog under a tree . " * 200)
    monkeypatch.setattr(Tokenizer, "decode", lambda self, tokens: decoded.append(len(tokens)) or original(self, tokens))
    text = Continuation(tokenizer, prompt, SamplingConfig(max_tokens=5))
    for token in prompt[:5]:
        text.add(token)
    assert max(decoded) < 40


def test_stop_texts_are_held_back_and_left_out(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the cat sees the old clock by the river .")
    text = Continuation(tokenizer, tokens[:1], SamplingConfig(max_tokens=99, stop=("old clock", "never")))
    pieces: list[str] = []
    for token in tokens[1:]:
        pieces.append(text.add(token))
        if text.ended:
            break
    assert text.ended == "stop"
    assert "".join(pieces) == "the cat sees the ".removeprefix(tokenizer.decode(tokens[:1]))


def test_the_end_of_a_document_ends_a_text_only_where_documents_are_separate(tokenizer: Tokenizer) -> None:
    prompt, end = tokenizer.encode("the cat"), tokenizer.end_of_document
    text = Continuation(tokenizer, prompt, SamplingConfig())
    assert (text.add(end), text.ended, text.num_chosen) == ("", "stop", 0)
    text = Continuation(tokenizer, prompt, SamplingConfig(), separated=False)
    text.add(end)
    assert (text.ended, text.num_chosen) == (None, 1)


def test_numbers_and_seeds_give_choices_of_their_own(tokenizer: Tokenizer) -> None:
    scores = np.zeros(tokenizer.vocab_size)

    def chosen(seed: int, number: int) -> list[int]:
        text = Continuation(tokenizer, [3], SamplingConfig(seed=seed), number)
        return [text.choose(scores) for _ in range(8)]

    assert chosen(1, 0) == chosen(1, 0)
    assert len({tuple(chosen(seed, number)) for seed in range(3) for number in range(3)}) == 9


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_texts_are_chosen_together_as_one_by_one(tokenizer: Tokenizer, penalty: float) -> None:
    def chosen(together: bool) -> list[list[int]]:
        configs = [SamplingConfig(seed=1, temperature=one) for one in (0.0, 0.5, 2.0)]
        configs[1] = replace(configs[1], repetition_penalty=penalty)
        texts = [Continuation(tokenizer, [3], config, number) for number, config in enumerate(configs)]
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(20):
            logits = torch.randn(3, tokenizer.vocab_size, generator=generator)
            found.append(choose_next(texts, logits, together=together))
            for text, token in zip(texts, found[-1], strict=True):
                text.add(token)
        return found

    assert chosen(True) == chosen(False)
