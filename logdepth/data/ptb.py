"""The Penn Treebank as Mikolov prepared it: one sentence a line, 10,000 word types. Its licence is LDC's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from logdepth.data.corpus import Corpus, Known, files_as_source
from logdepth.data.locate import hub_rows, local_files, looked_for
from logdepth.data.passages import SPLITS, Passage
from logdepth.data.readers import lines

FOLDER = "ptb"
NAMES = {split: f"ptb.{split}.txt" for split in SPLITS}
HUB_NAME = "ptb-text-only/ptb_text_only"
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}


class PTB(Corpus):
    summary = "Penn Treebank, Mikolov's preparation (text licensed by the LDC)"
    separated = False
    known: ClassVar = {
        "train": Known(887_521, 42_068, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        "valid": Known(70_390, 3_370, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        "test": Known(78_669, 3_761, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    }

    def files(self) -> list[Path] | None:
        return local_files(self.data_dir, FOLDER, list(NAMES.values()))

    def source(self) -> dict[str, Any] | None:
        files = self.files()
        return files_as_source(files) if files else None

    def passages(self) -> Iterator[Passage]:
        files = self.files()
        for number, split in enumerate(SPLITS):
            if files:
                yield from (Passage(split, line, False) for line in lines(files[number]))
                continue
            missing = looked_for(self.name, self.data_dir, f"{FOLDER}/{NAMES[split]}")
            for row in hub_rows(HUB_NAME, None, HUB_SPLITS[split], missing):
                yield Passage(split, f" {row['sentence']} \n", False)
