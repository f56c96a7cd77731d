"""Named tensors and a JSON record in one safetensors file, written atomically."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from logdepth.atomic import replacing
from logdepth.errors import UserError

RECORD = "logdepth"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], record: Any) -> None:
    with replacing(path) as partial:
        try:
            contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            safetensors.torch.save_file(contiguous, partial, metadata={RECORD: json.dumps(record)})
            partial.chmod(0o644)  # safetensors writes files that only their owner can read
        except safetensors.SafetensorError as error:  # it hides the system's error in its text
            raise UserError(f"cannot write {path}: {error}; free some space and run the same command again") from None


def load_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], Any]:
    """The tensors and the record of a file that `save_tensors` wrote."""
    if not path.is_file():
        raise UserError(f"{path} is not there")
    try:
        with safetensors.safe_open(path, framework="pt", device=device) as file:
            record = json.loads((file.metadata() or {}).get(RECORD, "null"))
            return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged ({error})") from None
