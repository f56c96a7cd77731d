"""The files in results/ are consistent: every derived number equals the one computed from the rest of the file."""

import math
from pathlib import Path

import pytest

from logdepth.evaluate import PAPER_CONTEXTS
from logdepth.recipes import parameters_of
from logdepth.results import Measured, RunResult, SplitFacts, read_result

FOLDER = Path(__file__).parent.parent / "results"
FILES = [path for path in sorted(FOLDER.glob("*/*.json")) if path.parent.name not in ("sweeps", "associativity")]
RUNS = [path for path in FILES if not path.name.startswith("timing-")]


def read(path: Path) -> RunResult:
    result = read_result(path)
    assert isinstance(result, RunResult)
    return result


def test_runs_are_found() -> None:
    assert len(RUNS) > 10


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_run_is_consistent(path: Path) -> None:
    run = read(path)
    assert path.stem == f"{run.recipe}-{run.config.seed}"
    assert run.parameters == parameters_of(run.config)
    for one in run.test:
        assert_consistent(one, run.data.splits["test"])
    for other in run.others:
        for one in other.test:
            assert_consistent(one, other.text)
    losses = {point.step: point.loss for point in run.valid_curve}
    assert losses[run.best_step] == min(losses.values()) == pytest.approx(run.valid_loss, abs=1e-6)
    assert max(losses) == run.steps
    assert sum(run.positions.tokens) == run.test[-1].tokens
    nats = sum(loss * tokens for loss, tokens in zip(run.positions.nats, run.positions.tokens, strict=True) if loss)
    assert nats == pytest.approx(run.test[-1].nats, rel=1e-5)
    if path.parent.name != "demo":
        assert [one.context for one in run.test] == sorted({*PAPER_CONTEXTS, run.config.train.context})


def assert_consistent(one: Measured, text: SplitFacts) -> None:
    assert one.tokens == text.tokens - 1
    assert one.loss == pytest.approx(one.nats / one.tokens, rel=1e-9)
    assert one.token_perplexity == pytest.approx(math.exp(one.loss), rel=1e-9)
    assert one.word_perplexity == pytest.approx(math.exp(one.nats / (text.words + text.line_ends)), rel=1e-9)
    assert one.bits_per_byte == pytest.approx(one.nats / math.log(2) / text.bytes, rel=1e-9)
