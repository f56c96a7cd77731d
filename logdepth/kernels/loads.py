"""Loads that are under way together.

The compiler saves registers by loading a number just before it is used first, wherever the load is written: a program
then waits for memory several times in turn. Where rows are summed over as well, or are wide, registers may not suffice
for more: see the machine code, and measure.
"""

import triton
import triton.language as tl


@triton.jit
def tied(one, other):
    """`one`, for which the compiler has to load `other` too; both are float32. The grid has two dimensions at most."""
    nothing = tl.program_id(2)  # 0, which the compiler does not know
    bits = one.to(tl.int32, bitcast=True) | (other.to(tl.int32, bitcast=True) & nothing)
    return bits.to(tl.float32, bitcast=True)
