"""Loads that are under way together.

The compiler saves registers by loading a number just before it is used first, wherever the load is written. A row that
is summed over before all of it is used so waits for memory several times; nothing else of its program is under way.
"""

import triton
import triton.language as tl


@triton.jit
def tied(one, other):
    """`one`, for which the compiler has to load `other` too; both are float32."""
    nothing = tl.program_id(2)  # always 0: no grid has a third dimension. The compiler does not know.
    bits = one.to(tl.int32, bitcast=True) | (other.to(tl.int32, bitcast=True) & nothing)
    return bits.to(tl.float32, bitcast=True)
