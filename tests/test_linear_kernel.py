"""Matrix products of many rows equal the plain ones, with the activation and dropout after them."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from logdepth.ops import linear_kernel as products
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


def test_which_products_fit() -> None:
    """Many rows in a low precision, on a GPU that copies tiles by itself."""
    copies = GPU and torch.cuda.get_device_capability() >= (9, 0)
    many, few = (torch.empty(rows, 64, dtype=torch.bfloat16, device=DEVICE) for rows in (products.FEWEST_ROWS, 64))
    weight = torch.empty(256, 64, dtype=torch.bfloat16, device=DEVICE)
    assert products.fits(many, weight) == copies
    assert not products.fits(few, weight)
    assert not products.fits(many.float(), weight.float())
    assert not products.fits(many, weight[:100])


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((products.FEWEST_ROWS, 64), (64, 1), True),
        ((products.FEWEST_ROWS, 64), (128, 1), True),  # rows apart
        ((products.FEWEST_ROWS, 64), (32, 1), False),  # rows that overlap
        ((products.FEWEST_ROWS, 64), (1, products.FEWEST_ROWS), False),  # columns apart
        ((products.FEWEST_ROWS - 1, 64), (64, 1), False),
    ],
)
def test_which_strides_fit(
    shape: tuple[int, int], strides: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_copies_tiles", lambda _device: True)
    x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    assert products.fits(x, torch.empty(256, 64, dtype=torch.bfloat16, device="meta")) == fits
