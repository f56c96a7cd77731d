"""The matrix products of a ScanLM: which there are, their FLOPs, and how long they take with nothing between them.

The operator's are counted by running the scan itself with an operator that only notes how many rows it is given.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logdepth.blocks import PaperLayer
from logdepth.models import ScanLMConfig
from logdepth.scanning import Operator, scan


class Product(NamedTuple):
    """`[rows, inputs] · [inputs, outputs]`."""

    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs


def merged_rows(batch: int, length: int) -> tuple[int, int]:
    """Merges of the up-sweep and of the down-sweep over a batch of rows of one length."""
    merges: Counter[str] = Counter()

    def counting(sweep: str) -> Operator:
        def operator(left: Tensor, _right: Tensor) -> Tensor:
            merges[sweep] += left.shape[0]
            return left

        return operator

    scan((counting("up"), counting("down")), torch.zeros(batch, length, 1))
    return merges["up"], merges["down"]


def forward_products(
    config: ScanLMConfig,
    vocab_size: int,
    batch: int,
    length: int,
    *,
    each_token: bool = False,
    leaves_kept: bool = False,
) -> list[Product]:
    """All products of a forward pass, one for each matrix: calls with the same weights count as one.

    Leaves of the first layer depend on the token alone, so that no more of them are needed than the vocabulary has;
    with `each_token`, they are computed for every token all the same. With `leaves_kept` they are there already.
    """
    with torch.device("meta"):
        model = config.build(vocab_size)
    tokens = batch * length
    up, down = merged_rows(batch, length)
    rows: Counter[nn.Linear] = Counter()
    for number, layer in enumerate(model.blocks):
        assert isinstance(layer, PaperLayer)
        leaves = tokens if each_token or number else 0 if leaves_kept else min(tokens, vocab_size)
        operators = layer.operators()
        upward, downward = operators if isinstance(operators, tuple) else (operators, operators)
        places = {layer.into_state: leaves, layer.embedding_net: leaves, layer.out_of_state: tokens}
        for module, count in (*places.items(), (upward, up), (downward, down)):
            assert isinstance(module, nn.Module)
            for linear in module.modules():
                if isinstance(linear, nn.Linear):
                    rows[linear] += count
    head = Product(tokens, config.embed_width, vocab_size)
    return [*(Product(count, one.in_features, one.out_features) for one, count in rows.items() if count), head]


def total_flops(products: list[Product]) -> int:
    return sum(one.flops for one in products)


def run_of(products: list[Product], randn: Callable[..., Tensor], *, backward: bool) -> Callable[[], Tensor]:
    """A function that makes each product in one call, on random operands that lie ready; backward: its two as well."""
    largest = max(one.rows * max(one.inputs, one.outputs) for one in products)
    first, second = randn(largest), randn(largest)
    weights = [randn(one.inputs, one.outputs) for one in products]

    def run() -> Tensor:
        last = first
        for one, weight in zip(products, weights, strict=True):
            features = first[: one.rows * one.inputs].view(one.rows, one.inputs)
            outputs = second[: one.rows * one.outputs].view(one.rows, one.outputs)
            last = features @ weight
            if backward:
                last = outputs @ weight.T
                last = features.T @ outputs
        return last

    return run
