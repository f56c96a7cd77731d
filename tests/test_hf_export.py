"""Exported runs: the same weights bit by bit, the same tokens, and code that needs no logdepth; and back to a run."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from logdepth.cli import main
from logdepth.data import Tokenizer, TokenizerConfig
from logdepth.errors import UserError
from logdepth.hf.export import export_run, import_run
from logdepth.hf.remote_code import START, closure, remote_code
from logdepth.hf.tokenizer import fast_tokenizer, merges
from logdepth.models import LM, ModelConfig
from logdepth.runs import RunFolder
from tests.command_line import refused
from tests.small_models import HYBRID, SCAN, shake
from tests.tiny_corpus import tiny_data
from tests.written_runs import write_run

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", corpus, HYBRID)


@pytest.mark.parametrize("model", [SCAN, HYBRID], ids=["tied", "untied"])
def test_weights_go_there_and_back_bit_by_bit(
    model: ModelConfig, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder, back = write_run(tmp_path / "run", corpus, model), tmp_path / "hf", tmp_path / "back"
    assert main(["export", str(run), "--to", "hf", str(folder)]) == 0
    assert main(["export", str(folder), str(back), "--to", "run"]) == 0
    assert capsys.readouterr().err == f"{folder} is written\n{back} is written\n"
    before, there, after = (load_file(file) for file in _weights(run, folder, back))
    assert before.keys() == after.keys()
    assert {f"model.{name}" for name in before} == there.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name])
        assert torch.equal(weight, there[f"model.{name}"])
    one, other = RunFolder(run), RunFolder(back)
    assert other.load().step == 7
    assert one.store_key() == other.store_key()
    assert one.tokenizer().model == other.tokenizer().model
    expected = one.config()
    assert other.config() == dataclasses.replace(
        expected,
        data=dataclasses.replace(expected.data, paths=()),
        train=dataclasses.replace(expected.train, init_from=None),
    )


def _weights(run: Path, folder: Path, back: Path) -> tuple[Path, ...]:
    return run / "best.safetensors", folder / "model.safetensors", back / "best.safetensors"


def test_an_exported_folder_says_what_it_holds(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    export_run(run, folder)
    files = "README.md config.json generation_config.json model.safetensors modeling_logdepth.py tokenizer.json "
    assert sorted(one.name for one in folder.iterdir()) == sorted(
        (files + "tokenizer.model tokenizer_config.json").split()
    )
    assert all(one.stat().st_mode & 0o777 == 0o644 for one in folder.iterdir())
    for file in folder.iterdir():  # nothing of this machine is published
        assert str(tmp_path).encode() not in file.read_bytes(), file
    card = (folder / "README.md").read_text()
    assert "`scan:heads=2 attention:heads=2,window=5 mlp`, 2 times" in card
    assert "3.5000 nats per token, after 7 steps" in card  # of the weights, not of the last line
    assert "O(log n), plus the windows of attention" in card
    generation = json.loads((folder / "generation_config.json").read_text())
    end = RunFolder(run).tokenizer().end_of_document
    assert [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [end] * 3


def test_a_model_of_one_stream_has_no_end(corpus: Path, tmp_path: Path) -> None:
    data = dataclasses.replace(tiny_data(corpus), corpus="ptb", paths=())
    export_run(write_run(tmp_path / "run", corpus, SCAN, data=data), tmp_path / "hf")
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert {"bos_token_id", "eos_token_id"}.isdisjoint(generation)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (None, None, "</s>")


def test_models_that_were_trained_further_become_runs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_run(run, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    shake(model, 0.1)
    model.save_pretrained(tmp_path / "tuned", max_shard_size="4KB")  # in several files
    assert "auto_map" not in json.loads((tmp_path / "tuned" / "config.json").read_text())  # there is no code beside it
    assert refused(capsys, "export", str(tmp_path / "tuned"), str(tmp_path / "back"), "--to", "run") == (
        f"logdepth export: {tmp_path}/tuned/tokenizer.model does not exist: the tokenizer is missing; copy it from the "
        "folder that was exported"
    )
    (tmp_path / "tuned" / "tokenizer.model").write_bytes((run / "tokenizer.model").read_bytes())
    import_run(tmp_path / "tuned", tmp_path / "back")
    assert "they were trained further" in capsys.readouterr().err
    loaded = RunFolder(tmp_path / "back").load().model
    assert isinstance(loaded, LM)
    assert all(torch.equal(one, model.model.state_dict()[name]) for name, one in loaded.state_dict().items())
    model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(UserError, match="a run needs the same model and vocabulary"):
        import_run(tmp_path / "tuned", tmp_path / "again")


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_run(run, tmp_path / "hf")

    def line(source: Path | str, out: str, to: str) -> str:
        return refused(capsys, "export", str(source), str(tmp_path / out), "--to", to)

    assert line(run, "hf", "hf").endswith("hf exists already; choose another folder")
    assert line(tmp_path / "hf", "run", "run").endswith("run exists already; choose another folder")
    assert line(tmp_path / "none", "new", "hf").endswith("holds no run: there is no config.json in it")
    assert "does not say from which run it is" in line(run, "new", "run")
    assert "config.json does not exist" in line(tmp_path / "none", "new", "run")
    assert "is not UTF-8 or has control characters" in line(run, "a\nb", "hf")
    for damage in (b"", b"{}" * 20):
        (tmp_path / "hf" / "model.safetensors").write_bytes(damage)
        assert "hf cannot be loaded (" in line(tmp_path / "hf", "new", "run")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert "hf cannot be loaded (" in line(tmp_path / "hf", "new", "run")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".partial*"))


def test_examples_of_the_page_run_as_printed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export_run(run, tmp_path / "pydocs-hf")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hugging-face.md").read_text(), flags=re.DOTALL)
    program = "\n".join(blocks)
    exec(compile(program, "hugging-face.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# → (.*)", program)


CODE = """
import importlib, importlib.abc, inspect, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("logdepth", "tyro"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

folder, again = sys.argv[1:]
model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["the cat", "a small dog remembers every"], return_tensors="pt", padding=True)
text = model.generate(**inputs, max_new_tokens=8, do_sample=False)
model.save_pretrained(again)
assert torch.equal(load(again).generate(**inputs, max_new_tokens=8, do_sample=False), text)
package = type(model.model).__module__.partition(".")[0]
dispatch = importlib.import_module(package + ".ops.dispatch")
with torch.no_grad():
    logits = model(inputs.input_ids).logits
    with dispatch.kernels(True):  # Triton reads the source of its kernels
        difference = (model(inputs.input_ids).logits - logits).abs().max().item()
print(json.dumps({
    "text": text.tolist(), "logits": logits.tolist(), "difference": difference, "package": package,
    "loaded": [name for name in sys.modules if name.partition(".")[0] == "logdepth"],
    "kernels": package + ".operators.grc.gate_kernel" in sys.modules,
    "source": inspect.getsource(type(model.model).logits),
}))
"""


def test_exported_code_needs_no_logdepth(corpus: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", corpus, SCAN)
    export_run(run, tmp_path / "hf")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE, tmp_path / "hf", tmp_path / "again"],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    inputs = tokenizer(["the cat", "a small dog remembers every"], return_tensors="pt", padding=True)
    assert found["text"] == model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist()
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found["logits"]), model(inputs.input_ids).logits)
    assert re.fullmatch(r"logdepth_[0-9a-f]{12}", found["package"])
    assert found["loaded"] == []
    assert found["kernels"]
    assert found["difference"] < 1e-3
    assert found["source"].startswith("    def logits(self, features: Tensor)")
    assert (tmp_path / "again" / "modeling_logdepth.py").read_text() == remote_code()


def test_exported_code_is_the_library() -> None:
    code = remote_code()
    scope: dict[str, Any] = {}
    exec(compile(code[: code.index("class Sources")], "modeling_logdepth.py", "exec"), scope)
    sources = scope["SOURCES"]
    assert sources.keys() == closure(START)
    assert {"logdepth.models.lm", "logdepth.decoding.decoder", "logdepth.ops.delta_rule_kernel"} < sources.keys()
    assert not {"logdepth.data", "logdepth.runs", "logdepth.training", "logdepth.hf.export"} & sources.keys()
    for name, source in sources.items():
        if name not in ("logdepth", "logdepth.hf"):
            file = ROOT.joinpath(*name.split("."))
            whole = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            assert source == whole.read_text(), name


DOCUMENTS = [file.read_text() for file in sorted((ROOT / "docs").glob("*.md"))]
"""Text with symbols, tables and code."""


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    """The paper's and a lossless one, of a part of the text."""
    lines = [line for document in DOCUMENTS[::2] for line in document.split("\n")]
    configs = {"paper": TokenizerConfig(vocab_size=700), "lossless": TokenizerConfig(vocab_size=900, lossless=True)}
    return {name: trained(lines, **config.settings()) for name, config in configs.items()}


def trained(lines: list[str], **options: Any) -> Tokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
    return Tokenizer(model.getvalue())


variants = pytest.mark.parametrize("variant", ["paper", "lossless"])


@variants
def test_tokens_are_sentencepieces_on_text(variant: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[variant]
    fast = fast_tokenizer(tokenizer)
    lines = [line for document in DOCUMENTS for line in document.split("\n")]
    assert len(lines) > 1_000
    for texts in (lines, DOCUMENTS):
        tokens = [tokenizer.encode(text) for text in texts]
        assert fast(texts)["input_ids"] == tokens
        known = [one for one in tokens if tokenizer.unknown not in one]  # an unknown piece is left out here
        first = " " if variant == "paper" else ""  # the paper's tokenizers put a space before a text
        expected = [first + tokenizer.decode(one) if one else "" for one in known]
        assert fast.batch_decode(known, skip_special_tokens=True) == expected


@variants
@settings(max_examples=200)
@given(text=st.text(st.one_of(st.characters(), st.sampled_from(" \n\t▁</s>ae0é\u00a0"))))
def test_tokens_are_sentencepieces_for_any_text(variant: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    if variant == "paper":  # where letters carry several accents, the normalisers differ; see docs/hugging-face.md
        text = re.sub(r"[\u0300-\u036f]+", "", text)
    tokenizer = tokenizers[variant]
    fast = fast_tokenizer(tokenizer)
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert fast(text)["input_ids"] == tokenizer.encode(text)


@variants
def test_names_of_special_tokens_are_text(variant: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = tokenizers[variant]
    fast_tokenizer(tokenizer).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("</s>", "a <unk> b", "<s>x</s>", "<0x0A>"):
        assert fast(text)["input_ids"] == tokenizer.encode(text)
        assert tokenizer.end_of_document not in fast(text)["input_ids"]
    assert fast.padding_side == "left"
    assert fast.pad_token_id == fast.eos_token_id == tokenizer.end_of_document


def test_tokenizers_of_other_kinds_are_refused() -> None:
    lines = ["the cat sees a dog", "a dog sees the cat"] * 50
    for options, words in (
        ({"model_type": "unigram", "vocab_size": 18}, "only BPE models"),
        ({"model_type": "bpe", "vocab_size": 22, "user_defined_symbols": ["<sep>"]}, "user-defined or unused pieces"),
    ):
        tokenizer = trained(lines, minloglevel=2, **options)
        with pytest.raises(UserError, match=words):
            fast_tokenizer(tokenizer)


def test_merges_are_in_the_order_of_scores() -> None:
    scores = {"a": -10.0, "b": -11.0, "ab": 0.0, "ba": -1.0, "aba": -2.0}
    assert merges(scores) == [("a", "b"), ("b", "a"), ("a", "ba"), ("ab", "a")]
