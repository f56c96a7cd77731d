"""Every kernel compiles for Hopper, and keeps what it works on in registers. Without a GPU, in a process of its own.

The interpreter that other tests use takes programs that the compiler refuses.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
CUDA, CAPABILITY, WARP = "cuda", 90, 32
WIDTHS = (448, 512, 1536)
"""Of a deeper model, which is no power of two, and of the paper's."""

SPILLED = {
    "logdepth.ops.delta_rule_kernel._erase_backward": 320,
    "logdepth.ops.block_reading_kernel._read_backward": 128,
}
"""Bytes per thread that kernels may spill: pointers and numbers of rows, read once or twice, but no tile."""
MEMORIES = ((64, 64, 64), (16, 16, 16))
"""Widths of keys and of values, and tokens of a chunk. Heads of 128 spill: a program holds whole matrices."""


def launched_kernels() -> set[str]:
    """`module.kernel` of every launch `kernel[grid](…)` in the sources."""
    return {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{kernel}"
        for path in (ROOT / "logdepth").rglob("*.py")
        for kernel in re.findall(r"^ +(_\w+)\[.+\]\(", path.read_text(), flags=re.MULTILINE)
    }


def test_every_kernel_compiles_without_spilling(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    spilling = [one for one in compiled if stack_of(one["usage"]) > SPILLED.get(one["kernel"], 0)]
    assert not spilling
    assert all("LOCAL:0 " in one["usage"] and "REG:" in one["usage"] for one in compiled)
    assert {one["kernel"] for one in compiled} == launched_kernels()


def stack_of(usage: str) -> int:
    found = re.search(r"STACK:(\d+) ", usage)
    assert found is not None
    return int(found[1])


class NoGpu:
    """What the compiler asks a driver for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(CUDA, CAPABILITY, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_instead_of_launching() -> None:
    """From now on `kernel[grid](…)` compiles for these arguments, and prints what the result takes of the GPU."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def compile_for(*arguments: Any, **options: Any) -> None:
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            print(json.dumps({"kernel": name, "usage": resources(compiled.asm["cubin"])}), flush=True)

        return compile_for

    driver.set_active(NoGpu())
    JITFunction.__getitem__ = launcher  # type: ignore[method-assign]


def resources(binary: bytes) -> str:
    """Registers, stack and local memory of the kernel in a binary, as the toolkit prints them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return next(line.strip() for line in printed.splitlines() if "REG:" in line)


def launch_everything(width: int) -> None:
    """As the library does on a GPU; the values do not matter."""
    from logdepth.operators.fused import pairs_kernel
    from logdepth.operators.grc import few_rows_kernel as few_rows_of_grc
    from logdepth.operators.grc import gate_kernel
    from logdepth.operators.mlp_ldru import weigh_kernel
    from logdepth.ops import (
        activation_kernel,
        column_sums,
        cross_entropy_kernel,
        delta_rule_kernel,
        few_rows_kernel,
        linear_kernel,
        lookup_kernel,
        norm_kernel,
        rows_kernel,
        short_conv_kernel,
    )

    rows, low = 64, torch.bfloat16
    states, pair = torch.empty(3 * rows, width, dtype=low), torch.empty(rows, 2 * width, dtype=low)
    gates, vector, bias = torch.empty(rows, 4 * width, dtype=low), torch.empty(width), torch.empty(4 * width, dtype=low)
    results, some = states[:rows], torch.zeros(rows, dtype=torch.int32)
    tokens, seed, sums = some.long(), torch.zeros(1, dtype=torch.int64), torch.empty(rows, 6 * width)
    dropout: dict[str, Any] = {"first": 0, "rate": 0.1, "seed": seed}
    hidden: dict[str, Any] = {"activation": "silu", "site": 2, **dropout}

    pairs_kernel.gather_pairs(states, some, some, pair, **dropout)
    pairs_kernel.add_pair_gradients(states, some, some, pair, **dropout)
    activation_kernel.activate(gates, gates, **hidden)
    activation_kernel.activate_backward(gates, gates, sums, **hidden)
    gate_kernel.gate(gates, states, some, some, vector, vector, 1e-5, results)
    norm_kernel.residual_normed(results, results, vector, vector, results, eps=1e-5, **dropout)
    gate_kernel.gate_backward(results, gates, states, some, some, vector, 1e-5, states, sums)
    norm_kernel.fill_normed(results, vector, vector, results, results, eps=1e-5, silu=True)
    norm_kernel.normed_backward(results, results, vector, vector, results, results, results, sums, eps=1e-5, silu=True)
    norm_kernel.residual_normed_backward(results, results, results, vector, sums, eps=1e-5, **dropout)
    double = torch.empty(2 * width)
    weigh_kernel.weigh(pair, pair, double, double, pair, eps=1e-5)
    weigh_kernel.weigh_backward(pair, pair, pair, double, double, pair, sums, eps=1e-5)
    column_sums.column_sums(sums)
    rows_kernel.scaled(results, vector[:1])
    rows_kernel.scatter_rows(states, tokens, results)

    leaf: dict[str, Any] = {"eps": 1e-5, "rate": 0.1, "seed": seed}
    lookup_kernel.leaves(states, tokens, vector, vector, results, **leaf)
    lookup_kernel.leaves_backward(results, states, tokens, vector, results, **leaf)
    lookup_kernel.look_up(states, tokens, results)
    lookup_kernel.add_looked_up(results, states, tokens, 0.1, results)
    lookup_kernel.sum_by_token(results, lookup_kernel.order_of(tokens, len(states)))
    cross_entropy_kernel.cross_entropy_(gates, tokens, torch.empty(rows), with_gradient=True, ignored=-100)

    heads = 8
    vectors = torch.empty(2, 64, heads, 3 * 64, dtype=low).transpose(1, 2)
    rates, inverse = torch.empty(2, 64, heads).transpose(1, 2), torch.empty(2, heads, 64, 64)
    read, moved, matrices = torch.empty_like(inverse), torch.empty_like(inverse), torch.empty(2, heads, 64, 128)
    settings: dict[str, Any] = {"epsilon": 1e-6, "exact": False}
    delta_rule_kernel.chunk(vectors, rates, rates, inverse, read, moved, matrices, **settings)
    delta_rule_kernel.chunk_backward(
        read, moved, matrices, vectors, rates, rates, inverse, vectors, rates, rates, **settings
    )

    tokens_of_rows, early, taps = (
        torch.empty(2, rows, width, dtype=low),
        states.view(-1, 3, width),
        torch.empty(4, width),
    )
    short_conv_kernel.convolve(tokens_of_rows, early, taps, tokens_of_rows)
    short_conv_kernel.convolve_backward(
        tokens_of_rows, tokens_of_rows, early, taps, tokens_of_rows, early, torch.empty(4, 4 * width)
    )

    weight, square = torch.empty(4 * width, 2 * width, dtype=low), torch.empty(4 * width, 4 * width, dtype=low)
    into_state = square[:width]
    linear_kernel.linear_activated(pair, weight, bias, gates, **hidden)
    for count in (1, rows):
        both = states[:count], states[:count]
        few_rows_kernel.linear(both, weight, bias, gates[:count], activation="silu")
        few_rows_kernel.linear([pair[:count]], weight, bias, gates[:count], activation="silu")
        mixed = torch.empty(count, width)
        few_rows_of_grc.mix(gates[:count], square, bias, *both, mixed)
        few_rows_kernel.linear([gates[:count]], into_state, bias, mixed, residual=mixed)
        norm_kernel.fill_normed(mixed, vector, vector, None, results[:count], eps=1e-5, silu=False)


def launch_memories(key_width: int, value_width: int, size: int, precision: Any) -> None:
    """The kernels that merge and read blocks of memories."""
    from logdepth.operators.matrix_affine import merge_kernel
    from logdepth.ops import block_reading_kernel
    from logdepth.ops.block_reading import ReadIndex

    pieces, heads, levels = 4, 8, 3
    widths = {"heads": heads, "key_width": key_width, "value_width": value_width, "precision": precision}
    rows = torch.empty(pieces, heads * key_width * (key_width + value_width))
    some, is_read = torch.zeros(pieces, dtype=torch.int32), torch.zeros(pieces, dtype=torch.int8)
    for lists in ((None, None), (some, some)):
        merge_kernel.merge(rows, rows, *lists, rows, **widths)
    merge_kernel.merge_backward(rows, rows, None, None, rows, None, (rows, rows), None, **widths)
    merge_kernel.merge_backward(rows, rows, some, some, rows, (rows, rows), (rows, rows), (rows, is_read), **widths)

    values, keys = (torch.empty(pieces, heads, size, width) for width in (value_width, key_width))
    reads = ReadIndex(*[some] * 9, num_partial=2, nbytes=0)
    sums = torch.empty(pieces, levels * heads)
    for weights in ((torch.empty(pieces, heads, size, 2), torch.empty(levels * heads)), (None, None)):
        read = (values, keys, *weights)
        block_reading_kernel.read(*read, rows, rows, reads, values, precision=precision)
        grads = (keys, keys, keys, weights[0], sums)
        block_reading_kernel.read_backward(*read, rows, rows, reads, *grads, precision=precision)
        block_reading_kernel.block_gradients(*read, reads, keys, keys, rows, rows, precision=precision)


if __name__ == "__main__":
    compile_instead_of_launching()
    for memory in MEMORIES:
        for dot_precision in ("tf32x3", "tf32"):
            launch_memories(*memory, dot_precision)
    for model_width in WIDTHS:
        launch_everything(model_width)
