"""The config of a run: what it refuses, and what machines of a study must agree on."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from logdepth.runs import decisive
from tests.run_folders import TRAIN, run_config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"max_steps": 2**40 + 1}, "max_steps must be at most 1,099,511,627,776; got 1099511627777"),
        ({"batch_size": 10**400}, r"batch_size must be at most 1,099,511,627,776; got 1000000000… \(401 digits\)"),
        ({"threads": 0}, "threads must be at least 1; got 0"),
        ({"threads": 1025}, "threads must be at most 1,024; got 1025"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0; got -1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0; got -1.0"),
        ({"weight_decay": math.nan}, "weight_decay must be at least 0; got nan"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"muon_learning_rate": 0.0}, "muon_learning_rate must be above 0"),
        ({"muon_learning_rate": math.inf}, "muon_learning_rate must be above 0 and finite"),
        ({"muon_momentum": 1.0}, "muon_momentum must be from 0 to below 1"),
        ({"muon_momentum": -0.1}, "muon_momentum must be from 0 to below 1"),
        ({"decay_fraction": 0.0}, "decay_fraction must be above 0 and at most 1"),
        ({"decay_fraction": 1.5}, "decay_fraction must be above 0 and at most 1"),
        ({"decay_fraction": math.nan}, "decay_fraction must be above 0 and at most 1"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(TRAIN, **changes)


def test_machines_of_a_study_may_differ_in_how_they_accelerate(corpus: Path) -> None:
    assert decisive(run_config(corpus)) == decisive(run_config(corpus, accelerate=True, compile=True))
