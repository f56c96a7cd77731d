"""WikiText-2 (CC BY-SA 3.0): the `.tokens` files, where rare words are <unk>, and the raw text that the paper uses."""

from typing import Any, ClassVar

from logdepth.data.corpus import Known
from logdepth.data.three_files import ThreeFiles


class WikiText2(ThreeFiles):
    summary = "WikiText-2, .tokens files: rare words are <unk>"
    known: ClassVar = {
        "train": Known(2_051_910, 36_718, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
        "valid": Known(213_886, 3_760, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
        "test": Known(241_211, 4_358, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
    }
    folder = "wikitext-2"
    pattern = "wiki.{}.tokens"
    hub_name = "Salesforce/wikitext"
    hub_config = "wikitext-2-v1"

    @staticmethod
    def line_of(row: dict[str, Any]) -> str:
        text: str = row["text"]
        return text or " \n"  # the hub's dataset stores blank lines as empty strings


class WikiText2Raw(WikiText2):
    summary = "WikiText-2, raw text: the paper's edition"
    known: ClassVar = {}
    folder = "wikitext-2-raw"
    pattern = "wiki.{}.raw"
    hub_config = "wikitext-2-raw-v1"

    @property
    def name(self) -> str:
        return "wikitext2_raw"
