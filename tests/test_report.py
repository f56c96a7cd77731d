"""Tables and figures from result files."""

import csv
import dataclasses
import io
import json
import math
from pathlib import Path

import pytest

from logdepth.cli import main
from logdepth.report import write_report
from logdepth.report.content import tables, title_of
from logdepth.report.table import FORMATS, Spread, Table, as_csv, as_json, as_latex, as_markdown
from logdepth.results import Results, write_result
from tests.tiny_study import made_up_run, made_up_times

ROWS = ("ar-grc", "transformer-alibi")
TABLE = Table(
    name="numbers",
    title="Numbers of 50 %",
    note="A_b & c.",
    heads=("model", "count", "loss"),
    rows=(("a|b", 12345, Spread.of([1.0, 2.0, 3.0])), ("AR_GRC", None, Spread.of([0.5], 4))),
)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for row in ROWS:
        for seed, perplexity in enumerate((20.0, 22.0)):
            write_result(tmp_path / "results" / f"ptb-{row}-{seed}.json", made_up_run(row, seed, perplexity))
    write_result(tmp_path / "results" / "timing-cpu.json", made_up_times(*ROWS))
    return tmp_path


def test_a_table_in_markdown() -> None:
    lines = as_markdown(TABLE).splitlines()
    assert lines[2:6] == [
        "| model | count | loss |",
        "| --- | ---: | ---: |",
        r"| a\|b | 12,345 | 2.00 ± 1.00 |",
        "| AR_GRC | – | 0.5000 |",
    ]


def test_a_table_in_latex_has_its_signs_escaped() -> None:
    latex = as_latex(TABLE)
    assert r"\begin{tabular}{lrr}" in latex
    assert r"a|b & 12,345 & 2.00 $\pm$ 1.00 \\" in latex
    assert r"AR\_GRC & -- & 0.5000 \\" in latex
    assert r"\caption{Numbers of 50 \%. A\_b \& c.}" in latex


def test_a_table_in_csv_and_json_keeps_numbers_whole() -> None:
    rows = list(csv.reader(io.StringIO(as_csv(TABLE))))
    assert rows[0] == ["model", "count", "loss", "loss, deviation"]
    assert rows[1] == ["a|b", "12345", "2.0", "1.0"]
    assert rows[2] == ["AR_GRC", "", "0.5", ""]
    saved = json.loads(as_json(TABLE))
    assert saved["rows"][0] == {"model": "a|b", "count": 12345, "loss": {"mean": 2.0, "deviation": 1.0}}


def test_names_of_models() -> None:
    titles = [title_of(row) for row in ("ar-mlp-ldru", "transformer-alibi", "gru")]
    assert titles == ["AR-MLP-LDRU", "Transformer (ALiBi)", "gru"]


def test_numbers_too_long_to_read_are_shown_by_their_size() -> None:
    assert [str(Spread(number, None)) for number in (999_999_999.0, 1e9, math.inf)] == [
        "999,999,999.00",
        "1.0e+09",
        "inf",
    ]
    assert str(Spread(3e19, 1e19, 4)) == "3.0e+19 ± 1.0e+19"


@pytest.mark.parametrize(
    ("accelerated", "compiled", "words"),
    [
        (True, True, "CUDA graphs, and fused kernels where the model has them; other layers compiled"),
        (True, False, "other layers not compiled"),
        (False, True, "operators and layers compiled"),
        (False, False, "operators and layers not compiled"),
    ],
)
def test_a_table_says_how_times_were_taken(accelerated: bool, compiled: bool, words: str) -> None:
    times = dataclasses.replace(made_up_times(*ROWS), accelerated=accelerated, compiled=compiled)
    (table,) = tables(Results([], [times]))
    assert f"precision {times.precision}, " in table.note
    assert f"{words}. Attention" in table.note
    assert table.title.endswith(", compiled") is compiled


def test_shifted_windows_show_in_the_table() -> None:
    run = made_up_run(ROWS[0], 0, 20.0)
    config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, shift_windows=True))
    cells = [
        found.texts()[0]
        for found in tables(Results([dataclasses.replace(run, config=config)], []))
        if found.name == "hyperparameters"
    ]
    assert "32 × 512, shifted" in cells[0]


def test_the_tables_of_a_study() -> None:
    runs = [made_up_run(row, seed, 20.0 + 2 * seed) for row in ROWS for seed in (0, 1)]
    found = {table.name: table for table in tables(Results(runs, [made_up_times(*ROWS)]))}
    assert list(found) == ["perplexity", "operators", "hyperparameters", "contexts", "times-cpu-2-threads"]
    assert found["perplexity"].texts()[0] == [
        "AR-GRC", "22.00 ± 1.41", "426.98 ± 53.66", "1.2371 ± 0.0258", "3,516,672", "2", "14.34",
    ]  # fmt: skip
    assert [row[0] for row in found["operators"].rows] == ["GRC"]
    assert found["operators"].texts()[0][-1] == "14.34"
    assert [row[0] for row in found["contexts"].rows] == [32, 512, 2976]
    assert found["contexts"].texts()[1] == ["512", "22.00 ± 1.41", "22.00 ± 1.41"]
    assert found["times-cpu-2-threads"].rows[0] == (32, 4, round(1e6 / 64e3, 3), round(1e6 / 64e3, 3))
    assert "E 256, D 256" in found["hyperparameters"].texts()[0][2]


def test_a_report_is_whole(study: Path) -> None:
    assert main(["report", str(study)]) == 0
    names = {"perplexity", "operators", "hyperparameters", "contexts", "times-cpu-2-threads"}
    assert {file.name for file in (study / "tables").iterdir()} == {
        f"{name}.{end}" for name in names for end in FORMATS
    }
    figures = {"perplexity-context", "position-loss", "time-context", "training", "overview"}
    drawn = {f"{name}.{end}" for name in figures for end in ("svg", "png")}
    assert {file.name for file in (study / "figures").iterdir()} == drawn
    page = (study / "report.html").read_text()
    assert page.count("<svg") == len(figures) - 1
    assert "cat &lt;b&gt;sat&lt;/b&gt; &amp; left" in page
    for secret in ("http://", "https://", "<script", "@import"):
        allowed = page.count(f'="{secret}www.w3.org') if secret.startswith("http") else 0
        assert page.count(secret) == allowed, secret


def test_a_report_made_again_is_the_same(study: Path) -> None:
    write_report(study)
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    write_report(study)
    assert before == {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}


def test_parts_of_a_study_have_a_report(tmp_path: Path) -> None:
    write_result(tmp_path / "results" / "ptb-ar-grc-0.json", made_up_run())
    write_report(tmp_path)
    assert not (tmp_path / "figures" / "time-context.svg").exists()
    assert "AR-GRC" in (tmp_path / "tables" / "perplexity.md").read_text()


def test_nothing_to_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "contains no result files; create some with `logdepth reproduce`" in capsys.readouterr().err


def test_what_cannot_be_averaged_is_infinite() -> None:
    assert str(Spread.of([1.0, float("inf")])) == "inf"
    table = Table(name="n", title="t", note="", heads=("x",), rows=((Spread.of([float("inf")]),),))
    assert json.loads(as_json(table))["rows"] == [{"x": {"mean": None, "deviation": None}}]


def test_two_machines_have_two_tables_and_figures(study: Path) -> None:
    write_result(study / "results" / "timing-other.json", made_up_times(*ROWS))
    write_report(study)
    assert (study / "tables" / "times-cpu-2-threads-2.md").exists()
    assert (study / "figures" / "time-context-2.svg").exists()


def test_the_papers_numbers_stand_beside_its_recipes_alone() -> None:
    run = made_up_run()
    assert "14.34" not in str(tables(Results([dataclasses.replace(run, parameters=5)], []))[0].rows)
    assert "14.34" in str(tables(Results([run], []))[0].rows)


def test_what_older_results_left_is_removed(study: Path) -> None:
    write_report(study)
    (study / "results" / "timing-cpu.json").unlink()
    (study / "results" / "ptb-transformer-alibi-0.json").unlink()
    (study / "results" / "ptb-transformer-alibi-1.json").unlink()
    write_report(study)
    left = {file.name for folder in ("tables", "figures") for file in (study / folder).iterdir()}
    assert not [name for name in left if name.startswith(("time", "overview"))]
    assert (
        "Missing models: AR-MLP-LDRU, Transformer (ALiBi), Transformer (sinusoidal)."
        in (study / "report.html").read_text()
    )


def test_rows_that_were_not_trained_alike_say_so() -> None:
    run = made_up_run("transformer-alibi")
    short = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, max_steps=30))
    note = tables(Results([made_up_run(), dataclasses.replace(run, config=short)], []))[0].note
    assert "Models differ in max_steps: AR-GRC None, Transformer (ALiBi) 30." in note
