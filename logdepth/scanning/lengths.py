"""How long each row is, kept as one number where all agree: then planning a step costs next to nothing."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Lengths(NamedTuple):
    """The lengths of `num_rows` rows: `common` where they are all the same, `each` otherwise. Never changed."""

    num_rows: int
    common: int | None
    each: Ints | None

    @classmethod
    def of(cls, each: Ints) -> Self:
        if each.size and (each == each[0]).all():
            return cls(each.size, int(each[0]), None)
        return cls(each.size, None, each) if each.size else cls(0, 0, None)

    def array(self) -> Ints:
        """One number a row."""
        return np.full(self.num_rows, self.common) if self.each is None else self.each

    @property
    def key(self) -> tuple[int, int] | bytes:
        """What tells these lengths from others."""
        return (self.num_rows, self.common) if self.common is not None else self.array().tobytes()

    @property
    def total(self) -> int:
        return self.num_rows * self.common if self.common is not None else int(self.array().sum())

    @property
    def longest(self) -> int:
        return self.common if self.common is not None else int(self.array().max(initial=0))

    def plus(self, other: Self) -> Self:
        if self.common is not None and other.common is not None:
            return type(self)(self.num_rows, self.common + other.common, None)
        return self.of(self.array() + other.array())

    def split(self, depth: int) -> tuple[Self, Self]:
        """The bits from `depth` up, and those below, each as lengths of their own."""
        mask = (1 << depth) - 1
        if self.common is not None:
            return (
                type(self)(self.num_rows, self.common >> depth, None),
                type(self)(self.num_rows, self.common & mask, None),
            )
        return self.of(self.array() >> depth), self.of(self.array() & mask)

    def levels_touched(self, total: Self) -> int:
        """Levels of the tree in which growing to `total` changes something: above them the bits are the same."""
        if self.common is not None and total.common is not None:
            return (self.common ^ total.common).bit_length()
        return int((self.array() ^ total.array()).max()).bit_length()
