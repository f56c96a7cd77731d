"""The process of the command line: whatever its streams are, and whenever it is interrupted, it says one line."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logdepth.cli import VERBS, main
from logdepth.cli.process import Messages
from tests.command_line import refused

FULL = Path("/dev/full")
"""Every write to it fails as on a full disk."""
CANNOT_WRITE = "cannot write to stdout: No space left on device; send the output elsewhere, or free some space"

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "--help",
        "recipes",
        "corpora",
        "tasks",
        "tasks s5",
        "completion fish",
        *(f"{verb} --help" for verb in VERBS),
    ],
)
def test_a_full_disk_under_stdout_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FULL.open("w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        assert main(command.split()) == 2
    program = f"logdepth {command.split()[0]}"
    assert capsys.readouterr().err == f"{program}: {CANNOT_WRITE}\n"


def shell(command: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a shell's command, in which $L is `logdepth`."""
    variables = os.environ | environment | {"L": f"{sys.executable} -m logdepth"}
    done = subprocess.run(["bash", "-c", command], env=variables, capture_output=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_nothing_fails_again_when_the_interpreter_exits() -> None:
    line = f"{CANNOT_WRITE}\n"
    assert shell(f"$L --help > {FULL}") == (2, "", f"logdepth --help: {line}")
    assert shell(f"$L --version > {FULL}", PYTHONUNBUFFERED="1") == (2, "", f"logdepth --version: {line}")


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", f"2> {FULL}"])
def test_streams_may_be_closed(streams: str) -> None:
    code, out, err = shell(f"$L --version {streams}")
    assert (code, err) == (0, "")
    assert out.startswith("logdepth ") == (">&-" not in streams.replace("2>&-", ""))
    assert shell(f"$L nonsense {streams}")[0] == 2


def test_text_that_the_encoding_lacks_is_replaced() -> None:
    code, out, err = shell("$L --help; $L tráin", PYTHONIOENCODING="ascii")
    assert code == 2
    assert out.startswith("usage: logdepth VERB")
    assert err == "logdepth tr\\xe1in: there is no verb 'tr\\xe1in'; did you mean 'train'?\n"


def test_messages_that_cannot_be_written_are_lost() -> None:
    stream = FULL.open("w")
    messages = Messages(stream)
    print("a message", file=messages, flush=True)
    assert messages.encoding == stream.encoding
    with pytest.raises(OSError, match="No space left"):
        stream.close()


def test_json_can_be_read_whatever_the_encoding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["corpora", "--json"]) == 0
    escaped = raw.getvalue().decode("ascii")
    monkeypatch.undo()
    assert main(["corpora", "--json"]) == 0
    plain = capsys.readouterr().out
    assert escaped.encode().decode("unicode_escape") == plain.replace('\\"', '"')


@pytest.mark.parametrize("program", [["-m", "logdepth"], ["-c", "import logdepth.cli as c, sys; sys.exit(c.main())"]])
def test_an_interrupt_during_imports_is_one_line(program: list[str], tmp_path: Path) -> None:
    # The first heavy import of the verb waits, as a slow disk makes it wait, and swallows exceptions.
    (tmp_path / "torch").mkdir()
    slow = "import pathlib, time\npathlib.Path('importing').touch()\n"
    slow += "try:\n    time.sleep(60)\nexcept BaseException:\n    raise ImportError\n"
    (tmp_path / "torch" / "__init__.py").write_text(slow)
    root = str(Path(__file__).parent.parent)
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    process = subprocess.Popen(
        [sys.executable, *program, "corpora"], env=variables, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "importing").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "logdepth: interrupted\n"
    assert process.returncode == 130


def test_the_package_imports_nothing_heavy_before_it_must() -> None:
    code = "import sys, logdepth.cli, logdepth.cli.process; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_unexpected_error_of_a_path_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = str(tmp_path / ("a" * 300))
    reason = "File name too long; check this path and its permissions"
    for command in ("evaluate", "generate", "associativity"):
        assert refused(capsys, command, long) == f"logdepth {command}: cannot use {long}: {reason}"
    assert "File name too long" in refused(capsys, "train", "pydocs-ar-grc", "--config", long)
    assert "does not exist; set --data-dir" in refused(capsys, "corpora", "--data-dir", long)
    assert refused(capsys, "evaluate", "two\nlines").endswith("config.json in it")
    (tmp_path / "loop").symlink_to("loop")
    assert "loop" in refused(capsys, "evaluate", str(tmp_path / "loop"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "not enough memory; choose smaller sizes"),
        (
            RuntimeError("alloc_cpu.cpp:127] can't allocate memory: you tried to allocate 512 bytes. Error"),
            "not enough memory (allocate 512 bytes); choose",
        ),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"),
            "not enough memory (Storage size calculation overflowed with sizes=[9, 9]); choose",
        ),
        (ValueError("Overflow when unpacking long"), "not enough memory (Overflow when unpacking long); choose"),
        (OSError(28, "No space left on device"), CANNOT_WRITE),
        (PermissionError(13, "Permission denied", "/x"), "cannot use /x: Permission denied; check this path"),
    ],
)
def test_errors_of_the_machine_are_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("logdepth.cli.discard_output", lambda: None)
    monkeypatch.setattr("logdepth.cli._overview", fail)
    assert refused(capsys, "--help").startswith(f"logdepth --help: {line}")


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> None:
        raise error

    for error in (ValueError("x"), RuntimeError("shape mismatch"), OSError(22, "Invalid argument"), KeyError("a")):
        monkeypatch.setattr("logdepth.cli._overview", lambda error=error: fail(error))
        with pytest.raises(type(error)):
            main(["--help"])


@pytest.mark.parametrize(
    "flags",
    [
        "pydocs-ar-grc --model.depth 1000000000000",
        "pydocs-transformer-alibi --model.num-layers 1001",
        "pydocs-hybrid --model.repeats 1000000000000",
        "pydocs-ar-grc --config deep.json",
    ],
)
def test_absurd_numbers_of_layers_are_refused(
    flags: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.json").write_text('{"model": {"depth": 1000000000000}}')
    assert "must be at least 1 and at most 1,000; got 10" in refused(capsys, "train", *flags.split())


def test_odd_characters_of_a_message_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for word, shown in (("\x1b[31m", r"\x1b[31m"), ("a\nb", r"a\nb"), ("\u202e", r"\u202e"), ("café ☃", "café ☃")):
        assert f"there is no verb '{shown}'" in refused(capsys, word)
