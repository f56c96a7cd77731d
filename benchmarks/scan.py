"""Measures time and memory of `scan`, as ratios within one run: to its floor, its definition, and plain loops.

    python benchmarks/scan.py                        # the CPU table, two threads
    python benchmarks/scan.py --device cuda --dtype bfloat16

The floor is the time of the same operator calls, level by level, on contiguous operands prepared in advance. It is the
cost of a scan if reading and writing rows were free. Timed runs of the scan and the floor alternate, and the ratio is
the median over the pairs, so that a busy machine slows both. Memory is measured in a fresh process for each setting.
The targets are for two CPU cores and float32.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # runs uninstalled too

from benchmarks import program
from logdepth import ScanState, scan
from logdepth.atomic import write_json
from logdepth.operators import GRC
from logdepth.runs import device_named
from logdepth.runs.environment import environment
from logdepth.scanning import Operator, reference

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    batch: int = 1
    length: int = 1
    width: int
    documents: tuple[int, ...] = ()
    """Lengths of packed documents; empty for a batch of equal lengths."""
    forward_bar: float
    backward_bar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    milliseconds: float
    against: str
    against_milliseconds: float
    ratio: float
    spread: tuple[float, float]
    """First and third quartile of the ratio over the pairs of runs."""
    bar: float | None = None

    def __str__(self) -> str:
        verdict = "" if self.bar is None else f"   ≤ {self.bar:.2f} {'met' if self.ratio <= self.bar else 'MISSED'}"
        quartiles = f"[{self.spread[0]:.2f}, {self.spread[1]:.2f}]"
        return (
            f"{self.what:<46} {self.milliseconds:>9.3f} ms   {self.against:<12} {self.against_milliseconds:>9.3f} ms   "
            f"ratio {self.ratio:>6.3f} {quartiles:<14}{verdict}"
        )


def ragged_lengths(count: int, longest: int) -> tuple[int, ...]:
    """Return `count` lengths drawn uniformly from 1 … `longest`; the first is `longest`."""
    generator = torch.Generator().manual_seed(0)
    return (longest, *torch.randint(1, longest + 1, (count - 1,), generator=generator).tolist())


CASES = (
    Case(name="batch 8, length 1,024, width 256", batch=8, length=1024, width=256, forward_bar=1.15, backward_bar=1.2),
    Case(name="batch 1, length 256, width 64", length=256, width=64, forward_bar=1.35, backward_bar=1.35),
    Case(name="batch 1, length 255, width 64", length=255, width=64, forward_bar=1.35, backward_bar=1.35),
    Case(
        name="16 documents of 1…1,024, width 256",
        documents=ragged_lengths(16, 1024), width=256, forward_bar=1.25, backward_bar=1.25,
    ),
    Case(
        name="256 documents of 1…64, width 256",
        documents=ragged_lengths(256, 64), width=256, forward_bar=1.25, backward_bar=1.25,
    ),
    Case(
        name="256 documents of 1…64, width 64",
        documents=ragged_lengths(256, 64), width=64, forward_bar=1.25, backward_bar=1.25,
    ),
)  # fmt: skip
STEPS = ((1, 64), (8, 256))
STEP_BAR = 1.5
MEMORY_LENGTH, MEMORY_WIDTH, MEMORY_BAR = 65_536, 64, 0.38


class Bench:
    """The settings that all measurements share: device, dtype and duration; collects the results."""

    def __init__(self, device: str, dtype: torch.dtype, seconds: float) -> None:
        self.device, self.dtype, self.seconds = device, dtype, seconds
        self.has_bars = device == "cpu" and dtype == torch.float32
        self.rows: list[Row] = []

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def operator(self, width: int) -> GRC:
        return GRC(width).to(self.device, self.dtype)

    def clock(self, work: Work) -> float:
        start = time.perf_counter()
        work()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def compare(self, what: str, work: Work, against: str, floor: Work, bar: float | None = None) -> None:
        """Time the two alternately for `seconds`, at least five times each."""
        for _ in range(2):
            self.clock(work), self.clock(floor)
        pairs: list[tuple[float, float]] = []
        deadline = time.perf_counter() + self.seconds
        while len(pairs) < 5 or time.perf_counter() < deadline:
            pairs.append((self.clock(work), self.clock(floor)))
        ratios = [mine / floors for mine, floors in pairs]
        low, _, high = statistics.quantiles(ratios, n=4)
        row = Row(
            what=what,
            milliseconds=statistics.median(mine for mine, _ in pairs) * 1e3,
            against=against,
            against_milliseconds=statistics.median(floors for _, floors in pairs) * 1e3,
            ratio=statistics.median(ratios),
            spread=(low, high),
            bar=bar if self.has_bars else None,
        )
        self.rows.append(row)
        print(row, flush=True)


def recorded_calls(run: Callable[[Operator], object], operator: Operator) -> list[int]:
    """Return the number of rows of each operator call that `run` makes."""
    calls: list[int] = []

    def record(left: Tensor, right: Tensor) -> Tensor:
        calls.append(left.shape[0])
        return operator(left, right)

    with torch.no_grad():
        run(record)
    return calls


def compare_with_floor(bench: Bench, case: Case) -> None:
    operator = bench.operator(case.width)
    packed = bool(case.documents)
    cu_seqlens = [0, *torch.tensor(case.documents).cumsum(0).tolist()] if packed else None
    shape = (sum(case.documents), case.width) if packed else (case.batch, case.length, case.width)
    elements = bench.randn(*shape).requires_grad_()
    calls = recorded_calls(lambda op: scan(op, elements, cu_seqlens=cu_seqlens), operator)
    operands = [
        (bench.randn(n, case.width).requires_grad_(), bench.randn(n, case.width).requires_grad_()) for n in calls
    ]
    grads = [bench.randn(n, case.width) for n in calls]
    grad = bench.randn(*shape)
    leaves = [elements, *operator.parameters(), *(operand for pair in operands for operand in pair)]

    def scan_forward() -> None:
        with torch.no_grad():
            scan(operator, elements, cu_seqlens=cu_seqlens)

    def floor_forward() -> None:
        with torch.no_grad():
            for left, right in operands:
                operator(left, right)

    def clear_gradients() -> None:
        for leaf in leaves:
            leaf.grad = None

    def scan_backward() -> None:
        scan(operator, elements, cu_seqlens=cu_seqlens).prefixes.backward(grad)
        clear_gradients()

    def floor_backward() -> None:
        torch.autograd.backward([operator(left, right) for left, right in operands], grads)
        clear_gradients()

    bench.compare(f"{case.name}, forward", scan_forward, "floor", floor_forward, case.forward_bar)
    bench.compare(f"{case.name}, forward+backward", scan_backward, "floor", floor_backward, case.backward_bar)


@torch.no_grad()
def compare_step(bench: Bench, batch: int, width: int) -> None:
    """Compare one-token steps with the merges that they make, over all carry patterns of lengths 64 … 319."""
    operator = bench.operator(width)
    token = bench.randn(batch, 1, width)
    start = scan(operator, bench.randn(batch, 64, width)).state

    def steps(operator: Operator) -> None:
        state: ScanState = start
        for _ in range(256):
            state = scan(operator, token, state).state

    merges = [(bench.randn(n, width), bench.randn(n, width)) for n in recorded_calls(steps, operator)]

    def floor() -> None:
        for left, right in merges:
            operator(left, right)

    name = f"256 one-token steps, batch {batch}, width {width}"
    bench.compare(name, lambda: steps(operator), "merges", floor, STEP_BAR)


@torch.no_grad()
def compare_with_loops(bench: Bench, batch: int = 1, length: int = 256, width: int = 64) -> None:
    """Compare the scan with its definition, with streaming, and with a left-to-right recurrence of as many steps."""
    operator = bench.operator(width)
    elements = bench.randn(batch, length, width)

    def stream() -> None:
        state = None
        for position in range(length):
            state = scan(operator, elements[:, position : position + 1], state).state

    def recurrence() -> None:
        state = elements[:, 0]
        for position in range(1, length):
            state = operator(state, elements[:, position])

    name = f"batch {batch}, length {length}, width {width}, forward"
    whole = lambda: scan(operator, elements)  # noqa: E731
    bench.compare(name, whole, "reference", lambda: reference.scan(operator, elements))
    bench.compare(name, whole, "token stream", stream)
    bench.compare(name, whole, "recurrence", recurrence)


def peak_increase(device: str, dtype: torch.dtype, length: int, width: int, checkpoint: bool) -> int:
    """Return the increase of peak memory, in bytes, of one forward and backward pass; run it in a fresh process."""
    torch.manual_seed(0)
    operator = GRC(width).to(device, dtype)
    elements = torch.randn(1, length, width, device=device, dtype=dtype, requires_grad=True)
    scan(operator, elements[:, :64]).prefixes.sum().backward()  # loads libraries
    before = peak_memory(device, reset=True)
    scan(operator, elements, checkpoint=checkpoint).prefixes.sum().backward()
    return peak_memory(device) - before


def peak_memory(device: str, reset: bool = False) -> int:
    """Return the peak memory in bytes since the last reset (Linux, CUDA); with `reset`, the current memory."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure_memory(device: str, dtype: str) -> dict[str, float]:
    peaks = {}
    for checkpoint in (False, True):
        command = [sys.executable, __file__, "--device", device, "--dtype", dtype, "--peak", str(int(checkpoint))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks["checkpoint" if checkpoint else "plain"] = int(done.stdout)
    share = peaks["checkpoint"] / peaks["plain"]
    print(
        f"length {MEMORY_LENGTH:,}, width {MEMORY_WIDTH}, forward+backward: peak + {peaks['plain'] / 2**20:.0f} MiB, "
        f"with checkpoint + {peaks['checkpoint'] / 2**20:.0f} MiB   share {share:.3f}   ≤ {MEMORY_BAR} "
        f"{'met' if share <= MEMORY_BAR else 'MISSED'}"
    )
    return {**peaks, "share": share, "bar": MEMORY_BAR}


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="dtype (default: %(default)s)"
    )
    parser.add_argument("--threads", type=program.at_least(1), default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        help="seconds to repeat each comparison for, at least five times (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: none)")
    parser.add_argument("--peak", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device_named(options.device, "--device")
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak is not None:
        print(peak_increase(options.device, dtype, MEMORY_LENGTH, MEMORY_WIDTH, checkpoint=bool(options.peak)))
        return

    bench = Bench(options.device, dtype, options.seconds)
    for case in CASES:
        compare_with_floor(bench, case)
    for batch, width in STEPS:
        compare_step(bench, batch, width)
    compare_with_loops(bench)
    memory = measure_memory(options.device, options.dtype)
    if options.out is not None:
        machine = environment(torch.device(options.device)) | {"dtype": options.dtype}
        report = {"machine": machine, "times": [asdict(row) for row in bench.rows], "memory": memory}
        write_json(options.out, {"date": program.today(), **report})


if __name__ == "__main__":
    program.run(main)
