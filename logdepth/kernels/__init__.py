"""Triton kernels, each beside the plain torch that it stands for. Triton is imported when a kernel is first wanted.

On a machine without a GPU they run in Triton's interpreter, where TRITON_INTERPRET=1 is set before the first of them is
imported: slow, and the same arithmetic.
"""

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""That kernels read and write; they compute in float32."""


def usable_on(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def launched_where(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels go to the current GPU: this makes it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
