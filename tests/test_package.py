"""The package as users meet it: what it imports, what it says, and the README's first example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import logdepth

ROOT = Path(__file__).parent.parent


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
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
    assert logdepth.__all__ == ["ScanResult", "ScanState", "reduce", "scan"]
    assert callable(logdepth.scan)
    assert callable(logdepth.reduce)


def test_self_check_runs_uninstalled() -> None:
    printed = run_python("-m", "logdepth", "check")
    assert f"logdepth {logdepth.__version__}" in printed
    assert "cpu: scan agrees with its definition" in printed
    assert run_python("-m", "logdepth", "--version").strip() == f"logdepth {logdepth.__version__}"


@pytest.mark.parametrize("document", ["README.md", "docs/the-scan.md", "docs/extending.md", "docs/language-models.md"])
def test_python_examples_run_as_printed(document: str, tmp_path: Path) -> None:
    """The blocks of a document are one program, in order; lines `# → text` say what the line before prints."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    assert blocks, f"{document} has no example"
    program = "\n".join(blocks)
    expected = re.findall(r"# → (.*)", program)
    script = tmp_path / "example.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}")
    assert run_python(str(script)).splitlines() == expected


def test_the_version_is_in_the_changelog_and_the_citation() -> None:
    assert f"## {logdepth.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {logdepth.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_every_file_is_in_the_trees() -> None:
    """The README names the parts, docs/architecture.md every file of them."""
    readme, architecture = (ROOT / "README.md").read_text(), (ROOT / "docs" / "architecture.md").read_text()
    tree = architecture[architecture.index("## Every file") :]
    for path in (ROOT / "logdepth").rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"\s{path.name}\s", tree), f"docs/architecture.md misses {path.relative_to(ROOT)}"
    for path in (ROOT / "logdepth").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        if name not in ("__init__.py", "__main__.py", "__pycache__/", "py.typed"):
            assert re.search(rf"\s{name}\s", readme), f"README.md misses logdepth/{name}"


def test_git_ignores_nothing_of_the_package() -> None:
    """What it ignores is left out of wheels, and of every check that reads .gitignore."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "logdepth").rglob("*") if "__pycache__" not in path.parts]
    asked = ["git", "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(asked, cwd=ROOT, input="\n".join(files), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
