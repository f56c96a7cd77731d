"""Decoding: one token at a time for a whole batch, in place and with few launches."""

from logdepth.decoding.decoder import Decoder

__all__ = ["Decoder"]
