"""What a hybrid costs beyond its blocks: a training pass of the whole model against the sum of its parts.

    python benchmarks/hybrid.py                     # on a GPU, seconds; --device cpu --smoke to rehearse

The model comes from a config only: a scan, attention in a window and an MLP, in turns. Its forward and backward pass is
one CUDA graph. Each block, and the embedding with the head, is timed in the same way on inputs of the same shape.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # runs uninstalled too

import torch
from torch import Tensor

from benchmarks import program
from logdepth.acceleration import acceleration_in_words
from logdepth.blocks import Layout
from logdepth.capture import Captured
from logdepth.models import LM
from logdepth.ops.precision import arithmetic
from logdepth.runs import device_named

BLOCKS = ("scan:heads=4", "attention:window=128,heads=8", "mlp")
WARMUPS, REPEATS = 4, 20


def median_milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after warm-up and the capture of its graph."""
    times = []
    for number in range(WARMUPS + REPEATS):
        start = _now(device)
        work()
        if number >= WARMUPS:
            times.append(1e3 * (_now(device) - start))
    return statistics.median(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(
    device: torch.device, dim: int, vocab_size: int, batch: int, length: int, repeats: int
) -> dict[str, object]:
    """Times of the whole model and of its parts, forward and backward."""
    torch.manual_seed(0)
    model = LM(vocab_size, dim=dim, blocks=BLOCKS, repeats=repeats, initialisation="gpt2").to(device)
    tokens = torch.randint(vocab_size, (batch, length + 1)).to(device)

    def whole(tokens: Tensor) -> Tensor:
        with arithmetic("auto", device):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(loss)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    def ends(tokens: Tensor) -> Tensor:
        """Embedding and head, without blocks between them."""
        with arithmetic("auto", device):
            assert model.norm is not None
            features = model.norm(model.embedding(tokens[:, :-1])).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(model.logits(features).float(), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    def block(number: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            with arithmetic("auto", device):
                y, _ = model.blocks[number](x, None, Layout(x.shape[:2]))
            torch.autograd.backward(y, torch.ones_like(y))
            model.zero_grad(set_to_none=True)
            return y.detach()

        return run

    x = torch.randn(batch, length, dim, device=device)
    notes: list[str] = []

    def timed(function: Callable[[Tensor], Tensor], argument: Tensor) -> float:
        captured = Captured(function, on_warning=notes.append)
        milliseconds = median_milliseconds(partial(captured, argument), device)
        captured.forget()
        return milliseconds

    parts = {"embedding and head": timed(ends, tokens)}
    for number, one in enumerate(model.blocks):
        parts[f"{number}: {type(one).__name__}"] = timed(block(number), x)
    total = timed(whole, tokens)
    return {
        "acceleration": acceleration_in_words(model, True),
        "shape": [batch, length, dim],
        "whole_milliseconds": total,
        "part_milliseconds": parts,
        "ratio": total / sum(parts.values()),
        "notes": notes,
    }


def main() -> None:
    parser = program.Parser(__doc__)
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: a GPU if there is one)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to rehearse; the numbers mean nothing")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments: argparse.Namespace = parser.parse_args()
    device = device_named(arguments.device, "--device")
    sizes = (16, 37, 2, 32, 1) if arguments.smoke else (512, 8_000, 32, 512, 2)
    result = measure(device, *sizes)
    text = json.dumps(result, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    program.run(main)
