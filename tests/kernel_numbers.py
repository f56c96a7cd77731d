"""What tests of kernels share: numbers, what they are compared with, and few programs."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EPS = 1e-5
PROGRAMS = 3
"""Few, so that each has several turns."""
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [one for name, one in sys.modules.items() if name.startswith("logdepth.")]:
        for limit in {"MAX_PROGRAMS", "MULTIPROCESSORS", "MOST"} & set(vars(module)):
            monkeypatch.setattr(module, limit, 1 if limit == "MOST" else PROGRAMS)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def exact(*tensors: Tensor) -> list[Tensor]:
    """The same numbers, to be differentiated in float64."""
    return [one.detach().double().requires_grad_() for one in tensors]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """To the rounding of what was written in `dtype`; sums over rows of such numbers too."""
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def dropout(rate: float = 0.0, seed: int = 5, first: int = 0) -> dict[str, Any]:
    return {"rate": rate, "seed": torch.tensor([seed], device=DEVICE), "first": first}
