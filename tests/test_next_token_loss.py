"""The loss as a module: the mean cross-entropy of the next tokens, with the gradients of the model."""

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from logdepth.training import NextTokenLoss
from tests.small_models import SMALL_MODELS, VOCAB


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_it_is_the_mean_cross_entropy_of_the_models_logits(name: str) -> None:
    model = SMALL_MODELS[name].build(VOCAB)
    loss = NextTokenLoss(model)
    tokens = torch.randint(VOCAB, (3, 18))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    packed = (inputs.flatten(), targets.flatten(), [0, 5, 17, 34, 40, 51])
    for arguments in ((inputs, targets), packed):
        bounds = {"cu_seqlens": arguments[2]} if len(arguments) == 3 else {}
        expected = F.cross_entropy(model(arguments[0], **bounds).flatten(0, -2), arguments[1].flatten())
        found = loss(*arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        gradients = [torch.autograd.grad(one, list(model.parameters())) for one in (found, expected)]
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)


def test_its_parameters_are_those_of_the_model() -> None:
    model = SMALL_MODELS["sinusoidal-untied"].build(VOCAB)
    assert [id(one) for one in NextTokenLoss(model).parameters()] == [id(one) for one in model.parameters()]


@pytest.mark.filterwarnings("default")  # the compiler warns of its own internals
def test_ddp_and_compile_wrap_it() -> None:
    model = SMALL_MODELS["sinusoidal-untied"].build(VOCAB)
    loss, tokens = NextTokenLoss(model), torch.randint(VOCAB, (2, 9))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def gradients(module: nn.Module) -> list[Tensor]:
        torch.autograd.backward(module(inputs, targets))
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    expected = gradients(loss)
    assert len(expected) == len(list(model.parameters()))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = [DistributedDataParallel(loss), torch.compile(loss, backend="eager")]
        for module in wrapped:
            for left, right in zip(gradients(module), expected, strict=True):
                torch.testing.assert_close(left, right)
    finally:
        distributed.destroy_process_group()
