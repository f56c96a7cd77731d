"""Preparation: what is in a store, and that it is there whole or not at all."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from logdepth.data import SPLITS, DataConfig, TokenStore, open_prepared, prepare
from logdepth.data.passages import Passage
from logdepth.data.ptb import PTB
from logdepth.data.store import dtype_for
from logdepth.data.text import Text
from logdepth.errors import UserError
from tests.tiny_corpus import VOCAB, sentences, tiny_data, write_corpus


def test_a_store_holds_the_encoded_text_and_its_counts(corpus: Path) -> None:
    prepared = prepare(tiny_data(corpus))
    for split in SPLITS:
        text = (corpus / f"{split}.txt").read_text()
        store = prepared.stores[split]
        assert store.tokens.tolist() == [*prepared.tokenizer.encode(text), prepared.tokenizer.end_of_document]
        info = store.info
        assert (info.words, info.line_ends, info.bytes) == (len(text.split()), text.count("\n"), len(text.encode()))
        assert (info.tokens, info.vocab_size, info.documents) == (len(store), VOCAB, 1)
        assert info.tokenizer_hash == prepared.tokenizer.hash
        assert info.unknown == 0
    again = prepare(tiny_data(corpus))
    assert again.key == prepared.key
    assert open_prepared(prepared.key).stores["test"].info == prepared.stores["test"].info


def test_streams_have_no_separators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptb").mkdir()
    source = write_corpus(tmp_path / "source")
    for split in SPLITS:
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text((source / f"{split}.txt").read_text())
    monkeypatch.setattr(PTB, "known", {})
    config = dataclasses.replace(tiny_data(source), corpus="ptb", paths=())
    prepared = prepare(config, tmp_path)
    assert prepared.stores["train"].info.separator is None
    assert prepared.tokenizer.end_of_document not in prepared.stores["train"].tokens
    assert prepared.known_edition is None


def test_text_can_be_prepared_with_the_tokenizer_of_another(corpus: Path, tmp_path: Path) -> None:
    tokenizer = prepare(tiny_data(corpus)).tokenizer
    (tmp_path / "test.txt").write_text("the cat draws my neighbour .\n")
    other = prepare(tiny_data(tmp_path), tokenizer=tokenizer)
    assert other.tokenizer.hash == tokenizer.hash
    assert other.stores["test"].info.words == 6
    (tmp_path / "test.txt").write_text("the 漢字 cat ☃ draws .\n")
    assert prepare(tiny_data(tmp_path), tokenizer=tokenizer).stores["test"].info.unknown == 2
    with pytest.raises(UserError, match="its train split is empty"):
        prepare(tiny_data(tmp_path))


def test_changed_text_gives_another_store(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    first = prepare(tiny_data(folder)).key
    (folder / "valid.txt").write_text("the cat .\n")
    assert prepare(tiny_data(folder)).key != first


KILLED_WHILE_ENCODING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.tiny_corpus import tiny_data
from logdepth.data import prepare
from logdepth.data import tokenizer
sys.modules["logdepth.data.prepare"].BATCH_CHARACTERS = 2000
calls = []
def encode_many(self, texts, num_threads=-1, original=tokenizer.Tokenizer.encode_many):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, texts, num_threads)
tokenizer.Tokenizer.encode_many = encode_many
prepare(tiny_data(Path(sys.argv[1])))
"""


def test_killed_preparation_leaves_no_store(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path))
    command = [sys.executable, "-c", KILLED_WHILE_ENCODING, str(corpus), str(Path(__file__).parent.parent)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "stores").iterdir()]
    assert all(name.startswith(".partial-") for name in left)
    assert len(left) == 1
    assert len(prepare(tiny_data(corpus)).stores["train"]) > 1000


def test_interrupted_preparation_cleans_up(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["logdepth.data.prepare"], "_encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tiny_data(corpus))
    assert list((tmp_path / "stores").iterdir()) == []


def test_damaged_stores_are_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path))
    prepared = prepare(tiny_data(corpus))
    file = prepared.folder / "valid.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"valid\.bin has .* bytes instead of .*prepare the corpus again"):
        prepare(tiny_data(corpus))
    (prepared.folder / "valid.json").write_text('{"corpus": "x"}')
    with pytest.raises(UserError, match="was written by another version"):
        TokenStore.open(prepared.folder, "valid")
    with pytest.raises(UserError, match="create it with `logdepth prepare`"):
        open_prepared("nothing")


def test_numbers_of_tokens_fit_their_dtype() -> None:
    assert dtype_for(2**16) == "<u2"
    assert np.array([2**16 - 1], dtype="<u2")[0] == 2**16 - 1
    assert dtype_for(2**16 + 1) == "<u4"


def test_unknown_corpora_are_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no corpus 'pydoc'; did you mean 'pydocs'\?"):
        DataConfig(corpus="pydoc")


@pytest.mark.parametrize("reading", [2, 3])
def test_text_that_changes_while_it_is_prepared_is_refused(
    reading: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reading counts, the second trains the tokenizer, the third encodes."""
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "cache"))
    folder, original, readings = write_corpus(tmp_path / "corpus"), Text.passages, []

    def changing(self: Text) -> Iterator[Passage]:
        readings.append(1)
        if len(readings) == reading:
            (folder / "train.txt").write_text(sentences(300, seed=9))
        yield from original(self)

    monkeypatch.setattr(Text, "passages", changing)
    with pytest.raises(UserError, match="its train text changed during preparation"):
        prepare(tiny_data(folder))
    assert not list((tmp_path / "cache").glob("stores/*"))
    assert len(list((tmp_path / "cache").glob("tokenizers/*"))) == (reading == 3)


def test_what_killed_preparations_left_is_removed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path))
    old, young = tmp_path / "stores" / ".partial-old", tmp_path / "stores" / ".partial-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "train.bin").write_bytes(b"x")
    os.utime(old, (1, 1))
    prepare(tiny_data(corpus))
    assert not old.exists()
    assert young.exists()


def test_models_of_one_stream_are_not_charged_for_separators(corpus: Path) -> None:
    tokenizer = prepare(tiny_data(corpus)).tokenizer
    stream = prepare(tiny_data(corpus), tokenizer=tokenizer, separated=False)
    assert stream.stores["test"].info.separator is None
    assert tokenizer.end_of_document not in stream.stores["test"].tokens
