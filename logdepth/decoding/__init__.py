"""Decoding: one token at a time for a whole batch, in place and with few launches; and the texts that it makes."""

from logdepth.decoding.continuation import Continuation, Detokenizer, Ending, NotFiniteError, choose_next
from logdepth.decoding.decoder import Decoder
from logdepth.decoding.sampling import SamplingConfig
from logdepth.decoding.slots import Slots

__all__ = [
    "Continuation",
    "Decoder",
    "Detokenizer",
    "Ending",
    "NotFiniteError",
    "SamplingConfig",
    "Slots",
    "choose_next",
]
