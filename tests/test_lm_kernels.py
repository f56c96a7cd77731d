"""A language model by kernels is the plain one, in training, evaluation and steps."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from logdepth.models import LM, ScanLMConfig
from logdepth.operators import AffineConfig, GRCConfig, MLPLDRUConfig
from logdepth.operators.fused import sweep as fused_sweeps
from logdepth.ops import FrozenTable, kernels
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


def built(config: ScanLMConfig = SMALL, vocab: int = VOCAB, shaken_by: float = 0.2) -> LM:
    model = config.build(vocab)
    shaken(model, shaken_by)
    return model.to(DEVICE)


@pytest.fixture(autouse=True)
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each scan by kernels."""
    found: list[bool] = []
    original = fused_sweeps.fused_sweep

    def watched(*arguments: Any, **settings: Any) -> Any:
        found.append(True)
        return original(*arguments, **settings)

    monkeypatch.setattr(fused_sweeps, "fused_sweep", watched)
    return found


def by_kernels(compute: Callable[[], Any]) -> Any:
    with kernels(True):
        return compute()


def plainly(compute: Callable[[], Any]) -> Any:
    with kernels(False):
        return compute()


def tokens_of(*shape: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, shape).to(DEVICE)


def learnt(enabled: bool, model: LM, tokens: Tensor, targets: Tensor, **layout: Any) -> Outcome:
    """Loss and gradients, with kernels or without."""
    torch.manual_seed(4)
    with kernels(enabled):
        loss = model.loss(tokens, targets, **layout)
    return Outcome((loss.detach(),), torch.autograd.grad(loss, list(model.parameters())))


@every_config
@pytest.mark.parametrize("length", [2, 5], ids=["fewer-tokens-than-vocabulary", "more"])
def test_loss_and_gradients_are_the_plain_models(config: ScanLMConfig, length: int, sweeps: list[bool]) -> None:
    torch.manual_seed(2)  # with 0, a norm in one net amplifies rounding 20-fold, by kernels and without
    model, tokens, targets = built(config), tokens_of(2, length), tokens_of(2, length)
    expected = learnt(False, model, tokens, targets)
    assert not sweeps
    assert_same(learnt(True, model, tokens, targets), expected)
    assert len(sweeps) == config.depth


def test_packed_documents() -> None:
    model, tokens, targets = built(CONFIGS["leaf-norm"]), tokens_of(11), tokens_of(11)
    found, expected = (learnt(one, model, tokens, targets, cu_seqlens=[0, 4, 5, 11]) for one in (True, False))
    assert_same(found, expected)


def test_documents_of_a_pack_do_not_see_each_other() -> None:
    model, tokens, bounds = built(), tokens_of(11), [0, 4, 5, 11]

    def logits(tokens: Tensor) -> Tensor:
        with torch.no_grad(), kernels(True):
            return model(tokens, cu_seqlens=bounds)

    before = logits(tokens)
    for first, last in ((0, 4), (4, 5), (5, 11)):
        others = tokens.clone()
        others[first:last] = (others[first:last] + 1) % VOCAB
        changed = (logits(others) != before).any(dim=1)
        assert changed[first:last].all()
        assert int(changed.sum()) == last - first


@every_config
def test_logits_and_steps_are_the_plain_models(config: ScanLMConfig) -> None:
    model, tokens = built(config).eval(), tokens_of(2, 8)
    with torch.no_grad():
        expected = plainly(lambda: model(tokens))
        with kernels(True):
            torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
            ragged = model(tokens, lengths=[8, 3])
            torch.testing.assert_close(ragged[0], expected[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ragged[1, :3], expected[1, :3], rtol=1e-4, atol=1e-4)
            state, logits = model.init_state(2), []
            for part in tokens.split([1, 5, 2], dim=1):
                some, state = model.step(part, state)
                logits.append(some)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", [GRCConfig, MLPLDRUConfig])
def test_low_precision(operator: type[GRCConfig | MLPLDRUConfig]) -> None:
    config = ScanLMConfig(embed_width=16, operator=operator(width=16))
    model, tokens, targets = built(config, shaken_by=0.05), tokens_of(2, 5), tokens_of(2, 5)
    expected = learnt(False, model, tokens, targets)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        actual, plain_low = (learnt(one, model, tokens, targets) for one in (True, False))
    assert all(one.dtype == torch.float32 for one in actual.gradients)
    assert_as_near(actual, plain_low, expected)


@pytest.mark.parametrize("config", ["paper", "deep", "ldru"])
def test_a_backward_pass_is_not_autocast(config: str) -> None:
    model, tokens = built(CONFIGS[config]), tokens_of(2, 5)
    with kernels(True):
        losses = [model.features(tokens).square().sum() for _ in range(2)]  # the head is torch's own
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = torch.autograd.grad(losses[0], list(model.parameters()))
    outside = torch.autograd.grad(losses[1], list(model.parameters()))
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
    model = built(dataclasses.replace(dropping(0.2), leaf_dropout=0.3))
    tokens, targets = tokens_of(2, length), tokens_of(2, length)

    def loss() -> Tensor:
        torch.manual_seed(4)
        return by_kernels(lambda: model.loss(tokens, targets))  # type: ignore[no-any-return]

    layer = model.blocks[0]
    assert_slopes(loss, [[layer.leaf_norm.weight], [layer.leaf_norm.bias], [layer.into_state.weight]])
    assert_slopes(loss, [list(model.parameters())])


# The kept table of leaves


def change_in_place(model: LM) -> None:
    with torch.no_grad():
        model.blocks[0].into_state.weight[0, 0] += 1.0


def load_others(model: LM) -> None:
    model.load_state_dict({name: weight + 0.1 for name, weight in model.state_dict().items()})


def learn(model: LM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.loss(tokens_of(1, 3), tokens_of(1, 3)).backward()
    optimizer.step()


def learn_fused(model: LM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model.loss(tokens_of(1, 3), tokens_of(1, 3)).backward()
    optimizer.step()


def replace_weight(model: LM) -> None:
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach() + 0.3)


def change_behind_its_back(model: LM) -> None:
    model.embedding.weight.data.mul_(1.5).add_(0.1)


@pytest.mark.parametrize(
    "change", [change_in_place, load_others, learn, learn_fused, replace_weight, change_behind_its_back]
)
def test_leaves_are_kept_while_weights_are_frozen_and_no_longer(change: Callable[[LM], None]) -> None:
    model, tokens, made = built().eval(), tokens_of(2, 5), []
    model.blocks[0].embedding_net.register_forward_hook(lambda *_: made.append(True))

    def logits_agree() -> None:
        with torch.no_grad():
            found = by_kernels(lambda: model(tokens))
            calls = len(made)
            torch.testing.assert_close(found, plainly(lambda: copy.deepcopy(model)(tokens)), rtol=1e-4, atol=1e-4)
            del made[calls:]

    with model.frozen_weights(), model.frozen_weights():  # an evaluation inside another scope
        logits_agree()
        logits_agree()
    assert len(made) == 1
    before = plainly(lambda: model(tokens))
    change(model)
    assert not torch.allclose(plainly(lambda: model(tokens)), before, rtol=1e-2)
    made.clear()
    logits_agree()
    logits_agree()
    assert len(made) == 2
    with model.frozen_weights():
        logits_agree()


def test_inference_mode_and_other_modes_do_not_share_a_table_that_breaks() -> None:
    model, tokens, targets = built(CONFIGS["leaf-norm"]).eval(), tokens_of(2, 5), tokens_of(2, 5)
    plain = copy.deepcopy(model)
    with model.frozen_weights():
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                found, expected = by_kernels(lambda: model(tokens)), plainly(lambda: plain(tokens))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert_same(learnt(True, model, tokens, targets), learnt(False, plain, tokens, targets))


def test_leaves_of_all_tokens_serve_one_dtype() -> None:
    model, tokens, autocast = built().eval(), tokens_of(2, 5), torch.autocast(DEVICE.type, torch.bfloat16)
    with torch.no_grad(), kernels(True):
        with autocast, model.frozen_weights():
            expected = model(tokens)
        with model.frozen_weights():
            model(tokens)
            with autocast:
                assert torch.equal(model(tokens), expected)


def test_a_table_may_be_given() -> None:
    """As a decoder does, which keeps it from step to step."""
    model, tokens, made, table = built().eval(), tokens_of(2, 1), [], FrozenTable(always=True)
    model.blocks[0].embedding_net.register_forward_hook(lambda _module, _inputs, result: made.append(len(result)))
    for _ in range(2):
        with torch.no_grad(), kernels(True), model.frozen_weights(table):
            model(tokens)
    assert made == [VOCAB]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("outside", [VOCAB + 3, VOCAB, -1])
def test_tokens_outside_the_vocabulary_are_not_answered(outside: int, frozen: bool) -> None:
    model, tokens = built(CONFIGS["leaf-norm"]).eval(), tokens_of(2, 5)
    tokens[1, 2] = outside
    with torch.no_grad(), kernels(True), model.frozen_weights() if frozen else contextlib.nullcontext():
        logits = model(tokens)
    assert logits[1, 2:].isnan().all()
    assert logits[0].isfinite().all()


@every_config
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_nothing_at_all(config: ScanLMConfig, shape: tuple[int, int]) -> None:
    model, tokens = built(config).eval(), torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    with torch.no_grad(), kernels(True):
        assert model(tokens).shape == (*shape, VOCAB)
        assert model.step(tokens, model.init_state(len(tokens)))[0].shape == (*shape, VOCAB)
    loss = by_kernels(lambda: model.features(tokens).sum())
    assert not any(one.any() for one in torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


def test_an_evaluation_draws_no_random_numbers() -> None:
    model, tokens = built(dropping(0.4)).eval(), tokens_of(2, 5)
    before = torch.get_rng_state()
    with torch.no_grad(), kernels(True):
        model(tokens)
    assert torch.equal(torch.get_rng_state(), before)


def test_second_derivatives_are_refused() -> None:
    model, tokens = built(BARE), tokens_of(2, 5)
    loss = by_kernels(lambda: model.features(tokens).square().sum())
    with pytest.raises(RuntimeError, match="do not support create_graph=True"):
        torch.autograd.grad(loss, model.embedding.weight, create_graph=True)


# A model by kernels is a model like any other


def test_a_copy_is_apart() -> None:
    model, tokens = built(CONFIGS["untied"]).eval(), tokens_of(2, 5)
    with torch.no_grad():
        before = by_kernels(lambda: model(tokens))
        other = copy.deepcopy(model)
        for weight in other.parameters():
            weight += 0.3 * torch.randn_like(weight)
        found, expected = by_kernels(lambda: other(tokens)), plainly(lambda: other(tokens))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(by_kernels(lambda: model(tokens)), before)


def test_weights_are_the_same_and_saved_under_the_same_names() -> None:
    model = built()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    by_kernels(lambda: model.eval()(tokens_of(2, 5)))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("operator", [AffineConfig(width=WIDTH), MLPLDRUConfig.original(WIDTH)], ids=["affine", "ldru"])
def test_what_kernels_cannot_sweep_is_swept_plainly(operator: Any, sweeps: list[bool]) -> None:
    model = built(dataclasses.replace(BARE, operator=operator, leaf_norm=True))
    tokens, targets = tokens_of(2, 5), tokens_of(2, 5)
    found, expected = (learnt(one, model, tokens, targets) for one in (True, False))
    assert_same(found, expected)
    assert not sweeps


def test_a_model_of_double_precision_is_computed_in_it(sweeps: list[bool]) -> None:
    model, tokens, targets = built().double(), tokens_of(2, 5), tokens_of(2, 5)
    found, expected = (learnt(one, model, tokens, targets) for one in (True, False))
    assert_same(found, expected, tolerance=1e-12)
    assert found.results[0].dtype == torch.float64
    assert not sweeps


@pytest.mark.parametrize("name", ["embed_dropout", "leaf_dropout"])
@pytest.mark.parametrize("length", [2, 5], ids=["fewer-tokens-than-vocabulary", "more"])
def test_dropout_that_is_on_in_a_model_that_does_not_train(name: str, length: int) -> None:
    """As in Monte-Carlo dropout."""
    config = dataclasses.replace(CONFIGS["leaf-norm"], **{name: 0.5})
    model, tokens = built(config).eval(), tokens_of(3, length)
    with torch.inference_mode(), kernels(True), model.frozen_weights():
        torch.testing.assert_close(model(tokens), model(tokens))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        assert not torch.allclose(model(tokens), model(tokens))


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
    model = built(config, vocab, shaken_by=0.01)
    tokens, targets = tokens_of(*shape, vocab=vocab), tokens_of(*shape, vocab=vocab)
    with torch.autocast("cuda", torch.bfloat16):
        actual, plain_low = (learnt(one, model, tokens, targets) for one in (True, False))
    longer = 0.02 if operator is MLPLDRUConfig else 0.01  # 1.07 % were seen
    assert_as_near(actual, plain_low, learnt(False, model, tokens, targets), longer)
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        logits, logits_low = by_kernels(lambda: model(tokens)), plainly(lambda: model(tokens))
    with torch.no_grad():
        exact = plainly(lambda: model(tokens))
    assert distance([logits], [exact]) < max(5e-2, 1.5 * distance([logits_low], [exact]))


@on_gpu
def test_dropout_has_the_plain_models_law_on_a_gpu() -> None:
    """Masks differ, so that only means over many can be compared."""
    config = dataclasses.replace(dropping(0.4), post_merge="every")
    tokens, targets = tokens_of(2, 9), tokens_of(2, 9)
    model, losses = built(config), []
    for enabled in (False, True):
        with torch.no_grad(), kernels(enabled):
            losses.append(torch.stack([model.loss(tokens, targets) for _ in range(1000)]).double())
    plain, fused = losses
    error = float((plain.var() / len(plain) + fused.var() / len(fused)).sqrt())
    assert abs(float(plain.mean() - fused.mean())) < 4 * error
    assert 0.8 < float(fused.std() / plain.std()) < 1.25
