"""Merges of few rows by kernels: the answers of the plain modules, whatever the rows, widths and dtypes."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth.decoding.few_rows import FewRowsGRC, FewRowsLayer, Unsettled, fit

from logdepth.models import ScanLMConfig
from logdepth.models.scan_lm import ScanLayer
from logdepth.operators import GRC, GRCConfig, PostMerge, PostMergeConfig
from logdepth.ops.activation import ACTIVATIONS, ActivationName
from logdepth.ops.few_rows_kernel import MOST_ROWS, Norm, linear, settle

# The interpreter multiplies tiles of bfloat16 as if they were whole numbers.
LOW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = [1, 3, 8, 9, 16, 33, 64, MOST_ROWS + 1]
every_number_of_rows = pytest.mark.parametrize("num_rows", ROWS)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def unusual(module: torch.nn.Module) -> None:
    """Biases that are not zero, scales that are not one."""
    for name, weight in module.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm.weight" in name), std=0.3)


def merging(width: int, *, net: bool, activation: ActivationName = "silu", eps: float = 1e-5) -> GRC | PostMerge:
    operator: GRC | PostMerge = GRCConfig(width=width, activation=activation).build()
    if net:
        operator = PostMergeConfig(width=width, activation=activation).build(operator)
        operator.operator.norm.eps = 0.2  # type: ignore[union-attr]
    operator.norm.eps = eps
    unusual(operator)
    return operator.to(DEVICE).requires_grad_(False)


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_layers_that_are_not_as_they_are_built_do_not_fit() -> None:
    layer = ScanLayer(ScanLMConfig(embed_width=16, operator=GRCConfig(width=16))).to(DEVICE)
    assert fit(layer, torch.float32)
    assert not fit(layer, torch.float64)
    layer.out_of_state.register_forward_hook(lambda *_: None)
    assert not fit(layer, torch.float32)


@every_number_of_rows
@pytest.mark.parametrize("width", [8, 48, 64])
@pytest.mark.parametrize("net", [False, True], ids=["alone", "net"])
def test_merges_are_the_modules(num_rows: int, width: int, net: bool) -> None:
    operator = merging(width, net=net, eps=0.1)
    left, right = random(num_rows, width), random(num_rows, width)
    close(FewRowsGRC(operator)(left, right), operator(left, right))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_rows", [1, 2, MOST_ROWS + 1])
def test_every_activation(activation: ActivationName, num_rows: int) -> None:
    operator = merging(16, net=True, activation=activation)
    left, right = random(num_rows, 16), random(num_rows, 16)
    close(FewRowsGRC(operator)(left, right), operator(left, right))


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_long_sums_are_taken_in_parts(num_rows: int) -> None:
    operator = merging(300, net=True)
    left, right = random(num_rows, 300), random(num_rows, 300)
    close(FewRowsGRC(operator)(left, right), operator(left, right), 1e-4)


@every_number_of_rows
@pytest.mark.parametrize("states", [torch.float32, LOW])
def test_low_precision(num_rows: int, states: torch.dtype) -> None:
    """Products in fewer bits; states in their own dtype, which is that of the answer."""
    operator = merging(64, net=True)
    expected = operator(*(left_and_right := (random(num_rows, 64), random(num_rows, 64))))
    for module in operator.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(LOW)
    merged = FewRowsGRC(operator)(*(one.to(states) for one in left_and_right))
    assert merged.dtype == states
    close(merged, expected, 0.06)


def test_no_rows() -> None:
    merge = FewRowsGRC(merging(8, net=True))
    assert merge(random(0, 8), random(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("states", [torch.float32, LOW])
def test_results_are_settled_by_what_reads_them(num_rows: int, states: torch.dtype) -> None:
    operator = merging(48, net=True)
    merge = FewRowsGRC(operator)
    left, right, above = (random(num_rows, 48, dtype=states) for _ in range(3))
    place = torch.empty_like(left)
    folded = merge.merge(above, merge.merge(left, right, right), place)
    expected = operator(left.float(), right.float())
    tolerance = 2e-5 if states == torch.float32 else 0.02
    close(place, expected, tolerance)
    settled = torch.empty_like(left)
    settle(folded.values, folded.norm, settled)
    close(settled, operator(above.float(), place.float()), tolerance)


@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize("copies", [1, 3, 7])
@pytest.mark.parametrize("embed_width", [5, 64])
def test_outputs_and_the_places_of_prefixes(num_rows: int, copies: int, embed_width: int) -> None:
    torch.manual_seed(3)
    layer = ScanLayer(ScanLMConfig(embed_width=embed_width, operator=GRCConfig(width=24)))
    unusual(layer)
    layer = layer.to(DEVICE).eval().requires_grad_(False)
    few = FewRowsLayer(layer)
    norm = Norm(random(24), random(24), 0.1)
    values, table = random(num_rows, 24), random(11, embed_width)
    prefixes = torch.nn.functional.layer_norm(values, (24,), norm.scale, norm.shift, norm.eps)
    tokens = torch.randint(11, (num_rows,), device=DEVICE)
    expected = layer.output(prefixes, table[tokens])
    for inputs, looked_up in ((table, tokens), (table[tokens], None)):
        places = torch.zeros(copies + 1, num_rows + 1, 24, device=DEVICE)
        settled = places[:copies, :num_rows]
        close(few.output(Unsettled(values, norm), settled, inputs, looked_up), expected)
        close(settled, prefixes.expand(copies, -1, -1))
        assert not places[copies:].any()
        assert not places[:, num_rows:].any()


def test_a_norm_is_for_one_row() -> None:
    norm = Norm(random(8), random(8), 0.1)
    for settled, rows in ((random(2, 8), 2), (None, 1)):
        with pytest.raises(ValueError, match="one row in float32"):
            linear([random(rows, 8)], random(4, 8), random(4), random(rows, 4), norm=norm, settled=settled)
