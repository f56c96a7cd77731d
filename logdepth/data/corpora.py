"""The list of corpora. To add a corpus, add one file and one entry here."""

from logdepth.data.corpus import Corpus
from logdepth.data.openwebtext2 import OpenWebText2
from logdepth.data.ptb import PTB
from logdepth.data.pydocs import PyDocs
from logdepth.data.text import Text
from logdepth.data.webmix import Webmix
from logdepth.data.wikitext2 import WikiText2, WikiText2Raw

CORPORA: dict[str, type[Corpus]] = {
    "ptb": PTB,
    "wikitext2": WikiText2,
    "wikitext2_raw": WikiText2Raw,
    "openwebtext2": OpenWebText2,
    "webmix": Webmix,
    "pydocs": PyDocs,
    "text": Text,
}
"""Maps names to classes. `CORPORA["ptb"](data_dir).passages()` iterates over a corpus's text."""
