"""Named tensors and a JSON record in one safetensors file, written atomically, with a checksum of both."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from logdepth.atomic import NoSpaceError, replacing
from logdepth.checksums import (
    CHECKSUM,
    checksum_of,
    hashing_threads,
    mismatch,
    say_without_checksums,
    start_checksum,
)
from logdepth.data.locate import refuse_unprintable
from logdepth.errors import UserError

RECORD = "logdepth"
"""Key of the record in the file's metadata."""
VALUES = "values"
"""Field of a record with the checksum of the tensors alone, by which another file can name them."""
LARGE_BYTES = 2**22
"""Size in bytes from which NumPy asks the system for large pages."""
ALIGNMENT = 64
"""Alignment in bytes of the memory of PyTorch's tensors."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> str:
    """Write tensors and a record, which gets their common checksum; return the checksum of the tensors alone."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with hashing_threads() as threads:
        facts = _waited_for({name: _start_facts(one, threads) for name, one in contiguous.items()})
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

    Each tensor is copied into memory, and this copy is hashed by other threads while the next ones are copied.

    Args:
        path: the file.
        remedy: what to do if it is damaged, for the message.
        required: whether a missing checksum is an error. Otherwise, one line says that there is none.
    """
    if not path.is_file():
        raise UserError(f"{path} {'is not a file' if path.exists() else 'does not exist'}; {remedy}")
    try:
        with safetensors.safe_open(path, framework="pt") as file, hashing_threads() as threads:
            record = json.loads((file.metadata() or {})[RECORD])
            tensors, started = {}, {}
            for name in file.keys():  # noqa: SIM118
                tensors[name] = _in_memory(file.get_tensor(name))
                started[name] = _start_facts(tensors[name], threads)
            facts = _waited_for(started)
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
    elif checksum != _checksum(facts, record):
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


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that is in a mapped file, so that no later change of the file can change it.

    New memory costs more time than the copy, because the system makes it page by page. Large pages make it several
    times faster; NumPy asks for them, PyTorch does not. PyTorch would also copy with all cores, which are to hash.
    """
    in_file = _bytes_of(tensor)
    if tensor.nbytes < LARGE_BYTES:
        copy = in_file.clone()
    else:
        memory = np.empty(tensor.nbytes + ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        memory[start : start + tensor.nbytes] = in_file.numpy()
        copy = torch.from_numpy(memory[start : start + tensor.nbytes])
    return copy.view(tensor.dtype).view(tensor.shape)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a contiguous tensor as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def _start_facts(tensor: Tensor, threads: Executor) -> tuple[str, list[int], Callable[[], str]]:
    """Return the dtype and the shape of a tensor, and a function that waits for the checksum of its values."""
    return str(tensor.dtype), list(tensor.shape), start_checksum(_bytes_of(tensor).numpy(), threads)


def _waited_for(started: Mapping[str, tuple[str, list[int], Callable[[], str]]]) -> dict[str, Any]:
    return {name: [dtype, shape, checksum()] for name, (dtype, shape, checksum) in started.items()}


def _checksum(facts: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return checksum_of({"record": record, "tensors": facts})
