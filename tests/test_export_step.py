"""Exported steps: the model's answers at every length, from any state, by torch.export and in ONNX Runtime."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import logdepth
from logdepth.blocks import Block
from logdepth.cli import main
from logdepth.decoding.exported_step import exported_state
from logdepth.models import LM, LMConfig, LMState
from tests.block_states import close
from tests.command_line import refused
from tests.decoders import built, prefilled, random_tokens
from tests.small_models import SMALL_MODELS
from tests.written_runs import write_run

LONGEST = 20
"""Binary 10100: the counters of scans carry up to four levels far."""
APART = [0, 3, 7, 15]


@pytest.mark.parametrize("name", sorted(SMALL_MODELS.keys() - {"deep", "recompute"}))  # others have several layers, too
def test_steps_are_those_of_the_model(name: str) -> None:
    model = built(name)
    program, state = logdepth.export_step(model, batch=4, max_length=LONGEST)
    step = program.module()
    check_steps(step, model, state, model.init_state(4), LONGEST)
    apart = prefilled(model, APART)
    check_steps(step, model, exported_state(model, apart, LONGEST), apart, 5)


def check_steps(step: nn.Module, model: LM, state: dict[str, Tensor], expected_state: LMState, count: int) -> None:
    for tokens in random_tokens(count, 4):
        before = {name: one.clone() for name, one in state.items()}
        with torch.no_grad():
            logits, after = step(tokens, state)
            expected, expected_state = model.step(tokens[:, None], expected_state)
        close(logits, expected[:, 0])
        assert all(torch.equal(one, before[name]) for name, one in state.items())  # it is not changed in place
        assert [one.shape for one in after.values()] == [one.shape for one in state.values()]
        assert after["length"].equal(expected_state.lengths)
        state = after


def test_rows_that_are_too_long_have_no_answer() -> None:
    model = built("memory-window")
    program, _ = logdepth.export_step(model, batch=4, max_length=7)
    step, state, lengths = program.module(), exported_state(model, prefilled(model, [0, 5, 6, 7]), 7), [0, 5, 6, 7]
    for more in range(30):
        logits, state = step(torch.zeros(4, dtype=torch.int64), state)
        assert logits.isnan().all(dim=-1).tolist() == [length + more >= 7 for length in lengths]
        assert logits.isnan().any(dim=-1).tolist() == [length + more >= 7 for length in lengths]


def test_a_program_can_be_saved() -> None:
    model, file = built("memory-window"), io.BytesIO()
    program, state = logdepth.export_step(model, batch=2, max_length=8)
    torch.export.save(program, file)
    again = torch.export.load(io.BytesIO(file.getvalue())).module()
    tokens = torch.tensor([1, 2])
    assert torch.equal(again(tokens, state)[0], program.module()(tokens, state)[0])


def test_sizes_are_those_of_the_maximum() -> None:
    model = built("hybrid")
    state = exported_state(model, model.init_state(1), 1000)
    assert state["block0.scan0.blocks"].shape == state["block0.scan0.prefixes"].shape == (1, 10, 6)
    assert state["block1.keys"].shape == (1, 2, 5, 6)  # its window
    model = built("transformer-alibi")
    state = exported_state(model, model.init_state(1), 1000)
    assert state["block0.keys"].shape[2] == 1000
    assert all(one.shape[0] == 1 for one in state.values())


class Counting(Block):
    """Its state is of its own kind, and it does not say how to decode."""

    def forward(self, x: Tensor, state: Any, layout: Any) -> tuple[Tensor, Any]:
        return x, state

    def init_state(self, batch: int) -> Any:
        return [0] * batch


class Decoding(Counting):
    """It decodes, but does not say how to be exported."""

    def static_state(self, state: Any) -> Any:
        return list(state)


def test_what_cannot_be_exported_is_said_in_one_line() -> None:
    model = built("hybrid")
    with pytest.raises(ValueError, match=r"^batch and max_length must be at least 1; got 0 and 4096$"):
        logdepth.export_step(model, batch=0)
    with pytest.raises(ValueError, match=r"^the state has 15 tokens; give max_length 15 or more$"):
        exported_state(model, prefilled(model, APART), 14)
    with pytest.raises(ValueError, match=r"^export_step needs a model in eval mode: call model.eval\(\) first$"):
        logdepth.export_step(built("hybrid").train())
    with pytest.raises(TypeError, match=r"^export_step takes an LM; got Linear$"):
        logdepth.export_step(nn.Linear(2, 2))  # type: ignore[arg-type]
    model.blocks[0] = Counting()  # type: ignore[index]
    with pytest.raises(NotImplementedError, match=r"^Counting has a state of its own kind: it must override "):
        logdepth.export_step(model)
    model.blocks[0] = Decoding()  # type: ignore[index]
    with pytest.raises(NotImplementedError, match=r"^Decoding cannot be exported: its static state must have "):
        logdepth.export_step(model)


@pytest.mark.parametrize(
    "name", ["ar-mlp-ldru", "memory-summary", "memory-fold", "transformer-alibi", "scan-up", "window-1"]
)
def test_onnx_runtime_gives_the_same_answers(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from logdepth.onnx import to_onnx

    model = built(name).float()
    program, first = logdepth.export_step(model, batch=4, max_length=LONGEST)
    to_onnx(program, first, tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    assert [one.name for one in session.get_outputs()] == ["logits", *(f"next_{key}" for key in first)]
    apart = prefilled(model, APART)
    starts = [(first, model.init_state(4), LONGEST + 1), (exported_state(model, apart, LONGEST), apart, 5)]
    for start, expected_state, count in starts:
        state = {key: one.numpy() for key, one in start.items()}
        for number, tokens in enumerate(random_tokens(count, 4)):
            logits, *after = session.run(None, {"tokens": tokens.numpy()} | state)
            state = dict(zip(state, after, strict=True))
            if number == LONGEST:
                assert np.isnan(logits).all()
                break
            with torch.no_grad():
                expected, expected_state = model.step(tokens[:, None], expected_state)
            scale = expected.abs().max().item()
            torch.testing.assert_close(torch.from_numpy(logits), expected[:, 0], rtol=0, atol=1e-4 * scale)


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Path:
    blocks = ("scan:heads=2", "attention:heads=2,window=5", "mlp")
    return write_run(tmp_path / "run", corpus, LMConfig(dim=12, blocks=blocks, tied=False))


def test_an_exported_run_generates_text_as_its_readme_says(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    folder = tmp_path / "onnx"
    assert main(["export", str(run), str(folder), "--to", "onnx", "--max-length", "64"]) == 0
    assert capsys.readouterr().err == f"{folder} is written\n"
    assert {one.name for one in folder.iterdir()} == {"README.md", "state.npz", "step.onnx", "tokenizer.model"}
    assert all(one.stat().st_mode & 0o777 == 0o644 for one in folder.iterdir())
    assert all(str(tmp_path).encode() not in one.read_bytes() for one in folder.iterdir())
    readme = (folder / "README.md").read_text()
    assert "A row may read 64 tokens." in readme
    assert "| `block0.scan0.blocks` | float32 | 1 × 7 × 6 |" in readme
    (program,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(program.splitlines()) <= 17
    program = program.replace('"The"', '"the cat"')
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    trained = logdepth.load(run)
    count = 60 + 1 - len(trained.tokenizer.encode("the cat"))
    assert done.stdout == f"the cat{trained.generate('the cat', max_tokens=count, temperature=0)}\n"


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")

    def line(source: Path, out: Path, *more: str) -> str:
        return refused(capsys, "export", str(source), str(out), *more)

    assert line(run, run, "--to", "onnx").endswith(f"{run} exists already; choose another folder")
    assert "holds no run" in line(tmp_path / "none", tmp_path / "new", "--to", "onnx")
    assert "must be at least 1; got 0 and 4096" in line(run, tmp_path / "new", "--to", "onnx", "--batch", "0")
    assert "are for --to onnx" in line(run, tmp_path / "new", "--to", "hf", "--max-length", "64")
    assert not (tmp_path / "new").exists()
