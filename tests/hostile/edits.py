"""Plausible edits by a person to the files of runs, the cache, a study and a sweep, and every verb that reads them.

    python -m tests.hostile.edits
    python -m tests.hostile.edits --only 12

Outcomes are those of `flips`. An edit that the documents allow, such as one of a sweep's best.json, may change results.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from tests.hostile.flips import project_in
from tests.hostile.outcomes import HARMLESS, Case, parser, run_cases
from tests.hostile.project import LOSSLESS_STORE, LOSSY, STORE, Project

Change = Callable[[Path, Path], None]
"""A function of the project's folder and the file."""


class Edit(NamedTuple):
    """An edit of one file."""

    file: str
    """Pattern of the file; if several match, the first is edited."""
    what: str
    change: Change
    allowed: tuple[str, ...] = ()
    """Names of the checks whose results may change, because the documents say that the file may be changed so."""


def field(path: str, value: Any) -> Change:
    """Set a field of a JSON file; `path` is dotted. If the value is a function, it gets the old value."""

    def change(_: Path, file: Path) -> None:
        whole = json.loads(file.read_text())
        set_field(whole, path, value)
        file.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")

    return change


def set_field(whole: Any, path: str, value: Any) -> None:
    *names, last = (int(name) if name.isdigit() else name for name in path.split("."))
    inner = whole
    for name in names:
        inner = inner[name]
    inner[last] = value(inner[last]) if callable(value) else value


def without(name: str) -> Change:
    def change(_: Path, file: Path) -> None:
        whole = json.loads(file.read_text())
        del whole[name]
        file.write_text(json.dumps(whole, indent=2))

    return change


def rewritten(form: Callable[[Any], str]) -> Change:
    return lambda _, file: _write(file, form(json.loads(file.read_text())).encode())


def raw(edit: Callable[[bytes], bytes]) -> Change:
    return lambda _, file: _write(file, edit(file.read_bytes()))


def lines(edit: Callable[[list[bytes]], list[bytes]]) -> Change:
    return raw(lambda data: b"".join(edit(data.splitlines(keepends=True))))


def inserted(line: bytes, place: int = 3) -> Change:
    return lines(lambda whole: [*whole[:place], line + b"\n", *whole[place:]])


def line_field(name: str, value: Any, place: int = 2) -> Change:
    """Set a field of one line of a .jsonl file."""

    def edit(whole: list[bytes]) -> list[bytes]:
        line = json.loads(whole[place])
        line[name] = value
        return [*whole[:place], json.dumps(line).encode() + b"\n", *whole[place + 1 :]]

    return lines(edit)


def tokens(edit: Callable[[Any], Any]) -> Change:
    return raw(lambda data: edit(np.frombuffer(data, dtype="<u2").copy()).astype("<u2").tobytes())


def replaced_by(pattern: str) -> Change:
    return lambda world, file: _write(file, _first(world, pattern).read_bytes())


def swapped_with(pattern: str) -> Change:
    def change(world: Path, file: Path) -> None:
        other = _first(world, pattern)
        mine, its = file.read_bytes(), other.read_bytes()
        file.write_bytes(its)
        other.write_bytes(mine)

    return change


def removed(_: Path, file: Path) -> None:
    file.unlink()


def as_folder(_: Path, file: Path) -> None:
    file.unlink()
    file.mkdir()


def unreadable(_: Path, file: Path) -> None:
    file.chmod(0)


def copied_to(name: str) -> Change:
    return lambda _, file: shutil.copyfile(file, file.with_name(name)) and None


def tensors(edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> Change:
    """Change the tensors or the record of a safetensors file; checksums in the record stay as they are."""

    def change(_: Path, file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            record = json.loads(opened.metadata()["logdepth"])
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        edit(found, record)
        save_file(found, file, metadata={"logdepth": json.dumps(record)})

    return change


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def _first(folder: Path, pattern: str) -> Path:
    return next(file for file in sorted(folder.glob(pattern)))


def state(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the state of training in the record of a checkpoint."""
    return tensors(lambda _, record: edit(record["standing"]))


def solver_state(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the state of training in the record of a checkpoint on a task."""
    return tensors(lambda _, record: edit(record["state"]))


def _first_weight(edit: Callable[[Any], Any]) -> Change:
    def change(found: dict[str, Any], _: dict[str, Any]) -> None:
        name = next(name for name in sorted(found) if found[name].dim() == 2)
        found[name] = edit(found[name])

    return tensors(change)


def _renamed(found: dict[str, Any], _: dict[str, Any]) -> None:
    name = sorted(found)[-1]
    found[f"{name}s"] = found.pop(name)


CRLF = raw(lambda data: data.replace(b"\n", b"\r\n"))
COMPACT = rewritten(lambda whole: json.dumps(whole, separators=(",", ":")))
INDENTED = rewritten(lambda whole: json.dumps(whole, indent=4, ensure_ascii=True))
REVERSED = rewritten(lambda whole: json.dumps(dict(reversed(whole.items())), indent=2))
EMPTY = raw(lambda _: b"")
HALF = raw(lambda data: data[: len(data) // 2])
JUNK = raw(lambda data: data + b"\n# edited\n")
BOM = raw(lambda data: b"\xef\xbb\xbf" + data)
FORMS = (
    ("CRLF", CRLF),
    ("compact", COMPACT),
    ("indented and ASCII", INDENTED),
    ("fields in another order", REVERSED),
    ("a byte order mark", BOM),
    ("junk at the end", JUNK),
)
BEST, OF_CONFIG = ("train best.json",), "train the config of a run"
SIDECAR, RESULT, TIMES = f"{STORE}/test.json", "study/results/text-ar-grc-0.json", "study/results/timing-*.json"
TOKENIZER = f"cache/tokenizers/text-{LOSSY}-*"
STUDY_RUN = "study/runs/ar-grc-0"
METRICS = (
    ("another loss", line_field("loss", 1.5)),
    ("another step", line_field("step", 7)),
    ("NaN as a loss", line_field("loss", float("nan"))),
    ("text as a loss", line_field("loss", "low")),
    ("an unknown kind", line_field("kind", "test")),
    ("a line deleted", lines(lambda whole: whole[:2] + whole[3:])),
    ("a line twice", lines(lambda whole: [*whole[:3], *whole[2:]])),
    ("lines reordered", lines(lambda whole: [whole[1], whole[0], *whole[2:]])),
    ('{"x":1}', inserted(b'{"x":1}')),
    ("[1]", inserted(b"[1]")),
    ("5", inserted(b"5")),
    ("not JSON", inserted(b"loss is low here")),
    ("not UTF-8", inserted(b'{"kind": "train\xff"}')),
    ("an empty line", inserted(b"")),
    ("nested brackets", inserted(b"[" * 100_000)),
    ("a huge integer", inserted(b'{"kind": "train", "step": ' + b"9" * 6000 + b"}")),
    ("the last line cut off", raw(lambda data: data[:-20])),
    ("half of it", HALF),
    ("nothing in it", EMPTY),
    ("CRLF", CRLF),
)
STORE_FIELDS: tuple[tuple[str, Any], ...] = (
    *(("bytes", value) for value in (9970, -5, 0, "a", None)),
    *(("words", value) for value in (7, -5, 0)),
    *(("tokens", value) for value in (0, -5, "a", lambda old: old - 1, lambda old: old + 1)),
    *((name, 3) for name in ("unknown", "documents", "line_ends", "separator")),
    *(("vocab_size", value) for value in (50, 97, "a")),
    *(("dtype", value) for value in ("<u4", "<i2", "<f2", "nonsense", 5)),
    ("separator", None),
    ("text_sha256", "0" * 64),
    ("tokenizer_hash", "0" * 16),
    ("corpus", "ptb"),
    ("split", "train"),
)
CONFIG_FIELDS: tuple[tuple[str, Any], ...] = (
    ("config.model.input_residual", 0.2),
    ("config.model.post_merge", "every"),
    ("config.model.operator.activation", "gelu"),
    ("config.model.leaf_norm", False),
    ("config.model.depth", 2),
    ("config.train.learning_rate", 0.5),
    ("config.train.batch_size", 5),
    ("config.train.context", 17),
    ("config.train.max_steps", 14),
    ("config.train.weight_decay", 0.5),
    ("config.train.schedule", "wsd"),
    ("config.train.precision", "bfloat16"),
    ("config.train.reset_at_documents", True),
    ("config.data.corpus", "pydocs"),
    ("config.data.tokenizer.lossless", True),
    ("config.seed", 5),
    ("config", {}),
    ("store", "text-96-0000000000000000"),
    ("version", 2),
)
RESULT_FIELDS: tuple[tuple[str, Any], ...] = (
    ("test.0.token_perplexity", 12.5),
    ("test.0.word_perplexity", 12.5),
    ("test.0.bits_per_byte", 1.0),
    ("test.0.loss", 1.0),
    ("test.0.nats", 3.0),
    ("test.0.tokens", 5),
    ("test.0.tokens", 0),
    ("test.0.context", 17),
    ("test", []),
    ("valid_loss", 1.0),
    ("parameters", 1),
    ("steps", 31),
    ("best_step", 31),
    ("config", {}),
    ("config.train.learning_rate", 0.5),
    ("row", "x"),
    ("recipe", "x"),
    ("data.splits.test.bytes", 9970),
    ("data.splits.test.words", 1),
    ("data.tokenizer_hash", "0" * 16),
    ("positions.nats.3", 1.0),
    ("train_curve.3.loss", 1.0),
    ("valid_curve.0.loss", 1.0),
    ("samples.0.text", " is a better sample"),
    ("environment.device", "NVIDIA H200"),
    ("version", 2),
    ("schema", "logdepth.timing"),
)

HYBRID_FIELDS: tuple[tuple[str, Any], ...] = (
    ("config.model.blocks.0.chunk", 8),
    ("config.model.blocks.0.levels", 2),
    ("config.model.blocks.0.write_strength", 2.0),
    ("config.model.blocks.0.reading", "fold"),
    ("config.model.blocks.0.gate", False),
    ("config.model.blocks.0.kind", "MLPConfig"),
    ("config.model.blocks.2.window", 9),
    ("config.model.blocks.2.positions", "alibi"),
    ("config.model.blocks", ["mlp"]),
)
TASK_RESULT, TASK_RUN = "tasks/results/s3-grc-0.json", "tasks/runs/s3-grc-0"
BEGUN_RUN = "begun/runs/s3-grc-0"
BEGUN_FIELDS: tuple[tuple[str, Any], ...] = (
    ("train.learning_rate", 0.5),
    ("train.steps", 30),
    ("train.batch_tokens", 32),
    ("train.curriculum", None),
    ("train.threads", 2),
    ("solver.blocks.0.heads", 2),
    ("task", "s4"),
    ("form", "whole"),
    ("seed", 9),
)
TASK_FIELDS: tuple[tuple[str, Any], ...] = (
    ("test.0.right", 5),
    ("test.0.classes.0", [4, 4]),
    ("test.2.sequences", 1),
    ("test.1.length", 128),
    ("test", []),
    ("solver", "rope"),
    ("solver", "x"),
    ("parameters", 1),
    ("steps", 31),
    ("curve.0.1", 1.0),
    ("config", {}),
    ("config.task", "s4"),
    ("config.seed", 5),
    ("config.train.learning_rate", 0.5),
    ("version", 2),
)

EDITS: tuple[Edit, ...] = (
    *(Edit(SIDECAR, f"{name} = {value if not callable(value) else 'one off'!r}", field(name, value))
      for name, value in STORE_FIELDS),
    Edit(SIDECAR, "bytes left out", without("bytes")),
    Edit(SIDECAR, "an unknown field", lambda world, file: _add_field(file, "note", "mine")),
    Edit(f"{STORE}/valid.bin", "a token out of range", tokens(lambda ids: _with(ids, 10, 65_535))),
    Edit(f"{STORE}/valid.bin", "another token", tokens(lambda ids: _with(ids, 10, (ids[10] + 1) % LOSSY))),
    Edit(f"{STORE}/valid.bin", "two tokens exchanged", tokens(lambda ids: _with(ids, slice(20, 22), ids[[21, 20]]))),
    Edit(f"{STORE}/valid.bin", "one byte less", raw(lambda data: data[:-1])),
    Edit(f"{STORE}/valid.bin", "one token less", raw(lambda data: data[:-2])),
    Edit(f"{STORE}/valid.bin", "zeros", raw(lambda data: bytes(len(data)))),
    Edit(f"{STORE}/valid.bin", "nothing in it", EMPTY),
    Edit(f"{STORE}/valid.bin", "removed", removed),
    Edit(f"{STORE}/test.bin", "those of valid", replaced_by(f"{STORE}/valid.bin")),
    Edit(f"{STORE}/train.bin", "a token out of range", tokens(lambda ids: _with(ids, 100, 60_000))),
    Edit(f"{STORE}/train.bin", "another token", tokens(lambda ids: _with(ids, 100, 5))),
    Edit(f"{LOSSLESS_STORE}/test.bin", "another token", tokens(lambda ids: _with(ids, 10, 300))),
    Edit(f"{STORE}/tokenizer.model", "another corpus's", replaced_by("other/tokenizer.model")),
    Edit(f"{STORE}/tokenizer.model", "another vocabulary's", replaced_by("lossless/tokenizer.model")),
    Edit(f"{STORE}/tokenizer.model", "half of it", HALF),
    Edit(f"{STORE}/tokenizer.model", "removed", removed),
    Edit(f"{TOKENIZER}/tokenizer.model", "another corpus's", replaced_by("other/tokenizer.model")),
    Edit(f"{TOKENIZER}/tokenizer.model", "nothing in it", EMPTY),
    Edit(f"{TOKENIZER}/tokenizer.model", "removed", removed),
    Edit(f"{TOKENIZER}/tokenizer.json", "another share", field("sampled_share", 0.5)),
    Edit("cache/census/*.json", "bytes of test", field("splits.test.bytes", 9970)),
    Edit("cache/census/*.json", "words of train", field("splits.train.words", 9970)),
    Edit("cache/census/*.json", "SHA-256 of test", field("splits.test.sha256", "0" * 64)),
    Edit("cache/census/*.json", "5", raw(lambda _: b"5\n")),
    Edit("cache/census/*.json", "nothing in it", EMPTY),
    *(Edit(f"{run}/config.json", f"{name} = {value!r}", field(name, value))
      for run in ("run", "stopped") for name, value in CONFIG_FIELDS),
    Edit(f"{STUDY_RUN}/config.json", "another learning rate", field("config.train.learning_rate", 0.5)),
    Edit("stopped/config.json", "another text", field("config.data.paths", lambda _: ["elsewhere"])),
    *(Edit(f"{run}/tokenizer.model", what, change)
      for run in ("run", "stopped", STUDY_RUN)
      for what, change in (
          ("another corpus's", replaced_by("other/tokenizer.model")),
          ("another vocabulary's", replaced_by("lossless/tokenizer.model")),
          ("half of it", HALF),
          ("nothing in it", EMPTY),
          ("removed", removed),
      )),
    Edit("run/best.safetensors", "the last weights", replaced_by("run/last.safetensors")),
    Edit("run/best.safetensors", "those of an earlier step", replaced_by("stopped/best.safetensors")),
    Edit("run/best.safetensors", "those of another run", replaced_by("other/best.safetensors")),
    Edit("run/best.safetensors", "those of another model", replaced_by("lossless/best.safetensors")),
    Edit("run/best.safetensors", "a checkpoint", replaced_by("run/checkpoint.safetensors")),
    Edit("run/best.safetensors", "weights 1 % larger", _first_weight(lambda one: one * 1.01)),
    Edit("run/best.safetensors", "weights in bfloat16", _first_weight(lambda one: one.bfloat16())),
    Edit("run/best.safetensors", "a weight transposed", _first_weight(lambda one: one.t().contiguous())),
    Edit("run/best.safetensors", "a weight renamed", tensors(_renamed)),
    Edit("run/best.safetensors", "half of it", HALF),
    Edit("run/best.safetensors", "nothing in it", EMPTY),
    Edit("run/best.safetensors", "removed", removed),
    Edit("run/best.safetensors", "bytes after the end", JUNK),
    Edit("run/best.safetensors", "another step", tensors(lambda _, record: record.update(step=3))),
    Edit("run/best.safetensors", "no step", tensors(lambda _, record: record.pop("step"))),
    Edit("run/best.safetensors", "an empty record", tensors(lambda _, record: record.clear())),
    Edit("run/last.safetensors", "those of another run", replaced_by("other/last.safetensors")),
    Edit("stopped/checkpoint.safetensors", "that of another run", replaced_by("other/checkpoint.safetensors")),
    Edit("stopped/checkpoint.safetensors", "that of a later step", replaced_by("run/checkpoint.safetensors")),
    Edit("stopped/checkpoint.safetensors", "the weights", replaced_by("stopped/last.safetensors")),
    Edit("stopped/checkpoint.safetensors", "weights 1 % larger", _first_weight(lambda one: one * 1.01)),
    Edit("stopped/checkpoint.safetensors", "half of it", HALF),
    Edit("stopped/checkpoint.safetensors", "an unknown field", state(lambda found: found.update(x=1))),
    Edit("stopped/checkpoint.safetensors", "a field less", state(lambda found: found.pop("best_loss"))),
    Edit("stopped/checkpoint.safetensors", "another step", state(lambda found: found.update(step=5))),
    Edit("stopped/checkpoint.safetensors", "a step as text", state(lambda found: found.update(step="8"))),
    Edit("stopped/checkpoint.safetensors", "no fields", state(lambda found: found.clear())),
    *(Edit("stopped/metrics.jsonl", what, change) for what, change in METRICS),
    # The message about damaged metrics proposes to move them away; resuming says that they are lost, so it warns.
    Edit("stopped/metrics.jsonl", "removed", removed, ("resume",)),
    *(Edit(f"{STUDY_RUN}/metrics.jsonl", what, change) for what, change in METRICS),
    Edit(f"{STUDY_RUN}/metrics.jsonl", "removed", removed),
    Edit("stopped/environment.json", "another torch", field("torch", "1.0")),
    Edit("stopped/environment.json", "5", raw(lambda _: b"5\n")),
    Edit("stopped/environment.json", "removed", removed),
    Edit(f"{STUDY_RUN}/environment.json", "another device", field("device", "NVIDIA H200")),
    *(Edit(TASK_RESULT, f"{name} = {value!r}", field(name, value)) for name, value in TASK_FIELDS),
    Edit(TASK_RESULT, "sha256 left out", without("sha256")),
    Edit(TASK_RESULT, "a copy under another name", copied_to("copy.json")),
    *(Edit("hybrid/config.json", f"{name} = {value!r}", field(name, value)) for name, value in HYBRID_FIELDS),
    Edit("hybrid/best.safetensors", "weights 1 % larger", _first_weight(lambda one: one * 1.01)),
    *(Edit(f"{BEGUN_RUN}/config.json", f"{name} = {value!r}", field(name, value)) for name, value in BEGUN_FIELDS),
    Edit(f"{BEGUN_RUN}/config.json", "5", raw(lambda _: b"5\n")),
    Edit(f"{BEGUN_RUN}/config.json", "[]", raw(lambda _: b"[]\n")),
    Edit(f"{BEGUN_RUN}/config.json", "nothing in it", EMPTY),
    Edit(f"{BEGUN_RUN}/config.json", "removed", removed),
    Edit(f"{BEGUN_RUN}/config.json", "sha256 left out", without("sha256")),
    Edit(f"{BEGUN_RUN}/config.json", "a folder of this name", as_folder),
    Edit(f"{BEGUN_RUN}/checkpoint.safetensors", "weights 1 % larger", _first_weight(lambda one: one * 1.01)),
    Edit(f"{BEGUN_RUN}/checkpoint.safetensors", "another step", solver_state(lambda found: found.update(step=5))),
    Edit(f"{BEGUN_RUN}/checkpoint.safetensors", "an unknown field", solver_state(lambda found: found.update(x=1))),
    Edit(f"{BEGUN_RUN}/checkpoint.safetensors", "that of a later step", replaced_by(f"{TASK_RUN}/checkpoint*")),
    Edit(f"{BEGUN_RUN}/checkpoint.safetensors", "that of a text run", replaced_by("run/checkpoint.safetensors")),
    Edit(f"{BEGUN_RUN}/checkpoint.safetensors", "a folder of this name", as_folder),
    Edit(f"{BEGUN_RUN}/checkpoint.safetensors", "nothing in it", EMPTY),
    Edit(f"{TASK_RUN}/config.json", "another seed", field("seed", 9)),
    Edit(f"{TASK_RUN}/config.json", "removed", removed),
    Edit(f"{TASK_RUN}/checkpoint.safetensors", "half of it", HALF),
    *(Edit(RESULT, f"{name} = {value!r}", field(name, value)) for name, value in RESULT_FIELDS),
    Edit(RESULT, "another model's", replaced_by("study/results/text-transformer-alibi-0.json")),
    Edit(RESULT, "exchanged", swapped_with("study/results/text-transformer-alibi-0.json")),
    Edit(RESULT, "a copy under another name", copied_to("copy.json")),
    Edit(RESULT, "removed", removed, ("report",)),  # a report is of the results that are there
    Edit(TIMES, "another time", field("models.0.timings.0.milliseconds", 0.001)),
    Edit(TIMES, "another speed", field("models.0.timings.0.tokens_per_second", 1e9)),
    Edit(TIMES, "another number of parameters", field("models.0.parameters", 1)),
    Edit(TIMES, "no models", field("models", [])),
    Edit("sweep/best.json", "another learning rate", field("config.train.learning_rate", 0.02), BEST),
    Edit("sweep/best.json", "an unknown field", lambda world, file: _add_field(file, "speed", 1), BEST),
    Edit("sweep/sweep.json", "another loss", field("best.loss", 0.1)),
    Edit("sweep/sweep.json", "another learning rate", field("best_config.train.learning_rate", 0.5)),
    Edit("sweep/journal.log", "a line deleted", lines(lambda whole: whole[:9] + whole[10:])),
    # As after a kill, a retry has taken the next number, which is the seed of what one more trial tries.
    Edit("sweep/journal.log", "the last line cut off", raw(lambda data: data[:-20]), ("sweep, one more",)),
    Edit("sweep/journal.log", "not JSON", inserted(b"a note of mine")),
    Edit("sweep/journal.log", "not UTF-8", inserted(b'{"op_code": "\xff"}')),
    Edit("sweep/journal.log", "5", inserted(b"5")),
    Edit("sweep/journal.log", "another loss", lines(lambda whole: [_with_value(line) for line in whole])),
    Edit("sweep/journal.log", "nothing in it", EMPTY),
    Edit("sweep/journal.log", "removed", removed),
    Edit("sweep/trials/0000/config.json", "another seed", field("config.seed", 9)),
    *(Edit(file, what, change)
      for file in ("run/config.json", "stopped/config.json", SIDECAR, RESULT, TIMES, "cache/census/*.json",
                   TASK_RESULT, f"{BEGUN_RUN}/config.json")
      for what, change in FORMS),
    # --config takes the config of any run: in this file, the other run's is whole, and is trained as it says. The verbs
    # that read it together with the weights beside it refuse it.
    Edit("run/config.json", "exchanged with another run", swapped_with("other/config.json"), (OF_CONFIG,)),
    *(Edit(f"run/{name}", "exchanged with another run", swapped_with(f"other/{name}"))
      for name in ("tokenizer.model", "environment.json", "metrics.jsonl", "checkpoint.safetensors")),
    *(Edit(file, "a folder of this name", as_folder)
      for file in ("run/config.json", "run/best.safetensors", "run/tokenizer.model", "stopped/metrics.jsonl", SIDECAR,
                   f"{STORE}/test.bin", RESULT, "sweep/journal.log")),
    *((Edit(file, "no permission to read", unreadable)
       for file in ("run/config.json", "run/best.safetensors", "stopped/metrics.jsonl", SIDECAR, RESULT))
      if os.geteuid() else ()),
)  # fmt: skip


def _add_field(file: Path, name: str, value: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}, indent=2))


def _with(ids: Any, place: Any, value: Any) -> Any:
    ids[place] = value
    return ids


def _with_value(line: bytes) -> bytes:
    """A line of the journal that ends a trial, with another loss."""
    found = json.loads(line)
    if found.get("values"):
        found["values"] = [value - 1.0 for value in found["values"]]
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"


def one(project: Project, number: int, few: bool = False) -> Case:
    """Make an edit, by its number from 1 on, and run the checks that read the file, or only a quick one."""
    edit = EDITS[number - 1]
    name = _first(project.pristine, edit.file).relative_to(project.pristine).as_posix()
    checks = project.checks_of(name, few)
    if not checks:
        return Case(f"{name}: {edit.what}", HARMLESS, "nothing reads it")
    what = f"{name}: {edit.what}"
    return project.after_all(what, checks, lambda world: edit.change(world, world / name), [name], edit.allowed)


def main() -> int:
    arguments = parser(__doc__, count=len(EDITS)).parse_args()
    with project_in(arguments.keep) as project:
        numbers = arguments.only or list(range(1, min(arguments.count, len(EDITS)) + 1))
        return run_cases("edits", numbers, lambda number: one(project, number), arguments)


if __name__ == "__main__":
    sys.exit(main())
