"""Files of tensors: what was saved comes back, in memory of its own, and any changed bit is found."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from logdepth import checksums
from logdepth.errors import UserError
from logdepth.runs import tensors as tensor_files
from logdepth.runs.tensors import load_tensors, save_tensors


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether tensors are copied and hashed as small ones are, or as large ones."""
    if request.param == "large":
        monkeypatch.setattr(tensor_files, "LARGE_BYTES", 1)
        monkeypatch.setattr(checksums, "HANDED_OVER_BYTES", 1)
        monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    return str(request.param)


def saved(path: Path) -> dict[str, Tensor]:
    tensors = {
        "matrix": torch.randn(7, 33),
        "transposed": torch.randn(5, 3).T,
        "half": torch.randn(9).to(torch.bfloat16),
        "number": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }
    save_tensors(path, tensors, {"step": 1})
    return tensors


def test_what_was_saved_comes_back(size: str, tmp_path: Path) -> None:
    expected = saved(tmp_path / "file.safetensors")
    found, record = load_tensors(tmp_path / "file.safetensors", required=True)
    assert record["step"] == 1
    assert found.keys() == expected.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name].contiguous(), rtol=0, atol=0)
        assert one.is_contiguous()
        assert one.data_ptr() % tensor_files.ALIGNMENT == 0  # as of PyTorch's own: its kernels round by alignment


def test_a_later_change_of_the_file_changes_no_tensor(size: str, tmp_path: Path) -> None:
    """A tensor that was in the mapped file would change after it was verified."""
    file = tmp_path / "file.safetensors"
    expected = saved(file)
    found, _ = load_tensors(file, required=True)
    with file.open("r+b") as written:
        written.seek(-file.stat().st_size // 2, 2)
        written.write(b"\xff" * (file.stat().st_size // 2))
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name].contiguous(), rtol=0, atol=0)


def test_a_flipped_bit_is_found(size: str, tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    expected = saved(file)
    content = file.read_bytes()
    for place in range(1, sum(one.nbytes for one in expected.values()) + 1, 37):
        file.write_bytes(content[:-place] + bytes([content[-place] ^ 16]) + content[len(content) - place + 1 :])
        with pytest.raises(UserError, match=r"file\.safetensors does not match its checksum"):
            load_tensors(file)
