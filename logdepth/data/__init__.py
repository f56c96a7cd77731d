"""Corpora, tokenizers, token stores and batches."""

from logdepth.data.batches import Batches, document_bounds
from logdepth.data.corpora import CORPORA
from logdepth.data.passages import SPLITS, Split
from logdepth.data.prepare import DataConfig, Prepared, is_prepared, open_prepared, prepare, prepare_other
from logdepth.data.store import StoreInfo, TokenStore
from logdepth.data.tokenizer import Tokenizer, TokenizerConfig

__all__ = [
    "CORPORA",
    "SPLITS",
    "Batches",
    "DataConfig",
    "Prepared",
    "Split",
    "StoreInfo",
    "TokenStore",
    "Tokenizer",
    "TokenizerConfig",
    "document_bounds",
    "is_prepared",
    "open_prepared",
    "prepare",
    "prepare_other",
]
