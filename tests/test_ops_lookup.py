"""Lookups by token equal an embedding followed by the function, in values, gradients and what is dropped."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")

from logdepth.ops import FrozenTable, LayerNorm, TokenLookup, kernels
from logdepth.ops import lookup as lookups
from logdepth.ops.dispatch import use_kernels
from tests.fused_models import (
    DEVICE,
    assert_slopes,
    few_programs,  # noqa: F401
    reproducible_products,  # noqa: F401
    shaken,
)

VOCAB, WIDTH = 5, 8
FEW, MANY = (2, 2), (3, 5)
"""Shapes of fewer tokens than there are in the vocabulary, and of more."""
every_shape = pytest.mark.parametrize("shape", [FEW, MANY, (11,), (0,), (2, 0)], ids=str)
every_scope = pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "torch"])


def table_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(VOCAB, WIDTH).to(DEVICE, dtype).requires_grad_()


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(VOCAB - 1, shape).to(DEVICE)  # the last never comes


@dataclasses.dataclass
class Counted:
    """A function of each row alone, that counts the rows it is given."""

    weight: Tensor
    rows: list[int] = dataclasses.field(default_factory=list)

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[:-1].numel())
        return torch.tanh(F.linear(x, self.weight))


def counted(width: int = 6) -> Counted:
    return Counted(torch.randn(width, WIDTH).to(DEVICE).requires_grad_())


def assert_alike(found: Tensor, expected: Tensor, learnt: list[Tensor]) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(expected)
    grads = (torch.autograd.grad(out, learnt, grad, retain_graph=True) for out in (found, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@every_scope
@every_shape
def test_rows(shape: tuple[int, ...], by_kernels: bool) -> None:
    table, tokens = table_of(), tokens_of(*shape)
    with kernels(by_kernels):
        lookup = TokenLookup(table, tokens)
        found = lookup.tensor()
    assert lookup.shape == found.shape == (*shape, WIDTH)
    assert torch.equal(found, F.embedding(tokens, table))


@every_scope
@every_shape
def test_map(shape: tuple[int, ...], by_kernels: bool) -> None:
    """Over the table where it has fewer rows, else over the tokens."""
    table, tokens, function = table_of(), tokens_of(*shape), counted()
    with kernels(by_kernels):
        found = TokenLookup(table, tokens).map(function)
    assert function.rows == [min(VOCAB, tokens.numel())]
    assert_alike(found, function(F.embedding(tokens, table)), [table, function.weight])


def test_a_mapped_table_may_lie_apart() -> None:
    table, tokens = table_of(), tokens_of(*MANY)
    scale, shift = (torch.randn(WIDTH, device=DEVICE) for _ in range(2))
    norm = LayerNorm(WIDTH).to(DEVICE)

    def turned(x: Tensor) -> Tensor:
        return (x * scale + shift).mT.contiguous().mT

    with kernels(True):
        found = TokenLookup(table, tokens).map(turned)
        normed = TokenLookup(table, tokens).map_with_norm(turned, norm, nn.Dropout(0.0))
    rows = turned(F.embedding(tokens, table))
    assert_alike(found, rows, [table])
    assert_alike(normed, rows + norm(rows), [table, *norm.parameters()])


def test_tokens_may_lie_apart() -> None:
    table, tokens, function = table_of(), tokens_of(5, 3).t(), counted()
    with kernels(True):
        lookup = TokenLookup(table, tokens)
        found = lookup.map(function)
        added = lookup.add_to(torch.zeros(3, 5, WIDTH, device=DEVICE), 0.5)
    assert_alike(found, function(F.embedding(tokens, table)), [table, function.weight])
    assert_alike(added, 0.5 * F.embedding(tokens, table), [table])


@every_scope
@pytest.mark.parametrize("shape", [FEW, MANY, (11,), (0,)], ids=str)
@pytest.mark.parametrize("norm_class", [LayerNorm, nn.LayerNorm])
def test_map_with_norm(shape: tuple[int, ...], by_kernels: bool, norm_class: type[nn.LayerNorm]) -> None:
    table, tokens, function, norm = table_of(), tokens_of(*shape), counted(), norm_class(6, eps=0.1)
    shaken(norm.to(DEVICE))
    with kernels(by_kernels):
        found = TokenLookup(table, tokens).map_with_norm(function, norm, nn.Dropout(0.0))
    assert function.rows == [min(VOCAB, tokens.numel())]
    rows = function(F.embedding(tokens, table))
    expected = rows + F.layer_norm(rows, (6,), norm.weight, norm.bias, norm.eps)
    assert_alike(found, expected, [table, function.weight, *norm.parameters()])


@every_scope
@pytest.mark.parametrize("length", [VOCAB, 400], ids=["few", "many"])
def test_dropout_after_the_norm_differs_from_token_to_token(length: int, by_kernels: bool) -> None:
    """Also among tokens of one kind: means and shares, the same again with the same seed."""
    table, function, norm, rate = table_of(), counted(), LayerNorm(6).to(DEVICE), 0.4
    norm.bias.data.fill_(10.0)  # nothing but what was dropped is small
    tokens = torch.full((length,), 2, device=DEVICE)
    dropout = nn.Dropout(rate)

    def mapped(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with kernels(by_kernels):
            return TokenLookup(table, tokens).map_with_norm(function, norm, dropout)

    leaves = mapped(1)
    assert torch.equal(leaves, mapped(1))
    assert not torch.equal(leaves, mapped(2))
    row = function(table)[2]
    dropped = (leaves - row).abs() < 1e-3
    if length > VOCAB:
        assert abs(float(dropped.double().mean()) - rate) < 0.05
        assert 0.4 < float((dropped[1:] != dropped[:-1]).double().mean()) < 0.56
    kept = ((row + norm(row) / (1 - rate)) * ~dropped)[~dropped]
    torch.testing.assert_close(leaves[~dropped], kept, rtol=1e-4, atol=1e-4)
    expected = row + norm(row)
    dropout.eval()
    before = torch.get_rng_state()
    torch.testing.assert_close(mapped(3), expected.expand(length, 6), rtol=1e-5, atol=1e-5)
    torch.manual_seed(3)
    assert not torch.equal(before, torch.get_rng_state()) or length == 0  # `mapped` alone has seeded


def test_gradients_under_dropout_are_the_slope() -> None:
    table, tokens, function, norm = table_of(), tokens_of(*MANY), counted(), LayerNorm(6)
    shaken(norm.to(DEVICE))
    weights = torch.randn(*MANY, 6, device=DEVICE)

    def loss() -> Tensor:
        torch.manual_seed(4)
        with kernels(True):
            return (TokenLookup(table, tokens).map_with_norm(function, norm, nn.Dropout(0.3)) * weights).sum()

    assert_slopes(loss, [[table], [function.weight], [norm.weight], [norm.bias]])


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.RMSNorm(6),
        lambda: LayerNorm(6, bias=False),
        lambda: LayerNorm(6, elementwise_affine=False),
        lambda: hooked(LayerNorm(6)),
        lambda: nn.Sequential(LayerNorm(6), nn.Tanh()),
    ],
    ids=["rms", "no bias", "no weights", "hook", "sequence"],
)
def test_a_modified_norm_or_dropout_is_called(norm: Callable[[], nn.Module]) -> None:
    table, tokens, function, made = table_of(), tokens_of(*MANY), counted(), norm().to(DEVICE)
    shaken(made)
    dropouts = (nn.Dropout(0.0), hooked(nn.Dropout(0.0)), nn.Identity())
    for dropout in dropouts:
        with kernels(True):
            found = TokenLookup(table, tokens).map_with_norm(function, made, dropout)  # type: ignore[arg-type]
        rows = function(F.embedding(tokens, table))
        assert_alike(found, rows + dropout(made(rows)), [table, function.weight, *made.parameters()])


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _module, _inputs, result: 2 * result)
    return module


@every_scope
@every_shape
@pytest.mark.parametrize("factor", [0.1, -2.0])
def test_add_to(shape: tuple[int, ...], by_kernels: bool, factor: float) -> None:
    table, tokens = table_of(), tokens_of(*shape)
    x = torch.randn(*shape, WIDTH).to(DEVICE).requires_grad_()
    with kernels(by_kernels):
        found = TokenLookup(table, tokens).add_to(2 * x, factor)
    assert_alike(found, 2 * x + factor * F.embedding(tokens, table), [x, table])


def test_what_is_added_to_is_left_as_it_was() -> None:
    table, tokens = table_of(), tokens_of(*MANY)
    lookup = TokenLookup(table, tokens)
    for x in (torch.zeros(*MANY, WIDTH), torch.zeros(WIDTH, *MANY[::-1]).permute(2, 1, 0)):
        x = x.to(DEVICE)
        for enabled in (False, True):
            with torch.no_grad(), kernels(enabled):
                found = lookup.add_to(x, 0.5)
            assert not x.any()
            torch.testing.assert_close(found, 0.5 * table[tokens])
    read = torch.randn(*MANY, WIDTH, device=DEVICE, requires_grad=True)
    with kernels(True):
        sigmoid = read.sigmoid()
        lookup.add_to(sigmoid, 0.5)
    sigmoid.sum().backward()
    assert read.grad is not None


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision(low: torch.dtype) -> None:
    """A mapped table of products' dtype; sums of gradients in all bits."""
    table, tokens, function = table_of(), tokens_of(3, 40), counted()
    norm = LayerNorm(6).to(DEVICE)
    with kernels(True), torch.autocast(DEVICE.type, low):
        lookup = TokenLookup(table, tokens)
        outs = [lookup.map(function), lookup.map_with_norm(function, norm, nn.Dropout(0.0))]
        added = lookup.add_to(torch.zeros(3, 40, WIDTH, device=DEVICE, dtype=low), 0.1)
    rows = function(F.embedding(tokens, table))
    for out, expected in zip(outs, (rows, rows + norm(rows)), strict=True):
        assert out.dtype == low
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=3e-2)
        found, wanted = (
            torch.autograd.grad(one.float().square().sum(), table, retain_graph=True) for one in (out, expected)
        )
        assert found[0].dtype == torch.float32
        assert (found[0] - wanted[0]).norm() <= 3e-2 * wanted[0].norm()
    assert added.dtype == low
    (grad,) = torch.autograd.grad(added.float().sum(), table)
    counts = torch.bincount(tokens.flatten(), minlength=VOCAB)[:, None]
    torch.testing.assert_close(grad, 0.1 * counts.expand(VOCAB, WIDTH).float(), rtol=1e-2, atol=1e-3)


def test_double_precision_is_exact() -> None:
    table, tokens = table_of(torch.float64), tokens_of(*MANY)
    with kernels(True):
        lookup = TokenLookup(table, tokens)
        assert torch.equal(lookup.map(torch.tanh), torch.tanh(table)[tokens])
        norm = LayerNorm(WIDTH).to(DEVICE).double()
        rows = lookup.map_with_norm(torch.tanh, norm, nn.Dropout(0.0))
        torch.testing.assert_close(rows, (torch.tanh(table) + norm(torch.tanh(table)))[tokens], rtol=1e-12, atol=1e-12)


def test_tokens_outside_the_table_are_not_answered() -> None:
    for outside in (VOCAB, VOCAB + 3, -1):
        tokens = tokens_of(*MANY)
        tokens[1, 2] = outside
        lookup = TokenLookup(table_of(), tokens)
        with kernels(True), torch.no_grad():
            for found in (
                lookup.map(torch.tanh),
                lookup.map_with_norm(torch.tanh, LayerNorm(WIDTH).to(DEVICE), nn.Dropout(0.0)),
                lookup.add_to(torch.zeros(*MANY, WIDTH, device=DEVICE), 0.1),
            ):
                assert found[1, 2].isnan().all()
                assert int(found.isnan().any(-1).sum()) == 1


def test_second_derivatives_are_refused() -> None:
    table, tokens, norm = table_of(), tokens_of(*MANY), LayerNorm(WIDTH).to(DEVICE)
    with kernels(True):
        lookup = TokenLookup(table, tokens)
        outs = [
            lookup.map(torch.sin),
            lookup.map_with_norm(torch.sin, norm, nn.Dropout(0.0)),
            lookup.add_to(torch.zeros(*MANY, WIDTH, device=DEVICE), 0.1),
        ]
    for out in outs:
        with pytest.raises(RuntimeError, match="do not support create_graph=True"):
            torch.autograd.grad(out.square().sum(), table, create_graph=True)


# The table that is kept


def test_a_table_is_kept_while_frozen() -> None:
    table, frozen, function = table_of(), FrozenTable(), counted()
    for shape, number in ((MANY, 1), (MANY, 1), (FEW, 2), (MANY, 2)):  # few tokens are mapped themselves
        tokens = tokens_of(*shape)
        with torch.no_grad():
            found = TokenLookup(table, tokens, frozen).map(function)
            torch.testing.assert_close(found, torch.tanh(F.linear(table, function.weight))[tokens])
        assert len(function.rows) == number
    always = FrozenTable(always=True)
    for _ in range(2):
        with torch.no_grad():
            TokenLookup(table, tokens_of(*FEW), always).map(function)
    assert function.rows[2:] == [VOCAB]


def test_nothing_is_kept_where_gradients_are_wanted_or_the_table_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    table, tokens, frozen, function = table_of(), tokens_of(*MANY), FrozenTable(), counted()
    for _ in range(2):
        found = TokenLookup(table, tokens, frozen).map(function)
    assert found.requires_grad
    assert function.rows == [VOCAB] * 2
    monkeypatch.setattr(lookups, "MAX_TABLE_ELEMENTS", VOCAB * WIDTH - 1)
    for _ in range(2):
        with torch.no_grad():
            TokenLookup(table, tokens, frozen).map(function)
    assert function.rows == [VOCAB] * 4


def test_a_kept_table_serves_one_dtype_and_one_way_to_compute() -> None:
    table, tokens, frozen, function = table_of(), tokens_of(*MANY), FrozenTable(), counted()
    autocast = torch.autocast(DEVICE.type, torch.bfloat16)

    @torch.no_grad()
    def mapped() -> Any:
        return TokenLookup(table, tokens, frozen).map(function)

    exact = mapped()
    with autocast:
        assert mapped().dtype == torch.bfloat16
        assert len(function.rows) == 2
        assert mapped().dtype == torch.bfloat16
    assert len(function.rows) == 2
    assert torch.equal(mapped(), exact)
    assert len(function.rows) == 3
    with kernels(not use_kernels(table)):
        mapped()
    assert len(function.rows) == 4


def test_a_table_that_was_kept_in_inference_mode_serves_others() -> None:
    table, tokens, frozen, function = table_of(), tokens_of(*MANY), FrozenTable(), counted()
    with torch.inference_mode():
        first = TokenLookup(table, tokens, frozen).map(function).clone()
    with torch.no_grad():
        assert torch.equal(TokenLookup(table, tokens, frozen).map(function), first)
    assert len(function.rows) == 1
    found = TokenLookup(table, tokens, frozen).map(function)
    assert_alike(found, function(F.embedding(tokens, table)), [table, function.weight])
