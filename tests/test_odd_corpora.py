"""Odd corpora: each is read, or refused in one line, and nothing half-written is left."""

import contextlib
import gzip
import json
import lzma
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logdepth.data import SPLITS, DataConfig, TokenizerConfig, prepare
from logdepth.data.passages import Passage
from logdepth.data.readers import documents, kind_of, lines
from logdepth.data.text import Text, WholeText
from logdepth.errors import UserError
from tests.command_line import refused
from tests.tiny_corpus import sentences, write_corpus

TEXT = sentences(200, seed=0)
LONG_NAME = "n" * 300


def rows(*lines_of_json: str) -> bytes:
    return "\n".join(lines_of_json).encode() + b"\n"


def parquet(columns: dict[str, Any], file: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), file)
    return file


def written(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def loop(folder: Path) -> Path:
    (folder / "a.txt").symlink_to(folder / "b.txt")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    return folder / "a.txt"


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


def a_socket(folder: Path) -> Path:
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as one:  # a socket's path must be short
        one.bind("s.txt")
    return folder / "s.txt"


def device(folder: Path) -> Path:
    (folder / "zero.txt").symlink_to("/dev/zero")
    return folder / "zero.txt"


def _with_dangling_link(folder: Path) -> Path:
    """As where another disk is not mounted: without its train.txt, the corpus would be another."""
    written(folder / "a.txt", TEXT.encode())
    (folder / "train.txt").symlink_to("/nowhere/train.txt")
    return folder


ODD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda folder: folder / "x.txt", r"x\.txt does not exist; correct --data\.paths"),
    "loop": (loop, r"cannot read .*a\.txt: Too many levels of symbolic links; correct --data\.paths"),
    "long name": (lambda folder: folder / LONG_NAME, r"cannot read .*nnn: File name too long"),
    "fifo": (fifo, r"a\.txt is neither a regular file nor a folder"),
    "socket": (a_socket, r"s\.txt is neither a regular file nor a folder"),
    "device": (device, r"zero\.txt is neither a regular file nor a folder"),
    "link to nothing": (
        lambda folder: _with_dangling_link(folder),
        r"train\.txt is a link to /nowhere/train\.txt, which does not exist; restore that file, or remove the link",
    ),
    "other format": (lambda folder: written(folder / "a.pdf", b"%PDF"), r"a\.pdf is no txt, md, jsonl or parquet file"),
    "empty folder": (lambda folder: folder, "contains no txt, md, jsonl or parquet file"),
    "not UTF-8 name": (
        lambda folder: written(folder / os.fsdecode(b"caf\xe9.txt"), TEXT.encode()),
        r"the name .*caf\\xe9\.txt' is not UTF-8 or has control characters; rename it",
    ),
    "not UTF-8 name inside": (
        lambda folder: written(folder / os.fsdecode(b"caf\xe9.txt"), TEXT.encode()).parent,
        r"the name .*caf\\xe9\.txt' is not UTF-8 or has control characters; rename it",
    ),
    "line break in a name": (
        lambda folder: folder / "a\nb.txt",
        r"the name .*a\\nb\.txt' is not UTF-8 or has control characters; rename it",
    ),
    "newlines": (lambda folder: written(folder / "a.txt", b"\n" * 500), "its train split has only white space"),
    "spaces": (lambda folder: written(folder / "a.txt", b" \n\t" * 500), "its train split has only white space"),
    "one letter": (
        lambda folder: written(folder / "a.txt", b"a " * 50),
        r"set --data\.tokenizer\.vocab-size to at most 26\d$",
    ),
    "empty": (lambda folder: written(folder / "a.txt", b""), "its train split is empty: its files have too little"),
    "huge integer": (
        lambda folder: written(folder / "a.jsonl", rows('{"text": "a"}', '{"text": "b", "n": ' + "7" * 6000 + "}")),
        r"a\.jsonl:2 has a number with too many digits",
    ),
    "deep brackets": (
        lambda folder: written(folder / "a.jsonl", rows('{"text": ' + "[" * 100_000)),
        r"a\.jsonl:1 has brackets that are nested too deeply",
    ),
    "odd fields": (
        lambda folder: written(folder / "a.jsonl", rows(json.dumps({f"a\n{n}": 1 for n in range(99)}))),
        r"it has the fields 'a\\n0', .*'a\\n7', … \(99 in total\)",
    ),
    "lists": (
        lambda folder: parquet({"text": [["a", "b"], ["c"]]}, folder / "a.parquet"),
        r'its "text" column must hold strings; got list<.*string>: convert it',
    ),
    "other columns": (
        lambda folder: parquet({"texts": ["a"], "b": [1]}, folder / "a.parquet"),
        r"""must have one "text" column; it has the columns 'texts', 'b': rename one""",
    ),
    "junk after xz": (
        lambda folder: written(folder / "a.txt.xz", lzma.compress(TEXT.encode()) + b"junk"),
        r"a\.txt\.xz is damaged or truncated",
    ),
    "zeros after xz": (
        lambda folder: written(folder / "a.txt.xz", lzma.compress(TEXT.encode()) + b"\0" * 5),
        r"a\.txt\.xz is damaged or truncated \(5 zero bytes follow a frame\)",
    ),
    "cut xz": (
        lambda folder: written(folder / "a.txt.xz", lzma.compress(TEXT.encode())[:-3]),
        r"a\.txt\.xz is damaged or truncated \(the last frame is incomplete\)",
    ),
    "junk after gz": (
        lambda folder: written(folder / "a.txt.gz", gzip.compress(TEXT.encode()) + b"j"),
        r"a\.txt\.gz is damaged or truncated",
    ),
    "junk after zst": (
        lambda folder: written(
            folder / "a.txt.zst", pytest.importorskip("zstandard").compress(TEXT.encode()) + b"junk"
        ),
        r"a\.txt\.zst is damaged or truncated",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_corpora_are_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus").mkdir()
    make, says = ODD[name]
    line = refused(capsys, "prepare", "text", "--data.paths", str(make(tmp_path / "corpus")))
    assert re.search(says, line), line
    assert "src/" not in line
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(left) <= 1, "at most a census"
    assert not any(name.startswith(".partial") for name in left)


def test_a_vocabulary_that_cannot_be_chosen_is_not_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "a.txt", b"a " * 50)
    line = refused(capsys, "prepare", "text", "--data.paths", str(file), "--data.tokenizer.no-lossless")
    assert line.endswith("corpus 'text': its train split has too little text for a tokenizer; add text to it")


def test_a_run_whose_corpus_is_refused_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / os.fsdecode(b"caf\xe9.txt"), TEXT.encode())
    out = tmp_path / "run"
    line = refused(capsys, "train", "text-ar-grc", "--data.paths", str(file), "--out", str(out))
    assert r"caf\xe9.txt' is not UTF-8 or has control characters; rename it" in line
    config = written(tmp_path / "config.json", json.dumps({"data": {"paths": ["a\0b"]}}).encode())
    line = refused(capsys, "train", "text-ar-grc", "--config", str(config), "--out", str(out))
    assert r"data.paths[0]: a path must not contain the character NUL; got 'a\x00b'" in line
    assert not out.exists()


@pytest.mark.parametrize("verb", ["train", "sweep", "reproduce"])
def test_odd_folders_for_results_are_refused(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose weights have such a path could be trained, but not loaded."""
    data = ["--data.paths", str(written(tmp_path / "a.txt", TEXT.encode()))]
    out = tmp_path / os.fsdecode(b"caf\xe9")
    flags = [*data, "--data.tokenizer.vocab-size", "300"] if verb != "reproduce" else [*data, "--models", "ar-grc"]
    name = "text" if verb == "reproduce" else "text-ar-grc"
    line = refused(capsys, verb, name, *flags, "--out", str(out))
    assert r"caf\xe9" in line
    assert line.endswith("is not UTF-8 or has control characters; choose another --out")
    assert not out.exists()


@pytest.mark.parametrize("name", [LONG_NAME, os.fsdecode(b"caf\xe9")])
def test_odd_folders_for_data_and_cache_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "prepare", "ptb", "--data-dir", str(tmp_path / LONG_NAME))
    assert "does not exist; set --data-dir or LOGDEPTH_DATA" in line
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / name))
    line = refused(capsys, "prepare", "pydocs")
    assert "LOGDEPTH_CACHE" in line or "is not UTF-8 or has control characters" in line
    assert not list(tmp_path.iterdir())


def test_a_fifo_among_shards_or_in_a_folder_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "webmix").mkdir()
    os.mkfifo(tmp_path / "webmix" / "train-0.jsonl.xz")
    assert "webmix/train-*.jsonl.xz does not exist" in refused(capsys, "prepare", "webmix", "--data-dir", str(tmp_path))
    folder = write_corpus(tmp_path / "corpus")
    os.mkfifo(folder / "fifo.txt")
    (folder / "device.txt").symlink_to("/dev/zero")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "itself").symlink_to(folder)
    assert [file.name for file in Text(None, (folder,)).files()] == ["test.txt", "train.txt", "valid.txt"]


def test_a_subfolder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write_corpus(tmp_path / "corpus") / "more").mkdir()

    def scandir(path: Any) -> Any:  # root may read all folders
        if Path(path).name == "more":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    original = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"cannot read .*/corpus/more: Permission denied; correct --data\.paths"):
        Text(None, (tmp_path / "corpus",)).files()


def test_intact_compressed_files_are_read(tmp_path: Path) -> None:
    half = len(TEXT) // 2
    parts = TEXT[:half].encode(), TEXT[half:].encode()
    padded = lzma.compress(parts[0]) + b"\0" * 8 + lzma.compress(parts[1]) + b"\0" * 2**15
    assert "".join(lines(written(tmp_path / "a.txt.xz", padded))) == TEXT
    assert "".join(lines(written(tmp_path / "b.txt.XZ", b"".join(map(lzma.compress, parts))))) == TEXT
    assert "".join(lines(written(tmp_path / "c.TXT.GZ", b"".join(map(gzip.compress, parts))))) == TEXT
    assert "".join(lines(written(tmp_path / "d.txt.gz", gzip.compress(TEXT.encode()) + b"\0" * 9))) == TEXT


def test_parquet_columns_of_any_strings_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        column = pyarrow.array(["a", None, "b", "a"], type=pyarrow.string()).cast(kind)
        assert list(documents(parquet({"text": column}, tmp_path / "a.PARQUET"))) == ["a", "b", "a"]


def test_words_that_would_end_sentencepiece_are_cut(tmp_path: Path) -> None:
    """SentencePiece ends the process, without an exception, at words of more than 65,535 characters."""
    file = tmp_path / "a.txt"
    file.write_text("ab" * 5_000 + "ﷺ" * 5_000 + " and 春夏 秋冬\n" + "xyz" * 30_000)
    for lossless, vocab_size in ((False, 64), (True, 280)):
        tokenizer = TokenizerConfig(vocab_size=vocab_size, lossless=lossless)
        prepared = prepare(DataConfig(corpus="text", paths=(file,), tokenizer=tokenizer))
        assert prepared.stores["train"].info.unknown == 0


def splits_of(*paths: Path) -> dict[str, str]:
    passages = list(Text(None, paths).passages())
    return {split: "".join(passage.text for passage in passages if passage.split == split) for split in SPLITS}


ONE_LINE = {
    "CR": (TEXT.replace("\n", "\r"), "\r"),
    "spaces": (TEXT.replace("\n", " "), " "),
    "tabs": (TEXT.replace("\n", "\t").replace(" ", "_"), "\t"),
    "no white space": ("".join(TEXT.split()), ""),
    "few lines": (TEXT.replace("\n", " ") + "\nend\n", " "),
    "ten lines": ("".join(TEXT.splitlines(keepends=True)[:10]), " "),
    "few CRLF lines": (TEXT.replace("\n", "\r\n", 1).replace(".\n", ". "), " "),
    "CJK": ("春夏秋冬" * 99, ""),
}


@pytest.mark.parametrize("name", ONE_LINE)
def test_text_of_few_lines_is_divided_by_position(name: str, tmp_path: Path) -> None:
    text, end = ONE_LINE[name]
    file = written(tmp_path / "a.txt", text.encode())
    parts = splits_of(file)
    assert "".join(parts.values()).encode() == file.read_bytes()
    assert [len(part) / len(text) for part in parts.values()] == pytest.approx([0.9, 0.05, 0.05], abs=0.02)
    assert parts["train"].endswith(end)
    assert parts["valid"].endswith(end)
    passages = list(Text(None, (file,)).passages())
    assert sum(passage.ends_document for passage in passages) == 3


def test_lines_are_cut_only_if_a_split_were_empty_otherwise(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", TEXT.replace("\n", "\r\n").encode())
    alone = splits_of(tmp_path)
    assert all(part.endswith("\r\n") for part in alone.values())
    written(tmp_path / "b.txt", b"one long line")
    assert splits_of(tmp_path) == alone | {"train": alone["train"] + "one long line"}


EMPTY_SPLITS: dict[str, tuple[dict[str, str], str]] = {
    "train.txt": ({"train.txt": TEXT}, "its valid split is empty: the names of its files assign train.txt to train;"),
    "test.txt": ({"test.txt": TEXT}, "its train split is empty: the names of its files assign test.txt to test;"),
    "both": (
        {"my-train.txt": TEXT, "test.jsonl": '{"text": "a"}'},
        "its valid split is empty: the names of its files assign my-train.txt to train, test.jsonl to test; add a file "
        "with 'valid' in its name, or use names without such words, so that each file is divided",
    ),
    "short": ({"a.txt": "two words"}, "its valid split is empty: its files have too little text to be divided; add"),
    "jsonl": (
        {"a.jsonl": '{"text": "a b c"}\n'},
        "split is empty: its documents are split by a hash of their text, and none is in",
    ),
}


@pytest.mark.parametrize("name", EMPTY_SPLITS)
def test_the_cause_of_an_empty_split_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, says = EMPTY_SPLITS[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    assert says in refused(capsys, "prepare", "text", "--data.paths", str(tmp_path))


def test_suffixes_may_be_upper_case_or_missing(tmp_path: Path) -> None:
    names = ("A.TXT", "b.Md", "NOTES", "c.gz", "d.JSONL.GZ", "e.tar.gz", "f.docx", ".hidden")
    kinds = [kind_of(tmp_path / name) for name in names]
    assert kinds == [".txt", ".md", "", "", ".jsonl", None, None, ""]
    only = tmp_path / "folder"
    only.mkdir()
    for name in ("README", "b.pdf", ".hidden"):
        written(only / name, TEXT.encode())
    assert Text(None, (only,)).files() == [only / "README"], "which is the only text in it"
    assert Text(None, (only / ".hidden",)).files() == [only / ".hidden"]
    assert "".join(splits_of(only / "README").values()) == TEXT
    written(only / "notes.TXT", TEXT.encode())
    assert Text(None, (only,)).files() == [only / "notes.TXT"]
    written(tmp_path / "d.JSONL.GZ", gzip.compress(rows('{"text": "a"}')))
    written(tmp_path / "c.gz", gzip.compress(TEXT.encode()))
    assert list(documents(tmp_path / "d.JSONL.GZ")) == ["a"]
    assert "".join(splits_of(tmp_path / "c.gz").values()) == TEXT


def test_the_whole_text_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(TEXT.encode())
    (tmp_path / "a-test.txt").write_bytes(b"one\rline")
    (tmp_path / "c.jsonl").write_bytes(rows('{"text": "first"}', '{"text": "second"}'))
    passages = list(WholeText(None, (tmp_path,)).passages())
    assert "".join(passage.text for passage in passages) == "one\rline" + TEXT + "firstsecond"
    assert {passage.split for passage in passages} == {"all"}
    documents_end = [passage for passage in passages if passage.ends_document]
    last = TEXT.splitlines(keepends=True)[-1]
    assert documents_end == [Passage("all", text, True) for text in ("one\rline", last, "first", "second")]
