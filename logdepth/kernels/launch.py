"""How row-wise kernels are launched: tiles of whole rows, or a bounded number of programs that share the rows."""

import triton

MAX_PROGRAMS = 528
"""Programs that each add to a partial sum of their own: four a multiprocessor, so that adding these up is cheap.

Sums in a fixed order, without atomics, are the same each time."""
TILE_WARPS = 4


def block_of(width: int) -> int:
    """The power of two that holds a row."""
    return int(triton.next_power_of_2(width))


def warps_of(width: int) -> int:
    """Warps for a row: four numbers a thread, up to a limit."""
    return max(1, min(16, block_of(width) // 128))


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns of a tile for four warps: a row a warp, where that makes sixteen numbers a thread."""
    block = block_of(width)
    return max(1, 2048 // block), block


def num_programs(num_tiles: int) -> int:
    return min(num_tiles, MAX_PROGRAMS)
