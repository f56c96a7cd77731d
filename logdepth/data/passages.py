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
    place = place_of(document.encode("utf-8", "surrogatepass"))
    if place < held_out:
        return "valid"
    return "test" if place < 2 * held_out else "train"


def place_of(encoded: bytes, purpose: bytes = b"") -> float:
    """A number from 0 to below 1 that the text alone decides; another one for another purpose."""
    digest = hashlib.blake2b(encoded, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**64
