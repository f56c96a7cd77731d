"""What a corpus yields: passages of text in order, each of one split."""

import hashlib
from typing import Literal, NamedTuple

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


class Passage(NamedTuple):
    split: Split
    text: str
    ends_document: bool
    """False where the text goes on without a break in the next passage of the split, as lines of a file do."""


def split_by_hash(document: str, held_out: float) -> Split:
    """The split of a document, from its text alone: a share of `held_out` each for valid and test.

    It does not change when documents come, go or are reordered, and copies of one document stay together.
    """
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    if place < held_out:
        return "valid"
    return "test" if place < 2 * held_out else "train"
