"""WikiText-2 (CC BY-SA 3.0): `.tokens` files, where rare words are <unk>, and the raw text that the paper used."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from logdepth.data.corpus import Corpus, Known, files_as_source
from logdepth.data.locate import hub_rows, local_files, looked_for
from logdepth.data.passages import SPLITS, Passage
from logdepth.data.readers import lines

HUB_NAME = "Salesforce/wikitext"
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}


class WikiText2(Corpus):
    summary = "WikiText-2, .tokens files: rare words are <unk>"
    separated = False
    known: ClassVar = {
        "train": Known(2_051_910, 36_718, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
        "valid": Known(213_886, 3_760, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
        "test": Known(241_211, 4_358, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
    }
    folder: ClassVar[str] = "wikitext-2"
    suffix: ClassVar[str] = "tokens"
    hub_config: ClassVar[str] = "wikitext-2-v1"

    def files(self) -> list[Path] | None:
        return local_files(self.data_dir, self.folder, [f"wiki.{split}.{self.suffix}" for split in SPLITS])

    def source(self) -> dict[str, Any] | None:
        files = self.files()
        return files_as_source(files) if files else None

    def passages(self) -> Iterator[Passage]:
        files = self.files()
        for number, split in enumerate(SPLITS):
            if files:
                yield from (Passage(split, line, False) for line in lines(files[number]))
                continue
            missing = looked_for(self.name, self.data_dir, f"{self.folder}/wiki.{split}.{self.suffix}")
            for row in hub_rows(HUB_NAME, self.hub_config, HUB_SPLITS[split], missing):
                yield Passage(split, row["text"] or " \n", False)  # the hub empties blank lines


class WikiText2Raw(WikiText2):
    summary = "WikiText-2, raw text: the paper's edition"
    known: ClassVar = {}
    folder = "wikitext-2-raw"
    suffix = "raw"
    hub_config = "wikitext-2-raw-v1"

    @property
    def name(self) -> str:
        return "wikitext2_raw"
