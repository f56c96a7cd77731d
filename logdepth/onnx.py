"""A run as a folder for ONNX Runtime: the step of one token as a graph, the first state, the tokenizer and a README.

It needs onnxscript, and what it writes needs onnxruntime, NumPy and SentencePiece; the extra `onnx` has all.
"""

import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxscript  # noqa: F401  (torch.onnx needs it, and would say so in many lines)
import torch
from torch import Tensor
from torch.export import ExportedProgram

from logdepth.atomic import new_folder, write_text
from logdepth.data import CORPORA
from logdepth.data.locate import refuse_unprintable
from logdepth.decoding.exported_step import export_step
from logdepth.errors import UserError
from logdepth.models import LM, num_parameters
from logdepth.runs import RunFolder, Weights
from logdepth.version import __version__

STEP, STATE, TOKENIZER = "step.onnx", "state.npz", "tokenizer.model"
NEXT = "next_"
"""The names of a step's outputs begin so: a graph must not have an input and an output of the same name."""
ONE_FILE = 2**30
"""Bytes of weights up to which they are in the file of the graph; it may not exceed 2 GiB."""

README = """# {name}

One step of a language model of {parameters:,} parameters for ONNX Runtime, exported by logdepth {version}. A step
reads one token of each of {batch:,} rows and returns the logits of the next ones and the state after them.

| file | what it is |
|---|---|
| `step.onnx` | the step{beside} |
| `state.npz` | the state of rows that have read nothing |
| `tokenizer.model` | the tokenizer, for SentencePiece |

## Use
`pip install onnxruntime sentencepiece`, then in this folder:

```python
import numpy as np
import onnxruntime
import sentencepiece

session = onnxruntime.InferenceSession("step.onnx")
tokenizer = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
state = dict(np.load("state.npz"))
tokens = tokenizer.encode("The")
for place in range({count}):
    logits, *after = session.run(None, {{"tokens": np.full({batch}, tokens[place]), **state}})
    state = dict(zip(state, after))  # they are in the same order
    if place + 1 == len(tokens):
        tokens.append(int(logits[0].argmax()))  # the likeliest token
{stop}print(tokenizer.decode(tokens))
```

{end}

## State
A row may read {max_length:,} tokens. After that its logits are NaN. `length` counts the tokens of each row, so rows may
have different lengths. A state is {bytes:,} bytes, whatever its length.

| input | type | shape |
|---|---|---|
| `tokens` | int64 | {batch} |
{table}

The outputs are `logits`, {dtype}, {batch} × {vocab_size}, and then each tensor of the state in this order, with
`next_` before its name.
"""
STOP = """        if tokens[-1] == tokenizer.eos_id():  # the end of a document
            break
"""
SEPARATED = "Token {end} ends a document: where it is chosen, the text is complete. It is also what a text starts from."
STREAM = "The model was trained on one stream of text. It knows no end of a document."


def to_onnx(program: ExportedProgram, state: Mapping[str, Tensor], file: Path) -> None:
    """Writes an exported step as an ONNX model.

    Args:
        program: what `export_step` returned; likewise `state`, whose tensors are inputs of the same names.
        file: the file to write. Weights above a gigabyte go into a file beside it, `FILE.data`.
    """
    size = sum(one.nbytes for one in program.state_dict.values())
    with _quietly():
        model = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["tokens", *state],
            output_names=["logits", *(NEXT + name for name in state)],
            verbose=False,
        )
        assert model is not None
        model.save(file, external_data=size > ONE_FILE)


def export_run(run: Path, folder: Path, weights: Weights = "best", *, batch: int = 1, max_length: int = 4096) -> None:
    """Writes the model of a run as a folder for ONNX Runtime.

    Args:
        run: the folder of a run.
        folder: the folder to write, which must not exist.
        weights: those with the lowest validation loss ("best"), or those of the last checkpoint ("last").
        batch: rows of a step.
        max_length: tokens that a row may read.
    """
    refuse_unprintable(folder, "choose another folder")
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; choose another folder")
    loaded = RunFolder(run).load(weights)
    assert isinstance(loaded.model, LM)
    program, state = export_step(loaded.model.eval(), batch, max_length)
    with new_folder(folder) as partial:
        to_onnx(program, state, partial / STEP)
        arrays: dict[str, Any] = {name: one.numpy() for name, one in state.items()}
        np.savez(partial / STATE, **arrays)
        shutil.copyfile(run / TOKENIZER, partial / TOKENIZER)
        beside = sorted(one.name for one in partial.glob(f"{STEP}.*"))
        separated = CORPORA[loaded.config.data.corpus].separated
        readme = README.format(
            name=run.resolve().name,
            parameters=num_parameters(loaded.model),
            version=__version__,
            batch=batch,
            beside="".join(f"; its weights are in `{name}`" for name in beside),
            count=min(max_length, 60),
            stop=STOP if separated else "",
            end=SEPARATED.format(end=loaded.tokenizer.end_of_document) if separated else STREAM,
            max_length=max_length,
            bytes=sum(one.nbytes for one in arrays.values()),
            table="\n".join(f"| `{name}` | {one.dtype} | {_shape(one)} |" for name, one in arrays.items()),
            dtype=str(loaded.model.embedding.weight.dtype).removeprefix("torch."),
            vocab_size=loaded.model.vocab_size,
        )
        write_text(partial / "README.md", readme)


def _shape(array: np.ndarray) -> str:
    return " × ".join(map(str, array.shape))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's messages about packages that a step does not need, and about its own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
