"""A corpus that tests make themselves: sentences of a small grammar, in which a good deal can be learned."""

import random
from pathlib import Path

import numpy as np

from logdepth.data import DataConfig, StoreInfo, TokenizerConfig, TokenStore

SUBJECTS = ("the cat", "a small dog", "every bird", "my neighbour", "the old clock")
VERBS = ("sees", "follows", "remembers", "draws")
PLACES = ("in the garden", "by the river", "under a tree", "near the door")
VOCAB = 96


def sentences(count: int, seed: int) -> str:
    chance = random.Random(seed)
    return "".join(
        f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {chance.choice(SUBJECTS)} {chance.choice(PLACES)} .\n"
        for _ in range(count)
    )


def write_corpus(folder: Path, count: int = 400) -> Path:
    """train.txt, valid.txt and test.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, split in enumerate(("train", "valid", "test")):
        (folder / f"{split}.txt").write_text(sentences(count if split == "train" else count // 8, seed=number))
    return folder


def tiny_data(folder: Path, **settings: object) -> DataConfig:
    tokenizer = TokenizerConfig(vocab_size=VOCAB, **settings)
    return DataConfig(corpus="text", paths=(folder,), tokenizer=tokenizer)


def store_of(tokens: list[int], separator: int | None = None) -> TokenStore:
    """A store without a corpus."""
    info = StoreInfo(
        corpus="made",
        split="train",
        dtype="<u2",
        vocab_size=100,
        tokenizer_hash="",
        text_sha256="",
        tokens=len(tokens),
        unknown=0,
        documents=1,
        words=10,
        line_ends=2,
        bytes=50,
        separator=separator,
    )
    return TokenStore(np.array(tokens, dtype="<u2"), info)
