"""Lengths of rows, stored as one number if all are equal, which makes planning a step of a stream cheap."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Lengths(NamedTuple):
    """The immutable lengths of `num_rows` rows: `common` if they are all equal, otherwise `each`."""

    num_rows: int
    common: int | None
    each: Ints | None

    @classmethod
    def of(cls, each: Ints) -> Self:
        """Create the lengths from an array with one number per row."""
        if each.size and (each == each[0]).all():
            return cls(each.size, int(each[0]), None)
        return cls(each.size, None, each) if each.size else cls(0, 0, None)

    def array(self) -> Ints:
        """Return an array with one number per row."""
        return np.full(self.num_rows, self.common) if self.each is None else self.each

    @property
    def key(self) -> tuple[int, int] | bytes:
        """A hashable value that identifies these lengths."""
        return (self.num_rows, self.common) if self.common is not None else self.array().tobytes()

    @property
    def total(self) -> int:
        """The sum of the lengths."""
        return self.num_rows * self.common if self.common is not None else int(self.array().sum())

    @property
    def longest(self) -> int:
        """The maximum length; 0 without rows."""
        return self.common if self.common is not None else int(self.array().max(initial=0))

    def plus(self, other: Self) -> Self:
        """Return the sums of the lengths, row by row."""
        if self.common is not None and other.common is not None:
            return type(self)(self.num_rows, self.common + other.common, None)
        return self.of(self.array() + other.array())

    def split(self, depth: int) -> tuple[Self, Self]:
        """Split each length into its bits from `depth` upwards, shifted down, and its bits below `depth`."""
        mask = (1 << depth) - 1
        if self.common is not None:
            return (
                type(self)(self.num_rows, self.common >> depth, None),
                type(self)(self.num_rows, self.common & mask, None),
            )
        return self.of(self.array() >> depth), self.of(self.array() & mask)

    def levels_touched(self, total: Self) -> int:
        """Return the number of tree levels that change when the lengths grow to `total`. All bits above are equal."""
        if self.common is not None and total.common is not None:
            return (self.common ^ total.common).bit_length()
        return int((self.array() ^ total.array()).max()).bit_length()
