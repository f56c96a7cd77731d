"""Stores and what else is cached: any change is found, in one line that names the file; old stores still load."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logdepth.checksums import checksum_of_bytes, seal
from logdepth.data import SPLITS, Prepared, open_prepared, prepare, store
from logdepth.data.store import TokenStore
from logdepth.errors import UserError
from tests.tiny_corpus import VOCAB, store_of, tiny_data, write_corpus

EDITS: dict[str, Any] = {
    "bytes": 9970,
    "words": 1,
    "text_sha256": "0" * 64,
    "vocab_size": VOCAB + 1,
    "dtype": "<u4",
    "tokens": 12,
    "separator": None,
    "corpus": "ptb",
    "tokens_sha256": "0" * 64,
    "sha256": "0" * 64,
}
WRONG: dict[str, list[Any]] = {
    "bytes": [-5, "a", 1.5, None, True],
    "dtype": ["<u8", "float32", "nonsense", 2],
    "split": ["other", 3],
    "tokens": [-1, "7", [7]],
    "separator": ["</s>"],
    "vocab_size": [-1, {}],
}


@pytest.fixture
def made(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """A store in a cache of its own."""
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "the cache"))
    return prepare(tiny_data(corpus))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without_checksums(folder: Path) -> None:
    """Makes a store as older versions wrote it."""
    for split in SPLITS:
        saved = json.loads((folder / f"{split}.json").read_text())
        del saved["sha256"], saved["tokens_sha256"]
        (folder / f"{split}.json").write_text(json.dumps(saved))


def use_all(key: str) -> None:
    for one in open_prepared(key).stores.values():
        assert len(one.tokens) == one.info.tokens


def refusal(use: Callable[[], Any]) -> str:
    """The one line with which a use is refused."""
    with pytest.raises(UserError) as refused:
        use()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_every_flipped_byte_of_a_store_is_found(made: Prepared) -> None:
    chance, found = random.Random(0), 0
    for file in sorted(made.folder.iterdir()):
        whole = file.read_bytes()
        places = {0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(30))}
        for place in places:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            if file.suffix == ".json" and not differs(damaged, whole):
                use_all(made.key)  # another kind of white space
                continue
            said = refusal(lambda: use_all(made.key))
            assert file.name in said or made.folder.name in said
            assert f"remove '{made.folder}' and prepare the corpus again" in said
            found += 1
        file.write_bytes(whole)
    use_all(made.key)
    assert found > 150


def differs(damaged: bytes, whole: bytes) -> bool:
    try:
        return bool(json.loads(damaged) != json.loads(whole))
    except ValueError:
        return True


@pytest.mark.parametrize("name", EDITS)
def test_every_edited_field_is_found(name: str, made: Prepared) -> None:
    edit(made.folder / "test.json", **{name: EDITS[name]})
    said = refusal(lambda: open_prepared(made.key))
    assert "test.json does not match its checksum: it is damaged, or was edited" in said


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_impossible_values_are_found_without_checksums(name: str, value: Any, made: Prepared) -> None:
    without_checksums(made.folder)
    edit(made.folder / "valid.json", **{name: value})
    assert "valid.json is damaged or was written by another version" in refusal(lambda: open_prepared(made.key))


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"corpus": ', "{}", "[" * 100_000, "\xff"])
def test_what_is_no_sidecar_is_refused(content: str, made: Prepared) -> None:
    (made.folder / "valid.json").write_bytes(content.encode("latin-1"))
    said = refusal(lambda: open_prepared(made.key))
    assert "valid.json" in said
    assert "prepare the corpus again" in said


def test_a_lost_checksum_is_not_an_old_store(made: Prepared) -> None:
    saved = json.loads((made.folder / "test.json").read_text())
    del saved["sha256"]
    (made.folder / "test.json").write_text(json.dumps(saved | {"bytes": 9970}))
    assert "test.json has lost its checksum" in refusal(lambda: open_prepared(made.key))


def test_old_stores_load_with_one_line(made: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    without_checksums(made.folder)
    capsys.readouterr()
    use_all(made.key)
    use_all(made.key)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{made.folder} was written by an older logdepth: its files carry no checksums")
    edit(made.folder / "valid.json", text_sha256="0" * 64)
    assert "does not hold what its name says" in refusal(lambda: open_prepared(made.key))


def test_tokens_outside_the_vocabulary_are_found_without_checksums(made: Prepared) -> None:
    without_checksums(made.folder)
    tokens = np.fromfile(made.folder / "valid.bin", dtype="<u2")
    tokens[7] = VOCAB
    tokens.tofile(made.folder / "valid.bin")
    said = refusal(lambda: use_all(made.key))
    assert f"valid.bin is damaged: it has token {VOCAB}, but its vocabulary has {VOCAB} tokens" in said


def test_another_store_in_its_place_is_found(made: Prepared, tmp_path: Path) -> None:
    other = prepare(tiny_data(write_corpus(tmp_path / "other", count=300)))
    shutil.rmtree(made.folder)
    shutil.copytree(other.folder, made.folder)
    assert "does not hold what its name says" in refusal(lambda: open_prepared(made.key))
    shutil.copy(made.folder / "test.json", made.folder / "valid.json")
    shutil.copy(made.folder / "test.bin", made.folder / "valid.bin")
    shutil.copytree(made.folder, other.folder, dirs_exist_ok=True)
    assert "does not hold what its name says" in refusal(lambda: open_prepared(other.key))


def test_another_tokenizer_in_its_place_is_found(made: Prepared, corpus: Path, tmp_path: Path) -> None:
    other = prepare(tiny_data(write_corpus(tmp_path / "other", count=300)))
    shutil.copy(other.folder / "tokenizer.model", made.folder / "tokenizer.model")
    assert "tokenizer.model does not match its checksum" in refusal(lambda: open_prepared(made.key))
    one, two = sorted((tmp_path / "the cache" / "tokenizers").iterdir())
    shutil.copy(one / "tokenizer.model", two / "tokenizer.model")
    shutil.rmtree(tmp_path / "the cache" / "stores")
    datas = [tiny_data(corpus), tiny_data(tmp_path / "other")]
    assert f"{two}/tokenizer.model does not match its checksum" in refusal(lambda: [*map(prepare, datas)])
    shutil.copy(one / "tokenizer.json", two / "tokenizer.json")  # now a whole, other tokenizer
    assert f"{two}/tokenizer.json does not match its checksum" in refusal(lambda: [*map(prepare, datas)])


def test_tokenizers_of_older_versions_load_with_one_line(
    made: Prepared, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (tmp_path / "the cache").glob("tokenizers/*/tokenizer.json")
    saved = json.loads(file.read_text())
    edit(file, sampled_bytes=1)
    assert "tokenizer.json does not match its checksum" in refusal(lambda: prepare(tiny_data(corpus)))
    del saved["sha256"], saved["tokenizer_hash"]
    file.write_text(json.dumps(saved))
    capsys.readouterr()
    assert prepare(tiny_data(corpus)).key == made.key
    assert "carry no checksums" in capsys.readouterr().err


def test_changed_censuses_are_found(made: Prepared, corpus: Path, tmp_path: Path) -> None:
    (file,) = (tmp_path / "the cache" / "census").iterdir()
    whole = json.loads(file.read_text())
    assert whole == seal({name: value for name, value in whole.items() if name != "sha256"})
    edit(file, source={})
    assert f"{file} does not match its checksum" in refusal(lambda: prepare(tiny_data(corpus)))
    assert "remove it, and the corpus is read again" in refusal(lambda: prepare(tiny_data(corpus)))
    file.write_text("[]")
    assert "it holds a list" in refusal(lambda: prepare(tiny_data(corpus)))
    file.write_text(json.dumps(seal({"corpus": "text", "source": {}, "splits": whole["splits"]})))
    assert f"{file} does not match its checksum" in refusal(lambda: prepare(tiny_data(corpus)))
    file.unlink()
    assert prepare(tiny_data(corpus)).key == made.key


def test_only_the_splits_that_are_used_are_read_and_once(made: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(store, "checksum_of_bytes", lambda data: hashed.append(len(data)) or checksum_of_bytes(data))
    monkeypatch.setattr(store, "_verified", set())
    for _ in range(3):
        stores = open_prepared(made.key).stores
        assert len(stores["train"]) > len(stores["test"])
        stores["test"].window(0, 5)
    assert hashed == [len(made.stores["test"])]
    file = made.folder / "test.bin"
    os.utime(file, ns=(1, 1))  # the file may be another now
    use_all(made.key)
    assert sorted(hashed) == sorted([hashed[0], *(len(one) for one in made.stores.values())])


def test_stores_without_files_are_not_verified() -> None:
    assert store_of([1, 99, 100]).tokens.tolist() == [1, 99, 100]


def test_an_empty_split_opens(corpus: Path, tmp_path: Path) -> None:
    tokenizer = prepare(tiny_data(corpus)).tokenizer
    (tmp_path / "test.txt").write_text("the cat .\n")
    other = prepare(tiny_data(tmp_path), tokenizer=tokenizer)
    assert len(other.stores["train"].tokens) == 0
    assert isinstance(other.stores["test"], TokenStore)
