"""Every test runs with fixed seeds, and with uninitialised memory poisoned: torch.empty gives NaN."""

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from logdepth.ops import cross_entropy
from logdepth.scanning.plan_cache import PLANS
from tests.rounding import round_as_a_gpu
from tests.tiny_corpus import write_corpus

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton looks when they are defined
    with contextlib.suppress(ImportError):
        round_as_a_gpu()

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client, which would retry for half a minute

# A job that a script started in the background, or under nohup, ignores these signals, and so would its processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


@pytest.fixture(autouse=True)
def own_plans() -> None:
    """A plan that another test has made may hide what goes wrong when it is made."""
    PLANS.clear()


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's is read or written: the cache is the test run's own."""
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("LOGDEPTH_DATA", raising=False)


@pytest.fixture(autouse=True)
def no_early_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command prints does not depend on whether the machine takes a second for it."""
    monkeypatch.setattr("logdepth.progress.FIRST_SECONDS", math.inf)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def chunks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many logits a head's cross-entropy takes at once."""
    return lambda logits: monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", logits)
