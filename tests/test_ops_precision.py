"""The dtype of products, and weights that are cast to it: all at once in a scope, or one by one."""

import threading

import pytest
import torch
from torch import nn

from logdepth.ops import Casts, product_dtype, using_casts
from logdepth.ops.precision import ALIGNMENT, cast, dot_precision, has_casts

LOW = torch.bfloat16


def weights() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (), (64, 2), (0, 4))]


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.bfloat16, torch.float16, torch.float16),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
)
def test_the_dtype_of_products_is_what_torch_computes_in(
    dtype: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype
) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        assert product_dtype(x) == expected == (x @ x).dtype
    assert product_dtype(torch.empty(2, dtype=dtype, device="meta")) == dtype


def test_copies_are_the_weights_in_another_dtype() -> None:
    every = weights()
    casts = Casts(every, LOW)
    for weight in every:
        copy = casts.get(weight)
        assert copy is not None
        assert copy.dtype == LOW
        assert not copy.requires_grad
        assert torch.equal(copy, weight.detach().to(LOW))
        assert casts.get(weight.detach()) is copy, "an alias is the same weight"
        assert copy.storage_offset() % ALIGNMENT == 0
    assert casts.get(torch.randn(3, 5)) is None
    assert casts.get(every[0].view(5, 3)) is None


def test_weights_that_have_the_dtype_and_whole_numbers_are_left_alone() -> None:
    low, whole = torch.randn(3).to(LOW), torch.arange(3)
    casts = Casts([low, whole], LOW)
    assert casts.get(low) is None
    assert casts.get(whole) is None
    with using_casts(casts):
        assert cast(low, LOW).data_ptr() == low.data_ptr()
    assert Casts([], LOW).get(low) is None


def test_a_cast_takes_the_copy_at_hand() -> None:
    every = weights()
    casts, others = Casts(every, LOW), Casts(every[:1], torch.float16)
    weight, copy = every[0], casts.get(every[0])
    assert cast(weight, LOW) is not copy
    with using_casts(casts):
        assert cast(weight, LOW) is copy
        assert cast(weight, torch.float16).dtype == torch.float16
        assert cast(weight, torch.float32).data_ptr() == weight.data_ptr()
        unknown = torch.randn(2)
        assert torch.equal(cast(unknown, LOW), unknown.to(LOW))
        with using_casts(others):
            assert cast(weight, LOW) is not copy
            assert cast(weight, torch.float16) is others.get(weight)
        assert cast(weight, LOW) is copy
        with using_casts(None):
            assert cast(weight, LOW) is not copy
    assert cast(weight, LOW) is not copy
    assert not cast(weight, LOW).requires_grad
    assert not cast(weight, torch.float32).requires_grad


def test_copies_do_not_follow_later_changes_and_new_ones_do() -> None:
    weight = nn.Parameter(torch.zeros(3))
    with using_casts(Casts([weight], LOW)):
        with torch.no_grad():
            weight += 1
        assert not cast(weight, LOW).any()
    assert cast(weight, LOW).all()


def test_a_scope_ends_with_an_error_and_in_its_thread_only() -> None:
    casts = Casts(weights(), LOW)
    assert not has_casts(LOW)
    with pytest.raises(KeyError), using_casts(casts):
        raise KeyError
    assert not has_casts(LOW)
    seen: list[bool] = []
    with using_casts(casts):
        assert has_casts(LOW)
        assert not has_casts(torch.float16)
        thread = threading.Thread(target=lambda: seen.append(has_casts(LOW)))
        thread.start()
        thread.join()
    assert seen == [False]


def test_kernels_round_float32_where_torch_or_autocast_does(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2)
    assert dot_precision() == dot_precision(x) == "tf32x3"
    assert dot_precision(x.to(LOW)) == "tf32"
    with torch.autocast("cpu", dtype=LOW):
        assert dot_precision() == "tf32x3"
        assert dot_precision(x) == "tf32"
        assert dot_precision(x.double()) == "tf32x3"
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert dot_precision() == dot_precision(x) == "tf32"
