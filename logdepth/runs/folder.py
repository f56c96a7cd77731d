"""The folder of a run: what is in it, and how to load the model from it.

config.json            the complete config, the key of the token store and the hash of the tokenizer; written last:
                       with it, a folder is a run
environment.json       versions, device, command
tokenizer.model        SentencePiece model
metrics.jsonl          one line per measurement
best.safetensors       weights with the lowest validation loss so far
last.safetensors       weights of the last checkpoint
checkpoint.safetensors everything needed to resume bit-for-bit

All of them carry checksums. Weights and checkpoints name the checksum of the config and the hash of the tokenizer that
they belong to; a checkpoint names the checksums of the metrics and of the weights that were saved with it.
"""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logdepth.atomic import (
    PARTIAL,
    alone,
    read_json,
    readable_disk_errors,
    remove_partial,
    replacing,
    write_json,
    write_text,
)
from logdepth.checksums import checksum_of, checksum_of_bytes, mismatch, seal, unseal
from logdepth.config import from_dict, to_dict
from logdepth.data import Prepared, Tokenizer
from logdepth.data.locate import refuse_unprintable
from logdepth.errors import UserError
from logdepth.models import LanguageModel, unallocated
from logdepth.runs.config import RunConfig
from logdepth.runs.environment import environment, typed_command
from logdepth.runs.tensors import VALUES, load_tensors, read_record, save_tensors
from logdepth.version import __version__

PRETRAINED = Path(__file__).parents[1] / "pretrained"
"""The run that comes with the library, for whoever names none."""
VERSION = 2
"""The version of config.json. Runs of version 1 carry no checksums."""
NAMES = 2
"""The version of the names of weights in files. Names of version 1 are translated when they are read."""
WRITTEN_BEFORE_CONFIG = {"environment.json", "tokenizer.model", "lock"}
"""Files that a run leaves if it is killed before its config is written; a new run replaces them."""
Weights = Literal["best", "last"]
RESTORE = "restore it from a copy"
WEIGHTS_REMEDY = f"{RESTORE}, or train a new run"
METRICS_REMEDY = f"{RESTORE}, or move it away to resume without the metrics so far"
CHECKPOINT_REMEDY = f"{RESTORE}, or remove it to use the weights without it"
CONFIG_REMEDY = (
    f"{RESTORE}; to train longer, use `logdepth train --resume {{}} --train.max-steps N`; for other changes, "
    "start a new run"
)
OF_A_TASK = "it is of a study of tasks, which only `logdepth reproduce` and `logdepth report` read"
METRICS_FIELDS = {
    "train": {"step", "seconds", "loss", "tokens_per_second"},
    "valid": {"step", "seconds", "valid_loss"},
}
"""Fields that a line of metrics of each kind has."""


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The content of config.json."""

    config: Any
    store: str
    tokenizer: str | None
    """Hash of tokenizer.model; None in runs of version 1."""
    previous: list[str]
    """Identities of the configs that the run had before it was extended."""
    sealed: bool
    """Whether the run was written with checksums."""
    identity: str
    """Checksum of config.json, which weights and checkpoints name."""


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
                f"{self.path} already holds a run; resume it with `logdepth train --resume {quoted(self.path)}`, "
                "or choose another --out"
            )
        refuse_unprintable(self.path, "choose another --out")  # safetensors reads no such file
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

    def create(self, config: RunConfig, prepared: Prepared, device: torch.device, ranks: int = 1) -> None:
        """Writes the files of a new run, its config last."""
        self.refuse_if_taken()
        with replacing(self.path / "tokenizer.model") as partial:
            partial.write_bytes(prepared.tokenizer.model)
        write_json(self.path / "environment.json", seal(environment(device, ranks) | {"command": typed_command()}))
        self._write_config(config, prepared.key, prepared.tokenizer.hash, previous=[])

    def change_config(self, config: RunConfig) -> None:
        """Replaces the config of the run. What was saved with the config before still belongs to the run."""
        saved = self._saved()
        self._write_config(config, saved.store, self.tokenizer().hash, [*saved.previous, saved.identity])

    def _write_config(self, config: RunConfig, store: str, tokenizer: str, previous: list[str]) -> None:
        facts = {"version": VERSION, "logdepth": __version__, "store": store, "tokenizer": tokenizer}
        fields = facts | {"previous": previous, "config": to_dict(config)}
        write_json(self.path / "config.json", seal(fields))

    @cached_property
    def belonging(self) -> dict[str, str]:
        """What weights and checkpoints name: the config and the tokenizer that they belong to.

        It is read once, so that a file that is edited or removed during training cannot keep the run from saving.
        """
        saved = self._saved()
        return {"config": saved.identity, "tokenizer": saved.tokenizer or self.tokenizer().hash}

    def config(self) -> RunConfig:
        return from_dict(RunConfig, self._saved().config, str(self.path / "config.json"))

    def store_key(self) -> str:
        """The key of the token store that the run trains on."""
        return self._saved().store

    def environment(self) -> dict[str, Any]:
        file = self.path / "environment.json"
        return unseal(_fields_in(file), file, RESTORE, required=self._saved().sealed)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path / "tokenizer.model", expected_hash=self._saved().tokenizer, remedy=RESTORE)

    def load(self, which: Weights = "best", device: torch.device | str = "cpu") -> LoadedRun:
        """The trained model, in evaluation mode."""
        config, tokenizer = self.config(), self.tokenizer()
        file = self.weights(which)
        if not file.is_file():
            other = "last" if which == "best" else "best"
            raise UserError(
                f"{file} is not there: resume the run with `logdepth train --resume {quoted(self.path)}`, "
                f"or, if it is finished, choose --weights {other}"
            )
        tensors, record = self.read_weights(which)
        with unallocated():
            model = config.model.build(tokenizer.vocab_size)
        load_weights(model, tensors, file, assign=True)
        model.allocate(device)
        return LoadedRun(config, model.eval(), tokenizer, record["step"])

    def append_metrics(self, lines: list[dict[str, Any]]) -> None:
        with readable_disk_errors(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines; a last line that a crash cut off is left out."""
        if not self.metrics.is_file():
            return []
        try:
            text = self.metrics.read_bytes().decode()
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"cannot read {self.metrics} ({error}); {self._metrics_remedy()}") from None
        complete, _, _ = text.rpartition("\n")
        found = []
        for number, line in enumerate(complete.split("\n") if complete else [], start=1):
            fields = _metrics_line(line)
            if fields is None:
                where = f"{self.metrics}:{number}"
                raise UserError(f"{where} is not a line of metrics: {line[:60]!r}; {self._metrics_remedy()}")
            found.append(fields)
        return found

    def _metrics_remedy(self) -> str:
        """What to do about metrics that cannot be read: those of a finished run never follow again."""
        record: dict[str, Any] = {}
        with contextlib.suppress(UserError):
            record = read_record(self.checkpoint, CHECKPOINT_REMEDY)
        state = record.get("standing")
        return WEIGHTS_REMEDY if isinstance(state, dict) and state.get("finished") else METRICS_REMEDY

    def metrics_mark(self) -> dict[str, Any]:
        """The size and the checksum of the metrics so far, which a checkpoint names."""
        data = self.metrics.read_bytes() if self.metrics.is_file() else b""
        return {"bytes": len(data), "sha256": checksum_of_bytes(data)}

    def rewind_metrics(self, mark: dict[str, Any], *, finished: bool = False) -> None:
        """Removes the metrics after a mark, because training resumes there; those before it must be as they were.

        They may be gone, but not those of a finished run, because no new ones follow.
        """
        if not self.metrics.is_file():
            if mark["bytes"] and finished:
                raise UserError(f"{self.metrics} is gone, and the run is finished; {WEIGHTS_REMEDY}")
            if mark["bytes"]:
                print(f"{self.metrics} is gone: the metrics so far are lost, and new ones follow", file=sys.stderr)
            return
        data = self.metrics.read_bytes()
        kept = data[: mark["bytes"]]
        if len(kept) != mark["bytes"] or checksum_of_bytes(kept) != mark["sha256"]:
            raise mismatch(self.metrics, WEIGHTS_REMEDY if finished else METRICS_REMEDY)
        if kept == data:
            return
        complete, _, _ = data[len(kept) :].rpartition(b"\n")  # what a crash cut off is no surprise
        if unreadable := sum(not _is_metrics_line(line) for line in complete.split(b"\n") if line):
            lines = "1 line that is" if unreadable == 1 else f"{unreadable} lines that are"
            again = "" if finished else "; the steps since then follow again"
            print(f"{self.metrics}: removed {lines} unreadable{again}", file=sys.stderr)
        with replacing(self.metrics) as partial:
            partial.write_bytes(kept)

    def rewind_metrics_to_steps(self, step: int, validated: int) -> None:
        """Like `rewind_metrics`, for checkpoints of older versions, which name no mark."""
        limits = {"train": step, "valid": validated}
        kept = [line for line in self.read_metrics() if line["step"] <= limits[line["kind"]]]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def save_weights(self, which: Weights, tensors: dict[str, Tensor], step: int) -> str:
        """Saves weights; returns the checksum by which a checkpoint names them."""
        return self.save_tensors(self.weights(which), tensors, {"step": step, "weights": which})

    def save_tensors(self, file: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> str:
        """Saves tensors that are named after the model's weights; returns their checksum."""
        return save_tensors(file, tensors, record | {"names": NAMES} | self.belonging)

    def read_weights(self, which: Weights) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The weights of a run, and their record."""
        file = self.weights(which)
        tensors, record = self.read_tensors(file)
        if record.get("weights", which) != which:
            raise UserError(
                f"{file} holds the {record['weights']} weights of the run, not the {which}; {WEIGHTS_REMEDY}"
            )
        self._refuse_unnamed(which, record)
        return tensors, record

    def verify_named(self, which: Weights) -> None:
        """An error if the weights that the checkpoint names are gone, or others are in their place.

        It looks at their record only; `read_weights` verifies that the weights match it.
        """
        file = self.weights(which)
        if not file.is_file():
            raise UserError(f"{file} is gone; {WEIGHTS_REMEDY}")
        self._refuse_unnamed(which, read_record(file, WEIGHTS_REMEDY))

    def _refuse_unnamed(self, which: Weights, record: dict[str, Any]) -> None:
        """Raises an error if the checkpoint names other weights than those with this record.

        Weights are saved before their checkpoint: after a kill in between, they are of a later step than it knows.
        Checkpoints of older versions name no weights.
        """
        if not self.checkpoint.is_file():
            return
        checkpoint = read_record(self.checkpoint, CHECKPOINT_REMEDY)
        named, state = checkpoint.get("weights"), checkpoint.get("standing")
        if not isinstance(named, dict) or which not in named or record.get(VALUES) == named[which]:
            return
        known = state.get("validated" if which == "best" else "step") if isinstance(state, dict) else None
        step = record.get("step")
        if not (isinstance(known, int) and isinstance(step, int) and step > known):
            raise UserError(
                f"{self.weights(which)} does not hold the weights that {self.checkpoint} names: one of them is of "
                f"another step, or another run's; {WEIGHTS_REMEDY}"
            )

    def refuse_odd_files(self) -> None:
        """An error if something else than a file has the name of a file that training writes."""
        for file in (self.checkpoint, self.metrics, self.weights("best"), self.weights("last")):
            if file.exists() and not file.is_file():
                raise UserError(f"{file} is not a file; move it away, and restore the file from a copy")

    def read_tensors(self, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors named after the weights of the model as it is built today, and their record."""
        saved = self._saved()
        tensors, record = load_tensors(file, WEIGHTS_REMEDY, required=saved.sealed)
        if record.get("config", saved.identity) not in (saved.identity, *saved.previous):
            raise UserError(
                f"{file} does not belong to {self.path / 'config.json'}: one of them is another run's, or was edited; "
                f"{WEIGHTS_REMEDY}"
            )
        tokenizer = saved.tokenizer or self.tokenizer().hash
        if record.get("tokenizer", tokenizer) != tokenizer:
            raise UserError(
                f"{file} does not belong to {self.path / 'tokenizer.model'}: one of them is another run's; "
                f"{WEIGHTS_REMEDY}"
            )
        if record.get("names", 1) < NAMES:
            translate = getattr(self.config().model, "current_name", None)
            if translate is not None:
                tensors = _translated(tensors, translate)
        return tensors, record

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in this folder."""
        with alone(self.path, f"another process is training in {self.path}"):
            for partial in self.path.glob(f"{PARTIAL}*"):  # left by a killed process
                remove_partial(partial)
            yield

    def _saved(self) -> _Saved:
        if not self.exists:
            runs = sorted(self.path.glob("runs/*/config.json"))
            study = f"; it is a study: give one of its runs, such as {runs[0].parent}" if runs else ""
            with contextlib.suppress(UserError):
                study = f"; {OF_A_TASK}" if runs and _is_of_a_task(_fields_in(runs[0])) else study
            raise UserError(f"{self.path} holds no run: there is no config.json in it{study}")
        file = self.path / "config.json"
        saved = _fields_in(file)
        if _is_of_a_task(saved):
            raise UserError(f"{self.path} holds no run of a language model: {OF_A_TASK}")
        if not {"version", "config", "store"} <= saved.keys():
            raise UserError(f"{file} is not that of a run; {RESTORE}")
        if saved["version"] not in (1, VERSION):
            raise UserError(f"{file} has version {saved['version']}; this logdepth reads versions 1 and {VERSION}")
        sealed = saved["version"] == VERSION
        fields = unseal(saved, file, CONFIG_REMEDY.format(quoted(self.path)), required=sealed)
        if not isinstance(fields["store"], str):
            raise UserError(f"{file}: store: expected a text; got {fields['store']!r}; {RESTORE}")
        return _Saved(
            config=fields["config"],
            store=fields["store"],
            tokenizer=fields.get("tokenizer"),
            previous=fields.get("previous", []),
            sealed=sealed,
            identity=checksum_of(fields),
        )


def quoted(path: Path) -> str:
    """A path as it is typed in a shell."""
    return shlex.quote(str(path))


def _fields_in(file: Path) -> dict[str, Any]:
    """The fields of a JSON file of the run."""
    try:
        saved = read_json(file)
    except UserError as error:
        raise UserError(f"{error}; {RESTORE}") from None
    if not isinstance(saved, dict):
        raise UserError(f"{file} is not that of a run; {RESTORE}")
    return saved


def _is_of_a_task(saved: dict[str, Any]) -> bool:
    """Whether these are the fields of the config.json of a training on a task."""
    return {"task", "solver"} <= saved.keys()


def _is_metrics_line(line: bytes) -> bool:
    try:
        return _metrics_line(line.decode()) is not None
    except UnicodeDecodeError:
        return False


def _metrics_line(line: str) -> dict[str, Any] | None:
    """The fields of a line of metrics; None if it is not one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and METRICS_FIELDS.get(str(found.get("kind")), {"?"}) <= found.keys():
        numbers = [value for name, value in found.items() if name != "kind"]
        if all(isinstance(value, int | float) for value in numbers) and isinstance(found["step"], int):
            return found
    return None


def _translated(tensors: dict[str, Tensor], translate: Callable[[str], str | None]) -> dict[str, Tensor]:
    """With the names of weights translated; model/ or optimizer/ may precede them, and /exp_avg or the like follow."""
    found = {}
    for name, tensor in tensors.items():
        before, weight, after = re.fullmatch(r"((?:model|optimizer)/)?([^/]+)(/.*)?", name).groups("")  # type: ignore[union-attr]
        current = translate(weight)
        if current is not None:
            found[f"{before}{current}{after}"] = tensor
    return found


def load_weights(model: LanguageModel, tensors: dict[str, Tensor], file: Path, *, assign: bool = False) -> None:
    """Loads weights into a model; missing weights, other shapes and unknown weights are errors.

    Args:
        model: the model.
        tensors: its weights.
        file: the file that they were read from, for messages.
        assign: whether the tensors become the model's weights. Otherwise, they are copied into them.
    """
    if assign:
        dtypes = {name: weight.dtype for name, weight in model.state_dict().items()}
        tensors = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=assign)
    except RuntimeError as error:
        raise UserError(f"{file} does not fit the model ({str(error).splitlines()[1].strip()})") from None
    for what, names in (("no", missing), ("a", unexpected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{file} does not fit the model: it has {what} weight '{names[0]}'{more}")
