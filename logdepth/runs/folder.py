"""The folder of a run: what is in it, and how to load the model from it.

config.json            the complete config and the key of the token store; written last: with it, a folder is a run
environment.json       versions, device, command
tokenizer.model        SentencePiece model
metrics.jsonl          one line per measurement
best.safetensors       weights with the lowest validation loss so far
last.safetensors       weights of the last checkpoint
checkpoint.safetensors everything needed to resume bit-for-bit
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logdepth.atomic import PARTIAL, alone, read_json, readable_disk_errors, replacing, write_json, write_text
from logdepth.config import from_dict, to_dict
from logdepth.data import Prepared, Tokenizer
from logdepth.errors import UserError
from logdepth.models import LanguageModel
from logdepth.runs.config import RunConfig
from logdepth.runs.environment import environment, typed_command
from logdepth.runs.tensors import load_tensors, save_tensors
from logdepth.version import __version__

VERSION = 1
NAMES = 2
"""The version of the names of weights in files. Names of version 1 are translated when they are read."""
WRITTEN_BEFORE_CONFIG = {"environment.json", "tokenizer.model", "lock"}
"""Files that a run leaves if it is killed before its config is written; a new run replaces them."""
Weights = Literal["best", "last"]


class LoadedRun(NamedTuple):
    """A trained model with its config and its tokenizer."""

    config: RunConfig
    model: LanguageModel
    tokenizer: Tokenizer
    step: int


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def exists(self) -> bool:
        return os.path.isfile(self.path / "config.json")  # noqa: PTH113  (False, not an error, where we may not look)

    def weights(self, which: Weights) -> Path:
        return self.path / f"{which}.safetensors"

    def refuse_if_taken(self) -> None:
        """An error if a new run cannot be written here: the folder holds a run or other files, or is not writable."""
        if self.exists:
            raise UserError(
                f"{self.path} already holds a run; resume it with `logdepth train --resume {self.path}`, "
                "or choose another --out"
            )
        with readable_disk_errors(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"{self.path} is a file; choose another --out")
            existing = next(one for one in (self.path, *self.path.absolute().parents) if one.exists())
            if not os.access(existing, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {self.path}: permission denied in {existing}; choose another --out")
        if self.path.is_dir():
            others = [file.name for file in self.path.iterdir() if not file.name.startswith(PARTIAL)]
            if not set(others) <= WRITTEN_BEFORE_CONFIG:
                raise UserError(f"{self.path} is not empty and holds no run; choose another --out")

    def create(self, config: RunConfig, prepared: Prepared, device: torch.device) -> None:
        """Writes the files of a new run, its config last."""
        self.refuse_if_taken()
        with replacing(self.path / "tokenizer.model") as partial:
            partial.write_bytes(prepared.tokenizer.model)
        write_json(self.path / "environment.json", environment(device) | {"command": typed_command()})
        saved = {"version": VERSION, "logdepth": __version__, "store": prepared.key}
        write_json(self.path / "config.json", saved | {"config": to_dict(config)})

    def config(self) -> RunConfig:
        return from_dict(RunConfig, self._saved()["config"], str(self.path / "config.json"))

    def store_key(self) -> str:
        """The key of the token store that the run trains on."""
        key: str = self._saved()["store"]
        return key

    def environment(self) -> dict[str, Any]:
        saved: dict[str, Any] = read_json(self.path / "environment.json")
        return saved

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path / "tokenizer.model")

    def load(self, which: Weights = "best", device: torch.device | str = "cpu") -> LoadedRun:
        """The trained model, in evaluation mode."""
        config, tokenizer = self.config(), self.tokenizer()
        file = self.weights(which)
        if not file.is_file():
            other = "last" if which == "best" else "best"
            raise UserError(
                f"{file} is not there: resume the run with `logdepth train --resume {self.path}`, "
                f"or, if it is finished, choose --weights {other}"
            )
        tensors, record = self.read_tensors(file)
        with torch.device("meta"):
            model = config.model.build(tokenizer.vocab_size)
        model.allocate(device)
        load_weights(model, tensors, file)
        return LoadedRun(config, model.eval(), tokenizer, record["step"])

    def append_metrics(self, lines: list[dict[str, Any]]) -> None:
        with readable_disk_errors(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines; a last line that a crash cut off is left out."""
        if not self.metrics.is_file():
            return []
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def rewind_metrics(self, step: int, validated: int) -> None:
        """Removes the lines after the steps from which training resumes: these are measured again."""
        limits = {"train": step, "valid": validated}
        kept = [line for line in self.read_metrics() if line["step"] <= limits[line["kind"]]]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def save_weights(self, which: Weights, tensors: dict[str, Tensor], step: int) -> None:
        self.save_tensors(self.weights(which), tensors, {"step": step})

    def save_tensors(self, file: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Saves tensors that are named after the model's weights."""
        save_tensors(file, tensors, record | {"names": NAMES})

    def read_tensors(self, file: Path) -> tuple[dict[str, Tensor], Any]:
        """Tensors named after the weights of the model as it is built today, and their record."""
        tensors, record = load_tensors(file)
        if isinstance(record, dict) and record.get("names", 1) < NAMES:
            translate = getattr(self.config().model, "current_name", None)
            if translate is not None:
                tensors = _translated(tensors, translate)
        return tensors, record

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in this folder."""
        with alone(self.path, f"another process is training in {self.path}"):
            for partial in self.path.glob(f"{PARTIAL}*"):  # left by a killed process
                partial.unlink()
            yield

    def _saved(self) -> dict[str, Any]:
        if not self.exists:
            runs = sorted(self.path.glob("runs/*/config.json"))
            study = f"; it is a study: give one of its runs, such as {runs[0].parent}" if runs else ""
            raise UserError(f"{self.path} holds no run: there is no config.json in it{study}")
        saved: dict[str, Any] = read_json(self.path / "config.json")
        if not isinstance(saved, dict) or not {"version", "config", "store"} <= saved.keys():
            raise UserError(f"{self.path}/config.json is not that of a run")
        if saved["version"] != VERSION:
            raise UserError(
                f"{self.path}/config.json has version {saved['version']}; this logdepth reads version {VERSION}"
            )
        return saved


def _translated(tensors: dict[str, Tensor], translate: Callable[[str], str | None]) -> dict[str, Tensor]:
    """With the names of weights translated; model/ or optimizer/ may precede them, and /exp_avg or the like follow."""
    found = {}
    for name, tensor in tensors.items():
        before, weight, after = re.fullmatch(r"((?:model|optimizer)/)?([^/]+)(/.*)?", name).groups("")  # type: ignore[union-attr]
        current = translate(weight)
        if current is not None:
            found[f"{before}{current}{after}"] = tensor
    return found


def load_weights(model: LanguageModel, tensors: dict[str, Tensor], file: Path) -> None:
    """Loads weights into a model; missing weights, other shapes and unknown weights are errors."""
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise UserError(f"{file} does not fit the model ({str(error).splitlines()[1].strip()})") from None
    for what, names in (("no", missing), ("a", unexpected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{file} does not fit the model: it has {what} weight '{names[0]}'{more}")
