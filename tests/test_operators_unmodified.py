"""Kernels are for operators and models as they are built. Kernels read weights and call no part, so a modified one
must get the answers of its parts, and its hooks must fire."""

import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

pytest.importorskip("triton")

from logdepth import scan
from logdepth.models import LM, ScanLMConfig
from logdepth.operators import GRC, MLPLDRU, AffineOperator, GRCConfig, MLPLDRUConfig, PostMerge
from logdepth.ops import LayerNorm, Linear, kernels
from logdepth.ops.dispatch import is_unmodified
from logdepth.scanning import Operator, OperatorPair
from tests.fused_models import (
    DEVICE,
    WIDTH,
    Outcome,
    assert_same,
    elements_of,
    few_programs,  # noqa: F401
    outcome,
    reproducible_products,  # noqa: F401
    scan_by,
    shaken,
    why_plain,
)

CHANGED = "kernels are for operators as they are built"


class Reversed(GRC):
    """A GRC that computes something else."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return super().forward(right, left)


class LowRank(Linear):
    """More than its weights say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def assert_scans_plainly(operator: Operator | OperatorPair) -> Outcome:
    """Values and gradients, exactly those without kernels; and without gradients, where merges have kernels of their
    own."""
    elements = elements_of(1, 4)
    module = operator[0] if isinstance(operator, tuple) else operator
    assert isinstance(module, nn.Module)
    inputs, outcomes = [elements, *module.parameters()], []
    for enabled in (False, True):
        with kernels(enabled):
            outcomes.append(outcome([scan(operator, elements).prefixes], inputs))
            with torch.no_grad():
                torch.testing.assert_close(scan(operator, elements).prefixes, outcomes[0].results[0])
    assert_same(outcomes[1], outcomes[0], tolerance=1e-5)
    return outcomes[1]


def test_subclasses_compute_what_they_say() -> None:
    operator = Reversed(WIDTH).to(DEVICE)
    plain = GRC(WIDTH).to(DEVICE)
    plain.load_state_dict(operator.state_dict())
    found = assert_scans_plainly(operator)
    reason = why_plain(operator, elements_of(1, 3))
    assert reason is not None
    assert "a part of this Reversed was changed" in reason
    assert not torch.allclose(found.results[0], scan_by(True, plain, elements_of(1, 4)).prefixes)
    assert_scans_plainly(PostMerge(operator, WIDTH).to(DEVICE))


def test_what_has_no_kernels_is_told_with_the_reason() -> None:
    ldru = MLPLDRU(WIDTH, norm_weights=False).to(DEVICE)
    elements = elements_of(1, 3)
    assert why_plain(ldru, elements) == "there are no fused kernels for MLPLDRU with norm_weights=False"
    assert_scans_plainly(ldru)
    assert_scans_plainly(PostMerge(AffineOperator(WIDTH), WIDTH).to(DEVICE))
    assert_scans_plainly(PostMerge(PostMerge(GRC(WIDTH), WIDTH), WIDTH).to(DEVICE))


def test_pairs_of_different_operators_scan_plainly() -> None:
    one, other = GRC(WIDTH).to(DEVICE), GRC(WIDTH).to(DEVICE)
    post = PostMerge(one, WIDTH).to(DEVICE)
    for pair in ((one, other), (post, other), (one, post)):
        reason = why_plain(pair, elements_of(1, 3))
        assert reason is not None
        assert "one operator for both sweeps" in reason
        assert_scans_plainly(pair)
    assert why_plain((one, one), elements_of(1, 3)) is None
    assert why_plain((post, one), elements_of(1, 3)) is None


def without(module: nn.Module, name: str) -> nn.Module:
    module.register_parameter(name, None)
    return module


CHANGES: dict[str, Callable[[Any], object]] = {
    "subclass of a part": lambda grc: setattr(grc, "hidden", LowRank(2 * WIDTH, 4 * WIDTH)),
    "torch's own linear": lambda grc: setattr(grc, "hidden", nn.Linear(2 * WIDTH, 4 * WIDTH)),
    "no bias": lambda grc: without(grc.gates, "bias"),
    "norm without weights": lambda grc: setattr(grc, "norm", LayerNorm(WIDTH, elementwise_affine=False)),
    "norm without bias": lambda grc: setattr(grc, "norm", LayerNorm(WIDTH, bias=False)),
    "no norm": lambda grc: setattr(grc, "norm", nn.Identity()),
    "part of another place": lambda grc: setattr(grc, "gates", LayerNorm(4 * WIDTH)),
    "one more part": lambda grc: setattr(grc, "more", Linear(1, 1)),
    "foreign activation": lambda grc: setattr(grc, "activation", torch.tanh),
    "own forward": lambda grc: setattr(grc.gates, "forward", lambda x: 2 * x),
    "forward hook": lambda grc: grc.gates.register_forward_hook(lambda _module, _inputs, result: 2 * result),
    "forward pre-hook": lambda grc: grc.hidden.register_forward_pre_hook(lambda _module, inputs: (2 * inputs[0],)),
    "backward hook": lambda grc: grc.hidden.register_full_backward_hook(lambda _module, grads, _: (2 * grads[0],)),
    "hook on the whole": lambda grc: grc.register_forward_hook(lambda _module, _inputs, result: 2 * result),
    "parametrised": lambda grc: register_parametrization(grc.norm, "weight", nn.Softplus()),
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@every_change
@pytest.mark.parametrize("net", [False, True], ids=["alone", "net"])
def test_a_modified_grc_scans_plainly(change: Callable[[Any], object], net: bool) -> None:
    grc = GRC(WIDTH)
    operator: GRC | PostMerge = PostMerge(grc, WIDTH) if net else grc
    shaken(operator.to(DEVICE))
    assert why_plain(operator, elements_of(1, 3)) is None
    change(grc)
    operator.to(DEVICE)
    reason = why_plain(operator, elements_of(1, 3))
    assert reason is not None
    assert "\n" not in reason
    assert CHANGED in reason or "activation" in reason
    assert_scans_plainly(operator)


@pytest.mark.parametrize(
    "change",
    [
        lambda post: setattr(post, "hidden", nn.Identity()),
        lambda post: post.out.register_forward_hook(lambda _module, _inputs, result: 2 * result),
        lambda post: setattr(post, "activation", torch.tanh),
        lambda post: setattr(post, "norm", nn.Identity()),
    ],
    ids=["no map", "hook", "activation", "no norm"],
)
def test_a_modified_net_scans_plainly(change: Callable[[PostMerge], object]) -> None:
    operator = MLPLDRU(WIDTH)
    post = PostMerge(operator, WIDTH, hidden_multiple=1)
    shaken(post.to(DEVICE))
    change(post)
    for pair in (post, (post, operator)):
        assert why_plain(pair, elements_of(1, 3)) is not None
        assert_scans_plainly(pair)


@pytest.mark.parametrize("name", ["first", "second", "weights", "norm", "left_value", "right_value", "out"])
def test_a_modified_mlp_ldru_scans_plainly(name: str) -> None:
    operator = MLPLDRU(WIDTH).to(DEVICE)
    operator.get_submodule(name).register_forward_hook(lambda _module, _inputs, result: 1.5 * result)
    assert_scans_plainly(operator)
    if name.endswith("value"):
        setattr(operator, name, nn.Identity())
        assert_scans_plainly(operator)


def test_what_is_unmodified() -> None:
    parts = {"": nn.Sequential, "0": Linear, "1": nn.Dropout}
    module = nn.Sequential(Linear(2, 2), nn.Dropout())
    assert is_unmodified(module, parts)
    assert is_unmodified(copy.deepcopy(module), parts)
    assert not is_unmodified(module, {**parts, "2": Linear})
    assert not is_unmodified(nn.Sequential(nn.Dropout(), Linear(2, 2)), parts)
    handle = module[1].register_forward_hook(lambda *_: None)
    assert not is_unmodified(module, parts)
    handle.remove()
    assert is_unmodified(module, parts)


# Models

SMALL = ScanLMConfig(embed_width=6, operator=GRCConfig(width=WIDTH), embedding_net=False)
WITH_NET = dataclasses.replace(SMALL, embedding_net=True, post_merge="none")
VOCAB = 5


def replace(module: nn.Module, name: str, part: nn.Module) -> None:
    shaken(part.to(DEVICE))
    setattr(module, name, part)


def doubled(_module: nn.Module, _inputs: Any, result: Tensor) -> Tensor:
    return 2 * result


MODEL_CHANGES: dict[str, Callable[[LM], object]] = {
    "other operator": lambda model: replace(model.blocks[0], "operator", PostMerge(AffineOperator(WIDTH), WIDTH)),
    "operator without kernels": lambda model: replace(
        model.blocks[0], "operator", PostMerge(MLPLDRUConfig.original(WIDTH).build(), WIDTH)
    ),
    "operator of another kind": lambda model: replace(model.blocks[0], "operator", PostMerge(MLPLDRU(WIDTH), WIDTH)),
    "dropout in place of no net": lambda model: setattr(model.blocks[0], "embedding_net", nn.Dropout(0.0)),
    "other norm": lambda model: replace(model.blocks[0], "norm", nn.RMSNorm(6)),
    "other norm of leaves": lambda model: replace(model.blocks[0], "leaf_norm", nn.RMSNorm(WIDTH)),
    "other output": lambda model: replace(
        model.blocks[0], "out_of_state", nn.Sequential(nn.Linear(WIDTH, 6), nn.Sigmoid())
    ),
    "hook on the output": lambda model: model.blocks[0].out_of_state.register_forward_hook(doubled),
    "no dropout of embeddings": lambda model: setattr(model, "embed_dropout", nn.Identity()),
    "hook on dropout of embeddings": lambda model: model.embed_dropout.register_forward_hook(doubled),
    "hook on the embedding": lambda model: model.embedding.register_forward_hook(doubled),
    "padding": lambda model: setattr(model.embedding, "padding_idx", 0),
    "gradients by frequency": lambda model: setattr(model.embedding, "scale_grad_by_freq", True),
}


@pytest.mark.parametrize("change", MODEL_CHANGES.values(), ids=MODEL_CHANGES)
def test_a_modified_model_is_the_plain_one(change: Callable[[LM], None]) -> None:
    model = SMALL.build(VOCAB)
    shaken(model.to(DEVICE))
    change(model)
    assert_models_agree(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.blocks[0], "embedding_net", nn.Identity()),
        lambda model: model.blocks[0].embedding_net.stem.register_forward_hook(doubled),
    ],
    ids=["no net", "hook"],
)
def test_a_model_with_a_modified_net_is_the_plain_one(change: Callable[[LM], None]) -> None:
    model = WITH_NET.build(VOCAB)
    shaken(model.to(DEVICE))
    change(model)
    assert_models_agree(model)


def assert_models_agree(model: LM) -> None:
    """Loss, gradients, and the logits of few tokens and of many, with kernels and without."""
    tokens = torch.randint(VOCAB, (2, 4), device=DEVICE)
    outcomes = []
    for enabled in (False, True):
        with kernels(enabled):
            loss = model.loss(tokens, tokens)
            gradients = outcome([loss], list(model.parameters())).gradients
            with torch.no_grad():
                outcomes.append(Outcome((loss.detach(), model(tokens), model(tokens[:, :2])), gradients))
    assert_same(outcomes[1], outcomes[0])


def test_an_embedding_keeps_its_own_rules() -> None:
    """Whether or not kernels are on: rows of a table, and nothing more, are looked up without calling the module."""
    model = SMALL.build(VOCAB).to(DEVICE)
    tokens = torch.randint(VOCAB, (2, 5), device=DEVICE)
    tokens[0, 0] = 0
    seen: list[torch.Size] = []
    handle = model.embedding.register_forward_hook(lambda _module, _inputs, result: seen.append(result.shape))
    model(tokens)
    assert seen == [(2, 5, 6)]
    handle.remove()
    untied = ScanLMConfig(embed_width=6, operator=GRCConfig(width=WIDTH), tied=False).build(VOCAB).to(DEVICE)
    untied.embedding.padding_idx = 0
    for enabled in (False, True):
        with kernels(enabled):
            (grad,) = torch.autograd.grad(untied.loss(tokens, tokens), untied.embedding.weight)
        assert not grad[0].any()
        assert grad[1:].any()
    untied.embedding.padding_idx, untied.embedding.max_norm = None, 1e-3
    with torch.no_grad():
        untied(tokens)
    assert untied.embedding.weight[tokens.flatten()].norm(dim=1).max() <= 1e-3 * 1.01


def test_dropout_in_a_replaced_net_differs_from_token_to_token() -> None:
    model = ScanLMConfig(embed_width=6, operator=GRCConfig(width=WIDTH), post_merge="none").build(VOCAB).to(DEVICE)
    model.blocks[0].embedding_net = nn.Dropout(0.5)
    seen: list[Tensor] = []
    model.blocks[0].leaf_norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    tokens = torch.zeros(4, 25, dtype=torch.int64, device=DEVICE)
    for enabled in (False, True):
        with kernels(enabled):
            model(tokens)
    for leaves in seen:
        assert leaves.shape == (4, 25, WIDTH)
        assert 0.3 < float((leaves == 0).double().mean()) < 0.7
        assert len(leaves.flatten(0, 1).unique(dim=0)) > 50


def test_being_asked_costs_no_random_numbers_and_no_compiler() -> None:
    """Runs are the same bit for bit with and without asking, and a start takes a second less."""
    check = (
        "import sys, torch; from logdepth.recipes import recipe; from logdepth.acceleration import _why_plain; "
        "model = recipe('ptb-ar-grc').model.build(50); before = torch.get_rng_state(); "
        "assert _why_plain(model, torch.empty(0)) == []; "
        "assert 'torch._dynamo' not in sys.modules; assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", check], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
