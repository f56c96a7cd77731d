"""The command line as people and programs meet it: one line and exit code 2 for every mistake, JSON where asked."""

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import logdepth
from logdepth.architectures import ARCHITECTURES
from logdepth.cli import VERBS, main
from logdepth.data import CORPORA
from logdepth.progress import Part, Progress, in_words
from logdepth.recipes import RECIPES, recipe
from logdepth.runs import RunConfig, RunFolder
from logdepth.tasks import TASKS
from logdepth.training import TrainState
from tests.command_line import refused
from tests.tiny_corpus import VOCAB, sentences

TINY = (
    f"--data.corpus text --data.tokenizer.vocab-size {VOCAB} --model.embed-width 16 --model.operator.width 16 "
    "--train.max-steps 12 --train.evaluate-every 6 --train.batch-size 4 --train.context 16 --train.device cpu"
).split()


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGDEPTH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        assert main(["train", "pydocs-ar-grc", *TINY, "--data.paths", str(corpus), "--out", str(out)]) == 0
    return out


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON that a verb prints."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"logdepth {logdepth.__version__}"
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"  {verb}" in overview for verb in VERBS)
    assert main([]) == 2
    capsys.readouterr()
    assert main(["", "train"]) == 2
    assert capsys.readouterr().err.startswith("logdepth: there is no verb ''; there are: ")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert not stopped.value.code
    assert f"usage: logdepth {verb}" in capsys.readouterr().out


def test_help_of_train_has_the_fields_of_its_configs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "wikitext2-transformer-alibi", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--model.num-heads INT Number of attention heads, which share the width evenly. (default: 16)" in text
    assert "--train.warmup-steps INT" in text
    assert "(default: 300)" in text
    assert "--train.accelerate, --train.no-accelerate" in text


def test_recipes_are_listed_with_parameter_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(RECIPES)
    assert "16,587,264" in next(line for line in lines if line.startswith("wikitext2-ar-grc"))
    listed = answer(capsys, "recipes")
    assert listed["openwebtext2-transformer-alibi"]["parameters"] == 95_104_512
    assert listed["ptb-ar-grc"]["config"]["data"]["tokenizer"]["vocab_size"] == 1500


def test_recipes_are_the_papers_rows() -> None:
    models = ("ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal")
    assert set(RECIPES) >= {f"{corpus}-{model}" for corpus in CORPORA for model in models}
    for name in RECIPES:
        if name.removeprefix("webmix-") in ARCHITECTURES:
            continue  # which has a test of its own
        config = recipe(name)
        assert config.data.corpus == name.split("-")[0]
        if not name.startswith("pydocs"):
            assert (config.train.batch_size, config.train.context, config.train.clip) == (32, 512, 1.0)
    assert recipe("wikitext2-ar-grc").train.warmup_steps == 300
    assert recipe("openwebtext2-ar-grc").train.learning_rate == 5e-4
    assert recipe("webmix-transformer-sinusoidal").train.learning_rate == 2e-4
    assert recipe("wikitext2-transformer-alibi").model.dropout == 0.3


def test_prepare_reports_counts(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data.paths", str(corpus), "--data.tokenizer.vocab-size", str(VOCAB), "--data.tokenizer.no-lossless"]
    report = answer(capsys, "prepare", "text", *flags)
    text = (corpus / "train.txt").read_text()
    assert report["splits"]["train"]["words"] == len(text.split())
    assert report["splits"]["train"]["bytes"] == len(text)
    assert Path(report["folder"]).is_dir()
    assert main(["prepare", "text", *flags]) == 0
    table = capsys.readouterr().out
    assert f"{len(text.split()) + 400:,}" in table  # with line ends
    assert "checksums" not in table


def test_train_and_everything_after_it(
    trained: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RunFolder(trained).config().train.max_steps == 12
    result = answer(capsys, "evaluate", str(trained), "--device", "cpu")["results"][0]
    assert result["bytes"] == len((corpus / "test.txt").read_text())
    assert result["context"] == 16
    assert result["token_perplexity"] == pytest.approx(math.exp(result["nats"] / result["tokens"]))
    several = answer(capsys, "evaluate", str(trained), "--contexts", "8", "32", "--stride", "4", "--positions")
    assert [(one["context"], one["stride"]) for one in several["results"]] == [(8, 4), (32, 4)]
    assert len(several["results"][1]["position_loss"]) == 32
    assert len(answer(capsys, "evaluate", str(trained), "--grid", "--split", "valid")["results"]) == 24
    (tmp_path / "test.txt").write_text("the cat draws my neighbour .\n")
    other = answer(capsys, "evaluate", str(trained), "--corpus", "text", "--paths", str(tmp_path))
    assert other["results"][0]["words"] == 7
    assert main(["evaluate", str(trained), "--weights", "last"]) == 0
    said = capsys.readouterr()
    assert "bits per byte" in said.out
    assert "the text is shorter" not in said.err
    assert main(["evaluate", str(trained), "--contexts", "99999999"]) == 0
    assert "context 99,999,999: the text is shorter, so it is evaluated as one window of " in capsys.readouterr().err

    made = answer(capsys, "generate", str(trained), "--prompt", "the cat", "my", "--max-tokens", "5")
    assert [one["prompt"] for one in made] == ["the cat", "my"]
    again = answer(capsys, "generate", str(trained), "--prompt", "the cat", "my", "--max-tokens", "5")
    assert made == again
    assert main(["generate", str(trained), "--prompt", "the cat", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "the cat" + made[0]["text"] + "\n"

    times = answer(capsys, "time", str(trained), "--contexts", "8,16", "--batch-size", "2", "--repeats", "2")
    assert [(one["batch_size"], one["context"]) for one in times["timings"]] == [(2, 8), (2, 16)]
    flags = ("--contexts", "16", "--batch-tokens", "32", "--repeats", "2", "--device", "cpu")
    times = answer(capsys, "time", "pydocs-transformer-alibi", *flags)
    assert "SDPA" in times["timings"][0]["attention"]


def test_all_of_a_given_text_is_measured(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = sentences(100, seed=5)
    file = tmp_path / "my text.txt"
    file.write_text(text)
    evaluate = ["evaluate", str(trained), "--paths", str(file)]
    (whole,) = answer(capsys, *evaluate)["results"]
    assert (whole["bytes"], whole["split"]) == (len(text), "all")
    assert whole["words"] == len(text.split()) + 100
    assert answer(capsys, *evaluate, "--corpus", "text")["results"] == [whole]
    assert whole["nats"] == pytest.approx(logdepth.load(trained).evaluate(text).nats, rel=0.01)  # without its end
    (test,) = answer(capsys, *evaluate, "--split", "test")["results"]
    assert test["split"] == "test"
    assert 0 < test["bytes"] < 0.1 * len(text)
    assert answer(capsys, *evaluate)["results"] == [whole], "the two are cached apart"
    assert main(evaluate) == 0
    shown = capsys.readouterr().out
    counts = f"{len(text):,} bytes, {len(text.split()) + 100:,} words with line ends, 1 document with"
    assert f"text, all of it: {counts}" in shown
    (own,) = answer(capsys, "evaluate", str(trained))["results"]
    assert own["split"] == "test"
    named = file.rename(tmp_path / "train.txt")
    line = refused(capsys, "evaluate", str(trained), "--paths", str(named), "--split", "test")
    assert "its test split is empty: the names of its files assign train.txt to train; add a file with 'test'" in line
    assert line.endswith("; or leave out --split to measure all of it")
    file.write_text("")
    assert "the text has fewer than two tokens" in refused(capsys, *evaluate)
    rows = "".join(json.dumps({"text": one}) + "\n" for one in ("", "", ""))
    (tmp_path / "a.jsonl").write_text(rows)
    line = refused(capsys, *evaluate[:-1], str(tmp_path / "a.jsonl"))
    assert "the text has no words, so there is nothing to measure; add text to it" in line


@pytest.mark.parametrize(
    "flags", [["--contexts", "8,32"], ["--contexts=8,32"], ["--contexts", "8,", "32"], ["--contexts", "8", "32"]]
)
def test_contexts_may_be_separated_by_commas(
    flags: list[str], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "evaluate", str(trained), *flags)["results"]
    assert [one["context"] for one in found] == [8, 32]
    assert "--contexts: cannot read '8', 'x'" in refused(capsys, "evaluate", str(trained), "--contexts", "8,x")
    assert "--contexts has no value" in refused(capsys, "evaluate", str(trained), "--contexts", ",")


def test_acceleration_is_the_default_and_changes_nothing_on_a_cpu(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb, more in (("evaluate", ()), ("generate", ("--prompt", "the cat", "--max-tokens", "5"))):
        more = (*more, "--device", "cpu")
        plain = answer(capsys, verb, str(trained), *more, "--no-accelerate")
        assert answer(capsys, verb, str(trained), *more) == plain
        assert answer(capsys, verb, str(trained), *more, "--accelerate") == plain
    flags = ("--contexts", "16", "--batch-tokens", "32", "--repeats", "2", "--device", "cpu")
    for choice in ((), ("--accelerate",), ("--no-accelerate",)):
        assert main(["time", str(trained), *flags, *choice]) == 0
        assert capsys.readouterr().err == ""


def test_several_samples_and_prompts_from_stdin(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = answer(capsys, "generate", str(trained), "--prompt", "my", "--samples", "3", "--max-tokens", "9")
    assert len({one["text"] for one in made}) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO("the old clock"))
    made = answer(capsys, "generate", str(trained), "--prompt", "-", "--samples", "2", "--max-tokens", "2")
    assert [one["prompt"] for one in made] == ["the old clock"] * 2


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (None, "--prompt - reads the prompt from stdin, which is closed; give it as --prompt TEXT"),
        (io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"), "--prompt -: stdin is not text in UTF-8"),
    ],
)
def test_stdin_that_cannot_be_read_is_one_line(
    stdin: io.TextIOWrapper | None, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert says in refused(capsys, "generate", "/nowhere", "--prompt", "-")


def test_corpora_are_listed_with_which_are_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOGDEPTH_DATA", raising=False)
    listed = answer(capsys, "corpora")
    assert {name: one["here"] for name, one in listed.items()} == {
        **dict.fromkeys(CORPORA, False),
        "pydocs": True,
        "text": None,
    }
    (tmp_path / "webmix").mkdir()
    (tmp_path / "webmix" / "train-0.jsonl.xz").touch()
    assert answer(capsys, "corpora", "--data-dir", str(tmp_path))["webmix"]["here"]
    assert main(["corpora", "--data-dir", str(tmp_path / "nowhere")]) == 2
    capsys.readouterr()
    assert main(["corpora"]) == 0
    assert "Penn Treebank" in capsys.readouterr().out


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = answer(capsys, "tasks")
    assert list(listed) == list(TASKS)
    assert listed["d2"] == {
        "family": "regular-languages",
        "title": "D₂",
        "symbols": 2,
        "classes": 2,
        "train": [str(length) for length in range(1, 41)],
        "test": [str(case) for case in TASKS["d2"].test_cases],
        "chance": pytest.approx(0.8125),
        "chance_at_end": 0.5,
    }
    assert listed["mqar"]["train"] == ["64/4", "128/8", "256/16", "256/32", "256/64"]
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(TASKS)
    assert re.split(r"  +", lines[1]) == [
        "parity",
        "regular-languages",
        "Parity",
        *"22",
        "1–40",
        "10–500",
        "0.5",
        "0.5",
    ]


def test_examples_of_a_task_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    made = answer(capsys, "tasks", "parity", "--length", "7", "--count", "4", "--seed", "5")
    assert (made["task"], made["case"], len(made["examples"])) == ("parity", "7", 4)
    for example in made["examples"]:
        assert example["answers"] == [sum(example["tokens"][:end]) % 2 for end in range(1, 8)]
    assert main(["tasks", "parity", "--length", "7", "--count", "4", "--seed", "5"]) == 0
    head, *blocks = capsys.readouterr().out.split("\n\n")
    assert head.startswith("parity: Parity (regular-languages), length 7")
    shown = [[line.split() for line in block.splitlines()] for block in blocks]
    assert shown == [
        [["tokens", *map(str, one["tokens"])], ["answers", *map(str, one["answers"])]] for one in made["examples"]
    ]

    made = answer(capsys, "tasks", "mqar", "--length", "64/8", "--count", "1")
    (example,) = made["examples"]
    assert len(example["tokens"]) == 64
    assert sum(one is not None for one in example["answers"]) == 8
    assert main(["tasks", "mqar", "--length", "64/8", "--count", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    tokens = [word for line in lines if line.startswith("tokens") for word in line.split()[1:]]
    answers = [word for line in lines if line.startswith("answers") for word in line.split()[1:]]
    assert tokens == [str(token) for token in example["tokens"]]
    assert answers == ["·" if one is None else str(one) for one in example["answers"]]


def test_the_document_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text()
    shown = re.search(r"    \$ logdepth (.*)\n((?:    .*\n|\n)*)", document)
    assert shown is not None
    assert main(shown[1].split()) == 0
    assert capsys.readouterr().out.split() == shown[2].split()


@pytest.mark.parametrize("name", TASKS)
def test_every_task_prints_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", name]) == 0
    assert capsys.readouterr().out.count("\n\ntokens") == 3


def test_unknown_text_is_mentioned(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test.txt").write_text("the cat ☃ draws 漢字 .\n")
    assert main(["evaluate", str(trained), "--paths", str(tmp_path)]) == 0
    assert "of the tokens are unknown to the tokenizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ([], 500),
        (["--train.epochs", "50"], None),
        (["--train.epochs=3"], None),
        (["--train.epochs", "3", "--train.max-steps", "7"], 7),
        (["--config", "epochs.json"], None),
        (["--config", "both.json"], 7),
    ],
)
def test_epochs_that_are_asked_for_count(
    arguments: list[str], steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("epochs.json").write_text('{"train": {"epochs": 3}}')
    Path("both.json").write_text('{"train": {"epochs": 3, "max_steps": 7}}')
    trained: list[RunConfig] = []

    def train(config: RunConfig, *_: object) -> TrainState:
        trained.append(config)
        return TrainState(finished="all steps done", best_step=1, best_loss=1.0)

    monkeypatch.setattr("logdepth.cli.train.train", train)
    assert main(["train", "pydocs-ar-grc", *arguments]) == 0
    assert [config.train.max_steps for config in trained] == [steps]


def test_config_files_come_before_flags(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.json"
    file.write_text(json.dumps({"train": {"learning_rate": 0.5, "clip": 2.0}, "model": {"operator": {"width": 16}}}))
    flags = [flag for flag in TINY if flag not in ("--model.operator.width",)]
    flags.remove("16")
    out = tmp_path / "run"
    where = ["--data.paths", str(corpus), "--out", str(out)]
    report = answer(
        capsys, "train", "pydocs-ar-grc", "--config", str(file), *flags, *where, "--train.clip", "3", "--model.no-tied"
    )
    assert report["finished"] == "all steps done"
    config = RunFolder(out).config()
    assert (config.train.learning_rate, config.train.clip, config.model.operator.width) == (0.5, 3.0, 16)
    assert not config.model.tied
    saved, two = str(out / "config.json"), str(tmp_path / "two")
    again = answer(capsys, "train", "pydocs-ar-grc", "--config", saved, "--out", two)
    assert again["best_loss"] == report["best_loss"]
    for wrong in ("[1]", '{"model": {"kind": []}}'):
        file.write_text(wrong)
        refused(capsys, "train", "pydocs-ar-grc", "--config", str(file))
    assert main(["train", "--config", saved, "--out", str(tmp_path / "three"), "--train.max-steps", "2"]) == 0
    assert RunFolder(tmp_path / "three").config().model == config.model
    assert "needs --out" in refused(capsys, "train", "--config", saved)
    line = refused(capsys, "train", "pydocs-transformer-alibi", "--config", saved)
    assert "is for a ScanLMConfig, not TransformerConfig as this recipe has" in line
    file.write_text('{"train": {"learnin_rate": 1}}')
    line = refused(capsys, "train", "pydocs-ar-grc", "--config", str(file))
    assert line.endswith("best.json.train: unknown field 'learnin_rate'; did you mean 'learning_rate'?")


def test_an_empty_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "RECIPE is empty" in refused(capsys, "train", "")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("trian", "there is no verb 'trian'; did you mean 'train'?"),
        (f"prepare text --data.tokenizer.sample-bytes 1{'0' * 400}", "sample_bytes must be from 1 to below 2^63"),
        ("train", "which recipe? `logdepth recipes` lists them"),
        ("train pydocs-ar-gcr", "there is no recipe 'pydocs-ar-gcr'; did you mean 'pydocs-ar-grc'?"),
        ("train pydocs-ar-grc --train.lerning-rate 1", "did you mean --train.learning-rate?"),
        (
            "train pydocs-ar-grc --model.blocks mlp",
            "unrecognized options: --model.blocks; only hybrids and the architectures on webmix have it",
        ),
        ("train pydocs-hybrid --model.blocks attention:heads=3", "model.blocks: dim 128 does not divide into 3 heads"),
        ("train webmix-rope --model.blocks attention:head=3", "'head'; did you mean 'heads'"),
        (
            "train pydocs-hybrid --model.blocks mlp --model.blocks scan",
            "--model.blocks is given 2 times; give it once, with all of its values",
        ),
        ("train pydocs-ar-grc --train.nope 1", "unrecognized options: --train.nope, 1; --help lists the options"),
        ("evaluate {run} --contexts", "--contexts has no value; give at least one value, or remove the flag"),
        ("reproduce pydocs --seeds --models ar-grc", "--seeds has no value"),
        ("train pydocs-ar-grc --train.threads 1000000000", "threads must be at most 1,024; got 1000000000"),
        ("train pydocs-ar-grc --seed " + "9" * 6000, "--seed: got 6000 digits; give fewer; --help lists the options"),
        ("train pydocs-ar-grc --train.max-steps " + "9" * 400, "got 9999999999… (400 digits)"),
        (
            "train pydocs-transformer-alibi --model.attention flex --train.device cpu",
            "model: FlexAttention has no gradients on a CPU: choose another attention backend, such as auto",
        ),
        (
            "train pydocs-hybrid --model.blocks attention:backend=flex --train.device cpu",
            "model.blocks: FlexAttention has no gradients on a CPU",
        ),
        ("tasks parity --length " + "9" * 6000, "such as 40, or tokens/items, such as 64/4; got '9"),
        ("train pydocs-ar-grc --config=", "--config is empty; give a path, or remove the flag"),
        ("train pydocs-ar-grc --train.epochs many", "--train.epochs: expected an integer; got 'many'"),
        ("train pydocs-ar-grc --train.max-steps five", "--train.max-steps: expected {None}|INT; got 'five'"),
        ("train pydocs-ar-grc --train.clip x", "--train.clip: expected a number; got 'x'"),
        ("train --resume", "resume"),
        ("train pydocs-ar-grc --resume {run}", "leave out 'pydocs-ar-grc'"),
        ("train --resume {run} --train.clip 6", "to start a new run from its weights, use --train.init-from"),
        ("train --out pydocs-ar-grc --train.epochs 1", "which recipe?"),
        ("train pydocs-ar-grc ptb-ar-grc", "ptb-ar-grc"),
        ("train --resume pydocs-ar-grc", "pydocs-ar-grc holds no run"),
        ("prepare --data-dir pydocs ptb-ar-grc", "the data directory pydocs does not exist"),
        ("train --seed 1 pydocs-ar-grc --train.epochs 0", "epochs must be at least 1"),
        ("generate {run} --prompt", "--prompt has no value"),
        ("generate {run} --samples 0", "--samples must be at least 1"),
        ("generate {run} --samples 1000000000000000000", "ask for more than 100,000 texts at once; ask for fewer"),
        ("evaluate {run} --device cuda:99", "try --device cpu"),
        ("evaluate {run} --grid --contexts 3", "give --grid or --contexts, not both"),
        ("time pydocs-ar-grc --grid --contexts 3", "give --grid or --contexts, not both"),
        ("corpora --jsn", "unrecognized options: --jsn"),
        ("tasks partiy", "there is no task 'partiy'; did you mean 'parity'?"),
        ("tasks parity s5", "s5"),
        ("tasks --seed 3", "--seed is for examples of one task; name the task, as in: logdepth tasks parity"),
        ("tasks --length=3", "--length is for examples of one task"),
        ("tasks parity --length 0", "parity: length is 0: an example has at least 1 symbol"),
        ("tasks parity --length -3", "--length: expected tokens, such as 40, or tokens/items, such as 64/4; got '-3'"),
        ("tasks parity --length x", "got 'x'"),
        ("tasks parity --length 4/", "got '4/'"),
        ("tasks parity --length ٣", "got '٣'"),
        ("tasks parity --length 4/1", "parity: items is 1: the length says it all here, give 0"),
        (
            "tasks parity --length 100001 --count 1",
            "--length and --count ask for more than 100,000 tokens; ask for fewer",
        ),
        ("tasks parity --count 0", "--count must be at least 1; got 0"),
        ("tasks parity --count x", "--count: expected an integer; got 'x'"),
        ("tasks parity --seed -1", "--seed must be at least 0; got -1"),
        ("tasks mqar --length 64", "mqar: case 64 has 0 pairs of keys and values: ask for at least 1, as in 64/1"),
        ("tasks mqar --length 64/17", "case 64/17 is too short: 17 pairs of keys and values take at least 68 tokens"),
        ("tasks listops --length 3", "listops: length is 3: lists have 1 or 4 to 2000 symbols"),
        ("tasks s5 --length 8/1", "s5: items is 1: give 0, or 1 where pairs are held out"),
        ("train pydocs-ar-grc --train.epochs 0", "epochs must be at least 1; got 0"),
        ("train pydocs-ar-grc --model.post-merge both", "invalid choice 'both'"),
        ("train pydocs-ar-grc --model.depth 0", "must be at least 1"),
        ("train pydocs-ar-grc --data.corpus pydoc", "there is no corpus 'pydoc'; did you mean 'pydocs'?"),
        ("train pydocs-ar-grc --data.corpus text", "needs files or folders to read; set --data.paths"),
        ("train pydocs-ar-grc --data.corpus text --data.paths /nowhere", "/nowhere does not exist"),
        ("train pydocs-ar-grc --train.device cuda:99", "device 'cuda:99' cannot be used here"),
        ("train pydocs-ar-grc --train.device gpu", "device 'gpu' cannot be used here"),
        ("train pydocs-ar-grc --config /nowhere.json", "/nowhere.json does not exist"),
        ("train pydocs-ar-grc --train.context 600000", "fewer than one batch of 16 × 600000 + 1"),
        ("train pydocs-ar-grc --data.tokenizer.vocab-size 900000", "--data.tokenizer.vocab-size to at most"),
        ("train pydocs-transformer-alibi --model.num-heads 3", "does not divide into 3 heads"),
        ("train pydocs-ar-grc --model.operator.width 15", "must be even; got 15"),
        ("train ptb-ar-grc", "none is set: give --data-dir or LOGDEPTH_DATA"),
        ("train ptb-ar-grc --data-dir /nowhere", "the data directory /nowhere does not exist"),
        ("train --resume /nowhere", "/nowhere holds no run"),
        ("train --resume {run} --fast", "unrecognized options: --fast"),
        ("associativity", "RUN is missing"),
        ("evaluate /nowhere", "/nowhere holds no run"),
        ("evaluate {run} --contexts 0", "--contexts must be at least 1"),
        ("evaluate {run} --contexts 8 --stride 9", "--stride must be from 1 to the context; got 9 and 8"),
        ("evaluate {run} --stride 0", "--stride must be from 1 to the context"),
        ("train pydocs-ar-grc --model.leaf-dropout 1.5", "leaf_dropout must be from 0 to below 1; got 1.5"),
        ("train pydocs-ar-grc --model.operator.dropout -0.1", "dropout must be from 0 to below 1; got -0.1"),
        ("train pydocs-ar-grc --seed 99999999999999999999999", "seed must be from 0 to below 2^63"),
        ("train pydocs-ar-grc --train.device meta", "only cpu and cuda are supported"),
        ("train pydocs-ar-grc --config /tmp", "cannot read /tmp"),
        ("train pydocs-ar-grc --out /proc/nothing", "cannot write /proc/nothing"),
        ("train ptb-ar-grc --train.reset-at-documents", "corpus 'ptb' is one stream"),
        ("time pydocs-ar-grc --batch-size 0", "must be at least 1"),
        ("time pydocs-ar-grc --warmups -1", "--warmups must be at least 0; got -1"),
        ("generate {run} --seed -1", "seed must be from 0 to below 2^63"),
        ("evaluate {run} --positions", "--positions requires --json"),
        ("evaluate {run} --paths /nowhere", "/nowhere does not exist"),
        ("evaluate {run} --split dev", "invalid choice 'dev'"),
        ("evaluate {run} --corpus ptbb", "there is no corpus 'ptbb'; did you mean 'ptb'?"),
        ("generate /nowhere", "/nowhere holds no run"),
        ("generate {run} --top-p 2", "top_p must be above 0 and at most 1; got 2.0"),
        ("generate {run} --max-tokens 0", "max_tokens must be at least 1; got 0"),
        ("time pydocs-ar-gcr", "there is no recipe 'pydocs-ar-gcr'; did you mean 'pydocs-ar-grc'?"),
        ("time pydocs-ar-grc --contexts 0", "must be at least 1"),
        ("prepare ptbb", "there is no corpus or recipe 'ptbb'; did you mean 'ptb'?"),
        ("prepare text", "needs files or folders to read; set --data.paths"),
        ("completion csh", "invalid choice 'csh'"),
        ("recipes --jsn", "unrecognized options: --jsn"),
        ("check --fast", "unrecognized options: --fast"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: str, says: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *arguments.replace("{run}", str(trained)).split())
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize("wrong", ["[1]", '{"version": 2}', '{"version": 2, "config": [], "store": "x"}', "{"])
def test_folders_with_another_config_are_refused(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(wrong)
    assert "config.json" in refused(capsys, "evaluate", str(tmp_path))


def test_a_list_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.json").write_text("[1]")
    for command in (["train"], ["train", "pydocs-ar-grc"], ["sweep", "pydocs-ar-grc"], ["reproduce", "pydocs"]):
        line = refused(capsys, *command, "--config", str(tmp_path / "list.json"))
        assert "list.json: expected a mapping of fields of a run's config" in line


def test_training_that_explodes_is_one_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data.paths", str(corpus), "--out", str(tmp_path / "run")]
    capsys.readouterr()
    code = main(["train", "pydocs-ar-grc", *TINY, *where, "--train.learning-rate", "1e30"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert "training diverged" in lines[-1]


def test_a_mistake_in_a_real_process_has_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "logdepth", "evaluate", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"logdepth evaluate: {tmp_path} holds no run: there is no config.json in it\n"


def test_completion_scripts_know_recipes_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "webmix-transformer-sinusoidal" in script
        assert "--train.learning-rate" in script


def test_what_was_done_before_does_not_shorten_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logdepth.progress.PLAIN_SECONDS", 0.0)
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("logdepth.progress.time.monotonic", lambda: next(now))
    progress = Progress("study", 100, unit="%")
    part = Part(progress, "a run", 10, 50, done=8)
    capsys.readouterr()
    part.update(9)
    line = capsys.readouterr().err
    seconds = progress.last_line - progress.started
    assert line == f"study: 45 %, a run, {in_words(seconds * (100 - 45) / 5)} left\n"


def test_an_early_estimate_is_called_rough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.progress.PLAIN_SECONDS", 0.0)
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("logdepth.progress.time.monotonic", lambda: next(now))
    progress = Progress("study", 1000)
    progress.update(0)
    assert capsys.readouterr().err == "study: 0/1,000 steps\n"
    for done in (9, 11):
        progress.update(done)
        seconds = progress.last_line - progress.started
        roughly = "roughly " if done == 9 else ""
        left = in_words(seconds * (1000 - done) / done)
        assert capsys.readouterr().err == f"study: {done}/1,000 steps, {roughly}{left} left\n"


def test_the_first_line_comes_early(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.progress.FIRST_SECONDS", 1.0)
    now = 0.0
    monkeypatch.setattr("logdepth.progress.time.monotonic", lambda: now)
    progress, printed = Progress("working", 100), []
    for tenth in range(250):
        now = tenth / 10
        progress.update(tenth / 10)
        if capsys.readouterr().err:
            printed.append(now)
    assert printed == [1.0, 11.0, 21.0]


def test_lines_are_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("study", 100, unit="%") as progress:
        parts = [Part(progress, f"run {number}", 10, 50) for number in (0, 1)]
        for part in parts:
            part.remark("the warm-up is too long")
            part.say("began")
            part.say("began")
        parts[0].say("began")
    assert capsys.readouterr().err.splitlines() == [
        "run 0: the warm-up is too long",
        "run 0: began",
        "run 1: began",
        "run 0: began",
    ]


def test_progress_in_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.progress.PLAIN_SECONDS", 0.0)
    with Progress("working", 10, unit="steps", done=2) as progress:
        progress.update(4, "loss 3.5")
        progress.say("a line that stays")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("working: 4/10 steps, loss 3.5, ")
    assert lines[0].endswith(" left")
    assert lines[1] == "a line that stays"
    with Progress("working", 2, unit="runs") as progress:
        for done in (0.5, 2.0, 2.0):
            progress.update(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["working: 0.5/2 runs", "working: 2/2 runs"]
    assert [in_words(seconds) for seconds in (0.4, 59.6, 200, 7500)] == ["0 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]
