"""Laws of every language model: causal, stream = whole, packed = separate; and the paper's parameter counts."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from logdepth.blocks import BLOCKS, AttentionConfig, MLPConfig, ScanConfig
from logdepth.errors import UserError
from logdepth.models import (
    LM,
    MODELS,
    LMConfig,
    ScanLMConfig,
    TransformerConfig,
    num_parameters,
)
from logdepth.operators import GRCConfig, MLPLDRUConfig
from tests.block_states import clones_of, close, same_state, tensors_of
from tests.small_models import HYBRID, SCAN, SMALL_MODELS, TRANSFORMER, VOCAB, small_model
from tests.toy import boundaries

every_model = pytest.mark.parametrize("name", SMALL_MODELS)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def test_every_kind_of_model_and_of_block_is_tested() -> None:
    assert {type(config) for config in SMALL_MODELS.values()} == set(MODELS.values())
    blocks = [one for config in SMALL_MODELS.values() if isinstance(config, LMConfig) for one in config.blocks]
    assert {type(one) for one in blocks} == set(BLOCKS.values())


@every_model
def test_logits_depend_on_the_past_alone(name: str) -> None:
    model, tokens = small_model(name), random_tokens(2, 21)
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
    model, tokens = small_model(name), random_tokens(3, 19)
    state, parts = model.init_state(3), []
    bounds = [0, *sorted(cuts), 19]
    for start, end in itertools.pairwise(bounds):
        logits, state = model.step(tokens[:, start:end], state)
        parts.append(logits)
    close(torch.cat(parts, dim=1), model(tokens))
    assert state.lengths.tolist() == [19, 19, 19]


@every_model
def test_rows_of_unequal_lengths_stream_as_if_alone(name: str) -> None:
    model = small_model(name)
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
    model = small_model(name)
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
    model, tokens = small_model(name).float(), random_tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model(tokens)
        first, state = model.step(tokens[:, :4], model.init_state(2))
        second, _ = model.step(tokens[:, 4:], state)
    assert whole.dtype == first.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0.03, atol=0.03)


@every_model
def test_a_state_can_be_continued_twice(name: str) -> None:
    model, tokens = small_model(name), random_tokens(2, 12)
    _, state = model.step(tokens[:, :6], model.init_state(2))
    before = clones_of(state)
    first, after = model.step(tokens[:, 6:], state)
    model.step(random_tokens(2, 6, seed=5), state)
    model.step(random_tokens(2, 1, seed=6), state, lengths=[0, 1])
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(state), before, strict=True))
    again, same = model.step(tokens[:, 6:], state)
    close(again, first)
    same_state(same, after)


@every_model
def test_a_selected_state_goes_on_as_its_rows(name: str) -> None:
    model, tokens = small_model(name), random_tokens(3, 10)
    _, state = model.step(tokens[:, :7], model.init_state(3), lengths=[7, 2, 5])
    more = random_tokens(5, 6, seed=4)
    rows = [2, 0, 0, -1, 1]
    logits, _ = model.step(more, state.select(rows))
    assert state.select(torch.tensor(rows)).lengths.tolist() == state.select(rows).lengths.tolist() == [5, 7, 7, 5, 2]
    for number, row in enumerate(rows):
        prompt = tokens[row, : [7, 2, 5][row]]
        close(logits[number], model(torch.cat([prompt, more[number]])[None])[0, len(prompt) :])
    assert len(state.select([]).lengths) == 0
    with pytest.raises(IndexError):
        state.select([3])


@every_model
def test_gradients_flow_through_a_state_until_it_is_detached(name: str) -> None:
    model, tokens = small_model(name), random_tokens(2, 11)
    weights = list(model.parameters())
    direction = torch.randn(2, 11, VOCAB, dtype=torch.float64)

    def gradients(logits: Tensor, of: Tensor) -> list[Tensor]:
        loss = (logits * of).sum()
        settings = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return list(torch.autograd.grad(loss, weights, **settings))

    first, state = model.step(tokens[:, :5], model.init_state(2))
    second, _ = model.step(tokens[:, 5:], state)
    whole = gradients(model(tokens), direction)
    for one, other in zip(gradients(torch.cat([first, second], dim=1), direction), whole, strict=True):
        close(one, other)
    detached = state.detach()
    assert not any(one.requires_grad for one in tensors_of(detached))
    same_state(detached, state)
    cut, _ = model.step(tokens[:, 5:], detached)
    close(cut, second)
    assert cut.requires_grad
    if any(one.is_floating_point() and one.numel() for one in tensors_of(state)):  # something is remembered
        later = gradients(second, direction[:, 5:])
        assert any(not torch.equal(*pair) for pair in zip(gradients(cut, direction[:, 5:]), later, strict=True))


@every_model
def test_padding_has_no_part_in_gradients(name: str) -> None:
    """Also of rows that have absorbed nothing at all yet: there padding has nothing to read."""
    model, tokens = small_model(name), random_tokens(3, 4)
    _, state = model.step(random_tokens(3, 5, seed=1), model.init_state(3), lengths=[0, 5, 2])
    logits, _ = model.step(tokens, state.detach(), lengths=[0, 4, 1])
    valid = torch.cat([logits[1], logits[2, :1]])
    found = torch.autograd.grad(valid.square().sum(), list(model.parameters()), allow_unused=True)
    alone = [
        model.step(tokens[row : row + 1, :new], state.detach().select([row]))[0][0] for row, new in ((1, 4), (2, 1))
    ]
    expected = torch.autograd.grad(torch.cat(alone).square().sum(), list(model.parameters()), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)


@every_model
def test_padded_rows_are_as_if_alone(name: str) -> None:
    model, lengths, tokens = small_model(name), [9, 1, 0, 17, 4], random_tokens(5, 17)
    logits = model(tokens, lengths=lengths)
    for row, length in enumerate(lengths):
        if length:
            close(logits[row, :length], model(tokens[row : row + 1, :length])[0])


@every_model
def test_losses_are_the_cross_entropy_of_the_logits(name: str) -> None:
    model, tokens, targets = small_model(name), random_tokens(3, 14), random_tokens(3, 14, seed=1)
    losses = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()), allow_unused=True)
    found = torch.autograd.grad(model.loss(tokens, targets), list(model.parameters()), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)
    close(model.loss(tokens, targets), losses.mean())
    whole, state = model.token_losses(tokens, targets)
    assert state is None
    close(whole, losses.detach())
    bounds = [0, 14, 28, 42]
    packed, _ = model.token_losses(tokens.flatten(), targets.flatten(), cu_seqlens=bounds)
    close(packed, losses.detach().flatten())
    close(model.loss(tokens.flatten(), targets.flatten(), cu_seqlens=bounds), losses.mean())
    first, state = model.token_losses(tokens[:, :5], targets[:, :5], model.init_state(3))
    second, state = model.token_losses(tokens[:, 5:], targets[:, 5:], state)
    close(torch.cat([first, second], dim=1), losses.detach())
    assert state.lengths.tolist() == [14, 14, 14]


@every_model
def test_packed_documents_are_separate(name: str) -> None:
    model = small_model(name)
    lengths = [5, 0, 1, 17]
    documents = [random_tokens(length, seed=length) for length in lengths]
    logits = model(torch.cat(documents), cu_seqlens=boundaries(lengths))
    alone = [model(document[None])[0] for document in documents if len(document)]
    close(logits, torch.cat(alone))


@every_model
def test_every_parameter_learns(name: str) -> None:
    model, tokens = small_model(name).train(), random_tokens(2, 9)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    still = [key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    # the affine operator starts where its right operand's decay is not yet used
    assert [key for key in still if "operator" not in key] == []


@every_model
def test_untrained_models_know_nothing_yet(name: str) -> None:
    """The loss of a fresh model is close to that of a guess: no initialisation is far off."""
    torch.manual_seed(1)
    model, tokens = SMALL_MODELS[name].build(VOCAB).double().eval(), random_tokens(8, 64)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    distance = abs(loss.item() - math.log(VOCAB))
    assert distance < 0.3, f"{distance:.2f} nats from a guess; check initialise and residual_outputs of its blocks"


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


def test_depth_one_has_no_residual_and_deeper_layers_do() -> None:
    model = dataclasses.replace(SCAN, depth=2, input_residual=0.0).build(VOCAB).eval()
    tokens = random_tokens(1, 5)
    with torch.no_grad():
        model.blocks[1].out_of_state.weight.zero_()
        model.blocks[1].out_of_state.bias.zero_()
    shallow = dataclasses.replace(SCAN, input_residual=0.0).build(VOCAB).eval()
    shallow.load_state_dict(
        {key: value for key, value in model.state_dict().items() if not key.startswith("blocks.1.")}
    )
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
        (lambda: SCAN.build(VOCAB).step(random_tokens(2, 3), SCAN.build(VOCAB).init_state(1)), "2 rows"),
        (lambda: LMConfig(blocks="scan"), r"write \('scan',\)"),  # type: ignore[arg-type]
        (lambda: LMConfig(dim=0), "dim must be at least 1"),
        (lambda: LMConfig(repeats=0), "repeats must be at least 1 and at most 1,000; got 0"),
        (
            lambda: LMConfig(blocks=("mlp",) * 1001),
            "the number of blocks must be at least 1 and at most 1,000; got 1001",
        ),
        (lambda: LMConfig(blocks=()), "there must be a block"),
        (lambda: LMConfig(output_dropout=1.0), "output_dropout must be from 0 to below 1; got 1.0"),
        (lambda: LMConfig(blocks=("atention",)), "there is no block 'atention'.*attention"),
        (lambda: LM(VOCAB, dim=12, blocks=("attention:heads=5",)), "dim 12 does not divide into 5 heads"),
        (lambda: LM(VOCAB, dim=12, blocks=("attention:heads=4",)), "RoPE needs heads of an even width; dim 12 has 4"),
        (lambda: LM(VOCAB, dim=12, blocks=("scan:heads=5",)), "a state of width 12 does not divide into 5 heads"),
        (lambda: AttentionConfig(window=0), "heads and window must be at least 1; got 8 and 0"),
        (lambda: MLPConfig(multiple=0.0), "multiple must be above 0 and at most 1,000,000; got 0.0"),
        (lambda: ScanConfig(operator="lstm"), r"operator 'lstm' is unknown; choose from .*grc, mlp-ldru"),
        (lambda: ScanConfig(conv=-1), "conv at least 0"),
    ],
)
def test_bad_configs_and_arguments_are_refused(make: object, says: str) -> None:
    with pytest.raises((ValueError, UserError), match=says):
        make()


def test_a_model_takes_a_config_or_its_fields() -> None:
    model = LM(VOCAB, dim=12, blocks=("scan:heads=2", AttentionConfig(heads=2, window=5), "mlp"))
    assert model.config == LMConfig(dim=12, blocks=("scan:heads=2", "attention:heads=2,window=5", "mlp"))
    assert model.config.blocks == (ScanConfig(heads=2), AttentionConfig(heads=2, window=5), MLPConfig())
    with pytest.raises(TypeError, match="give a config or its fields, not both; got a config and dim"):
        LM(VOCAB, LMConfig(), dim=12)
    assert len(HYBRID.build(VOCAB).blocks) == 6


@pytest.mark.parametrize("initialisation", ["zero-output", "gpt2"])
def test_initial_weights_are_normal_and_outputs_zero_or_small(initialisation: Any) -> None:
    config = dataclasses.replace(
        HYBRID, dim=96, blocks=("scan", "attention", "mlp"), initialisation=initialisation, positions="none"
    )
    model = config.build(1000)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].layer.into_state.weight.std().item() == pytest.approx(0.02, rel=0.05)
    outputs = [one for block in model.blocks for one in block.residual_outputs()]
    assert len(outputs) == 6
    for one in outputs:
        expected = 0.0 if initialisation == "zero-output" else 0.02 / 6**0.5
        assert one.weight.std().item() == pytest.approx(expected, rel=0.05)
    if initialisation == "zero-output":  # every block passes on what it gets
        tokens = random_tokens(1, 5)
        head = F.linear(model.norm(model.embedding(tokens) * 96**0.5), model.head_weight)
        torch.testing.assert_close(model(tokens), head)


def test_packed_documents_go_through_mlps_and_the_head_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = TRANSFORMER.build(VOCAB), []
    original = LM.logits
    monkeypatch.setattr(LM, "logits", lambda self, one: rows.append(len(one)) or original(self, one))
    model.blocks[1].register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    model(random_tokens(40), cu_seqlens=[0, 30, 31, 32, 40])
    assert rows == [40, 40]


@every_model
def test_no_rows_at_all(name: str) -> None:
    model = small_model(name)
    logits, state = model.step(random_tokens(0, 3), model.init_state(0))
    assert logits.shape == (0, 3, VOCAB)
    assert len(state.lengths) == 0
