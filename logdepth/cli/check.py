"""`logdepth check`: print installed versions, and check the scan against its definition on all devices."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import logdepth
from logdepth.cli.parsing import parse
from logdepth.operators import GRC
from logdepth.scanning import reference

TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Compare the scan with its definition on the CPU and all GPUs. The exit code is 1 if a device disagrees."""


def run(arguments: Sequence[str]) -> int:
    parse(CheckCommand, arguments, "check")
    print(f"logdepth {logdepth.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    devices = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    differences = {device: _difference_from_definition(device) for device in devices}
    for device, difference in differences.items():
        verdict = "agrees" if difference <= TOLERANCE else "DISAGREES"
        print(f"{device}: scan {verdict} with its definition, values and gradients to {difference:.0e}")
    return 0 if max(differences.values()) <= TOLERANCE else 1


def _difference_from_definition(device: str, length: int = 37, width: int = 16) -> float:
    """Return the largest difference in values and gradients of a small float64 scan."""
    generator = torch.Generator().manual_seed(0)
    operator = GRC(width).to(device, torch.float64)
    elements = torch.randn(2, length, width, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    weight = torch.randn(2, length, width, generator=generator, dtype=torch.float64).to(device)
    inputs = (elements, *operator.parameters())
    prefixes = logdepth.scan(operator, elements).prefixes
    expected = reference.scan(operator, elements)
    grads = torch.autograd.grad((prefixes * weight).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weight).sum(), inputs)
    pairs = zip((prefixes, *grads), (expected, *expected_grads), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)
