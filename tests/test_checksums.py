"""Checksums: any change of content is found; formatting and the order of fields are not content."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdepth import checksums
from logdepth.checksums import checksum_of_bytes, hashing_threads, seal, start_checksum, unseal
from logdepth.errors import UserError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.text().filter(lambda name: name != "sha256")
fields = st.dictionaries(names, values, max_size=5)


@given(fields)
def test_what_is_sealed_comes_back_however_it_is_formatted(content: dict[str, Any]) -> None:
    text = json.dumps(dict(reversed(seal(content).items())), indent=3)
    assert unseal(json.loads(text), Path("file.json"), "restore it") == content


@given(fields, names, values)
def test_another_value_is_refused(content: dict[str, Any], name: str, value: Any) -> None:
    changed = seal(content) | {name: value}
    if json.dumps(changed.get(name)) == json.dumps(content.get(name, object), default=str):
        return
    with pytest.raises(UserError, match=r"file\.json does not match its checksum.*; restore it"):
        unseal(changed, Path("file.json"), "restore it")


def test_a_missing_checksum_is_said_once_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unseal({"a": 1}, tmp_path / "one.json", "") == {"a": 1}
    assert unseal({"a": 2}, tmp_path / "two.json", "") == {"a": 2}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path} was written by an older logdepth")
    with pytest.raises(UserError, match=r"one\.json has lost its checksum.*; make it again"):
        unseal({"a": 1}, tmp_path / "one.json", "make it again", required=True)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200, 256])
def test_every_bit_counts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    found = {checksum_of_bytes(data), checksum_of_bytes(np.append(data, np.uint8(0)))}
    for place in range(size):
        for bit in range(8):
            flipped = data.copy()
            flipped[place] ^= 1 << bit
            found.add(checksum_of_bytes(flipped))
    assert len(found) == 2 + 8 * size


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200, 256])
def test_threads_compute_what_the_definition_says(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition must not change: files that exist name these checksums."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    blocks = [hashlib.sha256(data[start : start + 64]).digest() for start in range(0, size, 64)]
    expected = hashlib.sha256(size.to_bytes(8, "little") + b"".join(blocks)).hexdigest()
    for handed_over_bytes in (1, 2**20):
        monkeypatch.setattr(checksums, "HANDED_OVER_BYTES", handed_over_bytes)
        assert checksum_of_bytes(data) == expected
        with hashing_threads() as threads:
            checksum = start_checksum(data, threads)
        assert checksum() == checksum() == expected
