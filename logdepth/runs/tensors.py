"""Named tensors and a JSON record in one safetensors file, written atomically, with a checksum of both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from logdepth.atomic import NoSpaceError, replacing
from logdepth.checksums import CHECKSUM, checksum_of, checksum_of_bytes, mismatch, say_without_checksums
from logdepth.data.locate import refuse_unprintable
from logdepth.errors import UserError

RECORD = "logdepth"
"""Key of the record in the file's metadata."""
VALUES = "values"
"""Field of a record with the checksum of the tensors alone, by which another file can name them."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> str:
    """Write tensors and a record, which gets their common checksum; return the checksum of the tensors alone."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = _facts(contiguous)
    values = checksum_of(facts)
    named = {**record, VALUES: values}
    sealed = {**named, CHECKSUM: _checksum(facts, named)}
    with replacing(path, in_folder=True) as partial:  # safetensors writes under a temporary name of its own first
        try:
            safetensors.torch.save_file(contiguous, partial, metadata={RECORD: json.dumps(sealed)})
            partial.chmod(0o644)  # safetensors writes files that only their owner can read
        except safetensors.SafetensorError as error:  # it hides the system's error in its text
            raise NoSpaceError(path, str(error)) from None
    return values


def load_tensors(
    path: Path, remedy: str = "restore it from a copy", *, required: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the record of a file that `save_tensors` wrote.

    Args:
        path: the file.
        remedy: what to do if it is damaged, for the message.
        required: whether a missing checksum is an error. Otherwise, one line says that there is none.
    """
    if not path.is_file():
        raise UserError(f"{path} {'is not a file' if path.exists() else 'does not exist'}; {remedy}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {})[RECORD])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        refuse_unprintable(path)  # safetensors reads no such file
        raise UserError(f"{path} is damaged ({error}); {remedy}") from None
    except KeyError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{path} was not written by logdepth, or is damaged: it has no record; {remedy}")
    checksum = record.pop(CHECKSUM, None)
    if checksum is None and required:
        raise UserError(f"{path} has lost its checksum: it is damaged or was replaced; {remedy}")
    if checksum is None:
        say_without_checksums(path.parent)
    elif checksum != _checksum(_facts(tensors), record):
        raise mismatch(path, remedy)
    return tensors, record


def read_record(path: Path, remedy: str) -> dict[str, Any]:
    """Read only the record of a file that `save_tensors` wrote, without verifying it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get(RECORD, "null"))
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        refuse_unprintable(path)
        raise UserError(f"{path} is damaged ({error}); {remedy}") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} was not written by logdepth, or is damaged: it has no record; {remedy}")
    return record


def _facts(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: [str(one.dtype), list(one.shape), _checksum_of_values(one)] for name, one in tensors.items()}


def _checksum(facts: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return checksum_of({"record": record, "tensors": facts})


def _checksum_of_values(tensor: Tensor) -> str:
    return checksum_of_bytes(tensor.reshape(-1).view(torch.uint8).numpy())
