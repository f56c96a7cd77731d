"""Compares `generate` of the Hugging Face models with the library's decoder: logits, tokens, and time per token.

    python benchmarks/hugging_face.py --device cuda --precision bfloat16
    python benchmarks/hugging_face.py --models pydocs-ar-grc --steps 100 --repeats 3

Models are those of recipes, with random weights. Both ways generate greedily after the same prompts, in turn; the
median of the repeats counts. The time of a token is the time of all steps after the prompt, divided by their number. On
a CPU it is the time of one thread of this process, so that other programs do not count.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from logdepth.decoding import Decoder
from logdepth.hf import LogDepthConfig, LogDepthForCausalLM
from logdepth.models import LM
from logdepth.ops.precision import arithmetic
from logdepth.recipes import recipe

MODELS = ("wikitext2-ar-grc", "wikitext2-transformer-alibi", "webmix-memory-window", "webmix-grc-window")


def model_of(name: str, device: torch.device) -> LogDepthForCausalLM:
    run = recipe(name)
    torch.manual_seed(0)
    model = LogDepthForCausalLM(LogDepthConfig(vocab_size=run.data.tokenizer.vocab_size, model=run.model))
    with torch.no_grad():
        for parameter in model.parameters():  # blocks whose output is zero would hide errors
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(device).eval()


def by_decoder(model: LM, prompt: Tensor, steps: int) -> tuple[Tensor, float]:
    """The tokens after a prompt, and the seconds that the steps after the first token took."""
    with torch.inference_mode():
        logits, state = model.step(prompt, model.init_state(len(prompt)))
        decoder, tokens = Decoder(model, state), [logits[:, -1].float().argmax(-1)]
        start = _now(prompt)
        for _ in range(steps - 1):
            tokens.append(decoder.step(tokens[-1]).float().argmax(-1))
        took = _now(prompt) - start
    return torch.stack(tokens, dim=1), took


def by_generate(model: LogDepthForCausalLM, prompt: Tensor, steps: int) -> tuple[Tensor, float]:
    """The same by `generate`, less what it takes for the first token alone."""
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}

    def seconds(count: int) -> tuple[Tensor, float]:
        start = _now(prompt)
        found = model.generate(prompt, max_new_tokens=count, **settings)
        return found[:, prompt.shape[1] :], _now(prompt) - start

    _, first = seconds(1)
    tokens, whole = seconds(steps)
    return tokens, whole - first


def _now(tensor: Tensor) -> float:
    """Seconds, when all work on the tensor's device is done."""
    if not tensor.is_cuda:
        return time.process_time()
    torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def measured(name: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    model = model_of(name, device)
    prompt = torch.randint(model.config.vocab_size, (batch, arguments.prompt), device=device)
    ways: dict[str, Callable[[], tuple[Tensor, float]]] = {
        "decoder": lambda: by_decoder(model.model, prompt, arguments.steps),
        "generate": lambda: by_generate(model, prompt, arguments.steps),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    tokens: dict[str, Tensor] = {}
    with arithmetic(arguments.precision, device):
        with torch.inference_mode():
            difference = (model(prompt, use_cache=False).logits - model.model(prompt)).abs().max().item()
        for repeat in range(arguments.repeats + 1):
            for way, run in ways.items():
                gc.collect()
                tokens[way], took = run()
                if repeat:  # the first sets up
                    seconds[way].append(took)
    steps = arguments.steps - 1
    decoder, generate = (1e3 * statistics.median(seconds[way]) / steps for way in ways)
    return {
        "model": name,
        "batch": batch,
        "largest_difference_of_logits": difference,
        "same_tokens": (tokens["decoder"] == tokens["generate"]).double().mean().item(),
        "decoder_ms": decoder,
        "generate_ms": generate,
        "overhead_ms": generate - decoder,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=256, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        for batch in arguments.batches:
            rows.append(measured(name, batch, arguments))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        cuda = arguments.device.startswith("cuda")
        facts = {
            "device": torch.cuda.get_device_name(arguments.device) if cuda else platform.processor(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "settings": {key: value for key, value in vars(arguments).items() if key != "out"},
        }
        arguments.out.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
