"""docs/extending.md, followed to the letter in a copy of the project: one file, one entry, and it is everywhere."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.tiny_corpus import sentences

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r'```python title="(\S+)"\n(.*?)    ```', DOCUMENT, flags=re.DOTALL))
ENTRIES = re.findall(r'\*\*One entry\*\* in `(\w+)` \(`(\S+)`\): `("(\w+)": (\w+))`', DOCUMENT)
STUDY = """
import sys
from dataclasses import replace
import logdepth.recipes as recipes
import logdepth.reproduce.study as study
from logdepth.cli import main
setting = recipes.SETTINGS.get(sys.argv[1], recipes.PTB)
train = replace(setting.train, max_steps=2, evaluate_every=2, batch_size=2, context=16, warmup_steps=0, device="cpu")
recipes.SETTINGS[sys.argv[1]] = replace(setting, train=train, vocab_size=int(sys.argv[2]))
study.PAPER_CONTEXTS = study.SMALL_CONTEXTS = study.SMALL_TIMES = (8, 16)
study.TIME_TOKENS = study.SMALL_TIME_TOKENS = 64
sys.exit(main(["reproduce", sys.argv[1], *sys.argv[3:]]))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the document's files and entries."""
    folder = tmp_path_factory.mktemp("project")
    for part in ("logdepth", "tests", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / part, folder / part)
    assert len(FILES) == len(ENTRIES) == 4
    for (name, code), (table, where, entry, _, config) in zip(FILES.items(), ENTRIES, strict=True):
        (folder / name).write_text(textwrap.dedent(code))
        module = name.removesuffix(".py").replace("/", ".")
        listed = folder / where
        text = listed.read_text()
        text = re.sub(
            r"^from logdepth", f"from {module} import {config}\nfrom logdepth", text, count=1, flags=re.MULTILINE
        )
        text, entered = re.subn(rf"^({table}: .* = {{)$", rf"\1\n    {entry},", text, flags=re.MULTILINE)
        assert entered == 1
        listed.write_text(text)
    return folder


def run(project: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_recipes_and_corpora_list_them(project: Path) -> None:
    recipes = run(project, "-m", "logdepth", "recipes")
    for name in ("pydocs-ar-highway", "ptb-ar-highway", "pydocs-gru", "wikitext2-gru", "fables-ar-grc", "fables-gru"):
        assert re.search(rf"^{name} ", recipes, flags=re.MULTILINE), name
    assert "fables" in run(project, "-m", "logdepth", "corpora")


def test_a_hybrid_is_one_line(project: Path, tmp_path: Path) -> None:
    blocks = ["--model.blocks", "gru:width=24", "scan:operator=highway,heads=2", "attention:heads=2,window=8", "mlp"]
    sizes = [
        "--model.dim",
        "16",
        "--data.tokenizer.vocab-size",
        "300",
        "--train.device",
        "cpu",
        "--train.context",
        "16",
    ]
    steps = ["--train.max-steps", "2", "--train.evaluate-every", "2", "--train.batch-size", "2"]
    out = tmp_path / "run"
    run(project, "-m", "logdepth", "train", "pydocs-hybrid", *blocks, *sizes, *steps, "--out", str(out))
    text = run(project, "-m", "logdepth", "generate", str(out), "--prompt", "The", "--max-tokens", "3")
    assert text.startswith("The")


@pytest.mark.parametrize(
    ("name", "files", "least"),
    [
        ("highway", ("test_operators", "test_models"), 12),
        ("gru", ("test_blocks", "test_models", "test_evaluate", "test_generate", "test_sweep", "test_config"), 20),
        ("fables", ("test_corpora",), 2),
    ],
)
def test_their_laws_are_tested(project: Path, name: str, files: tuple[str, ...], least: int) -> None:
    """Some of the files, to be quick; the document's command runs all of them."""
    chosen = [f"tests/{file}.py" for file in files]
    printed = run(project, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "0", "-k", name, *chosen)
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None
    assert int(passed[1]) >= least


@pytest.mark.parametrize(
    ("corpus", "vocabulary", "model"), [("pydocs", 300, "ar-highway"), ("pydocs", 300, "gru"), ("fables", 60, "ar-grc")]
)
def test_their_study_has_a_report(project: Path, tmp_path: Path, corpus: str, vocabulary: int, model: str) -> None:
    data = tmp_path / "data"
    (data / "fables").mkdir(parents=True)
    for number in range(80):
        (data / "fables" / f"{number:02}.txt").write_text(sentences(6, seed=number))
    out = tmp_path / "study"
    flags = ["--models", model, "--seeds", "0", "--data-dir", str(data), "--out", str(out)]
    run(project, "-c", STUDY, corpus, str(vocabulary), *flags)
    title = model.upper() if model.startswith("ar-") else model
    assert title in (out / "tables" / "perplexity.md").read_text()
    page = (out / "report.html").read_text()
    assert title in page
    assert corpus in page
