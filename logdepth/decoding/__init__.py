"""Decoding: one token at a time for a whole batch, in place and with few launches.

Texts are in `continuation.py`, which needs tokenizers; this package does not, so that exported models need none.
"""

from logdepth.decoding.decoder import Decoder
from logdepth.decoding.sampling import SamplingConfig
from logdepth.decoding.slots import Slots

__all__ = ["Decoder", "SamplingConfig", "Slots"]
