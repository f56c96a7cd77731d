"""The accelerated language model is the plain one, and a model like any other."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from logdepth.fused import operators

from logdepth.models import ScanLM, ScanLMConfig
from logdepth.operators import AffineConfig, GRCConfig, MLPLDRUConfig
from tests.fused_models import (
    DEVICE,
    WIDTH,
    Outcome,
    assert_same,
    assert_slopes,
    few_programs,  # noqa: F401
    on_gpu,
    reproducible_products,  # noqa: F401
    shaken,
)

VOCAB = 5
SMALL = ScanLMConfig(embed_width=6, operator=GRCConfig(width=WIDTH))
BARE = dataclasses.replace(SMALL, embedding_net=False, post_merge="none", leaf_norm=False)
CONFIGS = {
    "paper": SMALL,
    "bare": BARE,
    "every-merge": dataclasses.replace(BARE, post_merge="every"),
    "leaf-norm": dataclasses.replace(BARE, leaf_norm=True, input_residual=0.0),
    "ldru": dataclasses.replace(SMALL, operator=MLPLDRUConfig(width=WIDTH)),
    "untied": dataclasses.replace(BARE, tied=False, post_merge="up"),
    "deep": dataclasses.replace(BARE, depth=2, leaf_norm=True),
    "recompute": dataclasses.replace(BARE, recompute=True, post_merge="up"),
    "embed-dropout": dataclasses.replace(BARE, embed_dropout=0.4),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def plain_and_fused(config: ScanLMConfig = SMALL, vocab: int = VOCAB, shaken_by: float = 0.2) -> tuple[ScanLM, ScanLM]:
    plain = config.build(vocab)
    shaken(plain, shaken_by)
    fused = copy.deepcopy(plain.to(DEVICE))
    assert fused.accelerate() is None
    assert fused.fused
    return plain, fused


def tokens_of(*shape: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, shape).to(DEVICE)


def learnt(model: ScanLM, tokens: Tensor, targets: Tensor, **layout: Any) -> Outcome:
    torch.manual_seed(4)
    loss = model.loss(tokens, targets, **layout)
    return Outcome((loss.detach(),), torch.autograd.grad(loss, list(model.parameters())))


@every_config
@pytest.mark.parametrize("length", [2, 5], ids=["fewer-tokens-than-vocabulary", "more"])
def test_loss_and_gradients_are_the_plain_models(config: ScanLMConfig, length: int) -> None:
    plain, fused = plain_and_fused(config)
    tokens, targets = tokens_of(2, length), tokens_of(2, length)
    assert_same(learnt(fused, tokens, targets), learnt(plain, tokens, targets))


def test_packed_documents() -> None:
    plain, fused = plain_and_fused(CONFIGS["leaf-norm"])
    tokens, targets = tokens_of(11), tokens_of(11)
    cu_seqlens = [0, 4, 5, 11]
    assert_same(
        learnt(fused, tokens, targets, cu_seqlens=cu_seqlens), learnt(plain, tokens, targets, cu_seqlens=cu_seqlens)
    )


@every_config
def test_logits_and_steps_are_the_plain_models(config: ScanLMConfig) -> None:
    plain, fused = (one.eval() for one in plain_and_fused(config))
    tokens = tokens_of(2, 8)
    with torch.no_grad():
        expected = plain(tokens)
        torch.testing.assert_close(fused(tokens), expected, rtol=1e-4, atol=1e-4)
        ragged = fused(tokens, lengths=[8, 3])
        torch.testing.assert_close(ragged[0], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ragged[1, :3], expected[1, :3], rtol=1e-4, atol=1e-4)
        state, logits = fused.init_state(2), []
        for part in tokens.split([1, 5, 2], dim=1):
            some, state = fused.step(part, state)
            logits.append(some)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", [GRCConfig, MLPLDRUConfig])
def test_low_precision(operator: type[GRCConfig | MLPLDRUConfig]) -> None:
    config = ScanLMConfig(embed_width=16, operator=operator(width=16))
    plain, fused = plain_and_fused(config, shaken_by=0.05)
    tokens, targets = tokens_of(2, 5), tokens_of(2, 5)
    expected = learnt(plain, tokens, targets)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        actual, plain_low = (learnt(one, tokens, targets) for one in (fused, plain))
    assert all(one.dtype == torch.float32 for one in actual.gradients)
    assert_as_near(actual, plain_low, expected)


@pytest.mark.parametrize("config", ["paper", "deep", "ldru"])
def test_a_backward_pass_is_not_autocast(config: str) -> None:
    _, fused = plain_and_fused(CONFIGS[config])
    tokens = tokens_of(2, 5)
    losses = [fused._features(tokens, None, None).square().sum() for _ in range(2)]  # the head is torch's own
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = torch.autograd.grad(losses[0], list(fused.parameters()))
    outside = torch.autograd.grad(losses[1], list(fused.parameters()))
    for one, other in zip(inside, outside, strict=True):
        assert torch.equal(one, other)


def assert_as_near(actual: Outcome, plain_low: Outcome, expected: Outcome, longer: float = 0.01) -> None:
    """About as far from float32 as the plain model in low precision, where that is near enough to mean something."""
    torch.testing.assert_close(actual.results[0], expected.results[0], rtol=2e-2, atol=0.0)
    least = distance(plain_low.gradients, expected.gradients)
    assert least < 0.1
    assert distance(actual.gradients, expected.gradients) < max(5e-2, 1.5 * least)
    for one, other in zip(actual.gradients, expected.gradients, strict=True):
        assert distance([one], [other]) < 0.3
    off, off_low = (abs(length(one.gradients, expected.gradients) - 1) for one in (actual, plain_low))
    assert off < max(longer, 2 * off_low), "rounding neither shortens nor lengthens them"


def length(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of all gradients together in the direction of those that are expected, over their norm."""
    along = sum(float((one * other).sum()) for one, other in zip(actual, expected, strict=True))
    return along / sum(float(one.square().sum()) for one in expected)


def distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of all gradients together, over their norm."""
    off = torch.stack([(one - other).norm() for one, other in zip(actual, expected, strict=True)]).norm()
    return float(off / torch.stack([one.norm() for one in expected]).norm())


def dropping(rate: float) -> ScanLMConfig:
    """Wherever a model without dropped embeddings can."""
    return dataclasses.replace(
        CONFIGS["leaf-norm"],
        operator=GRCConfig(width=WIDTH, dropout=rate),
        leaf_dropout=rate,
        output_dropout=rate,
        post_merge="up",
        post_merge_dropout=rate,
    )


@pytest.mark.parametrize("length", [2, 5], ids=["fewer-tokens-than-vocabulary", "more"])
def test_gradients_of_a_model_under_dropout_are_the_slope(length: int) -> None:
    fused = plain_and_fused(dataclasses.replace(dropping(0.2), leaf_dropout=0.3))[1]
    tokens, targets = tokens_of(2, length), tokens_of(2, length)

    def loss() -> Tensor:
        torch.manual_seed(4)
        return fused.loss(tokens, targets)

    layer = fused.layers[0]
    assert layer.leaf_norm is not None
    assert_slopes(loss, [[layer.leaf_norm.weight], [layer.leaf_norm.bias], [layer.into_state.weight]])
    assert_slopes(loss, [list(fused.parameters())])


# The kept table of leaves


def change_in_place(model: ScanLM) -> None:
    with torch.no_grad():
        model.layers[0].into_state.weight[0, 0] += 1.0


def load_others(model: ScanLM) -> None:
    model.load_state_dict({name: weight + 0.1 for name, weight in model.state_dict().items()})


def learn(model: ScanLM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.loss(tokens_of(1, 3), tokens_of(1, 3)).backward()
    optimizer.step()


def learn_fused(model: ScanLM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model.loss(tokens_of(1, 3), tokens_of(1, 3)).backward()
    optimizer.step()


def replace_weight(model: ScanLM) -> None:
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach() + 0.3)


def change_behind_its_back(model: ScanLM) -> None:
    model.embedding.weight.data.mul_(1.5).add_(0.1)


@pytest.mark.parametrize(
    "change", [change_in_place, load_others, learn, learn_fused, replace_weight, change_behind_its_back]
)
def test_leaves_are_kept_while_weights_are_held_and_no_longer(
    change: Callable[[ScanLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fused = (one.eval() for one in plain_and_fused())
    tokens = tokens_of(2, 5)
    made = 0
    refined = type(fused.layers[0].embedding_net).fused

    def counted(*arguments: Any) -> Tensor:
        nonlocal made
        made += 1
        return refined(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(fused.layers[0].embedding_net), "fused", counted)

    def logits_agree() -> None:
        with torch.no_grad():
            torch.testing.assert_close(fused(tokens), plain(tokens), rtol=1e-4, atol=1e-4)

    with fused.weights_held(), fused.weights_held():  # an evaluation inside another scope
        logits_agree()
        logits_agree()
    assert made == 1
    before = plain(tokens)
    change(fused)
    plain.load_state_dict(fused.state_dict())
    assert not torch.allclose(plain(tokens), before, rtol=1e-2)
    made = 0
    logits_agree()
    logits_agree()
    assert made == 2
    with fused.weights_held():
        logits_agree()


def test_inference_mode_and_other_modes_do_not_share_a_table_that_breaks() -> None:
    plain, fused = (one.eval() for one in plain_and_fused(CONFIGS["leaf-norm"]))
    tokens, targets = tokens_of(2, 5), tokens_of(2, 5)
    with fused.weights_held():
        with torch.inference_mode():
            torch.testing.assert_close(fused(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(fused(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
        assert_same(learnt(fused, tokens, targets), learnt(plain, tokens, targets))


def test_leaves_of_all_tokens_serve_one_dtype() -> None:
    _, fused = plain_and_fused()
    fused.eval()
    tokens, autocast = tokens_of(2, 5), torch.autocast(DEVICE.type, torch.bfloat16)
    with torch.no_grad():
        with autocast, fused.weights_held():
            expected = fused(tokens)
        with fused.weights_held():
            fused(tokens)
            with autocast:
                assert torch.equal(fused(tokens), expected)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("outside", [VOCAB + 3, VOCAB, -1])
def test_tokens_outside_the_vocabulary_are_not_answered(outside: int, held: bool) -> None:
    _, fused = plain_and_fused(CONFIGS["leaf-norm"])
    tokens = tokens_of(2, 5)
    tokens[1, 2] = outside
    with torch.no_grad(), fused.eval().weights_held() if held else contextlib.nullcontext():
        logits = fused(tokens)
    assert logits[1, 2:].isnan().all()
    assert logits[0].isfinite().all()


def test_nothing_at_all() -> None:
    plain, fused = (one.eval() for one in plain_and_fused(CONFIGS["leaf-norm"]))
    for shape in ((2, 0), (0, 3), (0, 0)):
        tokens = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
        with torch.no_grad():
            assert fused(tokens).shape == plain(tokens).shape


def test_an_evaluation_draws_no_random_numbers() -> None:
    _, fused = plain_and_fused()
    tokens = tokens_of(2, 5)
    before = torch.get_rng_state()
    with torch.no_grad():
        fused.eval()(tokens)
    assert torch.equal(torch.get_rng_state(), before)


# An accelerated model is a model


def test_a_copy_is_accelerated_and_apart() -> None:
    plain, fused = (one.eval() for one in plain_and_fused(CONFIGS["untied"]))
    tokens = tokens_of(2, 5)
    with torch.no_grad():
        before = fused(tokens)
        other = copy.deepcopy(fused)
        assert other.fused
        for weight in other.parameters():
            weight += 0.3 * torch.randn_like(weight)
        plain.load_state_dict(other.state_dict())
        torch.testing.assert_close(other(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
        assert torch.equal(fused(tokens), before)


def test_weights_are_saved_as_the_plain_models() -> None:
    plain, fused = plain_and_fused()
    fused.eval()(tokens_of(2, 5))
    saved = fused.state_dict()
    assert list(saved) == list(plain.state_dict())
    assert all(torch.equal(saved[name], weight) for name, weight in plain.state_dict().items())


def test_what_cannot_be_fused_says_why_in_one_line_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(1, 3)
    affine = dataclasses.replace(BARE, operator=AffineConfig(width=WIDTH)).build(VOCAB).to(DEVICE)
    assert affine.accelerate() == "there are fused kernels for GRC and MLPLDRU alone; this is AffineOperator"
    original = dataclasses.replace(BARE, operator=MLPLDRUConfig.original(WIDTH)).build(VOCAB).to(DEVICE)
    assert original.accelerate() == "there are no fused kernels for MLPLDRU with norm_weights=False"
    monkeypatch.setattr(operators, "usable_on", lambda device: False)
    grc = BARE.build(VOCAB).to(DEVICE)
    reason = grc.accelerate()
    assert reason is not None
    assert "Triton" in reason
    assert "\n" not in reason
    for model in (affine, original, grc):
        assert not model.fused
        assert model(tokens).shape == (1, 3, VOCAB)


@pytest.mark.parametrize("name", ["embed_dropout", "leaf_dropout"])
@pytest.mark.parametrize("length", [2, 5], ids=["fewer-tokens-than-vocabulary", "more"])
def test_dropout_that_is_on_in_a_model_that_does_not_train(name: str, length: int) -> None:
    """As in Monte-Carlo dropout."""
    config = dataclasses.replace(CONFIGS["leaf-norm"], **{name: 0.5})
    _, fused = plain_and_fused(config)
    tokens = tokens_of(3, length)
    fused.eval()
    with torch.inference_mode(), fused.weights_held():
        torch.testing.assert_close(fused(tokens), fused(tokens))
        for module in fused.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        assert not torch.allclose(fused(tokens), fused(tokens))


# On a GPU, at sizes that interest


@on_gpu
@pytest.mark.parametrize("vocab", [300, 5000], ids=["fewer-words-than-tokens", "more"])
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    # Rounding grows with the depth of a tree where no norm ends a merge, as in the down-sweep of an MLP-LDRU.
    ("operator", "shape"),
    [(GRCConfig, (2, 700)), (MLPLDRUConfig, (100, 14))],
)
def test_low_precision_on_a_gpu(
    operator: type[GRCConfig | MLPLDRUConfig], shape: tuple[int, int], width: int, vocab: int, recompute: bool
) -> None:
    config = ScanLMConfig(embed_width=width, operator=operator(width=width), recompute=recompute)
    plain, fused = plain_and_fused(config, vocab, shaken_by=0.01)
    tokens, targets = tokens_of(*shape, vocab=vocab), tokens_of(*shape, vocab=vocab)
    with torch.autocast("cuda", torch.bfloat16):
        actual, plain_low = (learnt(one, tokens, targets) for one in (fused, plain))
    longer = 0.02 if operator is MLPLDRUConfig else 0.01  # 1.07 % were seen
    assert_as_near(actual, plain_low, learnt(plain, tokens, targets), longer)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        logits, logits_low = (one.eval()(tokens) for one in (fused, plain))
    with torch.no_grad():
        exact = plain(tokens)
    assert distance([logits], [exact]) < max(5e-2, 1.5 * distance([logits_low], [exact]))


@on_gpu
def test_dropout_has_the_plain_models_law_on_a_gpu() -> None:
    """Masks differ, so that only means over many can be compared."""
    config = dataclasses.replace(dropping(0.4), post_merge="every")
    tokens, targets = tokens_of(2, 9), tokens_of(2, 9)
    losses = []
    for model in plain_and_fused(config):
        with torch.no_grad():
            losses.append(torch.stack([model.loss(tokens, targets) for _ in range(1000)]).double())
    plain, fused = losses
    error = float((plain.var() / len(plain) + fused.var() / len(fused)).sqrt())
    assert abs(float(plain.mean() - fused.mean())) < 4 * error
    assert 0.8 < float(fused.std() / plain.std()) < 1.25
