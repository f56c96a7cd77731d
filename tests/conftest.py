"""Every test runs with fixed seeds, and with uninitialised memory poisoned: torch.empty gives NaN."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers that share the cores must not each take all of them

settings.register_profile("logdepth", deadline=None, print_blob=True)
settings.load_profile("logdepth")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.manual_seed(0)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
