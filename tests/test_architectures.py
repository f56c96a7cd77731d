"""The study of architectures: models of equal size, trained the same way, with recipes, titles and an order."""

from dataclasses import replace

import pytest

from logdepth.architectures import ARCHITECTURES, TITLES
from logdepth.errors import UserError
from logdepth.recipes import parameters_of, recipe
from logdepth.report.content import in_order, title_of
from logdepth.reproduce import study_of

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
