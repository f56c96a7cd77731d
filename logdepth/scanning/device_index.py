"""Index arrays as tensors on a device, copied there without waiting for it."""

import torch
from torch import Tensor

from logdepth.scanning.lengths import Ints


def index_on(device: torch.device, index: Ints) -> Tensor:
    """The index as a tensor that any later computation may use, also one with gradients."""
    with torch.inference_mode(False):
        tensor = torch.from_numpy(index)
        # From pinned memory the copy needs no synchronisation with the device.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
