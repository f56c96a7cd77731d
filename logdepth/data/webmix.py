"""Webmix: Wikipedia, eLife, Gutenberg and digital.gov in jsonl.xz shards, a substitute for OpenWebText2.

Results on this corpus are always labelled webmix, never OpenWebText2.
"""

from collections.abc import Iterator
from typing import Any

from logdepth.data.corpus import Corpus, files_as_source
from logdepth.data.locate import local_shards, looked_for
from logdepth.data.passages import Passage, split_by_hash
from logdepth.data.readers import documents
from logdepth.errors import UserError

FOLDER = "webmix"
PATTERN = "train-*.jsonl.xz"
HELD_OUT = 0.005


class Webmix(Corpus):
    summary = "webmix (410 MB: Wikipedia, eLife, Gutenberg, digital.gov); 0.5 % each held out for valid and test"
    separated = True

    def source(self) -> dict[str, Any] | None:
        return files_as_source(local_shards(self.data_dir, FOLDER, PATTERN)) or None

    def passages(self) -> Iterator[Passage]:
        files = local_shards(self.data_dir, FOLDER, PATTERN)
        if not files:
            raise UserError(looked_for(self.name, self.data_dir, f"{FOLDER}/{PATTERN}"))
        for file in files:
            for text in documents(file):
                yield Passage(split_by_hash(text, HELD_OUT), text, True)
