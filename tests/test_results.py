"""Result files: what is written comes back; whatever is not as it should be is an error that names the file."""

import dataclasses
import json
from pathlib import Path

import pytest

from logdepth.errors import UserError
from logdepth.results import OtherText, read_result, read_results, write_result
from tests.tiny_study import made_up_run, made_up_times


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    for name, result in (("run", made_up_run()), ("timing", made_up_times("ar-grc", "transformer-alibi"))):
        file = tmp_path / f"{name}.json"
        write_result(file, result)
        assert read_result(file) == result
        saved = json.loads(file.read_text())
        assert (saved["schema"], saved["version"]) == (f"logdepth.{name}", 1)
    results = read_results(tmp_path)
    assert (len(results.runs), len(results.timings)) == (1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.pop("schema"), "is not a result file of logdepth: its schema is None"),
        (lambda saved: saved.update(schema="other"), "is not a result file of logdepth: its schema is 'other'"),
        (lambda saved: saved.update(version=2), "has version 2 of 'logdepth.run'; this logdepth reads version 1"),
        (lambda saved: saved.pop("version"), "has version None"),
        (lambda saved: saved.pop("parameters"), "the field 'parameters' of RunResult is missing"),
        (lambda saved: saved.update(parameters="many"), "expected int; got 'many'; the file is damaged"),
        (lambda saved: saved.update(extra=1), "unknown field 'extra'"),
        (lambda saved: saved["test"][1].pop("nats"), "test[1]: the field 'nats'"),
        (lambda saved: saved["config"].update(seed=-1), "seed must be from 0"),
        (lambda saved: saved.update(test=[]), "test must contain at least one evaluation"),
        (lambda saved: saved.update(environment={}), "environment has no device"),
        (lambda saved: saved["data"]["splits"].pop("valid"), "data.splits has no valid"),
        (lambda saved: saved["data"]["splits"]["test"].update(bytes=None), "data.splits.test.bytes: expected int"),
    ],
)
def test_other_schemas_and_damage_are_named(change: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ptb-ar-grc-0.json"
    write_result(file, made_up_run())
    saved = json.loads(file.read_text())
    change(saved)
    file.write_text(json.dumps(saved))
    with pytest.raises(UserError) as refused:
        read_result(file)
    assert str(file) in str(refused.value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ptb-ar-grc-0.json"
    write_result(file, made_up_run())
    file.write_text(file.read_text()[:-100])
    with pytest.raises(
        UserError, match=r"0\.json is not readable JSON .*; remove it and run the `logdepth reproduce` command"
    ):
        read_results(tmp_path)


@pytest.mark.parametrize("what", ["test text", "training text", "tokenizer"])
def test_numbers_of_other_texts_do_not_meet_in_a_table(what: str, tmp_path: Path) -> None:
    other = made_up_run(seed=1)
    split = {"test text": "test", "training text": "train"}.get(what)
    if split is None:
        data = dataclasses.replace(other.data, tokenizer_hash="ef")
    else:
        changed = dataclasses.replace(other.data.splits[split], sha256="ef")
        data = dataclasses.replace(other.data, splits=other.data.splits | {split: changed})
    write_result(tmp_path / "ptb-ar-grc-0.json", made_up_run())
    write_result(tmp_path / "ptb-ar-grc-1.json", dataclasses.replace(other, data=data))
    with pytest.raises(UserError, match=rf"ptb-ar-grc-1\.json has another {what} than ptb-ar-grc-0\.json"):
        read_results(tmp_path)


def test_a_mean_is_over_seeds_of_one_config(tmp_path: Path) -> None:
    first = made_up_run()
    write_result(tmp_path / "ptb-ar-grc-0.json", first)
    write_result(tmp_path / "copy.json", first)
    with pytest.raises(UserError, match=r"ptb-ar-grc-0\.json has the same model and seed as copy\.json"):
        read_results(tmp_path)
    (tmp_path / "copy.json").unlink()
    other = made_up_run(seed=1)
    train = dataclasses.replace(other.config.train, learning_rate=0.5)
    other = dataclasses.replace(other, config=dataclasses.replace(other.config, train=train))
    write_result(tmp_path / "ptb-ar-grc-1.json", other)
    with pytest.raises(UserError, match=r"ptb-ar-grc-1\.json was made with train\.learning_rate 0\.5"):
        read_results(tmp_path)


def test_machines_may_differ(tmp_path: Path) -> None:
    write_result(tmp_path / "ptb-ar-grc-0.json", made_up_run())
    other = made_up_run(seed=1)
    train = dataclasses.replace(other.config.train, device="cpu", threads=3)
    write_result(
        tmp_path / "ptb-ar-grc-1.json",
        dataclasses.replace(other, config=dataclasses.replace(other.config, train=train)),
    )
    assert len(read_results(tmp_path).runs) == 2


def test_times_of_another_corpus_are_refused(tmp_path: Path) -> None:
    write_result(tmp_path / "ptb-ar-grc-0.json", made_up_run())
    write_result(tmp_path / "timing-a.json", dataclasses.replace(made_up_times("ar-grc"), corpus="wikitext2"))
    with pytest.raises(UserError, match=r"timing-a\.json belongs to the corpus 'wikitext2', not 'ptb'"):
        read_results(tmp_path)


def test_one_name_stands_for_one_text(tmp_path: Path) -> None:
    for seed, sha256 in enumerate(("ab" * 32, "cd" * 32)):
        run = made_up_run(seed=seed)
        text = dataclasses.replace(run.data.splits["test"], sha256=sha256)
        other = OtherText(name="pages", text=text, test=run.test)
        write_result(tmp_path / f"{seed}.json", dataclasses.replace(run, others=(other,)))
    with pytest.raises(UserError, match=r"1\.json has another text named 'pages' than 0\.json"):
        read_results(tmp_path)
