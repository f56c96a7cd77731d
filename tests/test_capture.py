"""Captured calls: which kinds get a graph, what happens without one; on a GPU, that replays are calls."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logdepth import capture, keep_alive
from logdepth.capture import Captured, keep
from tests.fake_graphs import FakeRecorder, fake_recorder  # noqa: F401 (a fixture)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def doubled(numbers: Tensor, *, times: int = 2) -> Tensor:
    return numbers * times


def test_without_cuda_it_just_calls() -> None:
    function = Captured(doubled)
    for _ in range(5):
        assert function(torch.ones(3), times=3).tolist() == [3, 3, 3]
    assert not function.recordings


def test_a_kind_of_call_runs_twice_and_is_then_replayed(recorder: FakeRecorder) -> None:
    function = Captured(doubled)
    for number in range(6):
        assert function(torch.full((3,), float(number))).tolist() == [2 * number] * 3
        assert recorder.warmups == min(number + 1, 2)
        assert len(recorder.graphs) == (number >= 2)
    assert recorder.graphs[0].replays == 4  # the call that was captured is replayed too: a capture computes nothing


def test_results_are_overwritten_unless_they_are_clones(recorder: FakeRecorder) -> None:
    def both(numbers: Tensor) -> tuple[Tensor, Tensor]:
        return numbers + 1, numbers - 1

    function, cloning = Captured(both, warmups=1), Captured(both, warmups=1, clone=True)
    for number in range(3):
        last, kept = function(torch.tensor(float(number))), cloning(torch.tensor(float(number)))
    assert function(torch.tensor(9.0)) == last == (10, 8)
    assert cloning(torch.tensor(9.0)) == (10, 8)
    assert kept == (3, 1)


@pytest.mark.parametrize("clone", [False, True])
def test_results_can_be_the_next_arguments(clone: bool, recorder: FakeRecorder) -> None:
    swap = Captured(lambda one, other: (other, one), warmups=1, clone=clone)
    pair = torch.tensor(1.0), torch.tensor(2.0)
    for number in range(6):
        pair = swap(*pair)
        assert [one.item() for one in pair] == ([2, 1] if number % 2 == 0 else [1, 2])


def test_every_difference_that_a_graph_would_bake_in_is_another_kind(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = Captured(doubled, warmups=1, max_graphs=100)

    def twice(numbers: Tensor, **settings: Any) -> int:
        for _ in range(2):
            function(numbers, **settings)
        return len(function.recordings)

    plain = torch.ones(2, 3)
    assert twice(plain) == twice(plain) == twice(torch.zeros(3, 2).T) == 1
    assert twice(torch.ones(3, 2)) == 2
    assert twice(plain.double()) == 3
    assert twice(plain, times=5) == 4
    with torch.no_grad():
        assert twice(plain) == 5
    with torch.inference_mode():
        assert twice(plain) == 6
    for dtype in (torch.float16, torch.bfloat16):
        with monkeypatch.context() as patch:  # torch.autocast("cuda") is refused without a GPU
            patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
            patch.setattr(torch, "get_autocast_dtype", lambda device, dtype=dtype: dtype)
            assert twice(plain) == (7 if dtype == torch.float16 else 8)
    torch.use_deterministic_algorithms(False)
    assert twice(plain) == 9


def test_beyond_the_limit_calls_run_without_a_graph_and_it_is_said_once(recorder: FakeRecorder) -> None:
    lines: list[str] = []
    function = Captured(doubled, warmups=1, max_graphs=2, on_warning=lines.append)
    for _ in range(3):
        for length in range(1, 6):
            assert function(torch.ones(length)).tolist() == [2] * length
    assert len(recorder.graphs) == len(function.recordings) == 2
    assert lines == ["no CUDA graph of doubled: calls of more than 2 shapes or settings; the new ones run without one"]


def test_a_capture_that_fails_is_a_call_all_the_same_and_it_is_said_once(recorder: FakeRecorder) -> None:
    calls: list[int] = []

    def counting(numbers: Tensor) -> Tensor:
        calls.append(len(numbers))
        return numbers * 2

    recorder.refuses = True
    function = Captured(counting, warmups=1)
    function(torch.ones(3))
    with pytest.warns(
        UserWarning, match=r"no CUDA graph of counting: RuntimeError: not while capturing; it runs"
    ) as told:
        assert function(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(told) == 1
    assert told[0].filename == __file__
    recorder.refuses = False
    assert function(torch.ones(3)).tolist() == [2, 2, 2]  # not tried again, nor said
    assert calls == [3, 3, 3]
    assert not recorder.graphs
    for _ in range(2):
        function(torch.ones(4))
    assert len(recorder.graphs) == 1  # another kind may still be captured


def test_a_call_that_failed_is_no_warm_up(recorder: FakeRecorder) -> None:
    fails = True

    def failing(numbers: Tensor) -> Tensor:
        if fails:
            raise MemoryError
        return numbers * 2

    function = Captured(failing, warmups=2)
    for _ in range(3):
        with pytest.raises(MemoryError):
            function(torch.ones(3))
    fails = False
    for _ in range(2):
        function(torch.ones(3))
        assert not recorder.graphs
    assert function(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(recorder.graphs) == 1


def test_what_the_function_raises_is_raised(recorder: FakeRecorder) -> None:
    def failing(numbers: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Captured(failing)(torch.ones(1))


def test_shapes_that_never_come_back_are_forgotten(recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "REMEMBERED_KEYS", 3)
    function = Captured(doubled)
    for length in range(10):
        function(torch.ones(length))
    assert len(function._calls) == 3
    function(torch.ones(9))
    function(torch.ones(9))
    assert len(recorder.graphs) == 1


def test_forgotten_graphs_are_made_anew(recorder: FakeRecorder) -> None:
    function = Captured(doubled, warmups=1)
    for _ in range(2):
        for number in range(3):
            assert function(torch.tensor(float(number))) == 2 * number
        function.forget()
        assert not function.recordings
    assert (recorder.warmups, len(recorder.graphs)) == (2, 2)


def test_what_a_captured_function_uses_can_be_kept(recorder: FakeRecorder) -> None:
    def using(numbers: Tensor) -> Tensor:
        table = torch.ones(3)
        keep(table)
        return numbers + table

    function = Captured(using, warmups=1)
    for _ in range(3):
        function(torch.ones(3))
    (recording,) = function.recordings.values()
    (table,) = recording.kept  # while it was recorded, and neither before nor after
    assert table.tolist() == [1, 1, 1]
    assert not keep_alive._kept


def test_a_replay_counts_as_a_change(recorder: FakeRecorder) -> None:
    weight = nn.Parameter(torch.ones(2))
    function = Captured(doubled, warmups=1, changes=[weight])
    function(torch.ones(1))
    before = weight._version
    function(torch.ones(1))
    assert weight._version > before


def test_results_have_no_history(recorder: FakeRecorder) -> None:
    weight = nn.Parameter(torch.ones(2))
    function = Captured(lambda numbers: (numbers * weight, numbers), warmups=1)
    for _ in range(3):
        assert not any(one.requires_grad for one in function(torch.ones(2)))


def test_misuse_is_refused() -> None:
    function = Captured(doubled)
    with pytest.raises(ValueError, match="takes tensors by position, settings by name; got 3"):
        function(3)
    with pytest.raises(ValueError, match="takes tensors by position; got one named times"):
        function(torch.ones(1), times=torch.ones(1))
    with pytest.raises(ValueError, match="must be hashable; times is"):
        function(torch.ones(1), times=[2])
    with pytest.raises(ValueError, match="no gradient flows through"):
        function(torch.ones(1, requires_grad=True))
    with pytest.raises(ValueError, match="returns a tensor or a tuple of tensors; got list"):
        Captured(lambda numbers: [numbers])(torch.ones(1))
    with pytest.raises(ValueError, match="warmups must be at least 1"):
        Captured(doubled, warmups=0)


def test_garbage_is_left_alone_during_a_capture_only() -> None:
    with capture._nothing_else_happens():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with capture._nothing_else_happens():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def deterministic_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS needs for tests, which allow deterministic algorithms only."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def calls_of(function: Callable[..., Any], inputs: list[Tensor], seed: int | None = None) -> list[Tensor]:
    """The results of calls one after the other, each with its own seed."""
    results = []
    for number, one in enumerate(inputs):
        if seed is not None:
            torch.manual_seed(seed + number)
        results.append(function(one).clone())
    return results


@needs_gpu
def test_replays_are_calls_at_any_order_of_shapes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).cuda()
    inputs = [torch.randn(rows, 64, device="cuda") for rows in (8, 8, 8, 130, 130, 130, 8, 130, 8, 8, 130)]
    function = Captured(model)
    with torch.no_grad():
        plain, replayed = calls_of(model, inputs), calls_of(function, inputs)
    assert len(function.recordings) == 2
    assert None not in function.recordings.values()
    assert all(torch.equal(one, other) for one, other in zip(plain, replayed, strict=True))


@needs_gpu
def test_seeds_give_replays_the_same_dropout() -> None:
    inputs = [torch.ones(1000, device="cuda") for _ in range(7)]

    def dropped(numbers: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.dropout(numbers, 0.2), 0.3)

    function = Captured(dropped)
    plain, replayed = calls_of(dropped, inputs, seed=5), calls_of(function, inputs, seed=5)
    assert None not in function.recordings.values()
    assert all(torch.equal(one, other) for one, other in zip(plain, replayed, strict=True))
    assert len({tuple(one.tolist()) for one in replayed}) == len(inputs)


@needs_gpu
@pytest.mark.parametrize("outside", [False, True])
def test_replays_see_weights_that_changed_under_autocast(outside: bool) -> None:
    layer, numbers = nn.Linear(64, 64).cuda(), torch.randn(16, 64, device="cuda")

    def forward(numbers: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer(numbers)

    function = Captured(forward)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=outside):
        for _ in range(4):
            function(numbers)
    with torch.no_grad():
        layer.weight.mul_(2)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=outside):
        assert torch.equal(function(numbers), forward(numbers))
    assert [one is not None for one in function.recordings.values()] == [True]


@needs_gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_training_step_trains(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    batches = [torch.randint(50, (8, 33), device="cuda") for _ in range(8)]
    weights = []
    for captured in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Tensor, model: nn.Module = model, optimizer: torch.optim.SGD = optimizer) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss

        function = Captured(step) if captured else step
        calls_of(function, batches)
        weights.append([one.detach().clone() for one in model.parameters()])
    assert None not in function.recordings.values()
    torch.testing.assert_close(*weights, rtol=0 if deterministic else 1e-4, atol=0 if deterministic else 1e-5)


@needs_gpu
@pytest.mark.parametrize("how", ["waits for the GPU", "raises"])
def test_a_capture_that_fails_leaves_nothing_behind(how: str) -> None:
    def stubborn(numbers: Tensor) -> Tensor:
        dropped = nn.functional.dropout(numbers, 0.5)
        if how == "waits for the GPU":
            return dropped * dropped.sum().item()
        if torch.cuda.is_current_stream_capturing():
            raise ZeroDivisionError("on purpose")
        return dropped

    lines: list[str] = []
    function, inputs = Captured(stubborn, on_warning=lines.append), [torch.ones(100, device="cuda") for _ in range(5)]
    stream = torch.cuda.current_stream()
    assert all(
        torch.equal(*pair) for pair in zip(calls_of(stubborn, inputs, 3), calls_of(function, inputs, 3), strict=True)
    )
    (line,) = lines
    assert line.startswith("no CUDA graph of stubborn: ")
    assert "\n" not in line
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()  # refused by an allocator that takes a capture to be under way
    after = Captured(lambda numbers: nn.functional.dropout(numbers, 0.5), on_warning=lines.append)
    calls_of(after, inputs)
    assert len(lines) == 1


@needs_gpu
def test_forgotten_graphs_give_their_memory_back() -> None:
    function, numbers = Captured(lambda numbers: (numbers * 2) + 1), torch.ones(2**22, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(4):
        function(numbers)
    assert torch.cuda.memory_reserved() >= before + 2 * numbers.nbytes
    function.forget()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + numbers.nbytes


@needs_gpu
def test_inside_another_capture_it_just_calls() -> None:
    inner = Captured(lambda numbers: numbers * 2)
    outer = Captured(lambda numbers: inner(numbers) + 1, warmups=3)
    for number in range(6):
        assert outer(torch.tensor(float(number), device="cuda")).item() == 2 * number + 1
    assert None not in outer.recordings.values()


@needs_gpu
def test_tensors_of_a_gpu_and_of_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="takes tensors of one GPU; got cpu, cuda:0"):
        Captured(torch.add)(torch.ones(1), torch.ones(1, device="cuda"))
