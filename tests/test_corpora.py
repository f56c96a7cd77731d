"""Corpora read from files that the tests make; what is missing or damaged is said in one line."""

import dataclasses
import gzip
import json
import lzma
import os
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logdepth.data import CORPORA, SPLITS, TokenizerConfig, prepare
from logdepth.data.census import census_of
from logdepth.data.corpus import Known
from logdepth.data.passages import Passage, split_by_hash
from logdepth.data.ptb import PTB
from logdepth.data.text import Text
from logdepth.errors import UserError
from logdepth.recipes import recipe, rows_of
from tests.tiny_corpus import VOCAB, sentences, tiny_data, write_corpus


def write_jsonl(file: Path, texts: list[str], opener: Callable[..., Any] = open) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with opener(file, "wt", encoding="utf-8") as stream:
        for text in texts:
            stream.write(json.dumps({"text": text, "meta": 1}) + "\n")


def zst_open(file: Path, mode: str, encoding: str) -> Any:
    import zstandard

    return zstandard.open(file, mode, encoding=encoding)


DOCUMENTS = [sentences(2, seed=number) for number in range(4000)]


def texts(passages: Any, split: str) -> str:
    return "".join(passage.text for passage in passages if passage.split == split)


def test_every_corpus_says_what_it_is() -> None:
    for name, corpus in CORPORA.items():
        assert corpus.summary
        made = corpus(None, (Path("x"),)) if name == "text" else corpus()
        assert made.name == name


@pytest.mark.parametrize(
    ("name", "folder", "pattern"),
    [
        ("ptb", "ptb", "ptb.{}.txt"),
        ("wikitext2", "wikitext-2", "wiki.{}.tokens"),
        ("wikitext2_raw", "wikitext-2-raw", "wiki.{}.raw"),
    ],
)
def test_corpora_of_three_files_are_streams_as_they_are(tmp_path: Path, name: str, folder: str, pattern: str) -> None:
    (tmp_path / folder).mkdir()
    for number, split in enumerate(SPLITS):
        text = f" \n = Title {split} = \r\n" + sentences(3 + number, number) + "no end"
        (tmp_path / folder / pattern.format(split)).write_bytes(text.encode())
    passages = list(CORPORA[name](tmp_path).passages())
    for split in SPLITS:
        assert texts(passages, split).encode() == (tmp_path / folder / pattern.format(split)).read_bytes()
    assert not CORPORA[name].separated
    assert not any(passage.ends_document for passage in passages)


def test_openwebtext2_streams_shards_and_splits_by_hash(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "openwebtext2" / "b.jsonl.zst", DOCUMENTS[2000:], zst_open)
    write_jsonl(tmp_path / "openwebtext2" / "a.jsonl.zst", DOCUMENTS[:2000], zst_open)
    passages = list(CORPORA["openwebtext2"](tmp_path).passages())
    assert [passage.text for passage in passages] == DOCUMENTS
    assert all(passage.ends_document for passage in passages)
    assert [passage.split for passage in passages] == [split_by_hash(text, 0.0005) for text in DOCUMENTS]


def test_webmix_splits_by_hash(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "webmix" / "train-0.jsonl.xz", DOCUMENTS, lzma.open)
    counts = Counter(passage.split for passage in CORPORA["webmix"](tmp_path).passages())
    assert counts["train"] + counts["valid"] + counts["test"] == 4000
    assert 5 <= counts["valid"] <= 40
    assert 5 <= counts["test"] <= 40


def test_the_split_of_a_document_is_its_own() -> None:
    shares = Counter(split_by_hash(text, 0.1) for text in DOCUMENTS)
    assert 300 < shares["valid"] < 500
    assert 300 < shares["test"] < 500
    assert [split_by_hash(text, 0.1) for text in DOCUMENTS[::-1]] == [split_by_hash(text, 0.1) for text in DOCUMENTS][
        ::-1
    ]


def test_pydocs_is_the_prose_of_the_library() -> None:
    passages = list(CORPORA["pydocs"]().passages())
    size = sum(len(passage.text.encode()) for passage in passages)
    assert 1_500_000 < size < 3_000_000
    joined = "\n".join(passage.text for passage in passages)
    assert json.dumps.__doc__.strip().splitlines()[0] in joined
    assert "def dumps(" not in joined  # prose, not code
    assert "tkinter widget" not in joined.lower()
    for split in SPLITS:
        assert len(texts(passages, split)) / size > 0.02 or split != "train"
    assert passages == list(CORPORA["pydocs"]().passages())
    assert all(passage.text.strip() for passage in passages)


def test_text_takes_files_of_every_kind(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:10])
    write_jsonl(tmp_path / "b.jsonl.gz", DOCUMENTS[10:20], gzip.open)
    write_jsonl(tmp_path / "c.jsonl.xz", DOCUMENTS[20:30], lzma.open)
    write_jsonl(tmp_path / "d.jsonl.zst", DOCUMENTS[30:40], zst_open)
    parquet.write_table(pyarrow.table({"text": DOCUMENTS[40:50], "n": range(10)}), tmp_path / "e.parquet")
    (tmp_path / "readme.pdf").write_bytes(b"%PDF")
    passages = list(Text(None, (tmp_path,)).passages())
    assert [passage.text for passage in passages] == DOCUMENTS[:50]
    assert all(passage.ends_document for passage in passages)


def test_text_files_are_cut_in_three_at_line_ends(tmp_path: Path) -> None:
    text = sentences(1000, 0)
    (tmp_path / "book.txt").write_text(text)
    passages = list(Text(None, (tmp_path / "book.txt",)).passages())
    parts = [texts(passages, split) for split in SPLITS]
    assert "".join(parts) == text
    assert [len(part) / len(text) for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.002)
    assert Counter(passage.split for passage in passages if passage.ends_document) == dict.fromkeys(SPLITS, 1)
    assert all(part.endswith("\n") for part in parts)


def test_names_of_files_say_their_split(tmp_path: Path) -> None:
    for name in ("my_train-00.txt", "train-01.txt", "wiki.val.txt", "test.jsonl"):
        if name.endswith("txt"):
            (tmp_path / name).write_text(f"{name}\nmore\n")
        else:
            write_jsonl(tmp_path / name, ["a", "b"])
    passages = list(Text(None, (tmp_path,)).passages())
    assert texts(passages, "train") == "my_train-00.txt\nmore\ntrain-01.txt\nmore\n"
    assert texts(passages, "valid") == "wiki.val.txt\nmore\n"
    assert texts(passages, "test") == "ab"
    (tmp_path / "train-test.txt").write_text("x\n" * 100)
    (tmp_path / "z.jsonl").write_text("")
    notes = Text(None, (tmp_path,)).notes()
    assert [note.split(": ")[1] for note in notes] == [
        "train",
        "test",
        "train",
        "divided into train, valid and test",
        "valid",
        "documents split by hash",
    ]


def bad_json(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')


def bad_xz(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl.xz", DOCUMENTS, lzma.open)
    whole = (folder / "a.jsonl.xz").read_bytes()
    (folder / "a.jsonl.xz").write_bytes(whole[: len(whole) // 2])


def bad_zst(folder: Path) -> None:
    (folder / "a.jsonl.zst").write_bytes(b"not zstandard at all")


def cut_zst(folder: Path) -> None:
    write_jsonl(folder / "a.txt.zst", DOCUMENTS, zst_open)
    whole = (folder / "a.txt.zst").read_bytes()
    (folder / "a.txt.zst").write_bytes(whole[: len(whole) // 2])


def bad_gz(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl.gz", DOCUMENTS, gzip.open)
    whole = bytearray((folder / "a.jsonl.gz").read_bytes())
    whole[len(whole) // 2] ^= 255
    (folder / "a.jsonl.gz").write_bytes(whole)


def parquet_of_numbers(folder: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [1, 2]}), folder / "a.parquet")


def bad_utf8(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"fine\n\xff\xfe\n")


def bad_parquet(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(b"PAR1 nothing PAR1")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (bad_json, r"a\.jsonl:2 is not JSON"),
        (lambda folder: (folder / "a.jsonl").write_text('{"body": 1}\n'), r'a\.jsonl:1 must have a "text" field.*body'),
        (lambda folder: (folder / "a.jsonl").write_text("[1]\n"), r'a\.jsonl:1 must have a "text" field.*a list'),
        (
            lambda folder: (folder / "a.jsonl").write_text('{"text": 5}\n'),
            r'a\.jsonl:1 must have a "text" field.*; it has 5$',
        ),
        (bad_xz, r"a\.jsonl\.xz is damaged or truncated"),
        (bad_zst, r"a\.jsonl\.zst is damaged or truncated"),
        (cut_zst, r"a\.txt\.zst is damaged or truncated \(the last frame is incomplete\)"),
        (bad_gz, r"a\.jsonl\.gz"),
        (parquet_of_numbers, r'a\.parquet: its "text" column must hold strings; got int64'),
        (bad_utf8, r"a\.txt is not UTF-8 text"),
        (bad_parquet, r"a\.parquet is damaged or not a parquet file"),
        (lambda folder: (folder / "a.pdf").write_text(""), "contains no txt, md, jsonl or parquet file"),
        (
            lambda folder: (folder / "a.jsonl").write_text('{"text": "\\ud800"}\n'),
            "a document contains a lone surrogate",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[Path], Any], says: str) -> None:
    damage(tmp_path)
    with pytest.raises(UserError, match=says):
        census_of(Text(None, (tmp_path,)))


def test_missing_corpora_say_what_was_looked_for_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed
    for name in ("ptb", "wikitext2", "wikitext2_raw", "openwebtext2", "webmix"):
        with pytest.raises(UserError, match=rf"corpus '{name}': {tmp_path}/.* does not exist: put the file there"):
            list(CORPORA[name](tmp_path).passages())
        with pytest.raises(UserError, match=r"none is set: give --data-dir or LOGDEPTH_DATA"):
            list(CORPORA[name]().passages())
    with pytest.raises(UserError, match=r"pip install '\.\[hub\]'"):
        list(CORPORA["ptb"](tmp_path).passages())
    with pytest.raises(UserError, match="the data directory /nowhere does not exist"):
        list(CORPORA["ptb"](Path("/nowhere")).passages())
    with pytest.raises(UserError, match=r"takes no --data\.paths"):
        CORPORA["ptb"](None, (tmp_path,))
    with pytest.raises(UserError, match=r"needs files or folders to read"):
        Text()


def fake_hub(rows: dict[str, list[dict[str, str]]], seen: list[Any]) -> types.ModuleType:
    module = types.ModuleType("datasets")
    module.exceptions = types.SimpleNamespace(DatasetsError=RuntimeError)

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        seen.append((name, config, split))
        if not rows:
            raise ConnectionError("no network here\nand more lines")
        return rows[split]

    module.load_dataset = load_dataset
    return module


def test_the_hub_is_asked_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    hub = {split: [{"sentence": f"in {split}", "text": f" in {split} \n"}, {"sentence": "x", "text": ""}]
           for split in ("train", "validation", "test")}  # fmt: skip
    monkeypatch.setitem(sys.modules, "datasets", fake_hub(hub, seen))
    assert texts(CORPORA["ptb"](tmp_path).passages(), "valid") == " in validation \n x \n"
    assert texts(CORPORA["wikitext2"](tmp_path).passages(), "test") == " in test \n \n"
    assert texts(CORPORA["wikitext2_raw"]().passages(), "train") == " in train \n \n"
    assert [passage.text for passage in CORPORA["openwebtext2"](tmp_path).passages()] == [" in train \n", ""]
    assert ("Salesforce/wikitext", "wikitext-2-v1", "test") in seen
    assert ("Salesforce/wikitext", "wikitext-2-raw-v1", "train") in seen
    monkeypatch.setitem(sys.modules, "datasets", fake_hub({}, seen))
    with pytest.raises(UserError, match=r"does not exist.*; fetching .* from the hub failed too \(no network here\)$"):
        list(CORPORA["wikitext2"](tmp_path).passages())


def write_ptb(folder: Path) -> None:
    (folder / "ptb").mkdir(parents=True)
    for split in SPLITS:
        (folder / "ptb" / f"ptb.{split}.txt").write_text(" one two \n three \n")


def test_another_edition_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ptb(tmp_path)
    with pytest.raises(UserError, match="has 3 words and 2 line ends instead of 887,521 and 42,068"):
        census_of(PTB(tmp_path))
    known = dict.fromkeys(SPLITS, Known(3, 2, "x"))
    monkeypatch.setattr(PTB, "known", known)
    assert census_of(PTB(tmp_path))["valid"].bytes == len(" one two \n three \n")


def test_the_census_is_read_again_only_when_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.txt").write_text("a b\nc\n")
    (tmp_path / "valid.txt").write_text("a\n")
    (tmp_path / "test.txt").write_text("a")
    corpus = Text(None, (tmp_path,))
    census = census_of(corpus)
    assert census["train"]._replace(sha256="") == (1, 3, 2, 6, "")
    assert census["test"]._replace(sha256="") == (1, 1, 0, 1, "")
    reads: list[int] = []
    original = Text.passages

    def counting(self: Text) -> Any:
        reads.append(1)
        yield from original(self)

    monkeypatch.setattr(Text, "passages", counting)
    assert census_of(corpus) == census
    assert not reads
    (tmp_path / "train.txt").write_text("a b\nc d\n")
    assert census_of(corpus)["train"].words == 4
    assert reads == [1]


def test_documents_that_run_together_have_another_hash(tmp_path: Path) -> None:
    class Two(Text):
        def __init__(self, passages: list[Passage]) -> None:
            self.list = passages

        def source(self) -> None:
            return None

        def passages(self) -> Any:
            return iter(self.list)

    apart = [Passage("train", "a", True), Passage("train", "b", True)]
    together = [Passage("train", "ab", True)]
    hashes = [census_of(Two(passages))["train"].sha256 for passages in (apart, together)]
    assert hashes[0] != hashes[1]


def test_every_frame_of_a_zst_file_is_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.compress(json.dumps({"text": text}).encode() + b"\n") for text in DOCUMENTS[:50]]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert [passage.text for passage in Text(None, (tmp_path,)).passages()] == DOCUMENTS[:50]


def test_folders_of_one_relative_name_are_not_confused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = []
    for name, text in (("one", "a b c d\n"), ("two", "abc def\n")):
        for split in SPLITS:
            file = tmp_path / name / "data" / f"{split}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            os.utime(file, (1, 1))
        monkeypatch.chdir(tmp_path / name)
        words.append(census_of(Text(None, (Path("data"),)))["train"].words)
    assert words == [4, 2]


def test_a_stale_census_is_forgotten_when_it_shows(tmp_path: Path) -> None:
    """A file may be changed without a trace in its size and time."""
    folder = write_corpus(tmp_path)
    prepare(tiny_data(folder))
    file = folder / "train.txt"
    before, text = file.stat(), file.read_text()
    file.write_text(text.replace("the cat", "the cut", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = dataclasses.replace(tiny_data(folder), tokenizer=TokenizerConfig(vocab_size=VOCAB - 1))
    with pytest.raises(UserError, match="changed during preparation; run the same command again"):
        prepare(changed)
    assert prepare(changed).stores["train"].info.bytes == len(text)


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_there_or_says_in_one_line_what_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed
    try:
        first = next(CORPORA[name](tmp_path).passages())
    except UserError as error:
        said = str(error)
    else:
        assert first.split in SPLITS
        assert first.text
        return
    assert name in said
    assert "\n" not in said


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_has_a_recipe_for_every_row(name: str) -> None:
    for row in rows_of(name):
        assert recipe(f"{name}-{row}").data.corpus == name
