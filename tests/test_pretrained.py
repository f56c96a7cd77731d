"""The model that comes with the library: it is whole, small and loads by default, and its card has its numbers."""

import json
import re
from pathlib import Path

import pytest

import logdepth
from logdepth.cli import main
from logdepth.runs import RunFolder

TEXT = (
    "The river rises in the hills north of the town and flows south for about forty miles before it reaches the sea. "
    "In 1848 a railway was built along the valley, and the population of the villages grew from a few hundred to "
    "several thousand. Most of the people worked in the mills, which were closed between the two world wars."
)
CARD = (logdepth.PRETRAINED / "README.md").read_text(encoding="utf-8")


def test_it_loads_by_default_and_knows_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.runs.tensors.say_without_checksums", pytest.fail)
    trained = logdepth.load(device="cpu")
    count = sum(one.numel() for one in trained.model.parameters())
    assert f"It has {count:,} parameters" in CARD
    assert trained.evaluate(TEXT).bits_per_byte < 1.5  # 2.5 and more for a model that has learned little
    assert trained.evaluate(" ".join(reversed(TEXT.split()))).bits_per_byte > 2.0
    text = trained.generate("The population of the town was", max_tokens=12, temperature=0)
    assert re.fullmatch(r"[\w ,.'%\n-]+", text)


def test_the_command_line_uses_it_where_no_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for run in ([], [str(logdepth.PRETRAINED)]):
        assert main(["generate", *run, "--prompt", "The town", "--max-tokens", "4", "--device", "cpu"]) == 0
        found = capsys.readouterr()
        assert found.out.startswith("The town")
        assert "small model that comes with the library" in found.err


def test_it_is_small_and_names_no_other_machine() -> None:
    files = [one for one in logdepth.PRETRAINED.iterdir() if one.is_file()]
    assert sum(one.stat().st_size for one in files) <= 25e6
    assert {one.name for one in files} == {
        "README.md", "best.safetensors", "config.json", "result.json", "tokenizer.model",
    }  # fmt: skip
    config = RunFolder(logdepth.PRETRAINED).config()
    assert config.data.paths == ()
    assert config.train.init_from is None
    for one in files:
        assert b"/root" not in one.read_bytes()


def test_the_card_has_the_numbers_of_the_result() -> None:
    results = json.loads(Path(logdepth.PRETRAINED / "result.json").read_text())["results"]
    assert len(results) == 4
    for one in results:
        row = f"| {one['context']:,} | {one['loss']:.3f} | {one['token_perplexity']:.2f} | {one['bits_per_byte']:.3f} |"
        assert row in CARD
