"""Files are there whole or not at all."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from logdepth.atomic import PARTIAL, new_folder, read_json, readable_disk_errors, replacing, write_json, write_text
from logdepth.errors import UserError


class Crash(BaseException):
    """As a signal would be: not an Exception."""


def crash_while(writing: AbstractContextManager[Path], write: Callable[[Path], object]) -> None:
    with writing as partial:
        write(partial)
        raise Crash


def test_a_file_is_replaced_only_when_its_writer_ends_well(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "file.txt"
    with replacing(file) as partial:
        partial.write_text("first")
        assert not file.exists()
    with pytest.raises(Crash):
        crash_while(replacing(file), lambda partial: partial.write_text("second, cut o"))
    assert file.read_text() == "first"
    assert [one.name for one in file.parent.iterdir()] == ["file.txt"]


def test_temporary_files_of_a_writer_are_removed_with_its_folder(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        partial.with_name(".tmpX1y2z3").write_text("the writer's own")
        partial.write_text("whole")

    with pytest.raises(Crash):
        crash_while(replacing(tmp_path / "file", in_folder=True), write)
    assert list(tmp_path.iterdir()) == []
    with replacing(tmp_path / "file", in_folder=True) as partial:
        assert partial.parent.name.startswith(PARTIAL)
        write(partial)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "whole"


def test_what_a_killed_process_left_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    file = tmp_path / "a[1].json"
    old, new, running, other = (
        tmp_path / f"{PARTIAL}{process}-{name}"
        for process, name in ((dead.pid, file.name), (dead.pid, f"x-{file.name}"), (os.getppid(), file.name), (1, "b"))
    )
    folder = tmp_path / f"{PARTIAL}{dead.pid}-y-{file.name}"
    folder.mkdir()
    (folder / ".tmpX1y2z3").touch()
    for one in (old, new, running, other):
        one.touch()
    for one in (old, folder, running, other):
        os.utime(one, (0, 0))
    write_text(file, "x")
    assert sorted(tmp_path.iterdir()) == sorted([file, new, running, other])


def test_a_folder_appears_only_when_it_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(Crash):
        crash_while(new_folder(folder), lambda partial: (partial / "half").write_text("x"))
    assert list(tmp_path.iterdir()) == []
    with new_folder(folder) as partial:
        (partial / "whole").write_text("x")
    with new_folder(folder) as partial:  # as if by a second process that was slower
        (partial / "other").write_text("y")
    assert [file.name for file in folder.iterdir()] == ["whole"]
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_json_errors_name_the_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": 1})
    assert read_json(tmp_path / "a.json") == {"é": 1}
    (tmp_path / "b.json").write_text('{"cut": ')
    with pytest.raises(UserError, match=r"b\.json is not readable JSON"):
        read_json(tmp_path / "b.json")
    with pytest.raises(UserError, match=r"c\.json does not exist"):
        read_json(tmp_path / "c.json")
    os.mkfifo(tmp_path / "d.json")  # which nobody writes to
    with pytest.raises(UserError, match=r"d\.json is not a regular file"):
        read_json(tmp_path / "d.json")


def test_places_that_cannot_be_written_are_user_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/inside: "):
        write_json(tmp_path / "file" / "inside", 1)
    with (
        pytest.raises(UserError, match="it exists and is not a folder; move it to another folder"),
        new_folder(tmp_path / "file"),
    ):
        pass


def test_file_names_that_are_not_utf8_survive_json(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9\xff.txt")
    write_json(tmp_path / "a.json", {"paths": [name], "text": "é ☃"})
    assert read_json(tmp_path / "a.json") == {"paths": [name], "text": "é ☃"}
    assert "é ☃" in (tmp_path / "a.json").read_text("utf-8")  # what can be written as it is, is


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "no space left; free some space, then run the same command again"),
        (errno.ELOOP, "Too many levels of symbolic links"),
    ],
)
def test_errors_of_the_disk_name_the_file(number: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, readable_disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(f"cannot write {tmp_path}: {says}")
