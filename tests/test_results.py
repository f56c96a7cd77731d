"""Result files: what is written comes back; whatever is not as it should be is an error that names the file."""

import dataclasses
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logdepth.checksums import CHECKSUM, seal
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation
from logdepth.report.figures import binned_positions
from logdepth.results import Measured, OtherText, PositionLoss, read_result, read_results, write_result
from tests.command_line import refused
from tests.tiny_study import made_up_run, made_up_times


def rewrite(file: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool) -> None:
    """Change the content of a file, and give it a new checksum or none, as files of older versions."""
    saved = json.loads(file.read_text())
    del saved[CHECKSUM]
    change(saved)
    file.write_text(json.dumps(seal(saved) if sealed else saved))


def refusal_of(file: Path) -> str:
    """The one line with which a result file is refused."""
    with pytest.raises(UserError) as refused:
        read_result(file)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    for name, result in (("run", made_up_run()), ("timing", made_up_times("ar-grc", "transformer-alibi"))):
        file = tmp_path / f"{name}.json"
        write_result(file, result)
        assert read_result(file) == result
        saved = json.loads(file.read_text())
        assert (saved["schema"], saved["version"]) == (f"logdepth.{name}", 1)
        assert file.read_text().splitlines()[-2].startswith('"sha256": ')
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
        (lambda saved: saved["data"]["splits"]["test"].update(bytes=0), "the evaluated split has no words or no bytes"),
        (lambda saved: saved["data"]["splits"]["test"].update(words=10**40), "words must be from 0 to below 2^63"),
        (lambda saved: saved.update(schema=["logdepth.run"]), "is not a result file of logdepth: its schema is ['log"),
        (lambda saved: saved.update(valid_loss=10**400), "valid_loss: expected float; got 1000"),
        (lambda saved: saved.update(parameters=list(range(10**5))), "parameters: expected int; got [0, 1, 2, "),
    ],
)
def test_other_schemas_and_damage_are_named(change: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ptb-ar-grc-0.json"
    write_result(file, made_up_run())
    rewrite(file, change, sealed=True)
    refused = refusal_of(file)
    assert message in refused
    assert len(refused) < 600


@pytest.mark.parametrize("name", ["run", "timing"])
def test_a_flipped_bit_is_never_silent(name: str, tmp_path: Path) -> None:
    file, chance = tmp_path / "file.json", random.Random(0)
    whole = made_up_run() if name == "run" else made_up_times("ar-grc", "transformer-alibi")
    write_result(file, whole)
    content, found = file.read_bytes(), 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            unchanged = read_result(file) == whole
        except UserError as error:
            unchanged, found = str(file) in str(error), found + 1
        assert unchanged, "1e-05 and 1E-05 are one number"
    assert found > 190


@pytest.mark.parametrize("length", [1, 4_096, 4_097, 65_536])
def test_losses_at_distant_positions_are_kept_in_bins(length: int) -> None:
    tokens = 3 * length + length // 2
    counts = np.full(length, 3) + (np.arange(length) < length // 2)
    losses = np.random.default_rng(0).uniform(1, 5, length)
    evaluation = Evaluation(
        corpus="text",
        split="test",
        context=length,
        stride=length,
        tokens=tokens,
        words=tokens,
        bytes=4 * tokens,
        separator=None,
        unknown=0,
        nats=math.fsum(losses * counts),
        position_nats=losses * counts,
        position_tokens=counts,
    )
    positions = PositionLoss.of(evaluation)
    positions.verify(Measured.of(evaluation))
    if length <= 4_096:
        assert positions.ends is None
        assert list(positions.nats) == [round(loss, 6) for loss in losses]
        return
    assert positions.ends is not None
    assert positions.ends[-1] == length
    assert len(positions.ends) < 130
    start = 0
    for end, nats, count in zip(positions.ends, positions.nats, positions.tokens, strict=True):
        assert count == counts[start:end].sum()
        assert nats == pytest.approx((losses * counts)[start:end].sum() / count, abs=1e-6)
        start = end
    with pytest.raises(ValueError, match=r"positions.tokens"):
        dataclasses.replace(positions, tokens=(1, *positions.tokens[1:])).verify(Measured.of(evaluation))


def test_bins_of_positions_are_drawn_where_single_positions_would_be() -> None:
    tokens = np.arange(5_000, 0, -1)
    losses = np.linspace(5, 3, 5_000)
    ends = (1, 2, 3, *range(4, 5_001, 4))
    starts = [0, *ends[:-1]]
    counts = [int(tokens[start:end].sum()) for start, end in zip(starts, ends, strict=True)]
    means = [
        float((losses * tokens)[start:end].sum() / count)
        for start, end, count in zip(starts, ends, counts, strict=True)
    ]
    single = PositionLoss(context=5_000, nats=tuple(losses.tolist()), tokens=tuple(tokens.tolist()))
    binned = PositionLoss(context=5_000, nats=tuple(means), tokens=tuple(counts), ends=ends)
    for (place, loss), (expected_place, expected) in zip(
        binned_positions(binned), binned_positions(single), strict=True
    ):
        assert abs(place - expected_place) <= 4
        assert loss == pytest.approx(expected, abs=2e-3)


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ptb-ar-grc-0.json"
    write_result(file, made_up_run())
    file.write_text(file.read_text().replace('"epochs": 50', '"epochs": 60'))
    assert refusal_of(file) == (
        f"{file} does not match its checksum: it is damaged, or was edited after it was written; remove it and run the "
        "`logdepth reproduce` command that made it again"
    )


NUMBERS = "but the other numbers give"


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["test"][0].update(token_perplexity=19.0), f"test[0]: token_perplexity is 19.0, {NUMBERS}"),
        (lambda saved: saved["test"][1].update(loss=3.0), f"test[1]: loss is 3.0, {NUMBERS}"),
        (lambda saved: saved["test"][1].update(loss=math.nan), "test[1]: loss is nan"),
        (lambda saved: saved["test"][2].update(nats=math.inf), "nats a finite number from 0"),
        (lambda saved: saved["test"][2].update(word_perplexity=4.0), f"test[2].word_perplexity is 4.0, {NUMBERS}"),
        (lambda saved: saved["test"][2].update(bits_per_byte=1.0), f"test[2].bits_per_byte is 1.0, {NUMBERS}"),
        (lambda saved: saved["data"]["splits"]["test"].update(bytes=3601), f"test[0].bits_per_byte is .*, {NUMBERS}"),
        (lambda saved: saved["data"]["splits"]["test"].update(words=501), f"test[0].word_perplexity is .*, {NUMBERS}"),
        (lambda saved: saved["data"]["splits"]["test"].update(tokens=999), f"test[0].tokens is 999, {NUMBERS} 998"),
        (lambda saved: saved["test"].reverse(), "the contexts in test must be ascending"),
        (lambda saved: saved["positions"].update(context=64), "positions.context is 64, at which test has no"),
        (lambda saved: saved["positions"]["nats"].pop(), "nats must have a number for each position"),
        (lambda saved: saved["positions"].update(ends=[1, 2]), "ends must be ascending numbers above 0, one for each"),
        (lambda saved: saved["positions"].update(nats=[], tokens=[]), f"the number of positions is 0, {NUMBERS}"),
        (
            lambda saved: saved["positions"]["tokens"].__setitem__(3, 2),
            f"the sum of positions.tokens is 1000, {NUMBERS}",
        ),
        (lambda saved: saved["positions"]["nats"].__setitem__(0, 9.0), "positions.nats add up to"),
        (lambda saved: saved.update(valid_loss=2.9), "valid_loss is 2.9, but the lowest loss of valid_curve is 3.0"),
        (lambda saved: saved.update(best_step=99), "best_step is 99, which is no step of valid_curve"),
        (lambda saved: saved.update(best_step=50), f"the loss of valid_curve at best_step is 3.4, {NUMBERS} 3.0"),
        (lambda saved: saved.update(steps=101), f"steps is 101, {NUMBERS} 100"),
        (lambda saved: saved["valid_curve"].reverse(), "the steps of valid_curve must be ascending"),
        (lambda saved: saved["train_curve"][0].update(loss=-math.inf), "loss must be a finite number; got -inf"),
        (lambda saved: saved["made"].update(training_seconds=math.nan), "training_seconds must be a finite number"),
        (lambda saved: saved.update(row="x"), "row is 'x' and the corpus 'ptb', but recipe is 'ptb-ar-grc'"),
        (lambda saved: saved.update(recipe="ptb-x"), "row is 'ar-grc' and the corpus 'ptb', but recipe is 'ptb-x'"),
        (lambda saved: saved["data"].update(corpus="text"), "data.corpus is 'text', but config has 'ptb'"),
    ],
)
def test_numbers_that_follow_from_others_are_verified(
    change: Callable[[dict[str, Any]], object], message: str, sealed: bool, tmp_path: Path
) -> None:
    file = tmp_path / "ptb-ar-grc-0.json"
    write_result(file, made_up_run())
    rewrite(file, change, sealed=sealed)
    before, _, after = message.partition(".*")
    said = refusal_of(file)
    assert before in said
    assert after in said
    assert said.endswith("the `logdepth reproduce` command that made it again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda timing: timing.update(tokens_per_second=1.0),
            f"timings[1].tokens_per_second is 1.0, {NUMBERS} 1024000.0",
        ),
        (lambda timing: timing.update(milliseconds=-2.0), "the times of timings[1] must be above 0 and in the order"),
        (lambda timing: timing.update(fastest=math.nan), "the times of timings[1] must be above 0 and in the order"),
        (lambda timing: timing.update(batch_size=5), f"timings[1].tokens_per_second is 1024000.0, {NUMBERS} 1280000.0"),
    ],
)
def test_speeds_follow_from_times(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "timing-a.json"
    write_result(file, made_up_times("ar-grc"))
    rewrite(file, lambda saved: change(saved["models"][0]["timings"][1]), sealed=False)
    assert message in refusal_of(file)


def test_an_infinite_perplexity_is_a_result(tmp_path: Path) -> None:
    """A text of few words, such as a gene, has a word perplexity that no number can hold."""
    file, run = tmp_path / "ptb-ar-grc-0.json", made_up_run()
    text = dataclasses.replace(run.data.splits["test"], words=2, line_ends=0)
    test = tuple(dataclasses.replace(one, word_perplexity=math.inf) for one in run.test)
    data = dataclasses.replace(run.data, splits=run.data.splits | {"test": text})
    run = dataclasses.replace(run, data=data, test=test)
    write_result(file, run)
    assert read_result(file) == run


def test_files_without_checksums_load_and_say_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        write_result(tmp_path / f"{seed}.json", made_up_run(seed=seed))
        rewrite(tmp_path / f"{seed}.json", lambda saved: saved["config"]["train"].pop("schedule"), sealed=False)
    write_result(tmp_path / "timing.json", made_up_times("ar-grc"))
    rewrite(tmp_path / "timing.json", lambda _: None, sealed=False)
    assert len(read_results(tmp_path).runs) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path} was written by an older logdepth: its files carry no checksums, so damage and edits cannot be "
        "detected\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.update(config={}), "row is 'ar-grc' and the corpus"),
        (lambda saved: saved["config"].pop("train"), ".config: the field 'train.accelerate' is missing"),
        (lambda saved: saved["config"].pop("model"), ".config: the field 'model.depth' is missing"),
        (lambda saved: saved["config"]["train"].pop("epochs"), ".config: the field 'train.epochs' is missing"),
        (lambda saved: saved["config"]["model"].update(depth=2), ": parameters is 3516672, but config gives 6649344"),
        (lambda saved: saved["config"]["model"].update(embed_width=10**18), ".config.model cannot be built ("),
        (lambda saved: saved.update(parameters=5), ": parameters is 5, but config gives 3516672"),
    ],
)
def test_without_a_checksum_the_config_is_complete_and_of_its_size(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "ptb-ar-grc-0.json"
    write_result(file, made_up_run())
    rewrite(file, change, sealed=False)
    assert message in refusal_of(file)


def write_folder(file: Path) -> None:
    file.mkdir()


def write_loop(file: Path) -> None:
    file.symlink_to(file.name)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda file: file.write_text('{"parameters": ' + "9" * 6000 + "}"),
            "is not readable JSON (a number has too many digits",
        ),
        (lambda file: file.write_text("[" * 100_000), "is not readable JSON (its brackets are nested too deeply)"),
        (lambda file: file.write_text('{"sha256": ' + "[" * 900 + "]" * 900 + "}"), " is damaged"),
        (lambda file: file.write_bytes(b'{"row": "\xff"}'), "is not readable JSON ('utf-8' codec can't decode"),
        (lambda file: file.write_bytes(b'{"row": "\0"}'), "is not readable JSON (Invalid control character"),
        (lambda file: file.write_bytes(b"\0" * 100), "is not readable JSON (Expecting value"),
        (lambda file: file.write_text(""), "is not readable JSON (Expecting value"),
        (lambda file: file.write_text("5"), "is not a result file of logdepth: its schema is None"),
        (write_folder, "is not a file; move it to another folder"),
        (os.mkfifo, "is not a file; move it to another folder"),
        (write_loop, "Too many levels of symbolic links"),
    ],
)
def test_odd_files_are_one_line(
    write: Callable[[Path], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "study" / "results" / "pydocs-ar-grc-0.json"
    file.parent.mkdir(parents=True)
    write(file)
    for command in (["report", str(tmp_path / "study")], ["reproduce", "pydocs", "--out", str(tmp_path / "study")]):
        line = refused(capsys, *command)
        assert str(file) in line
        assert message in line
        assert len(line) < 600


def test_a_file_that_may_not_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results" / "pydocs-ar-grc-0.json"
    write_result(file, made_up_run())

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)  # root may read everything
    assert f"cannot read {file}: Permission denied; remove it" in refused(capsys, "report", str(tmp_path))


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


def test_names_of_files_do_not_change_the_order(tmp_path: Path) -> None:
    runs = [made_up_run(row, seed=seed) for row in ("ar-grc", "transformer-alibi") for seed in (0, 2, 10)]
    times = made_up_times("ar-grc")
    timings = [dataclasses.replace(times, environment=times.environment | {"device": name}) for name in ("a", "b")]
    for number, result in enumerate((*runs, *timings)):
        write_result(tmp_path / f"{number * 5 % 8}.json", result)
    found = read_results(tmp_path)
    assert [(run.row, run.config.seed) for run in found.runs] == [(run.row, run.config.seed) for run in runs]
    assert [timing.environment["device"] for timing in found.timings] == ["a", "b"]


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
    times = made_up_times("ar-grc")
    models = tuple(dataclasses.replace(model, recipe="wikitext2-ar-grc") for model in times.models)
    other = dataclasses.replace(times, corpus="wikitext2", models=models)
    write_result(tmp_path / "timing-a.json", other)
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
