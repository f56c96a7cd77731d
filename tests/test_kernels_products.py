"""Matrix products by kernels are the plain ones, with an activation and dropout after them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from logdepth.kernels import linear as products
from logdepth.ops.activation_kernel import activate
from logdepth.ops.linear_kernel import linear_activated
from tests.kernel_numbers import (
    ACTIVATIONS,
    DEVICE,
    GPU,
    assert_close,
    dropout,
    few_programs,  # noqa: F401
    random,
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows make several tiles; a GPU takes them as they are."""
    if not GPU:
        for name, size in {"ROWS": 16, "COLUMNS": 32, "DEPTH": 16}.items():
            monkeypatch.setattr(products, name, size)


product_dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16]
    if GPU
    else [torch.float32, torch.float16],  # the interpreter takes the bits of bfloat16 for integers
)
product_sizes = pytest.mark.parametrize(
    ("rows", "depth", "width"), [(1, 64, 64), (300, 192, 320)] if GPU else [(1, 16, 32), (40, 48, 48), (150, 32, 64)]
)


@pytest.mark.usefixtures("small_tiles")
@product_dtypes
@product_sizes
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_linear_activated_drops_what_the_activation_alone_drops(
    rate: float, rows: int, depth: int, width: int, dtype: torch.dtype
) -> None:
    x, weight, bias = random(rows, depth, dtype=dtype), random(width, depth, dtype=dtype), random(width, dtype=dtype)
    weight /= depth**0.5
    before, out = (
        F.linear(x.double(), weight.double(), bias.double()),
        torch.empty(rows, width, dtype=dtype, device=DEVICE),
    )
    for activation in ACTIVATIONS:
        settings: dict[str, Any] = {"activation": activation, "site": 2, **dropout(rate, first=3)}
        hidden = torch.empty(rows, width, device=DEVICE)
        activate(before.float(), hidden, **settings)
        linear_activated(x, weight, bias, out, **settings)
        assert_close(out, hidden, dtype)


@pytest.mark.usefixtures("small_tiles")
@product_dtypes
@pytest.mark.parametrize(("step", "apart"), [(2, 1), (4, 2), (3, 1), (8, 4)])
def test_rows_may_be_pairs_at_equal_distances(step: int, apart: int, dtype: torch.dtype) -> None:
    rows, width = 37, 64 if GPU else 16
    states = random(step * rows + apart, width, dtype=dtype)
    pairs = states[1:].as_strided((rows, 2, width), (step * width, apart * width, 1))
    weight, bias = random(48, 2 * width, dtype=dtype), random(48, dtype=dtype)
    weight /= width**0.5
    out, wanted = (torch.empty(rows, 48, dtype=dtype, device=DEVICE) for _ in range(2))
    settings: dict[str, Any] = {"activation": "silu", "site": 2, **dropout(0.4, first=3)}
    linear_activated(pairs, weight, bias, out, **settings)
    linear_activated(pairs.reshape(rows, 2 * width), weight, bias, wanted, **settings)
    assert torch.equal(out, wanted)


def test_which_products_fit() -> None:
    """Many rows in a low precision, on a GPU that copies tiles by itself."""
    copies = GPU and torch.cuda.get_device_capability() >= (9, 0)
    many, few = (torch.empty(rows, 64, dtype=torch.bfloat16, device=DEVICE) for rows in (products.FEWEST_ROWS, 64))
    weight = torch.empty(256, 64, dtype=torch.bfloat16, device=DEVICE)
    assert products.fits(many, weight) == copies
    assert not products.fits(few, weight)
    assert not products.fits(many.float(), weight.float())
    assert not products.fits(many, weight[:100])


def test_which_pairs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_copies_tiles", lambda _device: True)
    states = torch.empty(2**40, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256, 128, dtype=torch.bfloat16, device="meta")

    def pairs(step: int, apart: int, width: int = 64) -> Tensor:
        return states.as_strided((products.FEWEST_ROWS, 2, width), (step * 64, apart * 64, 1))

    assert products.fits(pairs(2, 1), weight)
    assert products.fits(pairs(2**26, 2**25 - 2), weight)
    assert not products.fits(pairs(2**26, 2**25 - 1), weight)  # the copy engine counts in 32 bits
    assert not products.fits(pairs(2, 2), weight)  # rows that overlap
    assert not products.fits(pairs(2, 1, 32), weight[:, :64])
