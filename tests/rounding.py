"""Triton's interpreter cuts off what a bfloat16 cannot hold; a GPU rounds it, and so do tests on a CPU with this.

Cut off, every result is a little too small, and what goes through many kernels the more so.
"""

from typing import Any

import numpy as np
import torch


def round_as_a_gpu() -> None:
    """From now on, in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return cut_off(values, source, target, mode)
        numbers = torch.from_numpy(np.array(values).view(np.float32))
        return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = rounded
