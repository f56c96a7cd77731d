"""Odd corpora through `prepare`, the stores that it makes, and two steps of training.

    python -m tests.hostile.corpora --count 500 --seed 1
    python -m tests.hostile.corpora --only 137

A corpus is one to three odd files, often beside good ones. If it is refused because of its vocabulary, the advice of
the message is followed. What a lossless tokenizer encoded must come back as the text that was written.
"""

import contextlib
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

from tests.hostile.commands import MEMORY
from tests.hostile.outcomes import DONE, MESSY, REFUSED, SILENT, Case, judged, numbers_of, parser, run_cases
from tests.hostile.worker import Said, Worker
from tests.tiny_corpus import sentences, write_corpus

STORE_FILES = {
    "tokenizer.model",
    *(f"{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "json")),
}
ADVICE = re.compile(r"vocab-size to at most (\d+)|require at least (\d+) pieces")
EMOJI = "\U0001f469\u200d\U0001f680\U0001f1eb\U0001f1f7é́"


def texts(chance: random.Random) -> str:
    """A text, often an odd one."""
    many = sentences(chance.choice((3, 40, 150)), seed=chance.randrange(100))
    words = many.split()
    return chance.choice(
        (
            *(
                many,
                many,
                many,
                many.strip(),
                many.replace("\n", "\r\n"),
                many.replace("\n", "\r"),
                many.replace("\n", " "),
            ),
            *("", "\n", "\n" * 500, " ", "\t\t", "a", "ab", "a\n", "\0", "\r", "\ufeff", "\u2581", "aaaa" * 2000),
            *(
                "".join(words),
                "x" * 100_000,
                " " * 5000,
                f"{many}\0{many}",
                "\0" * 300,
                f"\ufeff{many}",
                f"{many}\n\n\n\n",
            ),
            *(
                many.replace(" ", "\u00a0"),
                many.replace(" ", "\u2028"),
                many.replace("\n", "\u2029"),
                many.replace("\n", "\x85"),
            ),
            *(
                many.replace(" ", "\u2581"),
                many.replace("a", EMOJI),
                EMOJI * 300,
                many.replace("e", "e\u0301\u0323"),
                "漢字" * 500,
            ),
            *(
                many.upper().replace("E", "ß"),
                many.replace("o", "\ue000"),
                "\u202e" + many,
                many.replace(" ", "  "),
                "\x1b[31m" + many,
            ),
            *(
                "".join(map(chr, range(1, 300))) * 3,
                "</s><s><unk>" * 50,
                f"<unk> {many}",
                "<0x0A>" * 50,
                f"{many}\x0c{many}\x0b",
            ),
        )
    )


def encoded(chance: random.Random, text: str) -> tuple[bytes, str | None]:
    """A text as bytes, and what must come back: None if the bytes are not UTF-8 or nobody can say."""
    data = text.encode()
    kind = chance.random()
    if kind < 0.88:
        return data, text
    found = chance.choice(
        (
            text.encode("utf-16"),
            text.encode("latin-1", "replace") + b"\xe9\xff",
            data[: len(data) // 2] + b"\xf0\x9f",
            b"\xed\xa0\x80" + data,
            b"\xff\xfe" + data,
            bytes(chance.randrange(256) for _ in range(2000)),
        )
    )
    return found, None


def compressed(chance: random.Random, data: bytes) -> tuple[bytes, str, bool]:
    """Bytes in a container, its suffix, and whether it is whole."""
    suffix, pack = chance.choice(
        ((".gz", gzip.compress), (".xz", lzma.compress), (".zst", lambda one: zstandard.ZstdCompressor().compress(one)))
    )
    packed = pack(data)
    damage = chance.randrange(12)
    if damage < 5:
        return packed, suffix, True
    if damage == 5:
        return packed + pack(b""), suffix, True  # two streams are one file
    damaged = (
        packed[: max(1, len(packed) // 2)],
        packed[:-3],
        packed + b"junk at the end",
        data,
        b"",
        packed[:5] + bytes([packed[5] ^ 255]) + packed[6:],
    )
    giants = {
        ".zst": b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 7 + b"\x0f" + b"\x01\x00\x00",
        ".xz": lzma.compress(b"x")[:6] + b"\xff" * 40,
        ".gz": packed[:-4] + b"\xff" * 4,
    }
    return chance.choice((*damaged, giants[suffix])), suffix, False


def json_lines(chance: random.Random, text: str) -> tuple[str, str | None]:
    """The lines of a jsonl file, and what must come back."""
    documents = text.split(".")
    rows = [json.dumps({"text": one}, ensure_ascii=chance.random() < 0.5) for one in documents]
    if chance.random() < 0.5:
        return "\n".join(rows) + "\n", "".join(documents)
    odd: tuple[str, ...] = (
        *(
            "",
            "   ",
            "{}",
            "[]",
            "null",
            "5",
            '"text"',
            '{"text": null}',
            '{"text": 5}',
            '{"text": ["a"]}',
            '{"text": ""}',
        ),
        *(
            '{"text": {"text": "a"}}',
            '{"text": "\\ud800"}',
            '{"text": "a", "text": "b"}',
            '{"Text": "a"}',
            '{"text": "a"} x',
        ),
        *(
            '{"text": "a", "n": ' + "9" * 6000 + "}",
            "[" * 100_000,
            '{"text": "a", "x": ' + "[" * 2000 + "]" * 2000 + "}",
        ),
        *(
            '{"text": NaN}',
            '{"text": "a\0b"}',
            '{"text": "\\u0000"}',
            "\ufeff" + rows[0],
            '{"text": "a"',
            rows[0] + rows[-1],
        ),
    )
    rows.insert(chance.choice((0, len(rows))), chance.choice(odd))
    return "\n".join(rows) + "\n", None


def parquet(chance: random.Random, text: str) -> tuple[bytes, str | None]:
    """A parquet file, and what must come back."""
    documents = text.split(".")
    column = pyarrow.array(documents)
    odd: tuple[Any, ...] = (
        *(column.cast(pyarrow.large_string()), column.dictionary_encode(), pyarrow.array([*documents, None])),
        *(
            pyarrow.array([[one] for one in documents]),
            pyarrow.array([{"a": one} for one in documents]),
            column.cast(pyarrow.binary()),
        ),
        *(pyarrow.array(range(len(documents))), pyarrow.nulls(len(documents)), pyarrow.array([], pyarrow.string())),
        *(pyarrow.array([True] * len(documents)), pyarrow.array([{"string": 1}] * len(documents))),
    )
    good = chance.random() < 0.4
    table = pyarrow.table({"text": column if good else chance.choice(odd)})
    if not good and chance.random() < 0.2:
        table = table.rename_columns([chance.choice(("Text", "content", ""))])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    data = buffer.getvalue()
    if not good and chance.random() < 0.4:
        data = chance.choice(
            (data[:-4], data[: len(data) // 2], b"PAR1", data[:-8] + b"\xff\xff\xff\x7fPAR1", b"", data + b"x")
        )
    return data, "".join(documents) if good else None


def names(chance: random.Random) -> str:
    odd = (
        "odd",
        "a b",
        "a\nb",
        "'\"",
        "-x",
        ".hidden",
        "%s",
        "$x",
        "nü☃",
        "e\u0301",
        "x" * 240,
        "odd-\udcff",
        "train",
        "test",
        "valid",
    )
    return chance.choice((*["text"] * 10, *odd, *[f"{split}-1" for split in ("train", "valid", "test")]))


def odd_file(chance: random.Random, folder: Path, number: int) -> tuple[Path, str | None]:
    """Write a file whose name has this number; return it and what must come back of it."""
    text, stem = texts(chance), f"{names(chance)}{number}"
    kind = chance.random()
    if kind < 0.08:
        return _special(chance, folder / f"{stem}.txt")
    if kind < 0.2:
        data, expected = parquet(chance, text)
        suffix = ".parquet"
    elif kind < 0.4:
        lines, expected = json_lines(chance, text)
        data, suffix = lines.encode("utf-8", "surrogatepass"), chance.choice((".jsonl", ".ndjson", ".json", ".jsonl"))
        expected = None if suffix == ".json" else expected
    else:
        data, expected = encoded(chance, text)
        suffix = chance.choice(
            (".txt", ".txt", ".txt", ".md", ".TXT", "", ".tokens", ".csv", ".jsonl", ".parquet", ".txt.gz")
        )
        expected = expected if suffix in (".txt", ".md", ".tokens") else None
    if chance.random() < 0.25 and suffix != ".parquet":
        data, packing, whole = compressed(chance, data)
        suffix += packing
        expected = expected if whole else None
    file = folder / f"{stem}{suffix}"
    try:
        file.write_bytes(data)
    except OSError:  # a name that is too long for this file system
        file = folder / f"long-{number}.txt"
        file.write_bytes(data)
    return file, expected


def _special(chance: random.Random, file: Path) -> tuple[Path, None]:
    """Something that is not a file."""
    makers: tuple[Callable[[], Any], ...] = (
        lambda: file.symlink_to(file.name),
        lambda: file.symlink_to("missing"),
        lambda: file.symlink_to("."),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to("/dev/full"),
        lambda: file.symlink_to("/dev/null"),
        lambda: file.symlink_to("/proc/self/mem"),
        lambda: os.mkfifo(file),
        lambda: file.mkdir(),
        lambda: _bind(file),
    )
    chance.choice(makers)()
    return file, None


def _bind(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):  # a long name is no address
        one.bind(str(file))


class Corpora:
    """The corpora of a seed, in a folder."""

    def __init__(self, base: Path, worker: Worker, seed: int) -> None:
        self.world, self.worker, self.seed = base.resolve() / "corpora", worker, seed

    def one(self, number: int) -> Case:
        chance = random.Random(f"corpora {self.seed} {number}")
        shutil.rmtree(self.world, ignore_errors=True)
        folder = self.world / "text"
        folder.mkdir(parents=True)
        files = dict(odd_file(chance, folder, number) for number in range(chance.choice((1, 1, 2, 3))))
        if chance.random() < 0.6:
            good = write_corpus(self.world / "good", count=60)
            for file in sorted(good.iterdir()):
                shutil.copy(file, folder / file.name)
                files[folder / file.name] = file.read_text()
        paths = [folder] if chance.random() < 0.7 else list(files)
        expected = [files.get(file) for file in folder.iterdir()]
        flags = ["--data.corpus", "text", "--data.paths", *map(str, paths)]
        lossless = chance.random() < 0.6
        flags.append("--data.tokenizer.lossless" if lossless else "--data.tokenizer.no-lossless")
        vocab = chance.choice((300, 320, 400) if lossless else (12, 40, 96, 300))
        what = f"{sorted(file.name for file in files)}, {'lossless, ' * lossless}{vocab} pieces"
        outcome, detail = self._run(flags, vocab, None if None in expected else "".join(map(str, expected)), lossless)
        return Case(what, outcome, detail)

    def _run(self, flags: list[str], vocab: int, text: str | None, lossless: bool) -> tuple[str, str]:
        prepare = ["prepare", "text", *flags, "--json", "--data.tokenizer.vocab-size"]
        said = self._call([*prepare, str(vocab)])
        outcome, detail = judged(said, "prepare")
        if outcome == REFUSED and (advised := ADVICE.search(detail)):
            vocab = int(advised[1] or advised[2])
            said = self._call([*prepare, str(vocab)])
            outcome, detail = judged(said, "prepare")
            if outcome == REFUSED and ADVICE.search(detail):
                return MESSY, f"the advice to use {vocab} pieces leads to: {detail}"
        if left := self._half_written():
            return MESSY, f"left {left}; {detail}"
        if outcome != DONE:
            return outcome, detail
        if said.code != 0:
            return MESSY, f"{detail}, stderr {said.err.splitlines()[-3:]}"
        key = json.loads(said.out)["key"]
        looked = self._call([key, flags[3:], text, lossless], function="tests.hostile.calls:look_at_stores")
        if looked.code != 0 or looked.signal is not None:
            return SILENT, f"{looked.out} {looked.err[-300:]}"
        small = (
            "--model.embed-width 8 --model.operator.width 8 --train.batch-size 1 --train.context 4 --train.device cpu"
        )
        train = ["train", "pydocs-ar-grc", *flags, "--data.tokenizer.vocab-size", str(vocab), *small.split()]
        trained = self._call([*train, "--train.max-steps", "2", "--out", "new"])
        outcome, detail = judged(trained, "train")
        if outcome == REFUSED and any((self.world / "new").glob("*")):
            return MESSY, f"left {sorted(file.name for file in (self.world / 'new').iterdir())}; {detail}"
        if outcome == DONE and trained.code != 0:
            return MESSY, f"{detail}, stderr {trained.err.splitlines()[-3:]}"
        return outcome, f"prepared; train: {detail}"

    def _call(self, arguments: list[Any], **settings: Any) -> Said:
        env = {"LOGDEPTH_CACHE": str(self.world / "cache")}
        return self.worker.call(arguments, cwd=self.world, env=env, memory=MEMORY, **settings)

    def _half_written(self) -> list[str]:
        cache = self.world / "cache"
        left = [str(file) for file in cache.rglob(".partial-*")]
        left += [str(one) for one in cache.glob("stores/*") if {file.name for file in one.iterdir()} != STORE_FILES]
        return left + [str(one) for one in cache.glob("tokenizers/*") if len(list(one.iterdir())) != 2]


@contextlib.contextmanager
def corpora_in(folder: Path | None, seed: int) -> Iterator[Corpora]:
    with contextlib.ExitStack() as stack:
        base = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="logdepth-hostile-")))
        yield Corpora(base, stack.enter_context(Worker()), seed)


def main() -> int:
    arguments = parser(__doc__, count=500).parse_args()
    with corpora_in(arguments.keep, arguments.seed) as corpora:
        return run_cases("corpora", numbers_of(arguments), corpora.one, arguments)


if __name__ == "__main__":
    sys.exit(main())
