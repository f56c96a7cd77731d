"""Laws of every language model: causal, stream = whole, packed = separate; and the paper's parameter counts."""

import dataclasses
import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logdepth.models.attention import alibi_slopes, causal_attention, continued_attention
from torch import Tensor
from torch.nn import functional as F

from logdepth.models import MODELS, LanguageModel, ScanLMConfig, TransformerConfig, attention, num_parameters
from logdepth.operators import GRCConfig, MLPLDRUConfig
from tests.small_models import SCAN, SMALL_MODELS, TRANSFORMER, VOCAB
from tests.toy import boundaries

every_model = pytest.mark.parametrize("name", SMALL_MODELS)


def built(name: str) -> LanguageModel:
    torch.manual_seed(1)
    return SMALL_MODELS[name].build(VOCAB).double().eval()


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_every_kind_of_model_is_tested() -> None:
    assert {type(config) for config in SMALL_MODELS.values()} == set(MODELS.values())


@every_model
def test_logits_depend_on_the_past_alone(name: str) -> None:
    model, tokens = built(name), random_tokens(2, 21)
    logits = model(tokens)
    assert logits.shape == (2, 21, VOCAB)
    for position in (0, 7, 15, 20):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCAB
        other = model(changed)
        close(other[:, :position], logits[:, :position])
        assert not torch.allclose(other[:, position:], logits[:, position:])


@every_model
@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, 19), max_size=6))
def test_a_stream_gives_the_logits_of_the_whole(name: str, cuts: list[int]) -> None:
    model, tokens = built(name), random_tokens(3, 19)
    state, parts = model.init_state(3), []
    bounds = [0, *sorted(cuts), 19]
    for start, end in itertools.pairwise(bounds):
        logits, state = model.step(tokens[:, start:end], state)
        parts.append(logits)
    close(torch.cat(parts, dim=1), model(tokens))
    assert state.lengths.tolist() == [19, 19, 19]


@every_model
def test_rows_of_unequal_lengths_stream_as_if_alone(name: str) -> None:
    model = built(name)
    rows = [random_tokens(length, seed=length) for length in (9, 1, 14)]
    first = [4, 0, 7]
    state = model.init_state(3)
    for lengths, starts in ((first, [0, 0, 0]), ([5, 1, 7], first)):
        chunk = torch.zeros(3, max(lengths), dtype=torch.int64)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            chunk[row, :length] = rows[row][start : start + length]
        logits, state = model.step(chunk, state, lengths=lengths)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            close(logits[row, :length], model(rows[row][None])[0, start : start + length])
    kept = state.select([2, 0])
    assert kept.lengths.tolist() == [14, 9]
    more = random_tokens(2, 3, seed=99)
    logits, _ = model.step(more, kept)
    for number, row in enumerate((2, 0)):
        close(logits[number], model(torch.cat([rows[row], more[number]])[None])[0, -3:])


@every_model
def test_a_short_row_goes_on_alone_after_a_long_one_has_ended(name: str) -> None:
    model = built(name)
    rows = [random_tokens(10, seed=1), random_tokens(3, seed=2), random_tokens(3, seed=3)]
    chunk = torch.zeros(3, 12, dtype=torch.int64)
    for number, row in enumerate(rows):
        chunk[number, : len(row)] = row
    _, state = model.step(chunk, model.init_state(3), lengths=[10, 3, 3])
    more = random_tokens(2, 4, seed=9)
    logits, after = model.step(more, state.select([2, 1]))
    for number, row in enumerate((2, 1)):
        close(logits[number], model(torch.cat([rows[row], more[number]])[None])[0, -4:])
    assert after.lengths.tolist() == [7, 7]
    # all rows equally long, but shorter than the chunk that they came in
    _, state = model.step(chunk[1:], model.init_state(2), lengths=[3, 3])
    logits, _ = model.step(more, state)
    close(logits[0], model(torch.cat([rows[1], more[0]])[None])[0, -4:])


@every_model
def test_streams_in_bfloat16(name: str) -> None:
    model, tokens = SMALL_MODELS[name].build(VOCAB).eval(), random_tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model(tokens)
        first, state = model.step(tokens[:, :4], model.init_state(2))
        second, _ = model.step(tokens[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0.1, atol=0.1)


@every_model
def test_a_state_can_be_continued_twice(name: str) -> None:
    model, tokens = built(name), random_tokens(2, 12)
    _, state = model.step(tokens[:, :6], model.init_state(2))
    first, _ = model.step(tokens[:, 6:], state)
    model.step(random_tokens(2, 6, seed=5), state)
    again, _ = model.step(tokens[:, 6:], state)
    close(again, first)


@every_model
def test_packed_documents_are_separate(name: str) -> None:
    model = built(name)
    lengths = [5, 0, 1, 17]
    documents = [random_tokens(length, seed=length) for length in lengths]
    logits = model(torch.cat(documents), cu_seqlens=boundaries(lengths))
    alone = [model(document[None])[0] for document in documents if len(document)]
    close(logits, torch.cat(alone))


@every_model
def test_every_parameter_learns(name: str) -> None:
    model, tokens = built(name).train(), random_tokens(2, 9)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    still = [key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    # the affine operator starts where its right operand's decay is not yet used
    assert [key for key in still if "operator" not in key] == []


@every_model
def test_untrained_models_know_nothing_yet(name: str) -> None:
    """The loss of a fresh model is close to that of a guess: no initialisation is far off."""
    model, tokens = built(name), random_tokens(8, 64)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - torch.tensor(float(VOCAB)).log().item()) < 0.7


@pytest.mark.parametrize(
    ("config", "vocab_size", "millions", "tolerance"),
    [
        (ScanLMConfig(embed_width=256, operator=GRCConfig(width=256)), 1_500, 3.517, 0.002),
        (ScanLMConfig(embed_width=256, operator=GRCConfig(width=256)), 1_000, 3.389, 0.002),
        (ScanLMConfig(embed_width=512, operator=GRCConfig(width=512)), 8_000, 16.588, 0.002),
        (
            ScanLMConfig(embed_width=768, operator=GRCConfig(width=1536), embedding_net=False, post_merge="none"),
            50_000,
            97.404,
            0.002,
        ),
        (ScanLMConfig(embed_width=256, operator=MLPLDRUConfig(width=256)), 1_500, 3.45, 0.002),
        (ScanLMConfig(embed_width=512, operator=MLPLDRUConfig(width=512)), 8_000, 16.33, 0.002),
        (TransformerConfig(embed_width=512, num_layers=3, num_heads=16, tied=False), 8_000, 17.650, 0.002),
        (TransformerConfig(embed_width=768, num_layers=8, num_heads=12), 50_000, 95.104, 0.002),
        (TransformerConfig(embed_width=192, num_layers=8, num_heads=6), 1_500, 3.8, 0.02),
    ],
)
def test_parameter_counts_are_the_papers(
    config: ScanLMConfig | TransformerConfig, vocab_size: int, millions: float, tolerance: float
) -> None:
    with torch.device("meta"):
        count = num_parameters(config.build(vocab_size))
    assert count / 1e6 == pytest.approx(millions, rel=tolerance)


def test_alibi_slopes_fall_geometrically() -> None:
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-power for power in range(1, 9)]))
    twelve = alibi_slopes(12)
    torch.testing.assert_close(twelve[:8], alibi_slopes(8))
    torch.testing.assert_close(twelve[8:], torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]))


def test_alibi_is_its_definition() -> None:
    queries, keys, values = torch.randn(3, 2, 4, 7, 5, dtype=torch.float64)
    slopes = alibi_slopes(4).double()
    result = causal_attention(queries, keys, values, slopes, "sdpa")
    for head in range(4):
        for position in range(7):
            seen = slice(0, position + 1)
            scores = keys[:, head, seen] @ queries[:, head, position, :, None] / 5**0.5
            distance = position - torch.arange(position + 1)
            weights = (scores[..., 0] - slopes[head] * distance).softmax(-1)
            close(result[:, head, position], torch.einsum("bn,bnd->bd", weights, values[:, head, seen]))


def test_attention_of_sinusoidal_models_is_causal_softmax() -> None:
    queries, keys, values = torch.randn(3, 2, 4, 7, 5, dtype=torch.float64)
    positions = torch.arange(7)
    close(
        causal_attention(queries, keys, values, None, "sdpa"),
        continued_attention(queries, keys, values, None, positions),
    )


def test_compiled_models_make_the_mask_of_flex_attention_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention.flex_attention)
    attention._causal_mask.cache_clear()
    model = dataclasses.replace(TRANSFORMER, positions="alibi", attention="flex").build(VOCAB).eval()
    plain = dataclasses.replace(TRANSFORMER, positions="alibi", attention="sdpa").build(VOCAB).eval()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="eager")
    tokens = torch.randint(VOCAB, (2, 9))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")  # a traced mask would be made in every pass
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # here on purpose
        for _ in range(2):
            torch.testing.assert_close(compiled(tokens), plain(tokens))
    assert attention._causal_mask.cache_info().misses == 1


def test_depth_one_has_no_residual_and_deeper_layers_do() -> None:
    model = dataclasses.replace(SCAN, depth=2, input_residual=0.0).build(VOCAB).eval()
    tokens = random_tokens(1, 5)
    with torch.no_grad():
        model.layers[1].out_of_state.weight.zero_()
        model.layers[1].out_of_state.bias.zero_()
    shallow = dataclasses.replace(SCAN, input_residual=0.0).build(VOCAB).eval()
    shallow.load_state_dict({key: value for key, value in model.state_dict().items() if "layers.1" not in key})
    torch.testing.assert_close(model(tokens), shallow(tokens))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dataclasses.replace(TRANSFORMER, num_heads=3), "embed_width 16 does not divide into 3 heads"),
        (lambda: dataclasses.replace(TRANSFORMER, num_layers=0), "at least 1"),
        (lambda: dataclasses.replace(SCAN, depth=0), "at least 1"),
        (lambda: dataclasses.replace(SCAN, leaf_dropout=1.0), "leaf_dropout must be from 0 to below 1; got 1.0"),
        (lambda: dataclasses.replace(TRANSFORMER, dropout=-0.1), "dropout must be from 0 to below 1"),
        (lambda: GRCConfig(width=4, dropout=2.0), "dropout must be from 0 to below 1"),
        (lambda: dataclasses.replace(SCAN, operator=GRCConfig(width=7)), "must be even; got 7"),
        (lambda: TRANSFORMER.build(VOCAB)(random_tokens(4), cu_seqlens=[0, 5]), "rise from 0 to the 4 packed tokens"),
        (
            lambda: SCAN.build(VOCAB)(torch.zeros(3, dtype=torch.int64)),
            r"whole numbers \[batch, length\]; got .*\(3,\)",
        ),
        (lambda: TRANSFORMER.build(VOCAB)(torch.zeros(1, 3)), "whole numbers"),
        (lambda: TRANSFORMER.build(VOCAB).step(random_tokens(2, 3), TRANSFORMER.build(VOCAB).init_state(1)), "2 rows"),
        (
            lambda: (model := TRANSFORMER.build(VOCAB)).step(random_tokens(1, 4), model.init_state(1), lengths=[5]),
            "numbers from 0 to 4",
        ),
    ],
)
def test_bad_configs_and_arguments_are_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_packed_documents_go_through_the_head_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = TRANSFORMER.build(VOCAB), []
    original = type(model)._logits
    monkeypatch.setattr(type(model), "_logits", lambda self, one: rows.append(len(one)) or original(self, one))
    model(random_tokens(40), cu_seqlens=[0, 30, 31, 32, 40])
    assert rows == [40]


@every_model
def test_no_rows_at_all(name: str) -> None:
    model = built(name)
    logits, state = model.step(random_tokens(0, 3), model.init_state(0))
    assert logits.shape == (0, 3, VOCAB)
    assert len(state.lengths) == 0
