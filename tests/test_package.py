"""The package as users meet it: what it imports, what it says, and the README's first example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import logdepth

ROOT = Path(__file__).parent.parent


EXAMPLES = (
    "README.md",
    "docs/the-scan.md",
    "docs/extending.md",
    "docs/language-models.md",
    "docs/quickstart.md",
    "docs/your-own-model.md",
    "docs/memory.md",
    "docs/tasks.md",
    "docs/onnx.md",
)


def run_python(*arguments: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_imports_torch_and_numpy_alone() -> None:
    code = (
        "import sys, torch, numpy, torch.utils.checkpoint\n"
        "before = set(sys.modules)\n"
        "import logdepth, logdepth.operators\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    imported = run_python("-c", code).split()
    assert set(imported) <= {"logdepth", "torch", "numpy"}


def test_public_names() -> None:
    functions = {"build_tree", "export_step", "load", "recipe", "reduce", "scan", "train"}
    classes = {"LM", "MemoryLayer", "ScanLayer", "ScanResult", "ScanState", "TrainedModel", "Tree", "TreeState"}
    expected = classes | functions
    assert set(logdepth.__all__) == expected | {"PRETRAINED", "__version__"}
    assert isinstance(logdepth.PRETRAINED, Path)
    for name in expected:
        assert callable(getattr(logdepth, name)), name
    with pytest.raises(AttributeError, match="no attribute 'scam'"):
        logdepth.scam  # noqa: B018


def test_self_check_runs_uninstalled() -> None:
    printed = run_python("-m", "logdepth", "check")
    assert f"logdepth {logdepth.__version__}" in printed
    assert "cpu: scan agrees with its definition" in printed
    assert run_python("-m", "logdepth", "--version").strip() == f"logdepth {logdepth.__version__}"


@pytest.mark.parametrize("document", EXAMPLES)
def test_python_examples_run_as_printed(document: str, tmp_path: Path) -> None:
    """The blocks of a document are one program, in order; lines `# → text` say what the line before prints."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    assert blocks, f"{document} has no example"
    program = "\n".join(blocks)
    expected = re.findall(r"# → (.*)", program)
    script = tmp_path / "example.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}")
    assert run_python(str(script), cwd=tmp_path).splitlines() == expected


def test_the_version_is_in_the_changelog_and_the_citation() -> None:
    assert f"## {logdepth.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {logdepth.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_every_file_is_in_the_tree() -> None:
    """docs/architecture.md names every file and folder of the package."""
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    tree = architecture[architecture.index("## Every file") :]
    paths = [path for path in (ROOT / "logdepth").rglob("*") if "__pycache__" not in path.parts]
    for path in paths:
        name = f"{path.name}/" if path.is_dir() else path.name
        if (path.is_dir() or path.suffix == ".py") and name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"\s{re.escape(name)}\s", tree), f"docs/architecture.md misses {path.relative_to(ROOT)}"


def test_git_ignores_nothing_of_the_package() -> None:
    """What it ignores is left out of wheels, and of every check that reads .gitignore."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "logdepth").rglob("*") if "__pycache__" not in path.parts]
    asked = ["git", "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(asked, cwd=ROOT, input="\n".join(files), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
