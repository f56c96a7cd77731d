"""The library's models as Hugging Face models: the same logits, loss and text, with any padding and from any cache."""

import copy
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from logdepth.data import Tokenizer, prepare
from logdepth.decoding import Decoder
from logdepth.generate import SamplingConfig, generate
from logdepth.hf import LogDepthCache, LogDepthConfig, LogDepthForCausalLM
from logdepth.models import LM, LMState
from tests.block_states import close, same_state
from tests.decoders import built
from tests.small_models import SMALL_MODELS, VOCAB
from tests.tiny_corpus import tiny_data

every_model = pytest.mark.parametrize("name", SMALL_MODELS)
SOME = ("ar-grc", "transformer-alibi", "hybrid", "memory-window")
some_models = pytest.mark.parametrize("name", SOME)
MASKS = torch.tensor(
    [[0] * 4 + [1] * 7, [1] * 8 + [0] * 3, [1] * 11, [0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0]]  # left, right, none, anywhere
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Transformers says of right padding that generation would be wrong with it, which is so for other models."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity_warning()


def wrapped(name: str, vocab_size: int = VOCAB) -> LogDepthForCausalLM:
    """The model of this name with the weights of `small_model`."""
    lm = built(name, vocab_size)
    model = LogDepthForCausalLM(LogDepthConfig(vocab_size=vocab_size, model=SMALL_MODELS[name])).double().eval()
    missing, unexpected = model.model.load_state_dict(lm.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) <= ({"head.weight"} if lm.head is None else set())  # which is the embedding
    return model


def tokens_like(mask: Tensor, vocab_size: int = VOCAB) -> Tensor:
    return torch.randint(1, vocab_size, mask.shape, generator=torch.Generator().manual_seed(3))


def rows_of(tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """Each row without what is masked, as a batch of one."""
    return [row[kept != 0][None] for row, kept in zip(tokens, mask, strict=True)]


def greedy(model: LM, row: Tensor, count: int) -> list[int]:
    """What the library's decoder chooses after a row."""
    with torch.no_grad():
        logits, state = model.step(row, model.init_state(1))
        decoder, chosen = Decoder(model, state), []
        last = logits[:, -1]
        for _ in range(count):
            chosen.append(int(last.argmax()))
            last = decoder.step(torch.tensor(chosen[-1:]))
    return chosen


@every_model
def test_padding_anywhere_changes_no_logits_no_loss_and_no_text(name: str) -> None:
    model, tokens = wrapped(name), tokens_like(MASKS)
    rows = rows_of(tokens, MASKS)
    with torch.no_grad():
        expected = [model.model(row)[0] for row in rows]
        for use_cache in (False, True):
            logits = model(tokens, attention_mask=MASKS, use_cache=use_cache).logits
            for number, row in enumerate(expected):
                close(logits[number, MASKS[number] != 0], row)
                close(logits[number, -1], row[-1])  # a masked place has those of the token before
            close(model(tokens, use_cache=use_cache).logits, model.model(tokens))
        assert not logits[0, :4].any()
        nats = [model.model.loss(row[:, :-1], row[:, 1:]) * (row.shape[1] - 1) for row in rows]
        loss = model(tokens, attention_mask=MASKS, labels=tokens).loss
        close(loss, sum(nats) / sum(row.shape[1] - 1 for row in rows))
        found = model.generate(tokens, attention_mask=MASKS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert found[:, tokens.shape[1] :].tolist() == [greedy(model.model, row, 5) for row in rows]


@some_models
def test_the_loss_is_the_librarys_with_its_gradients(name: str) -> None:
    model, tokens = wrapped(name), tokens_like(MASKS)
    model.train()
    expected = model.model.loss(tokens[:, :-1], tokens[:, 1:])
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    labels = tokens.clone()
    found = model(tokens, labels=labels)
    assert found.past_key_values is None
    close(found.loss, expected)
    for one, other in zip(torch.autograd.grad(found.loss, list(model.parameters())), gradients, strict=True):
        close(one, other)
    labels[:, :6] = -100
    close(model(tokens, labels=labels).loss, model(tokens, labels=labels, num_items_in_batch=10).loss * 10 / (4 * 5))
    assert model(tokens, labels=torch.full_like(labels, -100), num_items_in_batch=10).loss == 0


@some_models
def test_packed_documents_are_separate(name: str) -> None:
    model, tokens = wrapped(name), tokens_like(torch.ones(1, 17))
    first, second = tokens[:, :6], tokens[:, 6:]
    positions = torch.cat([torch.arange(6), torch.arange(11)])[None]
    found = model(tokens, labels=tokens, position_ids=positions)
    close(found.logits, torch.cat([model(first).logits, model(second).logits], dim=1))
    nats = model(first, labels=first).loss * 5 + model(second, labels=second).loss * 10
    close(found.loss, nats / 15)
    with pytest.raises(ValueError, match="packed into one row"):
        model(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens))
    with pytest.raises(ValueError, match="no state to continue"):
        model(tokens, position_ids=positions, use_cache=True)


@pytest.fixture
def tokenizer(corpus: Path) -> Tokenizer:
    return prepare(tiny_data(corpus)).tokenizer


@some_models
@pytest.mark.parametrize("side", ["left", "right"])
def test_generated_text_is_that_of_generate(name: str, side: str, tokenizer: Tokenizer) -> None:
    """Also where rows end at different times, at the end of a document."""
    from logdepth.hf.tokenizer import fast_tokenizer

    model, fast = wrapped(name, tokenizer.vocab_size), fast_tokenizer(tokenizer)
    end = tokenizer.end_of_document
    with torch.no_grad():  # so that the end comes now and then
        assert model.model.head is not None
        model.model.head.weight[end] *= 4
    prompts = ["the cat", "a small dog remembers every bird", "my", "under a tree the old clock"]
    expected = [""] * len(prompts)
    config = SamplingConfig(max_tokens=14, temperature=0)
    for piece in generate(model.model, tokenizer, prompts, config):
        expected[piece.row] += piece.text
    inputs = fast(prompts, return_tensors="pt", padding=True, padding_side=side)
    found = model.generate(**inputs, max_new_tokens=14, do_sample=False, eos_token_id=end, pad_token_id=end)
    new = found[:, inputs.input_ids.shape[1] :]
    whole = [inputs.input_ids[at][inputs.attention_mask[at] == 1].tolist() + new[at].tolist() for at in range(4)]
    texts = fast.batch_decode(whole, skip_special_tokens=True)
    assert texts == [f" {one}{text}" for one, text in zip(prompts, expected, strict=True)]
    assert fast.batch_decode(new, skip_special_tokens=True) == expected  # with its first space


@some_models
def test_beams_and_samples_are_those_without_a_cache(name: str) -> None:
    model, tokens = wrapped(name), tokens_like(MASKS)
    given: dict[str, Any] = {"attention_mask": MASKS, "max_new_tokens": 6, "pad_token_id": 0}
    for settings in ({"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 3}):
        found = []
        for use_cache in (True, False):
            set_seed(0)
            found.append(model.generate(tokens, **given, **settings, use_cache=use_cache))
        assert torch.equal(*found)


class _Kept(BaseStreamer):
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


class _After(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_streamers_and_stopping_criteria() -> None:
    model, tokens, streamer = wrapped("hybrid"), tokens_like(torch.ones(1, 5)), _Kept()
    criteria = StoppingCriteriaList([_After(9)])
    found = model.generate(tokens, max_new_tokens=30, do_sample=False, streamer=streamer, stopping_criteria=criteria)
    assert found.shape == (1, 9)
    assert streamer.tokens == [*found[0].tolist(), -1]


@every_model
def test_a_cache_is_the_librarys_state_and_continues_it(name: str) -> None:
    model, tokens = wrapped(name), tokens_like(torch.ones(2, 14))
    cache = LogDepthCache()
    with torch.no_grad():
        model(tokens[:, :9], past_key_values=cache)
        state = model.model.step(tokens[:, :9], model.model.init_state(2))[1]
        same_state(cache.state, state)
        assert (cache.nbytes, cache.get_seq_length(), cache.batch_size, len(cache)) == (
            state.nbytes,
            9,
            2,
            len(state.blocks),
        )
        fork = copy.deepcopy(cache)
        assert fork.state is cache.state  # a copy of nothing
        whole = model.model(tokens)
        close(model(tokens[:, 9:11], past_key_values=cache).logits, whole[:, 9:11])
        for place in range(11, 14):  # by a decoder
            close(model(tokens[:, place : place + 1], past_key_values=cache).logits, whole[:, place : place + 1])
        same_state(cache.state, model.model.step(tokens, model.model.init_state(2))[1])
        assert cache.get_seq_length() == 14
        close(model(tokens[:, 9:], past_key_values=fork).logits, whole[:, 9:])
        expected = model.generate(tokens, max_new_tokens=4, do_sample=False)
        for one in (cache, fork):
            more = torch.cat([tokens, expected[:, 14:15]], dim=1)
            found = model.generate(more, max_new_tokens=3, do_sample=False, past_key_values=copy.deepcopy(one))
            assert torch.equal(found, expected)


@some_models
def test_rows_of_a_cache_are_chosen_and_repeated(name: str) -> None:
    model, tokens = wrapped(name), tokens_like(torch.ones(3, 8))
    with torch.no_grad():
        for steps in (0, 2):  # held as a state, and by a decoder
            caches = []
            for _ in range(3):
                cache = LogDepthCache()
                model(tokens[:, : 7 - steps], past_key_values=cache)
                for place in range(7 - steps, 7):
                    model(tokens[:, place : place + 1], past_key_values=cache)
                caches.append(cache)
            caches[0].reorder_cache(torch.tensor([2, 0, 2]))
            caches[1].batch_select_indices(torch.tensor([1]))
            caches[2].batch_repeat_interleave(2)
            for cache, rows in zip(caches, ([2, 0, 2], [1], [0, 0, 1, 1, 2, 2]), strict=True):
                expected = model.model(tokens[rows])[:, -1:]
                close(model(tokens[rows, 7:], past_key_values=cache).logits, expected)


def test_a_prompt_in_chunks_is_the_prompt() -> None:
    """A row may have no token in a chunk; its logits are then those of its last token."""
    model, tokens = wrapped("hybrid"), tokens_like(MASKS)
    settings: dict[str, Any] = {"attention_mask": MASKS, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, **settings)
    cache = LogDepthCache()
    assert torch.equal(model.generate(tokens, **settings, prefill_chunk_size=3, past_key_values=cache), expected)


def test_a_cache_refuses_what_it_cannot_do() -> None:
    model, tokens = wrapped("ar-grc"), tokens_like(torch.ones(2, 6))
    cache = LogDepthCache()
    assert (cache.batch_size, cache.nbytes, len(cache), cache.is_initialized) == (-1, 0, 0, False)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        cache.crop(0)
        with pytest.raises(ValueError, match="cannot take back 2 tokens"):
            cache.crop(-2)
        with pytest.raises(ValueError, match="3 rows, but the cache has 2"):
            model(tokens_like(torch.ones(3, 2)), past_key_values=cache)
        model(tokens[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="1 rows, but the cache has 2"):
            model(tokens[:1, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="a row has no token in this call"):
            model(tokens, attention_mask=torch.tensor([[1] * 6, [0] * 6]), past_key_values=cache)
        with pytest.raises(TypeError, match="must be a LogDepthCache; got DynamicCache"):
            model(tokens, past_key_values=DynamicCache())
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            model.generate(tokens[:1], assistant_model=model, max_new_tokens=3)
        cache.reset()
        assert cache.state is None
        close(model(tokens, past_key_values=cache).logits, model.model(tokens))


def test_a_state_takes_memory_of_its_logarithm() -> None:
    model, sizes = wrapped("ar-grc"), []
    for length in (127, 2047):
        with torch.no_grad():
            cache = model(tokens_like(torch.ones(1, length))).past_key_values
        assert isinstance(cache.state, LMState)
        sizes.append(cache.nbytes)
    assert sizes[1] * 7 == sizes[0] * 11  # blocks of 7 levels, of 11


def test_gradients_reach_the_tokens_before_a_cache() -> None:
    model, tokens = wrapped("hybrid"), tokens_like(torch.ones(2, 8))
    model(tokens, labels=tokens).loss.backward()
    expected = [one.grad for one in model.parameters()]
    model.zero_grad()
    cache = LogDepthCache()
    logits = [model(some, past_key_values=cache).logits for some in (tokens[:, :5], tokens[:, 5:])]
    features = torch.cat(logits, dim=1)[:, :-1]
    nn.functional.cross_entropy(features.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for one, other in zip(model.parameters(), expected, strict=True):
        assert one.grad is not None
        assert other is not None
        close(one.grad, other)
    cache.detach()
    assert cache.features is not None
    assert not cache.features.requires_grad


@every_model
def test_saved_models_are_loaded_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = wrapped(name).float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LogDepthForCausalLM
    state = model.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    assert all(torch.equal(state[key], weight) for key, weight in loaded.state_dict().items())
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(buffers[key], value) for key, value in model.named_buffers())
    assert loaded.config.model_config() == SMALL_MODELS[name] == AutoConfig.from_pretrained(tmp_path).model_config()
    tied = loaded.config.lm_config().tied
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        tokens = tokens_like(MASKS)
        expected = model(tokens).logits
        assert (half(tokens).logits.float() - expected).abs().max() < 0.1 * expected.abs().max() + 0.1
        assert half.generate(tokens, attention_mask=MASKS, max_new_tokens=2, pad_token_id=0).shape == (4, 13)


def test_weights_that_a_checkpoint_lacks_are_drawn(tmp_path: Path) -> None:
    model = wrapped("memory-window").float()
    kept = {key: value for key, value in model.state_dict().items() if "into_heads" not in key and "decay" not in key}
    model.save_pretrained(tmp_path, state_dict=kept)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = loaded.model.blocks[0].layer
    assert torch.equal(layer.decay_bias, LM(VOCAB, model.model.config).blocks[0].layer.decay_bias)
    assert 0.015 < layer.into_heads.weight.std() < 0.025
    assert torch.equal(layer.out.weight, model.model.blocks[0].layer.out.weight)


def test_a_vocabulary_grows() -> None:
    model, tokens = wrapped("hybrid"), tokens_like(MASKS)
    before = model(tokens).logits
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    assert model.config.vocab_size == model.model.vocab_size == VOCAB + 3
    close(model(tokens).logits[..., :VOCAB], before)
    assert model(torch.full((1, 3), VOCAB + 2)).logits.shape == (1, 3, VOCAB + 3)


def test_a_config_is_checked() -> None:
    config = LogDepthConfig(vocab_size=9, model=SMALL_MODELS["hybrid"])
    assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (12, 6, False)
    assert LogDepthConfig(**config.to_dict()).model_config() == SMALL_MODELS["hybrid"]
    with pytest.raises(Exception, match="unknown field 'dime'; did you mean 'dim'"):
        LogDepthConfig(model={"kind": "LMConfig", "dime": 3})
    with pytest.raises(ValueError, match="tie_word_embeddings must be False"):
        LogDepthConfig(model=SMALL_MODELS["hybrid"], tie_word_embeddings=True)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # 5.6 has no other
@pytest.mark.parametrize("arguments", [{"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@some_models
def test_blocks_are_recomputed_in_the_backward_pass(name: str, arguments: dict[str, bool]) -> None:
    model, tokens = wrapped(name), tokens_like(MASKS)
    model.train()
    model(tokens, attention_mask=MASKS, labels=tokens).loss.backward()
    expected = [one.grad for one in model.parameters()]
    model.zero_grad()
    calls: list[nn.Module] = []
    for block in model.model.blocks:
        block.register_forward_pre_hook(lambda module, _: calls.append(module))  # recomputing may end early
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    loss = model(tokens, attention_mask=MASKS, labels=tokens).loss
    assert len(calls) == len(model.model.blocks)
    loss.backward()
    assert len(calls) == 2 * len(model.model.blocks)
    for one, other in zip(model.parameters(), expected, strict=True):
        assert one.grad is not None
        assert other is not None
        close(one.grad, other)
    model.eval()
    model(tokens, labels=tokens).loss.backward()
    assert len(calls) == 3 * len(model.model.blocks)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("name", [*SOME, "ar-mlp-ldru", "every-merge", "memory-fold"])
def test_lora_attaches_to_all_linear_maps(name: str) -> None:
    peft = pytest.importorskip("peft")
    model, tokens = wrapped(name), tokens_like(MASKS)
    linears = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    before = model(tokens).logits.detach()
    for targets in ("all-linear", ["embedding", "head"]):
        adapted = peft.get_peft_model(wrapped(name), peft.LoraConfig(target_modules=targets, r=2))
        learned = {key: one for key, one in adapted.named_parameters() if one.requires_grad}
        assert len(learned) == 2 * (len(linears) - 1 if targets == "all-linear" else 2)  # all but the head
        with torch.no_grad():
            close(adapted(input_ids=tokens).logits, before)
            for one in learned.values():
                one.copy_(torch.randn_like(one) / 4)
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        assert all(one.grad is not None and one.grad.any() for one in learned.values())
        with torch.no_grad():
            after = adapted(input_ids=tokens).logits
            found = adapted.generate(input_ids=tokens, max_new_tokens=3, do_sample=False)
            slow = adapted.generate(input_ids=tokens, max_new_tokens=3, do_sample=False, use_cache=False)
            assert torch.equal(found, slow)
            if targets == "all-linear":
                close(adapted.merge_and_unload()(tokens).logits, after)
        assert (after - before).abs().max() > 1e-3


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch asks for it
def test_compiled_models_give_the_same() -> None:
    """The compiler of C++ is left out: it takes minutes, and what may break is what is traced."""
    model, tokens = wrapped("memory-window"), tokens_like(MASKS)
    given: dict[str, Any] = {"attention_mask": MASKS, "labels": tokens}
    expected = [model(tokens, **given).loss]
    expected += torch.autograd.grad(expected[0], list(model.parameters()))
    text = model.generate(tokens, attention_mask=MASKS, max_new_tokens=3, pad_token_id=0)
    model.forward = torch.compile(model.forward, backend="eager")
    found = [model(tokens, **given).loss]
    found += torch.autograd.grad(found[0], list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    assert torch.equal(model.generate(tokens, attention_mask=MASKS, max_new_tokens=3, pad_token_id=0), text)
    torch._dynamo.reset()


def test_trainer_trains(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = dataclasses.replace(SMALL_MODELS["hybrid"], embed_dropout=0.0)
    torch.manual_seed(0)
    model = LogDepthForCausalLM(LogDepthConfig(vocab_size=VOCAB, model=config))
    rows = (torch.arange(16) + torch.arange(32)[:, None]) % (VOCAB - 1) + 1
    labels = rows.clone()
    labels[:, 0] = -100  # which nothing predicts, but some versions of Trainer count
    examples = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(rows, labels, strict=True)
    ]
    settings = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=12,
        learning_rate=2e-2,
        logging_steps=4,
        save_steps=12,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=examples, eval_dataset=examples)
    before = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        assert before == pytest.approx(model.model.loss(rows[:, :-1], rows[:, 1:]).item(), rel=1e-4)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert torch.equal(loaded(rows).logits, model.eval()(rows).logits)


def test_what_would_be_ignored_is_refused() -> None:
    model, tokens = wrapped("ar-grc"), tokens_like(MASKS)
    model(tokens, output_attentions=False, output_hidden_states=None)
    for arguments, words in (
        ({"output_hidden_states": True}, "does not return what output_hidden_states asks for"),
        ({"inputs_embeds": torch.zeros(4, 11, 12)}, "does not take the argument inputs_embeds"),
        ({"attention_mask": torch.ones(4, 1, 11, 11)}, r"attention_mask must be \[batch, length\]"),
        ({"attention_mask": torch.ones(4, 3)}, r"got shape \(4, 3\) for tokens of shape \(4, 11\)"),
        ({"position_ids": torch.arange(11).expand(4, -1)}, "packed into one row"),
        ({"position_ids": torch.arange(1, 12)[None]}, "must be 0 at the first token"),
    ):
        given = tokens[:1] if "must be 0" in words else tokens
        with pytest.raises((TypeError, ValueError), match=words):
            model(given, **arguments)
