"""Copy index arrays to a device asynchronously."""

import torch
from torch import Tensor

from logdepth.scanning.lengths import Ints


def index_on(device: torch.device, index: Ints) -> Tensor:
    """Return the index as a tensor on the device. It is valid in any later computation, including with gradients."""
    with torch.inference_mode(False):
        tensor = torch.from_numpy(index)
        # A copy from pinned memory does not synchronise with the device.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
