"""A corpus that tests make themselves: sentences of a small grammar, in which a good deal can be learned."""

import random
from pathlib import Path

from logdepth.data import DataConfig, TokenizerConfig

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
