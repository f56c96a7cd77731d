"""Tokenizers: lines one by one are the whole, lossless settings lose nothing, the cache goes by text and settings."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logdepth.cli import main
from logdepth.data import DataConfig, TokenizerConfig, open_prepared, prepare
from logdepth.data.census import census_of
from logdepth.data.passages import Passage
from logdepth.data.text import Text
from logdepth.data.tokenizer import Tokenizer, _split_line, pieces, trained_tokenizer
from logdepth.errors import UserError
from logdepth.recipes import RECIPES, recipe
from tests.command_line import refused
from tests.tiny_corpus import VOCAB, sentences, tiny_data, write_corpus

PARTS = ("the cat", " ", "  ", "\n", "\n\n", "sees", ".", "é", "中", "\t", "\r\n", "\x85", "\u2028", "ﬁ", "x" * 9)
TEXTS = st.lists(st.sampled_from(PARTS), max_size=30).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tokenizer]]:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    lossless = TokenizerConfig(vocab_size=400, lossless=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGDEPTH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield {
            "paper": prepare(tiny_data(folder)).tokenizer,
            "lossless": prepare(DataConfig(corpus="text", paths=(folder,), tokenizer=lossless)).tokenizer,
        }


@pytest.mark.parametrize("name", ["paper", "lossless"])
@settings(max_examples=200)
@given(text=TEXTS)
@example(text=" lead and trail \n")
@example(text="the cat sees " * 3000)
def test_encoding_piece_by_piece_is_encoding_the_whole(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    assert "".join(pieces(text)) == text
    assert tokenizer.encode(text) == tokenizer.processor.encode(text)


@settings(max_examples=200)
@given(text=st.one_of(TEXTS, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\0"))))
def test_lossless_settings_lose_nothing(tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokenizer = tokenizers["lossless"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spaces_come_back_where_the_training_text_had_none(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    for file in (tmp_path / "corpus").iterdir():
        file.write_text(file.read_text().replace(" ", "-"))
    settings = TokenizerConfig(vocab_size=400, lossless=True)
    tokenizer = prepare(DataConfig(corpus="text", paths=(tmp_path / "corpus",), tokenizer=settings)).tokenizer
    text = " the cat  sees-it\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"tokenizer\.model is damaged: not a SentencePiece model"):
        Tokenizer.load(tmp_path / "tokenizer.model")


def test_the_papers_settings_turn_line_breaks_into_spaces(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["paper"]
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.decode(tokenizer.encode("the cat\nsees\n\n a small  dog")) == "the cat sees a small dog"


@given(line=st.text("ab c", max_size=400), longest=st.integers(8, 40))
def test_long_lines_are_cut_at_lone_spaces(line: str, longest: int) -> None:
    parts = list(_split_line(line, longest))
    assert "".join(parts) == line
    for part in parts[1:]:
        assert part.startswith(" ")
        assert not part.startswith("  ")


def test_tokenizers_are_cached_by_text_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "cache"))
    folder = write_corpus(tmp_path / "corpus")
    corpus = Text(None, (folder,))

    def train(**settings: int) -> str:
        tokenizer = trained_tokenizer(corpus, census_of(corpus), TokenizerConfig(**{"vocab_size": VOCAB} | settings))
        return tokenizer.hash

    first = train()
    assert train() == first
    made = list((tmp_path / "cache" / "tokenizers").iterdir())
    assert len(made) == 1
    stamp = (made[0] / "tokenizer.model").stat().st_mtime_ns
    train()
    assert (made[0] / "tokenizer.model").stat().st_mtime_ns == stamp
    assert train(vocab_size=80) != first
    (folder / "train.txt").write_text(sentences(399, 7))
    assert train() != first
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 3


def test_large_corpora_are_sampled_the_same_way_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Text(None, (write_corpus(tmp_path / "corpus", count=3000),))
    config = TokenizerConfig(vocab_size=VOCAB, sample_bytes=40_000)
    hashes = []
    for number in range(2):
        monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / f"cache{number}"))
        hashes.append(trained_tokenizer(corpus, census_of(corpus), config).hash)
        (record,) = (tmp_path / f"cache{number}" / "tokenizers").glob("*/tokenizer.json")
        facts = json.loads(record.read_text())
        assert 20_000 < facts["sampled_bytes"] < 60_000
        assert 0 < facts["sampled_share"] < 1
    assert hashes[0] == hashes[1]


def test_vocabularies_that_a_corpus_cannot_fill_are_refused(tmp_path: Path) -> None:
    corpus = Text(None, (write_corpus(tmp_path),))
    census = census_of(corpus)
    with pytest.raises(UserError, match=r"vocabulary of 8,000 pieces: set --data.tokenizer.vocab-size to at most \d+"):
        trained_tokenizer(corpus, census, TokenizerConfig(vocab_size=8000))
    says = r"does not support a vocabulary of 10 pieces: its characters require at least \d+ pieces"
    with pytest.raises(UserError, match=says):
        trained_tokenizer(corpus, census, TokenizerConfig(vocab_size=10))
    with pytest.raises(ValueError, match="at least 8"):
        TokenizerConfig(vocab_size=7)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer.load(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match="the tokenizer is missing"):
        Tokenizer.load(tmp_path / "other.model")


def test_the_hash_is_that_of_the_model(tokenizers: dict[str, Tokenizer]) -> None:
    one = tokenizers["paper"]
    assert one.hash == hashlib.sha256(one.model).hexdigest()[:16]


def test_long_lines_without_spaces_are_learned_from(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("春夏秋冬東西南北" * 1000 + "\n")
    prepared = prepare(DataConfig(corpus="text", paths=(tmp_path,), tokenizer=TokenizerConfig(vocab_size=16)))
    assert prepared.tokenizer.processor.unk_id() not in prepared.stores["train"].tokens


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("the disk is gone")])
def test_errors_while_reading_are_not_blamed_on_the_vocabulary(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Text(None, (write_corpus(tmp_path),))
    census = census_of(corpus)

    def broken(_: Text) -> Iterator[Passage]:
        yield Passage("train", "the cat\n", False)
        raise error

    monkeypatch.setattr(Text, "passages", broken)
    with pytest.raises(type(error), match=str(error) or None):
        trained_tokenizer(corpus, census, TokenizerConfig(vocab_size=VOCAB, sample_bytes=99))


def test_own_text_has_a_lossless_tokenizer_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGDEPTH_CACHE", str(tmp_path / "cache"))
    for name in RECIPES:
        if recipe(name).data.corpus == "webmix":
            continue  # whose architectures have a lossless tokenizer too
        assert recipe(name).data.tokenizer.lossless == name.startswith("text-")
    for verb in (["prepare", "text"], ["train", "text-ar-grc"]):
        with pytest.raises(SystemExit):
            main([*verb, "--help"])
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "--data.tokenizer.lossless, --data.tokenizer.no-lossless" in shown
        assert "Recipes for the corpus 'text' are lossless by default. (default: True)" in shown
    text = "A short text\r\nof two  lines,\tﬁne ☃.\n\n" * 9
    file = tmp_path / "own text.txt"
    file.write_bytes(text.encode())
    flags = ["prepare", "text", "--data.paths", str(file), "--data.tokenizer.vocab-size"]
    line = refused(capsys, *flags, "96")
    least = re.search(r"its characters and all bytes require at least (\d+) pieces; set .*vocab-size to that", line)
    line = refused(capsys, *flags[:-1])
    most = re.search(r"a vocabulary of 1,500 pieces: set --data.tokenizer.vocab-size to at most (\d+)$", line)
    assert least
    assert most
    assert 256 < int(least[1]) < int(most[1]) < 1500
    for size in (least[1], most[1]):
        assert main([*flags, size, "--json"]) == 0
        prepared = open_prepared(json.loads(capsys.readouterr().out)["key"])
        tokens = [store.tokens[:-1].tolist() for store in prepared.stores.values()]
        assert "".join(map(prepared.tokenizer.decode, tokens)) == text
    assert main([*flags, "32", "--data.tokenizer.no-lossless", "--json"]) == 0
    tokenizer = open_prepared(json.loads(capsys.readouterr().out)["key"]).tokenizer
    assert "\n" not in tokenizer.decode(tokenizer.encode(text))
