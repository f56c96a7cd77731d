"""On a GPU: models give the CPU's answers, FlexAttention gives SDPA's, and runs resume bit-for-bit."""

import dataclasses
import math
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.data import prepare
from logdepth.evaluate import PAPER_CONTEXTS, evaluate, loss_graphs
from logdepth.models import LM, LMConfig, ModelConfig, ScanLMConfig, TransformerConfig
from logdepth.operators import GRCConfig, MLPLDRUConfig
from logdepth.ops import kernels
from logdepth.ops.precision import Precision
from logdepth.runs import RunConfig, RunFolder, TrainConfig
from logdepth.timing import time_model
from logdepth.training import Trainer, resume, train
from tests.run_folders import interrupted_at, measured, same_files
from tests.small_models import SMALL_BLOCKS, enlarge
from tests.tiny_corpus import store_of, tiny_data

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler warns of its own insides
]

VOCAB = 50
MODELS: dict[str, ModelConfig] = {
    "ar-grc": ScanLMConfig(embed_width=64, operator=GRCConfig(width=64, dropout=0.1), depth=2, leaf_dropout=0.1),
    "ar-mlp-ldru": ScanLMConfig(embed_width=64, operator=MLPLDRUConfig(width=64), leaf_dropout=0.1),
    "alibi": TransformerConfig(embed_width=64, num_layers=2, num_heads=4, dropout=0.1),
    "sinusoidal": TransformerConfig(embed_width=64, num_layers=2, num_heads=4, dropout=0.1, positions="sinusoidal"),
    "hybrid": LMConfig(
        dim=64,
        blocks=("scan:heads=2,dropout=0.1,merge_dropout=0.1", "attention:heads=4,window=16,dropout=0.1", "mlp"),
        embed_dropout=0.1,
        initialisation="gpt2",
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0))


def attending(model: LM) -> LM:
    """With a Transformer's weights so large that what it attends to matters, as it hardly does at the start."""
    if not any(block.scan_operators() for block in model.blocks):
        enlarge(model, 3)
    return model


def assert_near(found: Tensor, expected: Tensor, deviations: float) -> None:
    """To so much of the spread of what is expected; some gradients are 0 but for rounding."""
    found, expected = found.float(), expected.float()
    assert float((found - expected).abs().max()) <= deviations * float(expected.std()) + 1e-5


@every_model
@pytest.mark.parametrize("enabled", [False, None], ids=["plain", "kernels"])
def test_logits_and_gradients_are_the_cpus(name: str, enabled: bool | None) -> None:
    tokens = tokens_of(3, 129)
    model = MODELS[name].build(VOCAB).eval()
    on_gpu = MODELS[name].build(VOCAB).eval().cuda()
    on_gpu.load_state_dict(model.state_dict())
    logits = {}
    for where, one in (("cpu", model), ("cuda", on_gpu)):
        with kernels(enabled):
            logits[where] = one(tokens.to(where))
            F.cross_entropy(logits[where].flatten(0, 1), tokens.to(where).flatten()).backward()
    torch.testing.assert_close(logits["cuda"].cpu(), logits["cpu"], rtol=2e-3, atol=2e-3)
    for (key, left), right in zip(model.named_parameters(), on_gpu.parameters(), strict=True):
        torch.testing.assert_close(right.grad.cpu(), left.grad, rtol=1e-2, atol=1e-4, msg=key)


@pytest.mark.parametrize("length", [1, 17, 128, 300, 1000])
@pytest.mark.parametrize("options", ["positions=alibi", "positions=rope,window=40", "positions=alibi,window=5"])
def test_flex_attention_is_sdpa(options: str, length: int) -> None:
    tokens = tokens_of(2, length).cuda()
    blocks = ("attention:heads=4,norm=layer,bias=true," + options, "mlp:activation=gelu,norm=layer,bias=true")
    config = LMConfig(dim=64, blocks=blocks, repeats=2, scale_embedding=True, norm="layer", initialisation="gpt2")
    flex = attending(with_backend(config, "flex").build(VOCAB)).cuda()
    sdpa = with_backend(config, "sdpa").build(VOCAB).cuda()
    sdpa.load_state_dict(flex.state_dict())
    grads = []
    for model in (flex, sdpa):
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        grads.append([logits, *(parameter.grad for parameter in model.parameters())])
    for left, right in zip(*grads, strict=True):
        assert_near(left, right, 0.02)  # slopes that are wrong by 10 % change logits by 0.06 to 0.14


def with_backend(config: LMConfig, backend: str) -> LMConfig:
    attention, mlp = config.blocks
    return dataclasses.replace(config, blocks=(dataclasses.replace(attention, backend=backend), mlp))


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_gives_the_logits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    model, tokens = attending(MODELS[name].build(VOCAB)).eval().cuda(), tokens_of(2, 70).cuda()
    with torch.inference_mode(), torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        whole, parts, state = model(tokens), [], model.init_state(2)
        for start, end in ((0, 1), (1, 33), (33, 34), (34, 70)):
            logits, state = model.step(tokens[:, start:end], state)
            parts.append(logits)
    # Without a state they would differ by 2 and more.
    assert_near(torch.cat(parts, dim=1), whole, 0.02 if dtype == torch.float32 else 0.3)


@every_model
def test_interrupted_and_resumed_ends_in_the_same_bits(name: str, corpus: Path, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)  # training turns it on by itself
    settings = TrainConfig(
        learning_rate=1e-3,
        max_steps=30,
        evaluate_every=10,
        batch_size=8,
        context=64,
        device="cuda",
        log_every=3,
        accelerate=False,
    )
    config = RunConfig(data=tiny_data(corpus), model=MODELS[name], train=settings)
    train(config, tmp_path / "whole")
    with interrupted_at(17, signal.SIGTERM):
        train(config, tmp_path / "parts")
    resume(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")


@every_model
def test_compiled_models_learn(name: str, corpus: Path, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    settings = TrainConfig(
        max_steps=12, evaluate_every=6, batch_size=4, context=64, device="cuda", compile=True, accelerate=False
    )
    state = train(RunConfig(data=tiny_data(corpus), model=MODELS[name], train=settings), tmp_path)
    assert math.isfinite(state.best_loss)


ACCELERATED = TrainConfig(
    max_steps=30, evaluate_every=10, batch_size=8, context=64, device="cuda", log_every=1, accelerate=True
)


@contextmanager
def all_captured() -> Iterator[list[bool]]:
    """Whether each trainer of the meantime had its steps captured in one graph, in the end."""
    original, last = Trainer._step, {}
    seen: list[bool] = []

    def looking(self: Trainer) -> None:
        original(self)
        recordings = [] if self.captured is None else list(self.captured.recordings.values())
        last[self] = len(recordings) == 1 and recordings[0] is not None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", looking)
        yield seen
    seen += last.values()
    graphs = [one for trainer in last for one in (trainer.captured, trainer.validation.captured) if one is not None]
    assert not any(one.recordings for one in graphs)  # memory is given back


@every_model
@pytest.mark.parametrize("compiled", [False, True])
def test_accelerated_runs_resume_bit_for_bit(name: str, compiled: bool, corpus: Path, tmp_path: Path) -> None:
    """Steps that run before the capture and steps that are replayed are the same, dropout and all."""
    torch.use_deterministic_algorithms(False)
    settings = dataclasses.replace(ACCELERATED, micro_batch=4, compile=compiled)
    config = RunConfig(data=tiny_data(corpus), model=MODELS[name], train=settings)
    with all_captured() as captured:
        train(config, tmp_path / "whole")
        with interrupted_at(17, signal.SIGTERM):
            train(config, tmp_path / "parts")
        resume(tmp_path / "parts")
    assert captured == [True, True, True]
    same_files(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("text", SMALL_BLOCKS.values())
def test_every_block_trains_in_a_graph_and_resumes_bit_for_bit(text: str, corpus: Path, tmp_path: Path) -> None:
    """One that is added to `BLOCKS` is tested here too."""
    torch.use_deterministic_algorithms(False)
    config = RunConfig(data=tiny_data(corpus), model=LMConfig(dim=64, blocks=(text, "mlp")), train=ACCELERATED)
    with all_captured() as captured:
        train(config, tmp_path / "whole")
        with interrupted_at(17, signal.SIGTERM):
            train(config, tmp_path / "parts")
        resume(tmp_path / "parts")
    assert captured == [True, True, True]
    same_files(tmp_path / "whole", tmp_path / "parts")


@every_model
def test_accelerated_runs_learn_as_plain_ones(name: str, corpus: Path, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    model = without_dropout(MODELS[name])
    # An MLP-LDRU normalises small numbers: in bfloat16 two ways to round part by more than two per cent.
    precision: Precision = "float32" if name == "ar-mlp-ldru" else "bfloat16"
    losses = []
    for accelerate in (False, True):
        settings = dataclasses.replace(ACCELERATED, accelerate=accelerate, precision=precision)
        with all_captured() as captured:
            train(RunConfig(data=tiny_data(corpus), model=model, train=settings), tmp_path / str(accelerate))
        assert captured == [accelerate]
        lines = [line for line in measured(tmp_path / str(accelerate)) if line["kind"] == "train"]
        losses.append([line["loss"] for line in lines])
    assert len(losses[0]) == 30
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[0][-1] < losses[0][0] - 0.5  # there was something to learn


@every_model
def test_validation_graphs_read_the_weights_as_they_are(name: str) -> None:
    torch.use_deterministic_algorithms(False)
    model = MODELS[name].build(VOCAB).cuda()
    store = store_of(tokens_of(9_000).tolist())
    said: list[str] = []
    graphs = loss_graphs(model, said.append)
    found = []
    for _ in range(5):
        found.append(evaluate(model, store, context=64, graphs=graphs).loss)
        assert found[-1] == pytest.approx(evaluate(model, store, context=64).loss, rel=1e-5)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
    assert len(set(found)) == 5
    assert None not in graphs.recordings.values()
    assert len(graphs.recordings) >= 1
    assert not said


def test_a_run_may_go_on_with_or_without_acceleration(corpus: Path, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    accelerated = RunConfig(data=tiny_data(corpus), model=without_dropout(MODELS["ar-grc"]), train=ACCELERATED)
    plain = dataclasses.replace(accelerated, train=dataclasses.replace(ACCELERATED, accelerate=False))
    ends = [train(plain, tmp_path / "plain").best_loss]
    for number, (before, after) in enumerate([(accelerated, plain), (plain, accelerated)]):
        folder = RunFolder(tmp_path / str(number))
        with interrupted_at(17, signal.SIGTERM):
            train(before, folder.path)
        ends.append(Trainer(folder, after, prepare(after.data), torch.device("cuda")).run().best_loss)
    assert ends == pytest.approx([ends[0]] * 3, rel=0.02)


@every_model
def test_accelerated_runs_on_packed_documents_have_no_graph_and_say_so(
    name: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.use_deterministic_algorithms(False)
    settings = dataclasses.replace(ACCELERATED, reset_at_documents=True)
    with all_captured() as captured:
        state = train(RunConfig(data=tiny_data(corpus), model=MODELS[name], train=settings), tmp_path)
    assert captured == [False]
    assert math.isfinite(state.best_loss)
    assert capsys.readouterr().err.count("no CUDA graph of training steps: with reset_at_documents") == 1


def without_dropout(config: ModelConfig) -> ModelConfig:
    if isinstance(config, ScanLMConfig):
        operator = config.operator
        operator = dataclasses.replace(operator, dropout=0.0) if isinstance(operator, GRCConfig) else operator
        return dataclasses.replace(config, leaf_dropout=0.0, operator=operator)
    if isinstance(config, LMConfig):
        scan, attention, mlp = config.blocks
        scan = dataclasses.replace(scan, dropout=0.0, merge_dropout=0.0)
        attention = dataclasses.replace(attention, dropout=0.0)
        return dataclasses.replace(config, embed_dropout=0.0, blocks=(scan, attention, mlp))
    return dataclasses.replace(config, dropout=0.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alibi", "FlexAttention, compiled, ALiBi"),
        ("sinusoidal", "FlashAttention"),
        ("hybrid", "FlexAttention, compiled, a window of 16"),
    ],
)
def test_attention_is_named(name: str, words: str) -> None:
    (timing,) = time_model(MODELS[name].build(VOCAB).cuda(), [128], batch_size=2, repeats=2)
    assert words in timing.attention


@pytest.mark.parametrize("name", ["alibi", "hybrid"])
def test_flex_attention_stays_compiled_over_the_papers_lengths(name: str) -> None:
    model = MODELS[name].build(VOCAB).cuda().eval()
    with warnings.catch_warnings(), torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        warnings.filterwarnings("error", message="flex_attention called without torch.compile")
        for context in PAPER_CONTEXTS:
            assert model(tokens_of(2, context).cuda()).isfinite().all()


def test_a_mask_made_in_an_evaluation_serves_training() -> None:
    model, tokens = MODELS["alibi"].build(VOCAB).cuda(), tokens_of(2, 77).cuda()
    with torch.inference_mode():
        model(tokens)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert model.embedding.weight.grad.isfinite().all()
