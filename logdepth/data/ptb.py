"""The Penn Treebank in Mikolov's preparation: one sentence per line, 10,000 word types. The LDC licenses the text."""

from typing import Any, ClassVar

from logdepth.data.corpus import Known
from logdepth.data.three_files import ThreeFiles


class PTB(ThreeFiles):
    summary = "Penn Treebank, Mikolov's preparation (text licensed by the LDC)"
    known: ClassVar = {
        "train": Known(887_521, 42_068, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        "valid": Known(70_390, 3_370, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        "test": Known(78_669, 3_761, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    }
    folder = "ptb"
    pattern = "ptb.{}.txt"
    hub_name = "ptb-text-only/ptb_text_only"

    @staticmethod
    def line_of(row: dict[str, Any]) -> str:
        return f" {row['sentence']} \n"
