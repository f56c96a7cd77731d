"""How row-wise kernels are launched: tiles of whole rows, or a bounded number of programs that share the rows.

A program that sums over rows keeps a sum of its own. Sums in a fixed order, without atomics, are the same each time.
"""

import triton
import triton.language as tl

STAGES = tl.constexpr(3)
"""Of loops over rows: while one is worked on, the next two are on their way. The compiler loads no row early by itself,
and even puts off part of its own, to keep registers free."""
MAX_PROGRAMS = 528
"""Programs that each add to a partial sum of their own, for rows of 2,048 numbers: four a multiprocessor."""
MANY = 2**30
"""Rows, for as many partial sums as there may be."""


def block_of(width: int) -> int:
    """The power of two that holds a row."""
    return int(triton.next_power_of_2(width))


def warps_of(width: int, numbers: int) -> int:
    """Warps for a row, with so many numbers a thread, up to a limit."""
    return max(1, min(16, block_of(width) // (32 * numbers)))


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns of a tile: sixteen numbers a thread, with rows inside one warp where they fit."""
    block = block_of(width)
    return max(1, 512 // block), block


def tile_warps(width: int) -> int:
    return warps_of(width, 16)


def num_programs(num_tiles: int) -> int:
    return min(num_tiles, MAX_PROGRAMS)
