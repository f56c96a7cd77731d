"""Solvers of tasks: their answers, their accuracy, their training, and result files."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logdepth.checksums import seal
from logdepth.errors import UserError
from logdepth.models import LMConfig
from logdepth.models.encoder import EncoderConfig
from logdepth.operators import GRCConfig
from logdepth.ops.cross_entropy import IGNORED
from logdepth.runs.tensors import load_tensors
from logdepth.solving import (
    DIVERGED,
    SOLVERS,
    Accuracy,
    Form,
    Questions,
    Solver,
    SolverState,
    SolverTrainer,
    TaskResult,
    TaskRunConfig,
    TaskTrainConfig,
    beyond,
    build_solver,
    chance_of,
    measure_case,
    percent,
    read_task_result,
    refuse_odd_solver,
    solver_kind,
    write_task_result,
)
from logdepth.solving.accuracy import CHECKS, num_sequences
from logdepth.solving.training import FLOOR, WINDOW, checked_cases, examples_at, learning_rate
from logdepth.tasks import TASKS, Case, Examples, GroupWords, MultiQueryRecall, Parity, held_out_batch

CPU = torch.device("cpu")
LANGUAGE_MODELS = [name for name, kind in SOLVERS.items() if not kind.is_encoder]
S3 = GroupWords(title="S3", group="S3")
SCAN = LMConfig(dim=8, blocks=("scan:conv=0,gate=false",), tied=False)


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.solving.training.CHECKED_LENGTH", 64)
    monkeypatch.setattr("logdepth.solving.training.CHECK_SEQUENCES", {"whole": 4, "prefixes": 4})


def run_config(task: str = "s3", **train: Any) -> TaskRunConfig:
    settings = {"steps": 30, "batch_size": 4, "check_every": 10, "device": "cpu", "stop_at": None, **train}
    return TaskRunConfig(task=task, solver=SCAN, seed=3, train=TaskTrainConfig(**settings))


def shaken(model: torch.nn.Module) -> None:
    """Weights away from zero, where outputs of blocks start."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)


def test_questions_ask_where_the_mask_is() -> None:
    tokens, targets = np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3) + 10
    mask = np.array([[False, True, True], [True, False, True]])
    found = Questions.of(Examples(tokens, targets, mask), "prefixes", CPU)
    assert found.places is not None
    assert found.places.tolist() == [1, 2, 3, 5]
    assert found.targets.tolist() == [11, 12, 13, 15]
    whole = Questions.of(Examples(tokens, targets, mask), "whole", CPU)
    assert whole.places is not None
    assert (whole.places.tolist(), whole.targets.tolist()) == ([2, 5], [12, 15])
    everywhere = Questions.of(Examples(tokens, targets, np.ones_like(mask)), "prefixes", CPU)
    assert everywhere.places is None
    assert everywhere.targets.tolist() == targets.flatten().tolist()


def test_rows_with_different_numbers_of_questions_ask_everywhere_and_ignore_the_rest() -> None:
    """The number of places then does not depend on the batch, which a CUDA graph needs."""
    mask = np.array([[False, True, True], [True, False, False]])
    found = Questions.of(Examples(np.zeros((2, 3), int), np.ones((2, 3), int), mask), "prefixes", CPU)
    assert found.places is None
    assert found.targets.tolist() == [IGNORED, 1, 1, 1, IGNORED, IGNORED]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.parametrize("task", [S3, MultiQueryRecall(title="", vocab_size=32)], ids=["s3", "mqar"])
def test_answers_in_pieces_are_those_of_the_whole(
    name: str, task: GroupWords | MultiQueryRecall, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_solver(task, SOLVERS[name].config(16)).double().eval()
    shaken(model)
    examples = task.sample(np.random.default_rng(0), 3, Case(45, 0) if task is S3 else Case(45, 4))
    questions = Questions.of(examples, "prefixes", CPU)
    expected = model(questions.tokens, questions.places)
    assert expected.shape == (len(questions.targets), task.num_classes)
    for tokens in (10**6, 21):
        monkeypatch.setattr("logdepth.solving.solver.PIECE_TOKENS", tokens)
        assert torch.equal(model.answers(questions.tokens, questions.places), expected.argmax(-1))


def test_an_encoder_answers_once_per_sequence() -> None:
    model = build_solver(Parity(title=""), EncoderConfig(operator=GRCConfig(width=8)))
    examples = Parity(title="").sample(np.random.default_rng(0), 5, Case(7))
    questions = Questions.of(examples, "whole", CPU)
    assert model(questions.tokens, questions.places).shape == (5, 2)
    assert model.answers(questions.tokens, questions.places).shape == (5,)
    with pytest.raises(ValueError, match="answers once for each sequence"):
        model(*Questions.of(examples, "prefixes", CPU)[:2])
    one = Questions.of(Parity(title="").sample(np.random.default_rng(0), 5, Case(1)), "whole", CPU)
    assert model(one.tokens, one.places).shape == (5, 2)


@pytest.mark.parametrize("name", SOLVERS)
def test_every_model_learns_something(name: str) -> None:
    """A few steps on one batch lower its loss, and gradients reach every weight."""
    task = TASKS["p-1-2"]
    torch.manual_seed(0)
    model = build_solver(task, SOLVERS[name].config(16))
    form: Form = "whole" if SOLVERS[name].is_encoder else "prefixes"
    questions = Questions.of(task.sample(np.random.default_rng(0), 16, Case(40)), form, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(questions.tokens, questions.places), questions.targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert all(weight.grad is not None for weight in model.parameters())


def test_solver_names_are_checked() -> None:
    assert solver_kind("grc") is SOLVERS["grc"]
    with pytest.raises(UserError, match="there is no model 'grcc' for tasks; did you mean 'grc'"):
        solver_kind("grcc")


class _Constant(Solver):
    """Answers 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        raise NotImplementedError

    def answers(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        return torch.ones(tokens.numel() if places is None else len(places), dtype=torch.int64)


@pytest.mark.parametrize("name", ["stack", "parity", "s5", "bucket-sort"])
def test_accuracy_counts_right_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain loops over the same examples, also where rows have different numbers of questions."""
    monkeypatch.setattr("logdepth.solving.accuracy.BATCH_TOKENS", 50)
    task = TASKS[name]
    case = Case(9)
    found = measure_case(_Constant(), task, "prefixes", case, sequences=12, stream=CHECKS)
    asked = right = last = done = number = 0
    classes = [[0, 0] for _ in range(task.num_classes)]
    while done < 12:
        batch = min(12 - done, 5)
        examples = held_out_batch(task, 0, case, batch, 2 * number + CHECKS)
        for targets, mask in zip(examples.targets, examples.mask, strict=True):
            answers = [int(one) for one, is_asked in zip(targets, mask, strict=True) if is_asked]
            asked += len(answers)
            right += answers.count(1)
            last += answers[-1] == 1
            for one in answers:
                classes[one][0] += 1
                classes[one][1] += one == 1
        done, number = done + batch, number + 1
    assert (found.sequences, found.asked, found.right, found.last_right) == (12, asked, right, last)
    assert found.share_right == right / asked
    if task.num_classes <= 32:
        assert found.classes == tuple(map(tuple, classes))
        assert found.accuracy == pytest.approx(chance_of(task))
    else:
        assert found.classes == ()
        assert found.accuracy == found.share_right


def test_checks_and_tests_have_examples_of_their_own() -> None:
    model = build_solver(S3, SCAN)
    shaken(model)
    counts = [measure_case(model, S3, "prefixes", Case(20), stream=stream).right for stream in (0, 1, 0)]
    assert counts[0] == counts[2] != counts[1]


@pytest.mark.parametrize(
    "change",
    [{"right": 9}, {"last_right": 3}, {"sequences": 0}, {"asked": 1}, {"classes": ((4, 4), (4, 1))}, {"length": 0}],
)
def test_impossible_counts_are_refused(change: dict[str, Any]) -> None:
    good = {"length": 4, "items": 0, "sequences": 2, "asked": 8, "right": 5, "last_right": 1}
    assert Accuracy(**good, classes=((4, 4), (4, 1))).accuracy == pytest.approx(0.625)
    with pytest.raises(ValueError, match=r"cannot be right|at least|counts"):
        Accuracy(**good | change | ({} if "classes" not in change else {"right": 6}))


def test_long_tests_have_fewer_sequences() -> None:
    assert num_sequences(Case(16)) == 512
    assert num_sequences(Case(65536)) == 8


def test_beyond_training() -> None:
    task = TASKS["mqar"]
    assert beyond(task, task.test_cases) == [case for case in task.test_cases if case.length > 256 or case.items > 64]
    assert all(case.length > 40 for case in beyond(TASKS["parity"], TASKS["parity"].test_cases))


@pytest.mark.parametrize("name", TASKS)
def test_checks_cover_a_few_cases_up_to_the_longest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.solving.training.CHECKED_LENGTH", 1024)
    task = TASKS[name]
    checked, possible = checked_cases(task), beyond(task, task.test_cases)
    assert 1 <= len(checked) <= 6
    assert len(set(checked)) == len(checked)
    assert checked[0] == possible[0]
    assert checked[-1] == max(one for one in possible if one.length <= (8192 if name == "passkey" else 1024))


def test_shares_are_never_rounded_up_to_100() -> None:
    assert [percent(share) for share in (1, 0.99999, 0.5, math.nan)] == ["100", "99.99", "50.00", "–"]
    assert [percent(share, 4) for share in (1, 0.9999999, 0.123456789)] == ["100", "99.9999", "12.3456"]


def test_the_learning_rate() -> None:
    constant = TaskTrainConfig(learning_rate=2.0, warmup_steps=4, steps=10)
    assert [learning_rate(constant, step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    cosine = dataclasses.replace(constant, schedule="cosine", warmup_steps=0, steps=11)
    assert learning_rate(cosine, 0) == 2.0
    assert learning_rate(cosine, 5) == pytest.approx(2.0 * (FLOOR + (1 - FLOOR) / 2))
    assert learning_rate(cosine, 10) == pytest.approx(2.0 * FLOOR)


def test_examples_depend_on_seed_and_step_only() -> None:
    config = TaskTrainConfig(batch_tokens=100)
    first = examples_at(S3, config, 1, 7, 31)
    assert all(np.array_equal(one, other) for one, other in zip(first, examples_at(S3, config, 1, 7, 31), strict=True))
    others = [examples_at(S3, config, seed, step, 31) for seed, step in ((1, 8), (2, 7))]
    assert all(one.tokens.shape != first.tokens.shape or (one.tokens != first.tokens).any() for one in others)
    lengths = {examples_at(S3, config, 0, step, 3).tokens.shape for step in range(40)}
    assert lengths == {(50, 2), (33, 3), (25, 4)}


def trained(config: TaskRunConfig, folder: Path, **options: Any) -> SolverState:
    return SolverTrainer(config, folder, **options).run()


def files_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, record = load_tensors(folder / "checkpoint.safetensors")
    record["state"].pop("seconds")
    return tensors, record["state"]


@pytest.mark.parametrize("stops", [(1,), (19, 20), (7, 10, 16)])
@pytest.mark.parametrize("train", [{}, {"optimizer": "amsgrad", "curriculum": 0.2}, {"optimizer": "muon"}])
def test_stopped_and_resumed_ends_in_the_same_bits(
    train: dict[str, Any], stops: tuple[int, ...], tmp_path: Path
) -> None:
    config = run_config(steps=45, check_every=10, **train)
    trained(config, tmp_path / "whole")
    for stop in stops:
        counts = iter(range(1, 100))
        state = trained(config, tmp_path / "parts", must_stop=lambda counts=counts, stop=stop: next(counts) == stop)
        assert state.finished is None
    assert trained(config, tmp_path / "parts").finished == "all steps done"
    whole, parts = files_of(tmp_path / "whole"), files_of(tmp_path / "parts")
    assert whole[1] == parts[1]
    assert whole[0].keys() == parts[0].keys()
    assert all(torch.equal(one, parts[0][name]) for name, one in whole[0].items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["grc", "memory", "rope", "window"])
def test_on_a_gpu_graphs_train_as_plain_steps_do_and_resume_in_the_same_bits(name: str, tmp_path: Path) -> None:
    config = run_config(steps=120, check_every=40, device="cuda", curriculum=0.2, batch_tokens=256)
    config = dataclasses.replace(config, solver=SOLVERS[name].config(32))
    whole = trained(config, tmp_path / "whole")
    counts = iter(range(1, 1000))
    trained(config, tmp_path / "parts", must_stop=lambda: next(counts) == 67)
    trained(config, tmp_path / "parts")
    assert files_of(tmp_path / "whole")[1] == files_of(tmp_path / "parts")[1]
    plain = dataclasses.replace(config, train=dataclasses.replace(config.train, accelerate=False))
    slow = trained(plain, tmp_path / "plain")
    assert whole.curve[0][1] == pytest.approx(slow.curve[0][1], rel=0.02)


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    config = run_config()
    before = trained(config, tmp_path)
    stamp = (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns
    assert trained(config, tmp_path) == before
    assert (tmp_path / "checkpoint.safetensors").stat().st_mtime_ns == stamp


def test_the_curriculum_adds_cases_when_steps_are_right(tmp_path: Path) -> None:
    seen: list[int] = []
    trainer = SolverTrainer(run_config(steps=100 * WINDOW, curriculum=1.0), tmp_path)
    trainer.must_stop = lambda: trainer.state.step == 4 * WINDOW
    answers = iter([1.0] * WINDOW + [0.9] + [1.0] * (3 * WINDOW))
    trainer.step = lambda *_: (torch.tensor(0.5), torch.tensor(next(answers)))
    trainer.on_step = lambda step: seen.append(trainer.state.num_cases)
    trainer.run()
    assert [seen[step * WINDOW - 1] for step in (1, 2, 3, 4)] == [2, 2, 3, 4]


def test_the_curriculum_adds_all_cases_over_the_first_half_of_the_steps(tmp_path: Path) -> None:
    """A model that learns nothing trains on all cases, too."""
    trainer = SolverTrainer(run_config(steps=8 * WINDOW, curriculum=1.0), tmp_path)
    trainer.step = lambda *_: (torch.tensor(0.5), torch.tensor(0.0))
    seen: list[int] = []
    trainer.on_step = lambda _: seen.append(trainer.state.num_cases)
    trainer.run()
    assert [seen[step * WINDOW - 1] for step in (1, 2, 3, 4, 8)] == [7, 15, 23, 31, 31]


def test_without_a_curriculum_all_cases_are_there(tmp_path: Path) -> None:
    assert SolverTrainer(run_config(), tmp_path).state.num_cases == 31


def test_training_ends_after_two_checks_at_which_the_task_is_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([1.0, 0.5, 1.0, 1.0])

    def measured(*_: Any, **__: Any) -> Any:
        class Found:
            accuracy = share

        return Found

    monkeypatch.setattr("logdepth.solving.training.measure_case", measured)
    trainer = SolverTrainer(run_config(steps=1000, stop_at=0.99), tmp_path)
    original = trainer._check

    def check() -> None:
        nonlocal share
        share = next(shares)
        original()

    share = 0.0
    trainer._check = check  # type: ignore[method-assign]
    state = trainer.run()
    assert (state.step, state.finished) == (40, "solved")
    assert [point[-1] for point in state.curve] == [1.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("stop", [None, 23, 26])
def test_a_loss_that_is_not_finite_ends_training(stop: int | None, tmp_path: Path) -> None:
    """The seed has a result, at the same step wherever training was interrupted, and is not trained again."""
    lines: list[str] = []
    trainer = SolverTrainer(run_config(check_every=15), tmp_path, on_line=lines.append)
    trainer.must_stop = lambda: trainer.state.step == stop
    trainer.step = lambda *_: (torch.tensor(math.nan if trainer.state.step >= 22 else 1.0), torch.tensor(0.0))
    trainer.run()
    if stop is not None:
        trainer = SolverTrainer(run_config(check_every=15), tmp_path, on_line=lines.append)
        trainer.step = lambda *_: (torch.tensor(math.nan), torch.tensor(0.0))
        trainer.run()
    assert (trainer.state.step, trainer.state.finished) == (23, DIVERGED)
    assert [point[0] for point in trainer.state.curve] == [15]
    assert lines[-1] == "step 23: the loss is not finite: training diverged"
    assert trained(run_config(check_every=15), tmp_path).finished == DIVERGED


def test_another_config_is_refused(tmp_path: Path) -> None:
    trained(run_config(), tmp_path)
    with pytest.raises(UserError, match=r"was made with train.learning_rate 0.001, not 0.01; choose another --out"):
        SolverTrainer(run_config(learning_rate=0.01), tmp_path)
    SolverTrainer(run_config(threads=1, checkpoint_minutes=9.0), tmp_path)  # those of the machine may change


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    trained(run_config(), tmp_path)
    config, checkpoint = tmp_path / "config.json", tmp_path / "checkpoint.safetensors"
    text, data = config.read_text(), bytearray(checkpoint.read_bytes())
    config.write_text(text.replace('"seed": 3', '"seed": 4'))
    with pytest.raises(UserError, match=r"config.json does not match its checksum.*remove this folder"):
        SolverTrainer(run_config(), tmp_path)
    other = json.loads(text)
    other.pop("sha256")
    other["train"]["threads"] = 5
    config.write_text(json.dumps(seal(other)))
    with pytest.raises(UserError, match=r"does not fit .* \(it belongs to another config.json\); remove"):
        SolverTrainer(run_config(), tmp_path)
    for damaged, reason in (
        ("5", "is damaged: it holds no fields"),
        ("[]", "is damaged"),
        ("{", "is not readable JSON"),
    ):
        config.write_text(damaged)
        with pytest.raises(UserError, match=rf"config.json {reason}.*; remove this folder to train the run again$"):
            SolverTrainer(run_config(), tmp_path)
    config.write_text(text)
    data[-5] ^= 4
    checkpoint.write_bytes(data)
    with pytest.raises(UserError, match=r"checkpoint.safetensors does not match its checksum"):
        SolverTrainer(run_config(), tmp_path)
    checkpoint.unlink()
    checkpoint.mkdir()
    with pytest.raises(UserError, match=r"checkpoint.safetensors is not a file; remove this folder"):
        SolverTrainer(run_config(), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"batch_tokens": 0},
        {"learning_rate": 0.0},
        {"curriculum": 1.5},
        {"stop_at": 0.0},
        {"betas": (0.9,)},
        {"warmup_steps": -1},
        {"warmup_steps": 10**400},
        {"steps": 10**400},
        {"batch_size": 10**30},
        {"batch_tokens": 10**19},
        {"threads": 1_000_000},
        {"weight_decay": -1.0},
        {"muon_momentum": 1.0},
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        TaskTrainConfig(**change)


def test_an_encoder_is_asked_once_per_sequence() -> None:
    with pytest.raises(ValueError, match=r"form must be 'whole'; got 'prefixes'"):
        TaskRunConfig(task="parity", solver=EncoderConfig(operator=GRCConfig(width=8)))


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (LMConfig(dim=8, blocks=("attention:heads=3",)), "dim 8 does not divide into 3 heads"),
        (LMConfig(dim=8, blocks=("attention:heads=2,backend=flex",)), "FlexAttention has no gradients on a CPU"),
        (EncoderConfig(operator=GRCConfig(width=0)), "widths must be at least 1; got a layer from 0 to 0"),
    ],
)
def test_solvers_that_cannot_be_trained_are_refused(solver: LMConfig | EncoderConfig, message: str) -> None:
    config = dataclasses.replace(run_config("parity"), solver=solver, form="whole")
    with pytest.raises(UserError, match=f"solver of parity: {message}"):
        refuse_odd_solver(config)


def test_a_config_without_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    """A kill between the two leaves one, and the settings may change before training begins again."""
    trained(run_config(), tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()
    other = run_config(learning_rate=0.01)
    assert SolverTrainer(other, tmp_path).run() == SolverTrainer(other, tmp_path).state


def result(**changes: Any) -> TaskResult:
    tests = [
        Accuracy(length=length, items=0, sequences=10, asked=10 * length, right=5 * length, last_right=4)
        for length in (16, 64, 128)
    ]
    fields = {
        "solver": "grc",
        "config": {"task": "s5", "seed": 1},
        "parameters": 5,
        "steps": 7,
        "finished": "solved",
        "curve": ((1.0, 2.0, 0.5, 3.0, 0.25),),
        "test": tuple(tests),
    }
    return TaskResult(**fields | changes)


def test_result_files_come_back(tmp_path: Path) -> None:
    path = write_task_result(tmp_path, result())
    assert path.name == "s5-grc-1.json"
    assert read_task_result(path) == result()
    assert result().score == 0.5
    assert not result().is_solved


def test_edited_result_files_are_refused(tmp_path: Path) -> None:
    path = write_task_result(tmp_path, result())
    text = path.read_text()
    path.write_text(text.replace('"right": 80', '"right": 81'))
    with pytest.raises(UserError, match="does not match its checksum"):
        read_task_result(path)
    path.write_text(json.dumps({name: value for name, value in json.loads(text).items() if name != "sha256"}))
    with pytest.raises(UserError, match="has lost its checksum"):
        read_task_result(path)
    other = tmp_path / "s5-rope-1.json"
    other.write_text(text)
    with pytest.raises(UserError, match="holds the result of s5-grc-1; give it that name"):
        read_task_result(other)
    other.write_text("[1]")
    with pytest.raises(UserError, match="is damaged: it holds no fields; remove it and run"):
        read_task_result(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"test": ()},
        {"config": {"task": "s5"}},
        {"curve": ((1.0, math.nan, 0.5, 3.0, 0.25),)},
        {"config": {"task": "parity", "seed": 0}},
        {"version": 2},
        {"seconds": -1.0},
    ],
)
def test_impossible_results_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|cannot"):
        result(**changes)
