"""Speed, memory and states of the architectures of `logdepth reproduce architectures`, side by side in one sitting.

    python benchmarks/architectures.py              # on a GPU, minutes; --device cpu --smoke to rehearse
    python benchmarks/architectures.py --rows rope memory --parts train

Training is a forward and backward pass as one CUDA graph, without the optimizer, which is the same for all.
Transformers are also timed with torch.compile, and the faster counts in ratios. Decoding continues rows that have read
random tokens. Results are written after every measurement.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # runs uninstalled too

import torch
from torch import Tensor

from benchmarks import program
from logdepth.acceleration import compile_model
from logdepth.architectures import ARCHITECTURES
from logdepth.atomic import write_json
from logdepth.capture import Captured
from logdepth.decoding import Decoder
from logdepth.models import LM, LMState
from logdepth.ops.precision import arithmetic
from logdepth.runs import device_named

TRANSFORMERS = ("rope", "alibi", "window")
Shape = tuple[int, int]
Note = Callable[[str], None]
PARTS = ("train", "forward", "decode")
WARMUPS = 4


class Sizes(NamedTuple):
    """How much is measured; shapes are rows, and tokens of each. States are of one row, a decoder's of all."""

    vocabulary: int = 16_000
    repeats: int = 10
    decoded: int = 32
    """Steps that are timed together, `repeats` times."""
    decoded_before: int = 512
    """Steps before these. A kind of step is recorded when it comes a second time, and kinds come ever more rarely."""
    train: Sequence[Shape] = ((8, 2_048), (2, 8_192), (1, 65_536))
    forward: Sequence[Shape] = ((1, 65_536),)
    decode: Sequence[Shape] = ((1, 8_191), (1, 65_535), (64, 65_535))
    """The lengths at which a tree holds most blocks, and the last that a cache of a power of two has room for."""


SMOKE = Sizes(
    vocabulary=40, repeats=1, decoded=3, decoded_before=4, train=((2, 96),), forward=((1, 192),), decode=((2, 127),)
)
PREFILLED = 8_192
"""Tokens of a part of what is read before decoding."""


def measure(sizes: Sizes, part: str, row: str, shape: Shape, compiled: bool, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ARCHITECTURES[row].build(sizes.vocabulary).to(device)
    if compiled:
        compile_model(model)
    notes: list[str] = []
    function = {"train": _trained, "forward": _read, "decode": _decoded}[part]
    result = function(model, sizes, shape, device, notes.append)
    return {"part": part, "row": row, "shape": list(shape), "compiled": compiled, **result, "notes": notes}


def _trained(model: LM, sizes: Sizes, shape: Shape, device: torch.device, note: Note) -> dict[str, Any]:
    tokens = torch.randint(model.vocab_size, (shape[0], shape[1] + 1), device=device)

    def passes(tokens: Tensor) -> Tensor:
        with arithmetic("auto", device):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(loss)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    passes(tokens)  # sets up what is lazy
    peak = _peak_memory(partial(passes, tokens), device)
    return {**_timed(Captured(passes, on_warning=note), sizes, tokens, device), "peak_bytes": peak}


@torch.inference_mode()
def _read(model: LM, sizes: Sizes, shape: Shape, device: torch.device, note: Note) -> dict[str, Any]:
    model.eval()

    def read(tokens: Tensor) -> Tensor:
        with arithmetic("auto", device):
            return model.features(tokens)

    tokens = torch.randint(model.vocab_size, shape, device=device)
    return _timed(Captured(read, on_warning=note), sizes, tokens, device)


@torch.inference_mode()
def _decoded(model: LM, sizes: Sizes, shape: Shape, device: torch.device, note: Note) -> dict[str, Any]:
    model.eval()
    batch, length = shape
    num_steps = sizes.decoded_before + sizes.repeats * sizes.decoded  # of which the last reaches the length
    with arithmetic("auto", device):
        state: LMState = model.init_state(1)
        for part in torch.randint(model.vocab_size, (1, length - num_steps), device=device).split(PREFILLED, dim=1):
            _, state = model.step(part, state)
        decoder = Decoder(model, state.select([0] * batch), on_warning=note)
        _, state = model.step(torch.randint(model.vocab_size, (1, num_steps), device=device), state)
        tokens, times = torch.zeros(batch, dtype=torch.int64, device=device), []
        for _ in range(sizes.decoded_before):
            decoder.step(tokens)
        for _ in range(sizes.repeats):
            start = _now(device)
            for _ in range(sizes.decoded):
                decoder.step(tokens)
            times.append(_now(device) - start)
    seconds = statistics.median(times) / sizes.decoded
    return {
        "milliseconds": 1e3 * seconds,
        "tokens_per_second": batch / seconds,
        "state_bytes": state.nbytes,
        "decoder_bytes": decoder.nbytes,
    }


def _timed(function: Callable[[Tensor], Tensor], sizes: Sizes, tokens: Tensor, device: torch.device) -> dict[str, Any]:
    times = []
    for number in range(WARMUPS + sizes.repeats):
        start = _now(device)
        function(tokens)
        if number >= WARMUPS:
            times.append(_now(device) - start)
    seconds = statistics.median(times)
    return {"milliseconds": 1e3 * seconds, "tokens_per_second": tokens.numel() / seconds}


def _peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes allocated at most while it runs, weights included."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: a GPU if there is one)")
    parser.add_argument("--rows", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), help="architectures")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not time compiled Transformers, which takes longer"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to rehearse; the numbers mean nothing")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments: argparse.Namespace = parser.parse_args()
    device = device_named(arguments.device, "--device")
    sizes = SMOKE if arguments.smoke else Sizes()
    results: list[dict[str, Any]] = []
    for part in arguments.parts:
        for shape in getattr(sizes, part):
            for row in arguments.rows:
                compiles = row in TRANSFORMERS and part != "decode" and not arguments.no_compile
                for compiled in (False, True) if compiles else (False,):
                    result = measure(sizes, part, row, shape, compiled, device)
                    gc.collect()  # a graph holds its memory until it is collected
                    print(json.dumps(result), flush=True)
                    results.append(result)
                    if arguments.out is not None:
                        write_json(arguments.out, results)


if __name__ == "__main__":
    program.run(main)
