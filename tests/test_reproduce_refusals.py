"""Studies: what does not fit is refused before work starts, and says what to do."""

import json
import re
from pathlib import Path

import pytest

from logdepth.atomic import alone
from logdepth.cli import main
from logdepth.config import to_dict
from logdepth.recipes import RECIPES
from logdepth.reproduce import study_of, work
from logdepth.reproduce.study import flags_as_fields
from logdepth.training import DivergedError
from tests.study_commands import error_of, flags_of_a_small_study, shorten_lengths  # noqa: F401 (fixtures)
from tests.tiny_corpus import VOCAB
from tests.tiny_study import TRAINING


def test_what_does_not_fit_is_refused(
    flags: list[str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no corpus or study 'ptbb'; did you mean 'ptb'?" in error_of(capsys, "ptbb")
    assert "there is no model 'ar-gcr'" in error_of(capsys, "ptb", "--models", "ar-gcr")
    assert "--seeds must be different" in error_of(capsys, "ptb", "--seeds", "1", "1")
    assert "--budget must be above 0" in error_of(capsys, "ptb", "--budget", "0")
    assert "ptb.train.txt" in error_of(capsys, "ptb", "--out", str(tmp_path / "ptb"), "--data-dir", str(tmp_path))
    assert not (tmp_path / "ptb").exists(), "nothing was begun"
    assert "needs files or folders of text: give them, for example --data.paths my.txt" in error_of(capsys, "text")
    file = tmp_path / "file"
    file.write_text("")
    assert f"{file} is a file; choose another --out" in error_of(capsys, "text", *flags, "--out", str(file))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"recipe": "ptb-ar-grc", "config": {}}))
    assert "is for the recipe 'ptb-ar-grc'" in error_of(capsys, "text", *flags, str(other))
    other.write_text("[]")
    assert "expected a mapping" in error_of(capsys, "text", *flags, str(other))
    out = tmp_path / "study"
    part = ["text", *flags, "--models", "ar-grc", "--seeds", "0", "--out", str(out)]
    assert main(["reproduce", *part]) == 0
    other.write_text(json.dumps({"train": {"learning_rate": 0.5}}))
    changed = ["text", *flags, str(other), "--models", "ar-grc", "--seeds", "0", "--out", str(out)]
    line = error_of(capsys, *changed)
    assert "text-ar-grc-0.json was made with train.learning_rate 0.01, but this command sets 0.5" in line
    result = out / "results" / "text-ar-grc-0.json"
    saved = result.read_text()
    result.unlink()
    assert "ar-grc-0 was made with train.learning_rate 0.01, but this command sets 0.5" in error_of(capsys, *changed)
    assert main(["evaluate", str(out)]) == 2
    assert f"it is a study: give one of its runs, such as {out}/runs/ar-grc-0" in capsys.readouterr().err
    result.write_text(saved[: len(saved) // 2])
    assert f"{result} is not readable JSON" in error_of(capsys, *part)


OTHER_OPERATOR = "'ar-mlp-ldru' from 'MLPLDRUConfig' to 'GRCConfig'"


def test_overrides_cannot_make_a_row_another(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    for change, says in (
        ({"config": to_dict(RECIPES["text-ar-grc"]())}, f"model.operator.kind of {OTHER_OPERATOR}"),
        ({"model": to_dict(RECIPES["text-ar-grc"]())["model"]}, f"model.operator.kind of {OTHER_OPERATOR}"),
        (
            {"recipe": "text-ar-grc", "config": {"data": {"corpus": "ptb"}}},
            "data.corpus of 'ar-grc' from 'text' to 'ptb'",
        ),
        ({"recipe": "text-transformer-alibi", "config": {"model": {"positions": "sinusoidal"}}}, "model.positions of"),
        ({"seed": 4}, "seed of 'ar-grc' from 0 to 4"),
    ):
        file.write_text(json.dumps(change))
        assert says in error_of(capsys, "text", *flags, str(file), "--out", str(tmp_path / "study"))


def test_a_text_shorter_than_a_batch_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "long.json"
    data = {"paths": [str(corpus)], "tokenizer": {"vocab_size": VOCAB, "lossless": False}}
    config.write_text(json.dumps({"data": data, "train": {"context": 100_000, "device": "cpu"}}))
    part = ["text", "--models", "ar-grc", "--out", str(tmp_path / "study"), "--config", str(config)]
    assert "fewer than one batch of 32 × 100000 + 1; lower train.batch_size" in error_of(capsys, *part)
    assert not (tmp_path / "study").exists()


def test_two_processes_do_not_work_on_one_study(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(tmp_path, "taken"):
        part = ["text", *flags, "--models", "ar-grc", "--seeds", "0", "--out", str(tmp_path)]
        assert f"another process is working on {tmp_path}" in error_of(capsys, *part)


def test_a_config_need_only_fit_the_models_that_are_asked_for(
    flags: list[str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scan.json"
    data = {"paths": [str(corpus)], "tokenizer": {"vocab_size": VOCAB}}
    file.write_text(json.dumps({"data": data, "model": {"operator": {"width": 24}}}))
    study = study_of("text", ["ar-grc"], overrides=[file])
    assert to_dict(study.rows["ar-grc"])["model"]["operator"]["width"] == 24
    said = error_of(capsys, "text", "--config", str(file))
    assert "unknown field 'operator'" in said
    assert 'for transformer-alibi; a file with a "recipe" changes only that recipe' in said
    flat = tmp_path / "flat.json"
    flat.write_text(json.dumps({"recipe": "text-ar-grc", "data": data, "train": {"epochs": 3}}))
    study = study_of("text", ["ar-grc"], overrides=[flat])
    assert (study.models, study.rows["ar-grc"].train.epochs) == (("ar-grc",), 3)
    assert study.rows["transformer-alibi"].train.epochs != 3


def test_advice_can_be_followed_with_the_command_at_hand(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary that the corpus cannot fill: `train` has a flag for it, `reproduce` a file."""
    file = tmp_path / "small.json"
    file.write_text(json.dumps({"data": {"paths": [str(corpus)]}, "train": TRAINING}))
    part = ["text", "--models", "ar-grc", "--seeds", "0", "--untimed", "--out", str(tmp_path / "study"), "--config"]
    said = error_of(capsys, *part, str(file))
    advice = r"set data\.tokenizer\.vocab_size to at most (\d+) \(--config FILE with (\{.*\})\)$"
    found = re.search(f"does not support a vocabulary of 1,500 pieces: {advice}", said)
    assert found
    smaller = tmp_path / "smaller.json"
    smaller.write_text(found[2].replace("…", found[1]))
    study = study_of("text", ["ar-grc"], overrides=[file, smaller])
    assert study.rows["ar-grc"].data.tokenizer.vocab_size == int(found[1])
    assert main(["reproduce", *part, str(file), str(smaller), "--budget", "1e-9"]) == 3, "begun, and stopped at once"
    capsys.readouterr()
    assert main(["train", "text-ar-grc", "--data.paths", str(corpus), "--out", str(tmp_path / "run")]) == 2
    assert f"set --data.tokenizer.vocab-size to at most {found[1]}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("advice", "said"),
    [
        ("lower --train.batch-size or --train.context", "lower train.batch_size or train.context"),
        ("try --train.device cpu", "try train.device cpu"),
    ],
)
def test_advice_names_fields_in_place_of_flags(advice: str, said: str) -> None:
    name = said.split()[1].removeprefix("train.")
    assert flags_as_fields(advice) == f'{said} (--config FILE with {{"train": {{"{name}": …}}}})'


def test_other_advice_stays() -> None:
    assert flags_as_fields("x is a file; choose another --out") == "x is a file; choose another --out"
    assert flags_as_fields("train on it with --data.corpus text") == "train on it with `logdepth reproduce text`"


def test_advice_after_a_failed_run_names_fields_too(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(*_: object) -> None:
        raise DivergedError("start anew with a lower --train.learning-rate")

    monkeypatch.setattr(work, "train", diverges)
    part = ["text", *flags, "--models", "ar-grc", "--seeds", "0", "--untimed", "--out", str(tmp_path), "--json"]
    assert main(["reproduce", *part]) == 3
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert "lower train.learning_rate (--config FILE with" in failed
