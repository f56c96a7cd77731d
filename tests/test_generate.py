"""Generation: the same text in any batch and from any split, sampling as it says, text that arrives whole."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logdepth.data import DataConfig, Tokenizer, TokenizerConfig, prepare
from logdepth.decoding.sampling import choose
from logdepth.errors import UserError
from logdepth.generate import SamplingConfig, _ModelSteps, generate
from logdepth.models import LM, LanguageModel
from tests.small_models import SMALL_MODELS, small_model
from tests.tiny_corpus import tiny_data

PROMPTS = ["the cat", "", "a small dog remembers every", "my"]
every_model = pytest.mark.parametrize("name", SMALL_MODELS)


@pytest.fixture
def tokenizer(corpus: Path) -> Tokenizer:
    return prepare(tiny_data(corpus)).tokenizer


def texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: list[str],
    config: SamplingConfig,
    separated: bool = True,
    **acceleration: Any,
) -> list[str]:
    found, ended = [""] * len(prompts), Counter[int]()
    for piece in generate(model, tokenizer, prompts, config, separated=separated, **acceleration):
        assert not ended[piece.row]
        found[piece.row] += piece.text
        ended[piece.row] += piece.last
    assert ended == dict.fromkeys(range(len(prompts)), 1)
    return found


def built(name: str, tokenizer: Tokenizer) -> LanguageModel:
    return small_model(name, tokenizer.vocab_size)


@every_model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_gets_the_same_text_in_any_batch(name: str, temperature: float, tokenizer: Tokenizer) -> None:
    model, config = built(name, tokenizer), SamplingConfig(max_tokens=12, temperature=temperature, top_k=20)
    together = texts(model, tokenizer, PROMPTS, config)
    for number in range(len(PROMPTS)):
        assert texts(model, tokenizer, PROMPTS[: number + 1], config)[number] == together[number]


@every_model
def test_texts_are_those_of_the_models_own_steps(
    name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = built(name, tokenizer), SamplingConfig(max_tokens=30, stop=("e",))  # rows end at different times
    found = texts(model, tokenizer, PROMPTS, config)
    monkeypatch.setattr("logdepth.generate.Decoder", lambda model, state, **_: _ModelSteps(model, state))
    assert texts(model, tokenizer, PROMPTS, config) == found
    assert len({len(text) for text in found}) > 1


@every_model
def test_acceleration_changes_nothing_on_a_cpu(name: str, tokenizer: Tokenizer) -> None:
    model, config = built(name, tokenizer), SamplingConfig(max_tokens=8)
    found = texts(model, tokenizer, PROMPTS, config, on_warning=pytest.fail)
    assert found == texts(model, tokenizer, PROMPTS, config, accelerate=False, on_warning=pytest.fail)


class Wrapped(LanguageModel):
    """A model that is no LM."""

    def __init__(self, inner: LM) -> None:
        super().__init__()
        self.inner, self.vocab_size = inner, inner.vocab_size

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        return self.inner(*arguments, **settings)

    def init_state(self, batch: int) -> Any:
        return self.inner.init_state(batch)

    def step(self, *arguments: Any, **settings: Any) -> Any:
        return self.inner.step(*arguments, **settings)


def test_models_that_are_no_lm_generate_too(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = built("ar-grc", tokenizer), SamplingConfig(max_tokens=12, stop=("e",))
    assert isinstance(model, LM)
    expected = texts(model, tokenizer, PROMPTS, config)
    monkeypatch.setattr("logdepth.generate.Decoder", pytest.fail)
    assert texts(Wrapped(model), tokenizer, PROMPTS, config) == expected


@every_model
def test_greedy_text_is_what_the_whole_forward_pass_says(name: str, tokenizer: Tokenizer) -> None:
    model = built(name, tokenizer).eval()
    text = texts(model, tokenizer, ["the cat"], SamplingConfig(max_tokens=9, temperature=0.0), separated=False)[0]
    tokens = tokenizer.encode("the cat")
    for _ in range(9):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert text == tokenizer.decode(tokens).removeprefix("the cat")


def test_the_end_of_a_document_ends_a_text(tokenizer: Tokenizer) -> None:
    model = built("ar-grc", tokenizer)
    with torch.no_grad():  # a head that always wants the end
        model.embedding.weight.zero_()
        model.blocks[0].out_of_state.bias.fill_(1.0)
        model.embedding.weight[tokenizer.end_of_document] = 1.0
    config = SamplingConfig(max_tokens=5, temperature=0.0)
    assert texts(model, tokenizer, PROMPTS, config) == [""] * 4
    assert list(generate(model, tokenizer, [], config)) == []


def test_models_of_one_stream_need_a_prompt(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="cannot start from nothing; give a --prompt"):
        list(generate(built("ar-grc", tokenizer), tokenizer, [""], SamplingConfig(), separated=False))


def test_stop_texts_end_a_row_and_are_left_out(tokenizer: Tokenizer) -> None:
    model, config = built("ar-grc", tokenizer), SamplingConfig(max_tokens=40, seed=1)
    whole = texts(model, tokenizer, ["the cat"], config, separated=False)[0]
    stop = whole[15:18]
    config = dataclasses.replace(config, stop=(stop, "never"))
    stopped = texts(model, tokenizer, ["the cat"], config, separated=False)[0]
    assert stopped == whole[: whole.index(stop)]


@pytest.mark.parametrize("name", ["ar-grc", "transformer-sinusoidal", "hybrid"])
def test_pieces_join_to_the_decoded_text_also_in_bytes(name: str, corpus: Path) -> None:
    """Random tokens of a byte-level vocabulary: spaces, line breaks and broken characters in every order."""
    lossless = TokenizerConfig(vocab_size=400, lossless=True)
    tokenizer = prepare(DataConfig(corpus="text", paths=(corpus,), tokenizer=lossless)).tokenizer
    model = built(name, tokenizer)
    config = SamplingConfig(max_tokens=300, temperature=50.0)
    text = texts(model, tokenizer, ["the cat"], config, separated=False)[0]
    generator = np.random.default_rng([0, 0])
    tokens = tokenizer.encode("the cat")
    state = model.eval().init_state(1)
    with torch.inference_mode():
        logits, state = model.step(torch.tensor([tokens]), state)
        for _ in range(300):
            tokens.append(choose(logits[0, -1].double().numpy(), config, generator))
            logits, state = model.step(torch.tensor([tokens[-1:]]), state)
    assert text == tokenizer.decode(tokens).removeprefix("the cat")


def test_no_token_is_repeated_under_a_high_penalty(tokenizer: Tokenizer) -> None:
    model = built("ar-grc", tokenizer)
    free = SamplingConfig(max_tokens=12, temperature=0.0)
    for config, repeats in ((free, True), (dataclasses.replace(free, repetition_penalty=1e9), False)):
        (text,) = texts(model, tokenizer, ["the cat"], config, separated=False)
        tokens = tokenizer.encode("the cat" + text)
        assert (len(set(tokens)) < len(tokens)) == repeats


@every_model
def test_filtered_text_does_not_depend_on_the_other_rows(name: str, tokenizer: Tokenizer) -> None:
    config = SamplingConfig(max_tokens=8, seed=3, min_p=0.1, repetition_penalty=1.5)
    model = built(name, tokenizer)
    together = texts(model, tokenizer, PROMPTS, config)
    assert texts(model, tokenizer, PROMPTS[:2], config) == together[:2]
    plain = dataclasses.replace(config, min_p=None, repetition_penalty=1.0)
    assert texts(model, tokenizer, PROMPTS, plain) != together


@every_model
def test_rows_that_end_early_do_not_change_the_others(name: str, tokenizer: Tokenizer) -> None:
    model, config = built(name, tokenizer), SamplingConfig(max_tokens=14, seed=3)
    alone = texts(model, tokenizer, ["my"], config, separated=False)[0]
    long = "a small dog remembers every bird by the river ."
    other = texts(model, tokenizer, ["my", long], config, separated=False)[1]
    stop = dataclasses.replace(config, stop=(other[:2],))  # ends the longer row at once
    together = texts(model, tokenizer, ["my", long], stop, separated=False)
    assert together[1] == ""
    assert together[0] == alone[: alone.find(other[:2])] if other[:2] in alone else alone


def test_prompts_that_are_no_text_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="is not text in UTF-8"):
        list(generate(built("ar-grc", tokenizer), tokenizer, ["\udcff"], SamplingConfig()))
