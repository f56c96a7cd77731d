"""Passages: the pieces of text that a corpus yields in order. Each belongs to one split."""

import hashlib
from typing import Literal, NamedTuple

Split = Literal["train", "valid", "test", "all"]
"""A part of a corpus; `all` is text that is not divided."""
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
"""The parts into which corpora are divided."""


class Passage(NamedTuple):
    """A piece of text of one split."""

    split: Split
    text: str
    ends_document: bool
    """Whether a document ends here. If not, the split's next passage continues it without a break, as lines do."""


def split_by_hash(document: str, held_out: float) -> Split:
    """Assign a document to a split by a hash of its text. valid and test each get a fraction `held_out`.

    The assignment does not depend on the other documents or their order. Copies of a document get the same split.
    """
    place = place_of(document.encode("utf-8", "surrogatepass"))
    if place < held_out:
        return "valid"
    return "test" if place < 2 * held_out else "train"


def place_of(encoded: bytes, purpose: bytes = b"") -> float:
    """Hash a text to a number in [0, 1). Hashes for different purposes are independent."""
    digest = hashlib.blake2b(encoded, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**64
