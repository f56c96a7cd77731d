"""Counts the texts whose tokens differ between SentencePiece and the exported Hugging Face tokenizer.

    python benchmarks/tokenizer_ids.py --corpora pydocs wikitext2 --data-dir DIR

For each corpus it trains the paper's tokenizer and a lossless one, and encodes all lines of all corpora and files with
each, and all documents whole. Then it encodes random strings of several kinds, which are harder than any text.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from logdepth.data import CORPORA, DataConfig, Tokenizer, TokenizerConfig, prepare
from logdepth.hf.tokenizer import fast_tokenizer

MAX_DOCUMENT = 200_000
"""Characters of a document that is encoded whole, at most."""
BATCH = 10_000


def characters(*ranges: tuple[int, int]) -> str:
    return "".join(chr(code) for first, last in ranges for code in range(first, last))


KINDS = {
    "ASCII": characters((0x20, 0x7F)),
    "Latin": characters((0x80, 0x250)),
    "white space and controls": " \t\r\x0b\x0c\x00\x01\u00a0\u2003\u3000\u200b\u2028\ufeff\u2581ab",
    "any of the first plane": characters((0x20, 0xD800), (0xE000, 0x10000)),
    "emoji": characters((0x1F300, 0x1F700)) + "\u200d\ufe0f",
    "kana and Hangul": characters((0x3040, 0x3130), (0x1100, 0x1200)) + "\u3099\u309a",
    "names of special tokens": "<s>/unk0xA \n",
    "letters with stacked accents": "aeoun " + characters((0x300, 0x345)),
}


def random_texts(alphabet: str, count: int) -> Iterator[str]:
    chance = random.Random(0)
    for _ in range(count):
        yield "".join(chance.choice(alphabet) for _ in range(chance.randint(0, 12)))


def differences(tokenizer: Tokenizer, texts: list[str]) -> tuple[int, int]:
    """Texts with other tokens, and texts that decode to another text."""
    fast, other_tokens, other_text = fast_tokenizer(tokenizer), 0, 0
    space = " " * (tokenizer.encode("a") == tokenizer.encode(" a"))  # which the paper's put before a text
    for start in range(0, len(texts), BATCH):
        some = texts[start : start + BATCH]
        for text, found in zip(some, fast(some)["input_ids"], strict=True):
            tokens = tokenizer.encode(text)
            other_tokens += tokens != found
            if tokenizer.unknown not in tokens:  # an unknown token is left out there, and is " ⁇ " here
                decoded = fast.decode(tokens, skip_special_tokens=True).removeprefix(space)
                other_text += tokenizer.decode(tokens) != decoded
    return other_tokens, other_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", nargs="+", default=["pydocs"], choices=list(CORPORA))
    parser.add_argument("--data-dir", type=Path, help="root data directory")
    parser.add_argument("--paths", nargs="+", type=Path, default=[], help="files of other text")
    parser.add_argument("--vocab-size", type=int, default=2_000)
    parser.add_argument("--random", type=int, default=5_000, help="random strings of each kind")
    arguments = parser.parse_args()

    sources = {name: CORPORA[name](arguments.data_dir) for name in arguments.corpora}
    if arguments.paths:
        sources["files"] = CORPORA["text"](None, arguments.paths)
    passages = {name: [one.text for one in source.passages()] for name, source in sources.items()}
    texts = {
        f"{name}, lines": [line for one in some for line in one.split("\n") if line.strip()]
        for name, some in passages.items()
    }
    texts |= {f"{name}, whole": [one for one in some if len(one) <= MAX_DOCUMENT] for name, some in passages.items()}
    texts |= {f"random: {kind}": list(random_texts(some, arguments.random)) for kind, some in KINDS.items()}
    for corpus in arguments.corpora:
        for lossless in (False, True):
            config = TokenizerConfig(vocab_size=arguments.vocab_size, lossless=lossless)
            tokenizer = prepare(DataConfig(corpus=corpus, tokenizer=config), arguments.data_dir).tokenizer
            print(f"\ntokenizer of {corpus}, {tokenizer.vocab_size:,} pieces, {'lossless' if lossless else 'NFKC'}")
            for name, some in texts.items():
                start = time.monotonic()
                other_tokens, other_text = differences(tokenizer, some)
                took = time.monotonic() - start
                print(
                    f"  {name:40} {len(some):>8,} texts  {other_tokens:>5,} with other tokens"
                    f"  {other_text:>5,} decoded otherwise  {took:6.1f} s"
                )


if __name__ == "__main__":
    main()
