"""The encoder of whole sequences against a recursive one in plain Python, its gradients, and its initial weights."""

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.models.encoder import SCALE, Encoder, EncoderConfig
from logdepth.operators import GRCConfig, MLPLDRUConfig, OperatorConfig

WIDTH, SYMBOLS, CLASSES = 6, 5, 3
OPERATORS: dict[str, OperatorConfig] = {
    "mlp-ldru": MLPLDRUConfig.original(width=WIDTH),
    "grc": GRCConfig(width=WIDTH),
}
Remainder = Literal["zero", "fold"]


def encoder_of(operator: str, remainder: Remainder, dropout: float = 0.0) -> Encoder:
    torch.manual_seed(0)
    config = EncoderConfig(operator=OPERATORS[operator], remainder=remainder, dropout=dropout)
    encoder = config.build(SYMBOLS, CLASSES).double()
    for parameter in encoder.parameters():  # the initial ones are small or the identity, which hides mistakes
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


def merged(encoder: Encoder, left: Tensor, right: Tensor) -> Tensor:
    """LN(m + fc(m)) with m = left ⊙ right, of two vectors."""
    merge = encoder.merge
    both = merge.operator(left[None], right[None])[0]
    both = both + merge.out.weight @ F.relu(merge.hidden.weight @ both + merge.hidden.bias) + merge.out.bias
    return F.layer_norm(both, (WIDTH,), merge.norm.weight, merge.norm.bias)


def leaf(encoder: Encoder, token: int) -> Tensor:
    state = F.layer_norm(encoder.embedding.weight[token], (WIDTH,), encoder.norm.weight, encoder.norm.bias)
    hidden = F.relu(encoder.hidden.weight @ state + encoder.hidden.bias)
    return state + encoder.out.weight @ hidden + encoder.out.bias


def with_zeros(merge: Callable[[Tensor, Tensor], Tensor], leaves: list[Tensor], size: int) -> Tensor:
    """The root of a tree over `size` places, a power of two, of which the leaves take the first ones."""
    if size == 1:
        return leaves[0]
    half = size // 2
    if len(leaves) <= half:
        only = with_zeros(merge, leaves, half)
        return merge(torch.zeros_like(only), only)
    return merge(with_zeros(merge, leaves[:half], half), with_zeros(merge, leaves[half:], half))


def folded(merge: Callable[[Tensor, Tensor], Tensor], leaves: list[Tensor]) -> Tensor:
    """The left fold of complete trees, largest first."""
    largest = 2 ** (len(leaves).bit_length() - 1)
    state = with_zeros(merge, leaves[:largest], largest)
    rest = leaves[largest:]
    while rest:
        size = 2 ** (len(rest).bit_length() - 1)
        state = merge(state, with_zeros(merge, rest[:size], size))
        rest = rest[size:]
    return state


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("remainder", ["zero", "fold"])
def test_it_is_the_recursion(operator: str, remainder: Remainder) -> None:
    encoder = encoder_of(operator, remainder)
    for length in range(1, 21):
        tokens = torch.randint(SYMBOLS, (2, length), generator=torch.Generator().manual_seed(length))
        expected = []
        for row in tokens.tolist():
            leaves = [leaf(encoder, token) for token in row]

            def merge(left: Tensor, right: Tensor) -> Tensor:
                return merged(encoder, left, right)

            if remainder == "zero":
                root = with_zeros(merge, leaves, 2 ** math.ceil(math.log2(length)))
            else:
                root = folded(merge, leaves)
            expected.append(encoder.classifier.weight @ root + encoder.classifier.bias)
        torch.testing.assert_close(encoder(tokens), torch.stack(expected))


def test_the_remainders_differ() -> None:
    tokens = torch.arange(7)[None] % SYMBOLS
    zero, fold = (encoder_of("grc", remainder)(tokens) for remainder in ("zero", "fold"))
    assert not torch.allclose(zero, fold)


@pytest.mark.parametrize("remainder", ["zero", "fold"])
def test_gradients_reach_every_weight_and_token(remainder: Remainder) -> None:
    encoder = encoder_of("mlp-ldru", remainder)
    leaves = encoder.leaves(torch.arange(11)[None] % SYMBOLS).detach().requires_grad_()
    torch.autograd.gradcheck(encoder.root, (leaves,))
    (of_leaves,) = torch.autograd.grad(encoder.root(leaves).square().sum(), leaves)
    assert (of_leaves.abs().sum(dim=-1) > 0).all()
    encoder(torch.arange(11)[None] % SYMBOLS).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_order_of_tokens_matters() -> None:
    encoder = encoder_of("mlp-ldru", "zero")
    assert not torch.allclose(encoder(torch.tensor([[0, 1, 2]])), encoder(torch.tensor([[1, 0, 2]])))


def test_parameters_and_initial_scale_are_the_papers() -> None:
    torch.manual_seed(1)
    width = 64
    encoder = EncoderConfig().build(num_symbols=1000, num_classes=5)
    network = 2 * (4 * width * width) + 4 * width + width
    operator = (
        (2 * width) ** 2 + 2 * width + 8 * width**2 + 4 * width + 8 * width**2 + 2 * width + 3 * (width**2 + width)
    )
    count = 1000 * width + 2 * width + network + operator + network + 2 * width + 5 * width + 5
    assert sum(parameter.numel() for parameter in encoder.parameters()) == count

    # The embedding is a normal of 0.02, cut off at twice that, which leaves a deviation of 0.88 of it.
    assert encoder.embedding.weight.abs().max() <= 2 * SCALE
    assert encoder.embedding.weight.std().item() == pytest.approx(0.88 * SCALE, rel=0.02)
    # Leaves and classifier: a normal of 1/√in, cut off at twice that.
    for layer, inputs in ((encoder.hidden, width), (encoder.out, 4 * width), (encoder.classifier, width)):
        assert layer.weight.abs().max() <= 2 / math.sqrt(inputs)
        assert layer.weight.std().item() == pytest.approx(
            0.88 / math.sqrt(inputs), rel=0.1 if layer is encoder.classifier else 0.02
        )
        assert not layer.bias.any()
    # Variance scaling: the mean of fan-in and fan-out is 160.
    for layer in (encoder.merge.hidden, encoder.merge.out):
        assert layer.weight.std().item() == pytest.approx(math.sqrt(0.02 / 160), rel=0.03)
        assert not layer.bias.any()
    first = encoder.merge.operator.first
    assert first.weight.std().item() == pytest.approx(math.sqrt(1 / 128), rel=0.03)


def test_dropout_is_on_in_training_only() -> None:
    encoder = encoder_of("mlp-ldru", "zero", dropout=0.5)
    tokens = torch.arange(9)[None] % SYMBOLS
    assert not torch.equal(encoder(tokens), encoder(tokens))
    encoder.eval()
    assert torch.equal(encoder(tokens), encoder(tokens))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="remainder must be zero or fold; got 'ones'"):
        EncoderConfig(remainder="ones")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dropout"):
        EncoderConfig(dropout=1.5)
