"""Studies: the text and tokens of their runs are the same, and other text is measured too."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from logdepth.cli import main
from logdepth.reproduce import study_of, work
from logdepth.results import read_results
from logdepth.runs import RunFolder
from logdepth.training import train
from tests.study_commands import MODELS, error_of, flags_of_a_small_study, shorten_lengths  # noqa: F401 (fixtures)
from tests.tiny_corpus import VOCAB, write_corpus
from tests.tiny_study import CONTEXTS, TRAINING, override_files


def test_a_run_is_measured_on_the_text_that_it_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the first run, and the text changed before it goes on: the second run would have another text."""
    text, out = write_corpus(tmp_path / "text"), tmp_path / "study"
    first = [*override_files(tmp_path, text), "--seeds", "0", "--out", str(out), "--models", "ar-grc"]
    part = [*first, *(model for model in MODELS if model != "ar-grc")]
    with monkeypatch.context() as patch:
        asked = iter([False] * 8 + [True] * 100)
        patch.setattr(work._Work, "_is_spent", lambda _: next(asked))
        assert main(["reproduce", "text", *part]) == 3
    capsys.readouterr()
    with (text / "train.txt").open("a") as file:
        file.write("one more line .\n")
    line = error_of(capsys, "text", *part)
    assert "transformer-alibi seed 0 has another training text than ar-grc seed 0" in line
    assert not (out / "results").exists()
    assert main(["reproduce", "text", *first]) == 0
    result = read_results(out / "results").runs[0]
    assert result.data.store == RunFolder(out / "runs" / "ar-grc-0").store_key()


def test_runs_that_start_from_another_have_its_tokens(corpus: Path, flags: list[str], tmp_path: Path) -> None:
    first = tmp_path / "first"
    config = study_of("text", overrides=[Path(one) for one in flags[1:]]).rows["ar-grc"]
    other = dataclasses.replace(config.data, tokenizer=dataclasses.replace(config.data.tokenizer, vocab_size=VOCAB - 8))
    train(dataclasses.replace(config, data=other), first)
    file = tmp_path / "from.json"
    file.write_text(json.dumps({"train": {"init_from": os.path.relpath(first)}}))
    part = ["text", *flags, str(file), "--models", "ar-grc", "--seeds", "0", "--out", str(tmp_path / "study")]
    assert main(["reproduce", *part]) == 0
    result = read_results(tmp_path / "study" / "results").runs[0]
    assert result.data.store == RunFolder(tmp_path / "study" / "runs" / "ar-grc-0").store_key()
    assert result.main.loss < result.valid_loss + 0.5
    assert main(["reproduce", *part]) == 0, "a relative path is the same path"


def test_other_vocabularies_are_refused_before_training(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "other.json", tmp_path / "study"
    change = {"data": {"tokenizer": {"vocab_size": VOCAB - 8}}}
    file.write_text(json.dumps({"recipe": "text-transformer-alibi", "config": change}))
    line = error_of(capsys, "text", *flags, str(file), "--models", *MODELS, "--seeds", "0", "--out", str(out))
    assert "transformer-alibi seed 0 has another tokenizer than ar-grc seed 0" in line
    assert not out.exists()


def test_other_text_is_measured_too(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, elsewhere = tmp_path / "study", write_corpus(tmp_path / "elsewhere", count=160)
    arguments = ["text", *flags, "--models", "ar-grc", "--untimed", "--out", str(out), "--seeds", "0"]
    assert main(["reproduce", *arguments, "--others", f"elsewhere={elsewhere}"]) == 0
    (run,) = read_results(out / "results").runs
    (other,) = run.others
    assert (other.name, other.text.documents) == ("elsewhere", 3), "all of it, whatever its files are called"
    assert other.positions is not None
    assert other.positions.context == CONTEXTS[-1]
    assert [one.context for one in other.test] == [TRAINING["context"], CONTEXTS[-1]]
    capsys.readouterr()
    contexts = [str(one.context) for one in other.test]
    folder = str(out / "runs" / "ar-grc-0")
    assert main(["evaluate", folder, "--paths", str(elsewhere), "--contexts", *contexts, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["results"]
    assert [one.nats for one in other.test] == [one["nats"] for one in evaluated]
    table = (out / "tables" / "others.md").read_text()
    assert f"{other.test[0].token_perplexity:.2f}" in table
    assert "was not measured on more; remove it" in error_of(capsys, *arguments, "--others", f"more={elsewhere}")
    longer = [*arguments, "--others", f"elsewhere={elsewhere}", "--other-contexts", "128"]
    assert "was not measured on elsewhere at 128 tokens; remove it" in error_of(capsys, *longer)
    (out / "results" / "text-ar-grc-0.json").unlink()
    assert main(["reproduce", *longer]) == 0
    ((other,),) = (run.others for run in read_results(out / "results").runs)
    assert [one.context for one in other.test] == [TRAINING["context"], 128]
    assert "nowhere does not exist" in error_of(capsys, *arguments, "--others", "elsewhere=nowhere")
    (elsewhere / "test.txt").write_text("a small dog sees the cat .\n" * 9)
    said = error_of(capsys, *longer[:-4], "1", *longer[-4:])
    assert "text-ar-grc-0.json was measured on another text named 'elsewhere'; choose another name" in said
    assert not (out / "runs" / "ar-grc-1").exists()


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["nothing"], "--others needs NAME=PATH"),
        (["=here"], "--others needs NAME=PATH"),
        (["one={untested}", "one=there"], "two texts named 'one'"),
        (["one=nowhere"], "nowhere does not exist"),
        (["one={untested}"], "has fewer than two tokens"),
        (
            ["one={untested}", "--other-contexts", "0"],
            "--other-contexts must be different lengths of at least 1; got 0",
        ),
    ],
)
def test_other_text_is_refused_before_training(
    flags: list[str], others: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untested = tmp_path / "untested.txt"
    untested.write_text("")
    given = [one.format(untested=untested) for one in others]
    assert said in error_of(capsys, "text", *flags, "--out", str(tmp_path / "study"), "--others", *given)
    assert not (tmp_path / "study" / "runs").exists()
