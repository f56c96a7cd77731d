"""What there is to see of a model that reads: its trees, how its state grows, and the weights of levels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from logdepth.blocks import KeyValueState, MemoryBlock, TensorState
from logdepth.blocks.attention import AttentionBlock
from logdepth.blocks.memory import MemoryLayer, MemoryState
from logdepth.blocks.scan import ScanLayerState
from logdepth.models import LM
from logdepth.ops.block_reading import level_weights
from logdepth.scanning import ScanState, TreeState


@dataclass
class TreeFacts:
    """Trees of one shape: those of all blocks of a kind whose leaves have as many tokens."""

    kind: str
    """scan or memory."""
    chunk: int
    """Tokens of a leaf."""
    weighted: bool
    """Whether a token weighs the blocks that it reads by their level."""
    blocks: list[int] = field(default_factory=list)
    """The numbers of the model's blocks that have such a tree."""
    block_bytes: int = 0
    """Bytes of one node of the tree, over all these blocks."""


@dataclass
class Anatomy:
    """The parts of a model's state, and what a Transformer of its width would keep instead."""

    trees: list[TreeFacts]
    fixed_bytes: int
    """What does not grow."""
    caches: list[tuple[int, int | None]]
    """Of each attention: bytes per token, and the number of tokens that are kept at most."""
    kv_token_bytes: int
    """Bytes per token of a KV cache with as many layers as this model has blocks that mix tokens."""

    def state_bytes(self, length: int) -> int:
        """Bytes of the state after `length` tokens."""
        trees = sum(one.block_bytes * (length // one.chunk).bit_count() for one in self.trees)
        caches = sum(size * (length if most is None else min(length, most)) for size, most in self.caches)
        return self.fixed_bytes + trees + caches

    def body(self) -> dict[str, Any]:
        trees = [vars(one) for one in self.trees]
        caches = [{"token_bytes": size, "most": most} for size, most in self.caches]
        return {
            "trees": trees,
            "fixed_bytes": self.fixed_bytes,
            "caches": caches,
            "kv_token_bytes": self.kv_token_bytes,
        }


def anatomy_of(model: LM, *, low: bool = False) -> Anatomy:
    """The anatomy of a model.

    Args:
        model: any LM.
        low: whether keys, values and the inputs of convolutions are in 16 bits, as they are under autocast.
    """
    found = Anatomy([], 0, [], 0)
    mixing = 0
    for number, block in enumerate(model.blocks):
        state = block.init_state(1)
        mixing += state is not None
        halves = 2 if low else 1
        if isinstance(state, ScanState):
            _add_tree(found, number, "scan", 1, False, [state])
        elif isinstance(state, ScanLayerState):
            _add_tree(found, number, "scan", 1, False, state.scans)
            found.fixed_bytes += 0 if state.conv is None else state.conv.nbytes // halves
        elif isinstance(state, MemoryState):
            assert isinstance(block, MemoryBlock)
            _add_tree(found, number, "memory", block.layer.chunk, True, [state.tree])
            opened, *window = state.tensors.tensors
            found.fixed_bytes += opened.nbytes + sum(one.nbytes for one in window) // halves
        elif isinstance(state, KeyValueState):
            assert isinstance(block, AttentionBlock)
            window_size = block.config.window
            size = 2 * block.dim * state.keys.element_size() // halves
            found.caches.append((size, None if window_size is None else window_size - 1))
        elif isinstance(state, TensorState):
            found.fixed_bytes += state.nbytes
    weight = model.embedding.weight
    found.kv_token_bytes = 2 * mixing * model.config.dim * (2 if low else weight.element_size())
    return found


def _add_tree(
    anatomy: Anatomy, number: int, kind: str, chunk: int, weighted: bool, states: Sequence[TreeState]
) -> None:
    for tree in anatomy.trees:
        if (tree.kind, tree.chunk) == (kind, chunk):
            break
    else:
        tree = TreeFacts(kind, chunk, weighted)
        anatomy.trees.append(tree)
    tree.blocks.append(number)
    for state in states:
        item = torch.empty(0, dtype=state.dtype).element_size()
        tree.block_bytes += len(state.tables) * state.width * item


def weighted_memories(model: LM) -> list[MemoryLayer]:
    """The memories whose blocks are weighed by level only, and not by what they contain, in the order of the model."""
    layers = [block.layer for block in model.blocks if isinstance(block, MemoryBlock)]
    return [layer for layer in layers if layer.reads_levels and not layer.summary]


@contextmanager
def recorded_slopes(model: LM, wanted: bool = True) -> Iterator[list[Tensor]]:
    """A scope whose forward pass leaves the slopes of all level weights, `[tokens, heads, 2]` for each memory."""
    found: list[Tensor] = []
    if not wanted:
        yield found
        return

    def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
        del module, inputs
        found.append(output.detach().float().reshape(-1, output.shape[-1] // 2, 2).cpu())

    hooks = [layer.level_slopes.register_forward_hook(record) for layer in weighted_memories(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def weights_read(layer: MemoryLayer, slopes: Tensor, first: int) -> list[list[float]]:
    """λ of the blocks that each token reads, from the latest to the earliest, as means over the heads.

    Args:
        layer: the memory.
        slopes: at consecutive tokens, `[tokens, heads, 2]`.
        first: the position of the first of them.
    """
    before = [(first + place) // layer.chunk for place in range(len(slopes))]
    levels = range(max(before, default=0).bit_length())
    bias = layer.level_bias.detach().cpu()
    of_heads, no_summary = slopes.transpose(0, 1)[None], slopes.new_empty(1, 0)
    by_level = [level_weights(level, of_heads, bias, no_summary).mean(dim=(0, 1, 3)).tolist() for level in levels]
    return [
        [round(by_level[level][place], 4) for level in levels if number >> level & 1]
        for place, number in enumerate(before)
    ]
