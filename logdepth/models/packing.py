"""Token arguments: checked, and packed documents as a padded batch and back, for models that compute on rectangles."""

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning import LengthsLike
from logdepth.scanning.integers import integers


def check_tokens(tokens: Tensor, packed: bool) -> None:
    """Refuses what is no batch of token numbers, in words of tokens."""
    expected = "[total] with cu_seqlens" if packed else "[batch, length]"
    if tokens.ndim != (1 if packed else 2) or tokens.is_floating_point():
        raise ValueError(f"tokens must be whole numbers {expected}; got {tokens.dtype} of shape {tuple(tokens.shape)}")


def unpack(packed: Tensor, cu_seqlens: LengthsLike) -> tuple[Tensor, Tensor]:
    """Packed documents `[total, …]` as rows `[documents, longest, …]` padded with zeros, and where their items went.

    The second result indexes the flattened rows: `rows.flatten(0, 1)[index]` is `packed` again.
    """
    bounds = integers("cu_seqlens", cu_seqlens)
    lengths = np.diff(bounds)
    if not bounds.size or bounds[0] != 0 or bounds[-1] != len(packed) or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to the {len(packed)} packed tokens; got {bounds.tolist()[:8]}")
    longest = int(lengths.max(initial=0))
    starts = np.repeat(np.arange(len(lengths)) * longest - bounds[:-1], lengths)
    index = torch.from_numpy(starts + np.arange(len(packed))).to(packed.device)
    rows = packed.new_zeros(len(lengths) * longest, *packed.shape[1:]).index_copy(0, index, packed)
    return rows.view(len(lengths), longest, *packed.shape[1:]), index
