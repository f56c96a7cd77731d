"""The processes of the GPU benchmark, on the CPU: their results, their failures and their shared caches."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import accelerated, gpu, program
from benchmarks.speed import baselines, decoding, parts, startup
from benchmarks.speed.bench import Bench
from benchmarks.speed.kv_cache import CachedTransformer
from benchmarks.speed.parts import PARTS, PartProcess, rehearse, run_part
from benchmarks.speed.sizes import SINUSOIDAL, smoke
from logdepth.errors import UserError
from logdepth.models import TransformerConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(smoke(), torch.device("cpu"), tmp_path / "part.json", seconds=60)


def test_a_failure_does_not_end_a_part(bench: Bench) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("first line\nsecond line")

    bench.attempt(fails, model="one")
    bench.attempt(lambda: {"milliseconds": 1.0}, model="two")
    bench.deadline = 0.0
    bench.attempt(lambda: {"milliseconds": 1.0}, model="three")
    first, second, third = json.loads(bench.out.read_text())
    assert first == {"model": "one", "failed": "RuntimeError: first line"}
    assert second["milliseconds"] == 1.0
    assert third == {"model": "three", "failed": "TimeoutError: no time left"}


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    part = PartProcess("rates", tmp_path, smoke=True).run(0.01)
    assert (part["status"], part["results"]) == ("timed out", [])


def test_a_failing_part_reports_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "__file__", str(tmp_path / "speed" / "parts.py"))
    part = PartProcess("rates", tmp_path, smoke=True).run(60.0)
    assert part["status"] == "failed"
    assert "No such file" in part["message"]


def test_a_rehearsal_leaves_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = PartProcess("large", tmp_path, smoke=True, rehearsed_share=0).run(60.0)
    assert (done["status"], done["results"]) == ("done", [])
    assert capfd.readouterr().out == ""


def test_rehearsals_share_the_pieces_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(parts, "signal_when_parent_ends", lambda _: None)
    monkeypatch.setattr(f"{PARTS['decoding'].module}.measure", lambda _: (partial(done.append, one) for one in "abcde"))
    shares = []
    for share in range(PARTS["decoding"].rehearsals):
        monkeypatch.setattr("sys.stdin", io.StringIO("1e12\n"))
        run_part("decoding", torch.device("cpu"), None, smoke=True, share=share)
        shares.append("".join(done))
        done.clear()
    assert shares == ["ad", "be", "c"]
    monkeypatch.setattr("sys.stdin", io.StringIO("1e12\n"))
    run_part("decoding", torch.device("cpu"), Path("results"), smoke=True)
    assert "".join(done) == "abcde", "what is measured is measured by one process"


def test_each_rehearsal_has_its_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[str, int]] = []

    class Recorded:
        def __init__(self, name: str, folder: Path, smoke: bool, *, rehearsed_share: int) -> None:
            made.append((name, rehearsed_share))

        def run(self, seconds: float) -> None: ...

        def end(self) -> None: ...

    monkeypatch.setattr(parts, "PartProcess", Recorded)
    rehearse(["decoding", "large"], tmp_path, smoke=True)
    assert made == [("decoding", 0), ("decoding", 1), ("decoding", 2), ("large", 0)]


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_timed_separately(backward: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[str, ...]] = []
    monkeypatch.setattr(baselines, "allow_only", lambda *kernels: allowed.append(kernels))
    config = bench.sizes.theirs[SINUSOIDAL]
    milliseconds = baselines._time_of(bench, "cudnn", config, 2, 16, backward)
    assert milliseconds is not None
    assert milliseconds > 0
    assert allowed == [("cudnn",)]


def test_the_fastest_attention_is_allowed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[str, ...]] = []
    times: dict[str, float | None] = {"flash": 2.0, "cudnn": 1.0}
    monkeypatch.setattr(baselines, "allow_only", lambda *kernels: allowed.append(kernels))
    monkeypatch.setattr(baselines, "_time_of", lambda _bench, kernel, *_: times[kernel])
    monkeypatch.setattr(Bench, "cuda", True)
    config = bench.sizes.theirs[SINUSOIDAL]
    for best in ("cudnn", "flash"):
        with baselines.fastest_attention(bench, config, 2, 16, backward=True) as found:
            assert allowed[-1] == (best,)
            assert found == {"attention": f"SDPA, {best}", "attention_milliseconds": times}
        assert allowed[-1] == baselines.KERNELS, "afterwards all are"
        times["cudnn"] = None


def test_the_faster_of_whole_functions_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[str, ...]] = []
    milliseconds: dict[str, float | None] = {"flash": 3.5, "cudnn": 3.0}
    monkeypatch.setattr(baselines, "allow_only", lambda *kernels: allowed.append(kernels))
    monkeypatch.setattr(Bench, "clear", lambda _: None)

    def times() -> dict[str, Any]:
        kernel = allowed[-1][0] if allowed else "cudnn"
        found = milliseconds[kernel]
        if found is None:
            raise RuntimeError("No available kernel. Aborting execution.")
        return {"milliseconds": found, "quartiles": [found - 1, found + 1]}

    whole = baselines.fastest_whole(bench, times)
    assert not allowed, "there is one kernel on a CPU"
    assert whole["attention"] == "SDPA"
    monkeypatch.setattr(Bench, "cuda", True)
    for best in ("cudnn", "flash"):
        allowed.clear()
        assert baselines.fastest_whole(bench, times) == {
            "milliseconds": milliseconds[best],
            "quartiles": [milliseconds[best] - 1, milliseconds[best] + 1],
            "attention": f"SDPA, {best}",
            "whole_milliseconds": {kernel: ms for kernel, ms in milliseconds.items() if ms is not None},
        }
        assert allowed == [("flash",), ("cudnn",)]
        milliseconds["cudnn"] = None
    milliseconds["flash"] = None
    with pytest.raises(RuntimeError, match="has none of its kernels for this: flash, cudnn"):
        baselines.fastest_whole(bench, times)


@pytest.mark.parametrize(("slow", "chunks"), [(9.0, 3), (0.0, 2)])
def test_slow_steps_are_timed_in_fewer_chunks(
    slow: float, chunks: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.sizes.chunks == 3
    monkeypatch.setattr(decoding, "SLOW_CHUNK", slow)
    assert decoding._timed(bench, lambda tokens: tokens, 2, 1)["repeats"] == chunks


def test_attention_is_skipped_only_if_it_has_no_kernel(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "No available kernel. Aborting execution."
    config = bench.sizes.theirs[SINUSOIDAL]

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(baselines, "allow_only", lambda *_: None)
    monkeypatch.setattr(baselines.F, "scaled_dot_product_attention", refuse)
    assert baselines._time_of(bench, "cudnn", config, 2, 16, True) is None
    said = "no CUDA graph of attention: it cannot be captured"
    with pytest.raises(RuntimeError, match="cannot be captured"):
        baselines._time_of(bench, "cudnn", config, 2, 16, True)


def test_the_start_uses_the_installed_python_files(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "of the other parts")
    passed: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        passed.update(env)
        return subprocess.CompletedProcess(command, 0, stdout='{"first_step_seconds": 1.0}\n', stderr="")

    monkeypatch.setattr("benchmarks.speed.startup.subprocess.run", run)
    for piece in startup.measure(bench):
        piece()
    assert "PYTHONPYCACHEPREFIX" not in passed
    assert passed["PYTHONDONTWRITEBYTECODE"] == "1", "no compiled files may be left for later runs"
    assert bench.results[0]["first_step_seconds"] == 1.0


def test_no_cache_confuses_attention_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with gpu._compile_caches(str(tmp_path)):
        assert os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] == "0"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
        assert os.environ["TRITON_CACHE_DIR"].startswith(str(tmp_path))


def test_a_rehearsal_reports_what_it_could_not_compile(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, Any]:
        raise MemoryError("no room")

    bench = Bench(smoke(), torch.device("cpu"), None, seconds=60)
    bench.attempt(fail, model="a")
    bench.attempt(lambda: {"milliseconds": 1.0}, model="b")
    assert capsys.readouterr().out == "  not compiled before: model a, failed MemoryError: no room\n"
    assert bench.results == []


def test_a_rehearsal_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "REHEARSAL_SECONDS", 0.1)
    choice = tmp_path / "inductor" / "ab" / f"kernel{parts.BEST_CONFIG}"
    choice.parent.mkdir(parents=True)
    choice.touch()
    rehearse(["large", "decoding"], tmp_path, smoke=True)
    assert re.fullmatch(r"compiled in \d+ s\n", capsys.readouterr().out)
    assert not choice.exists(), "what was fastest beside others may not be when alone"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_benchmark(number: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--smoke", "--parts", "large,decoding"]
    benchmark = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while len(_children(benchmark.pid)) < 6:  # two parts, and their rehearsals: three share decoding's
        assert benchmark.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    children = _children(benchmark.pid)
    benchmark.send_signal(number)
    said = benchmark.communicate(timeout=60)[1]
    assert benchmark.returncode == 128 + number
    assert "Traceback" not in said
    end = time.monotonic() + 60  # one that was just being started ends when it has imported what it needs
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end, said
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_more_parts_join_a_report_of_the_same_kind_of_machine(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    machine = {"device": "NVIDIA H200", "torch": "2.11", "triton": "3.6"}
    file.write_text(json.dumps({"machine": machine, "parts": {"rates": {}}, "seconds": 9.0}))
    assert gpu._gone_on_with(file, {"machine": machine})["parts"] == {"rates": {}}
    with pytest.raises(UserError, match=r"made with torch 2\.11, this is 2\.12: run all parts"):
        gpu._gone_on_with(file, {"machine": machine | {"torch": "2.12"}})


def test_invalid_arguments_are_one_line_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py", "--smoke", "--parts", "rates,nothing"])
    with pytest.raises(SystemExit, match=r"^2$"):
        program.run(gpu.main)
    assert capsys.readouterr().err.startswith("there is no part 'nothing'; parts are startup, rates")


def test_a_failing_part_keeps_earlier_results() -> None:
    done, failed = {"status": "done"}, {"status": "failed"}
    assert gpu.better_of(done, failed) is done
    assert gpu.better_of(failed, done) is done
    assert gpu.better_of(None, failed) is failed
    other = {"status": "done", "seconds": 1}
    assert gpu.better_of(done, other) is other


def test_a_failing_part_is_reported_despite_earlier_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_process: PartProcess, _seconds: float) -> dict[str, Any]:
        return {"status": "failed", "message": "no", "seconds": 1.0, "results": []}

    out = tmp_path / "speed.json"
    monkeypatch.setattr(gpu, "rehearse", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a program's own, and the environment of its processes
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("sys.argv", ["gpu.py", "--smoke", "--out", str(out), "--parts", "rates"])
    gpu.main()
    monkeypatch.setattr(PartProcess, "run", fail)
    with pytest.raises(SystemExit, match="not done: rates"):
        gpu.main()
    assert json.loads(out.read_text())["parts"]["rates"]["status"] == "done"


def test_runs_with_other_settings_do_not_overwrite_published_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["accelerated.py", "--steps", "10"])
    with pytest.raises(SystemExit, match=r"^2$"):
        program.run(accelerated.main)
    assert capsys.readouterr().err.endswith("give others an --out of their own\n")


def test_seeds_run_in_processes_and_are_merged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "together.json"
    arguments = ["--device", "cpu", "--recipe", "pydocs-ar-grc", "--seeds", "3", "--contexts", "64", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["accelerated.py", *arguments])
    monkeypatch.setattr(accelerated, "prepare", lambda _: None)
    monkeypatch.setattr(program, "signal_when_parent_ends", lambda _: None)
    monkeypatch.setattr(
        accelerated, "trained", lambda config, _: {"seed": config.seed, "accelerated": config.train.accelerate,
                                                   "valid_perplexity": []}
    )  # fmt: skip
    monkeypatch.setattr(accelerated, "evaluated", lambda folder, *_: [{"of": folder.name}])
    failing = 9
    ended: list[int] = []

    class InThisProcess:
        def __init__(self, command: list[str]) -> None:
            self.arguments = accelerated.parsed(command[2:])

        def wait(self) -> int:
            if self.arguments.only_seed == failing:
                return 2
            accelerated.one_seed(self.arguments, torch.device("cpu"))
            return 0

        def terminate(self) -> None:
            ended.append(self.arguments.only_seed)

    monkeypatch.setattr(accelerated, "subprocess", SimpleNamespace(Popen=InThisProcess))
    monkeypatch.setattr(program, "exit_when_terminated", lambda: None)
    accelerated.main()
    found = json.loads(out.read_text())
    assert [(run["seed"], run["accelerated"]) for run in found["runs"]] == [
        (seed, fast) for seed in range(3) for fast in (False, True)
    ]
    assert found["evaluations"] == [{"of": "False"}]
    failing = 1
    with pytest.raises(SystemExit, match=r"^2$"):
        program.run(accelerated.main)
    assert capsys.readouterr().err.endswith("seed 1 failed, as it says above\n")
    assert 1 in ended


@pytest.mark.parametrize("positions", ["sinusoidal", "alibi"])
def test_rivals_are_one_graph_in_bfloat16(positions: str) -> None:
    """The benchmark compiles them whole, and counts what breaks into several graphs as failed."""
    torch.compiler.reset()
    whole = partial(torch.compile, fullgraph=True, dynamic=False, backend="eager")
    model = TransformerConfig(embed_width=16, num_layers=1, num_heads=2, positions=positions).build(20)
    model = model.bfloat16().eval()
    added = baselines.positions_for(model, 9)

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    def features(tokens: torch.Tensor) -> torch.Tensor:
        return baselines.features_of(model, tokens, added, attend)

    tokens = torch.arange(18).view(2, 9)
    assert torch.equal(whole(features)(tokens), features(tokens))
    with torch.inference_mode():
        first, second = (CachedTransformer(model, 2, 4) for _ in range(2))
        second.caches = [(keys.clone(), values.clone()) for keys, values in first.caches]
        compiled = whole(first.logits)
        for column in tokens.t()[:6]:
            assert torch.equal(compiled(column), second.logits(column))
