"""The study of architectures: models of equal size, trained the same way, with recipes, titles and an order."""

import math
from dataclasses import replace

import numpy as np
import pytest

from logdepth.architectures import ARCHITECTURES, TITLES
from logdepth.errors import UserError
from logdepth.recipes import parameters_of, recipe
from logdepth.report.content import in_order, tables, title_of
from logdepth.report.figures import figures
from logdepth.report.paired import interval
from logdepth.reproduce import study_of
from logdepth.results import OtherText, Results, RunResult
from tests.tiny_study import made_up_run, measured, positions_of

EVERY = [recipe(f"webmix-{row}") for row in ARCHITECTURES]


def test_all_have_as_many_parameters_outside_the_embedding() -> None:
    sizes = [parameters_of(config) - config.data.tokenizer.vocab_size * config.model.dim for config in EVERY]  # type: ignore[union-attr]
    assert max(sizes) / min(sizes) < 1.005


def test_all_are_trained_the_same_way_on_the_same_tokens() -> None:
    assert len({replace(config, model=EVERY[0].model) for config in EVERY}) == 1


@pytest.mark.parametrize("row", ["memory", "memory-window"])
def test_every_level_that_training_reaches_has_weights_of_its_own(row: str) -> None:
    config = recipe(f"webmix-{row}")
    memory = config.model.blocks[0]  # type: ignore[union-attr]
    assert memory.chunk << memory.levels == config.train.context


def test_the_study_has_all_of_them_in_order() -> None:
    study = study_of("architectures", contexts=[4_096])
    assert (study.corpus, study.models, study.seeds) == ("webmix", tuple(ARCHITECTURES), (0, 1, 2))
    assert study.contexts == (2_048, 4_096)  # the training length too
    assert study.recipe("rope") == "webmix-rope"
    assert in_order(["rope", "memory", "mine"], "webmix") == ["memory", "rope", "mine"]
    assert in_order(["transformer-alibi", "ar-grc"], "webmix") == ["ar-grc", "transformer-alibi"]
    assert [title_of(row) for row in ARCHITECTURES] == list(TITLES.values())


def test_there_is_no_other_study() -> None:
    with pytest.raises(UserError, match="no corpus or study 'architecture'; did you mean 'architectures'"):
        study_of("architecture")


def a_run(row: str, seed: int, loss: float, at_longest: float) -> RunResult:
    """A made-up run of an architecture with these losses in short and in long windows."""
    run, config = made_up_run("ar-grc", seed), replace(recipe(f"webmix-{row}"), seed=seed)
    text = run.data.splits["test"]
    test = (measured(2_048, math.exp(loss), text), measured(32_768, math.exp(at_longest), text))
    return replace(
        run,
        recipe=f"webmix-{row}",
        row=row,
        config=config,
        data=replace(run.data, corpus="webmix"),
        test=test,
        positions=positions_of(test[-1]),
        valid_loss=loss,
        valid_curve=(replace(run.valid_curve[-1], loss=loss),),
    )


def test_differences_are_paired_by_seed_and_the_best_transformer_is_chosen_by_validation() -> None:
    runs = [
        *(a_run("memory-window", seed, 4.00 + seed / 10, 3.90) for seed in (0, 1, 2)),
        *(a_run("rope", seed, 4.05 + seed / 10, 9.0) for seed in (0, 1, 2)),
        *(a_run("alibi", seed, 4.03 + seed / 10 + (seed == 2) / 100, 3.85) for seed in (0, 1, 2, 3)),
    ]
    (table,) = (one for one in tables(Results(runs, [])) if one.name == "paired")
    ours, theirs = "Memory tree and window", "Transformer++ (ALiBi)"
    short, long = table.rows
    assert short == (ours, theirs, "test split", 2_048, "-0.0333", "-0.0477 to -0.0190", 3)
    assert long == (ours, theirs, "test split", 32_768, "+0.0500", "+0.0500 to +0.0500", 3)
    assert not [one for one in tables(Results(runs[3:], [])) if one.name == "paired"], "of these no pair is compared"


def test_loss_by_position_on_other_text_is_drawn() -> None:
    runs = []
    for row in ("memory", "rope"):
        run = a_run(row, 0, 4.0, 3.9)
        other = OtherText(name="long text", text=run.data.splits["test"], test=run.test, positions=run.positions)
        runs.append(replace(run, others=(other,)))
    drawn = figures(Results(runs, []))
    (axes,) = drawn["position-loss-long-text"][1].axes
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert [line.get_label() for line in lines] == ["Memory tree", "Transformer++ (RoPE)"]
    assert all(np.allclose(line.get_ydata(), 3.9) for line in lines)
    assert "position-loss-long-text" not in figures(Results([a_run("memory", 0, 4.0, 3.9)], []))


def test_an_interval_contains_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    contains = 0
    for _ in range(2_000):
        low, high = map(float, str(interval(rng.normal(1.0, 0.5, 3).tolist())).split(" to "))
        contains += low <= 1 <= high
    assert 0.935 < contains / 2_000 < 0.965
    assert interval([0.1]) is None
