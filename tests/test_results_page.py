"""The results pages as a whole, from made-up files, and whether the pages in docs/ match the files in results/."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draw_results
from logdepth.atomic import read_json
from logdepth.checksums import seal, unseal
from logdepth.drawing import source_of
from logdepth.errors import UserError
from logdepth.results import write_result
from page_templates import PLACEHOLDER, templates
from results_page.bars import BARS, bars
from results_page.figures import figure_file
from results_page.kept import STUDIES, read_kept
from results_page.markdown import NOTHING
from results_page.page import PER_STUDY, SECTIONS, pages
from results_page.readme import BEGIN, END, readme_block, with_block
from tests.kept_results import a_run, add_associativity, add_study, add_sweep, add_tasks, an_associativity

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with results of every study, a sweep and an associativity study."""
    folder = tmp_path_factory.mktemp("kept") / "results"
    for study in STUDIES:
        add_study(folder / study)
    add_sweep(folder / "sweeps" / "ptb" / "ptb-ar-grc.json")
    add_associativity(folder / "associativity" / "wikitext2-ar-grc.json", an_associativity())
    add_tasks(folder / "tasks" / "groups-quick")
    add_tasks(folder / "tasks" / "groups", "s5")
    add_tasks(folder / "tasks" / "recall", "mqar", {"grc": 0.1, "memory": 0.9})
    return folder


def test_pages_readme_and_figures_match_the_results() -> None:
    kept = read_kept(ROOT / "results")
    written = {path: (ROOT / "docs" / path).read_text(encoding="utf-8") for path in pages_in(ROOT / "docs")}
    assert written == pages(kept), "run: make results"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == with_block(readme, readme_block(kept)), "run: make results"
    planned = {figure_file(name): plan.source for name, plan in draw_results.plans(kept).items()}
    drawn = {path.name: source_of(path) for path in (ROOT / "docs" / "figures").glob("results-*.svg")}
    assert drawn == planned, "run: make results"


def test_all_kept_files_have_checksums() -> None:
    files = sorted((ROOT / "results").glob("*/**/*.json"))
    assert len(files) > 90
    for path in files:
        unseal(read_json(path), path, "restore it", required=True)


def pages_in(docs: Path) -> list[str]:
    """Return the paths of the results pages below docs/."""
    found = [docs / "results.md", *(docs / "results").glob("*.md")]
    return [path.relative_to(docs).as_posix() for path in found if not path.name.endswith(".in.md")]


def test_every_study_has_its_page_and_every_section_its_place() -> None:
    places = {page: PLACEHOLDER.findall(path.read_text("utf-8")) for page, path in templates("results").items()}
    for study in STUDIES:
        assert places.pop(f"results/{study}.md") == [f"{name}:{study}" for name in PER_STUDY]
    assert sorted(place for found in places.values() for place in found) == sorted(SECTIONS)


def test_every_page_is_in_the_navigation_and_linked_from_the_results() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    linked = templates("results")["results.md"].read_text(encoding="utf-8")
    for page in templates("results"):
        assert f": {page}\n" in navigation
        assert page == "results.md" or f"({page})" in linked


def test_the_results_are_one_page_to_read() -> None:
    words = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").replace("|", " ").split()
    assert len(words) < 1600


def test_without_results_the_pages_say_so(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "pydocs.json").write_text("is not part of it")
    kept = read_kept(tmp_path)
    text = "".join(pages(kept).values())
    assert "{{" not in text
    assert ".svg" not in text
    without = {
        "caveats",
        "others",
        "bars",
        "verdicts",
        "task_choice",
        "task_published",
    }  # empty, or say it in words of their own
    assert text.count(NOTHING) == len(PER_STUDY) * len(STUDIES) + len(SECTIONS.keys() - without)
    assert bars(kept).count("|  | not run yet |") == len(BARS)
    assert readme_block(kept) == NOTHING + "\n"
    assert draw_results.plans(kept) == {}


def test_everything_is_written_and_drawn(everything: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    stale = tmp_path / "docs" / "figures" / "results-gone-times.svg"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    arguments = ["--results", str(everything), "--docs", str(tmp_path / "docs"), "--readme", str(readme)]
    draw_results.main(arguments)
    kept = read_kept(everything)
    written = {path: (tmp_path / "docs" / path).read_text() for path in pages_in(tmp_path / "docs")}
    assert written == pages(kept)
    text = "".join(written.values())
    assert NOTHING not in text
    assert "not run yet" not in text
    main = written.pop("results.md")
    assert "../figures/" not in main
    assert "(figures/" not in "".join(written.values())
    linked = set(re.findall(r"\((figures/results-[\w-]+\.svg)\)", main))
    linked |= set(re.findall(r"\(../(figures/results-[\w-]+\.svg)\)", "".join(written.values())))
    linked |= {path.removeprefix("docs/") for path in re.findall(r"\((docs/[\w/-]+\.svg)\)", readme.read_text())}
    assert {path.name for path in stale.parent.iterdir()} == {Path(path).name for path in linked}
    assert len(linked) == 3 * len(STUDIES) + 3 + 2 + 3  # of two studies there are deeper models; three are of tasks
    assert readme.read_text().startswith(f"before\n{BEGIN}| study | model |")
    assert readme.read_text().endswith(f".*\n{END}\nafter\n")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    draw_results.main(arguments)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_the_readme_stays_short(everything: Path) -> None:
    text = with_block((ROOT / "README.md").read_text(encoding="utf-8"), readme_block(read_kept(everything)))
    assert len(text.splitlines()) < 200


def test_a_figure_names_its_result_files(tmp_path: Path) -> None:
    write_result(tmp_path / "ptb" / "a.json", a_run("ptb", "ar-grc", 0))
    before = draw_results.plans(read_kept(tmp_path))["ptb-lengths"].source
    write_result(tmp_path / "ptb" / "b.json", a_run("ptb", "ar-grc", 1))
    assert draw_results.plans(read_kept(tmp_path))["ptb-lengths"].source != before


def test_the_script_runs_from_any_folder_and_finds_its_parts(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(f"{BEGIN}{END}\n")
    script = str(ROOT / "docs" / "figures" / "draw_results.py")
    arguments = ["--results", "results", "--docs", "docs", "--readme", "README.md"]
    done = subprocess.run([sys.executable, script, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = {path: (tmp_path / "docs" / path).read_text(encoding="utf-8") for path in pages_in(tmp_path / "docs")}
    assert written == pages(read_kept(tmp_path / "results"))
    assert (tmp_path / "README.md").read_text() == f"{BEGIN}{NOTHING}\n{END}\n"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("ptb/a.json", "is not a result file of logdepth"),
        ("sweeps/ptb/a.json", "is not the sweep.json of a sweep; move it elsewhere"),
        ("sweeps/a.json", "belongs in a folder of its own, named after its study"),
        ("associativity/a.json", "is not an output of `logdepth associativity`"),
    ],
)
def test_unexpected_files_are_one_line_errors(tmp_path: Path, file: str, words: str) -> None:
    path = tmp_path / "results" / file
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert_nothing_is_written(tmp_path, "results", ROOT / "README.md", words)


def test_a_missing_folder_is_a_one_line_error(tmp_path: Path) -> None:
    assert_nothing_is_written(tmp_path, "nowhere", ROOT / "README.md", "nowhere")


def test_a_readme_without_markers_is_an_error(tmp_path: Path) -> None:
    add_study(tmp_path / "results" / "ptb", seeds=1)
    (tmp_path / "README.md").write_text(END + BEGIN)
    assert_nothing_is_written(tmp_path, "results", tmp_path / "README.md", "the README has no place for the table")


def test_an_edited_sweep_is_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "results" / "sweeps" / "ptb" / "a.json"
    add_sweep(path)
    path.write_text(json.dumps(seal(json.loads(path.read_text()))).replace('"loss": 3.25', '"loss": 3.15'))
    assert_nothing_is_written(tmp_path, "results", ROOT / "README.md", "a.json does not match its checksum")


def assert_nothing_is_written(folder: Path, results: str, readme: Path, words: str) -> None:
    with pytest.raises(UserError, match=words):
        draw_results.main(["--results", str(folder / results), "--docs", str(folder / "docs"), "--readme", str(readme)])
    assert not (folder / "docs").exists()
