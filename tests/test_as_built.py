"""What is fused: operators and models as they are built, and nothing else. Kernels read weights and call no module."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from logdepth.fused import FusedOperator, why_not_fused

from logdepth.models import ScanLM, ScanLMConfig
from logdepth.operators import GRC, MLPLDRU, AffineConfig, GRCConfig, MLPLDRUConfig, PostMerge
from tests.fused_models import DEVICE, WIDTH

DEEP = ScanLMConfig(embed_width=6, operator=GRCConfig(width=WIDTH), depth=2, embedding_net=False, post_merge="none")


def test_other_operators_that_are_made_from_a_grc_are_not_taken_for_one() -> None:
    class Other(GRC):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return super().forward(right, left)

    assert why_not_fused(Other(WIDTH), torch.empty(0, device=DEVICE)) is not None


def test_what_has_no_kernels_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match="for GRC and MLPLDRU alone; this is function"):
        FusedOperator(lambda left, right: left + right)
    with pytest.raises(TypeError, match="no fused kernels for MLPLDRU with norm_weights=False"):
        FusedOperator(MLPLDRU(WIDTH, norm_weights=False))


def test_pairs_of_different_cells_are_not_fused() -> None:
    one, other = GRC(WIDTH), GRC(WIDTH)
    for pair in ((one, other), (PostMerge(one, WIDTH), other), (one, PostMerge(one, WIDTH))):
        reason = why_not_fused(pair, torch.empty(0, device=DEVICE))
        assert reason is not None
        assert "where both sweeps have one operator" in reason
    assert why_not_fused((one, one), torch.empty(0, device=DEVICE)) is None


class LowRank(nn.Linear):
    """More than its weights say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def without(module: nn.Module, name: str) -> nn.Module:
    module.register_parameter(name, None)
    return module


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda grc: setattr(grc, "hidden", LowRank(2 * WIDTH, 4 * WIDTH)), "operator.hidden is LowRank in place of"),
        (lambda grc: setattr(grc, "gates", without(grc.gates, "bias")), "operator.gates has no bias"),
        (lambda grc: setattr(grc, "norm", nn.LayerNorm(WIDTH, elementwise_affine=False)), "norm has no weight"),
        (lambda grc: setattr(grc, "norm", nn.Identity()), "operator.norm is Identity in place of LayerNorm"),
        (lambda grc: setattr(grc, "more", nn.Linear(1, 1)), "operator.more is Linear in place of nothing"),
        (lambda grc: setattr(grc, "activation", torch.tanh), "operator has an activation that is not among"),
        (lambda grc: setattr(grc.gates, "forward", torch.relu), "operator.gates has a forward of its own"),
        (lambda grc: grc.gates.register_forward_hook(lambda *_: None), "operator.gates has hooks"),
        (lambda grc: grc.hidden.register_forward_pre_hook(lambda *_: None), "operator.hidden has hooks"),
        (lambda grc: grc.hidden.register_full_backward_hook(lambda *_: None), "operator.hidden has hooks"),
    ],
)
def test_an_operator_must_be_as_it_is_built(change: Callable[[GRC], object], why: str) -> None:
    """Kernels read weights, and would compute something else without a word."""
    grc = GRC(WIDTH)
    change(grc)
    reason = why_not_fused(PostMerge(grc, WIDTH), torch.empty(0, device=DEVICE))
    assert reason is not None
    assert why in reason
    with pytest.raises(TypeError, match="operator"):
        FusedOperator(PostMerge(grc, WIDTH))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: setattr(model.layers[1], "operator", AffineConfig(width=WIDTH).build()), "this is Affine"),
        (lambda model: setattr(model.layers[1], "operator", MLPLDRUConfig.original(WIDTH).build()), "norm_weights"),
        (lambda model: setattr(model.layers[1], "operator", MLPLDRUConfig(width=WIDTH).build()), "in place of GRC"),
        (lambda model: setattr(model.layers[1], "embedding_net", nn.Dropout(0.5)), "is Dropout in place of Identity"),
        (lambda model: setattr(model, "embed_dropout", nn.Identity()), "embed_dropout is Identity in place of"),
        (lambda model: model.embed_dropout.register_forward_hook(lambda *_: None), "embed_dropout has hooks"),
        (lambda model: setattr(model.embedding, "max_norm", 1.0), "embedding has max_norm=1.0"),
        (lambda model: setattr(model.embedding, "padding_idx", 0), "embedding has padding_idx=0"),
    ],
)
def test_every_part_of_a_model_must_be_as_it_is_built(change: Callable[[ScanLM], None], why: str) -> None:
    model = DEEP.build(5).to(DEVICE)
    assert model.accelerate() is None
    change(model)
    reason = model.accelerate()
    assert reason is not None
    assert why in reason
    assert "\n" not in reason
    assert not model.fused, "nor is it any more"


def test_being_asked_costs_no_random_numbers_and_no_compiler() -> None:
    """Runs are the same to the bit with other ways to ask, and a start takes a second less."""
    check = (
        "import sys, torch; from logdepth.recipes import recipe; model = recipe('ptb-ar-grc').model.build(50); "
        "before = torch.get_rng_state(); assert model.accelerate() is None; "
        "assert 'torch._dynamo' not in sys.modules; assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", check], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
