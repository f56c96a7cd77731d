"""OpenWebText2: web pages linked from Reddit, in jsonl.zst shards. A hash of each document selects its split."""

from collections.abc import Iterator
from typing import Any, ClassVar

from logdepth.data.corpus import Corpus, files_as_source
from logdepth.data.locate import hub_rows, local_shards, looked_for
from logdepth.data.passages import Passage, split_by_hash
from logdepth.data.readers import documents


class OpenWebText2(Corpus):
    summary = "OpenWebText2 (65 GB), jsonl.zst shards; 0.05 % each held out for valid and test"
    separated = True
    folder: ClassVar[str] = "openwebtext2"
    pattern: ClassVar[str] = "*.jsonl.zst"
    hub_name: ClassVar[str] = "segyges/OpenWebText2"
    held_out: ClassVar[float] = 0.0005

    def source(self) -> dict[str, Any] | None:
        files = local_shards(self.data_dir, self.folder, self.pattern)
        return files_as_source(files) if files else None

    def passages(self) -> Iterator[Passage]:
        for text in self._documents():
            yield Passage(split_by_hash(text, self.held_out), text, True)

    def _documents(self) -> Iterator[str]:
        files = local_shards(self.data_dir, self.folder, self.pattern)
        if files:
            for file in files:
                yield from documents(file)
            return
        missing = looked_for(self.name, self.data_dir, f"{self.folder}/{self.pattern}")
        yield from (row["text"] for row in hub_rows(self.hub_name, None, "train", missing))
