"""Distances between (a ⊙ b) ⊙ c and a ⊙ (b ⊙ c) on a model's own states, at each level of its tree.

a, b, c are consecutive blocks T_l[j], T_l[j+1], T_l[j+2] of the up-sweep over real text. The distance between the two
results is divided by the distance between results of unrelated texts, which makes it independent of the scale and the
mean of the states. A distance of 0 means associative; a distance of 1 means as different as unrelated texts.

    distance² = mean ‖x - y‖² / mean ‖x - x'‖²       x = (a ⊙ b) ⊙ c, y = a ⊙ (b ⊙ c), x' = x in another window

An operator that forgets, such as a ⊙ b = b, is trivially associative. The influence of a measures this: it is the
distance from x to (a' ⊙ b) ⊙ c, with a' from another window. Only a distance below the influence indicates more than
forgetting.

Everything is computed in the precision of the weights, so that distances do not include errors of lower precision.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.associativity.trees import paper_layers, scanned, with_tree
from logdepth.models import LM
from logdepth.scanning import Operator, OperatorPair
from logdepth.scanning.merge import operator_pair
from logdepth.shapes import Batch, Tokens

Law = Literal["up", "down", "mixed"]
LAWS: dict[Law, str] = {
    "up": "(a ⊙up b) ⊙up c = a ⊙up (b ⊙up c)",
    "down": "(a ⊙down b) ⊙down c = a ⊙down (b ⊙down c)",
    "mixed": "(a ⊙down b) ⊙down c = a ⊙down (b ⊙up c)",
}
"""The laws of an associative operator. If the two sweeps have different operators, `mixed` states that two blocks can
be folded onto a prefix one by one or merged first. If they have the same operator, only `up` is measured."""
GROUP = 8
"""Number of windows that are compared with each other: few, to save memory, and far apart in the text."""
MERGE_ROWS = 16_384
"""Maximum rows per operator call."""


class Distance(NamedTuple):
    """The distance of one law in one layer at one level, over all triples."""

    layer: int
    law: Law
    level: int
    """Level l of the blocks, which contain 2^l elements each."""
    triples: int
    """Number of triples."""
    distance: float
    """Root mean square distance, divided by that of unrelated texts."""
    error: float | None
    """Standard error of the distance over groups of windows; None if there is one group."""
    influence: float
    """Root mean square change of (a ⊙ b) ⊙ c if a comes from another text, divided by that of unrelated texts."""
    relative: float
    """Mean of ‖x - y‖ / ‖x‖."""
    cosine: float
    """Mean cosine similarity of x and y."""


class _Sums(NamedTuple):
    """Sums over the triples of one group of windows."""

    triples: int
    squares: float
    """Sum of ‖x - y‖²."""
    unrelated: float
    """Mean of ‖x - x'‖² over all pairs of windows, multiplied by `triples`."""
    replaced: float
    """Sum of ‖x - (a' ⊙ b) ⊙ c‖²."""
    relative: float
    cosine: float

    @property
    def distance(self) -> float:
        return math.sqrt(self.squares / self.unrelated) if self.unrelated else math.nan

    @property
    def influence(self) -> float:
        return math.sqrt(self.replaced / self.unrelated) if self.unrelated else math.nan


_Key = tuple[int, Law, int]


@torch.inference_mode()
def distances(
    model: LM, windows: Tokens, *, batch_tokens: int, on_group: Callable[[], None] = lambda: None
) -> list[Distance]:
    """Measure all laws of all layers at all levels.

    Args:
        model: the model.
        windows: tokens `[windows, length]`.
        batch_tokens: maximum tokens per forward pass of the model.
        on_group: called after each of the `num_groups(len(windows))` groups.
    """
    found: dict[_Key, list[_Sums]] = {}
    number = num_groups(len(windows))
    for first in range(number):
        group = windows[first::number].to(next(model.parameters()).device)
        for layer, (operator, leaves) in enumerate(_leaves(model, group, max(1, batch_tokens // group.shape[1]))):
            for law, level, sums in _compared(operator, leaves):
                found.setdefault((layer, law, level), []).append(sums)
        on_group()
    return [_distance(key, groups) for key, groups in sorted(found.items(), key=_in_order)]


def num_groups(num_windows: int) -> int:
    """Return the number of groups into which windows are divided."""
    return max(1, num_windows // GROUP)


def _leaves(model: LM, windows: Tokens, rows: int) -> list[tuple[Operator | OperatorPair, Batch]]:
    """Return each layer's operator and its leaves. The model processes `rows` windows at a time."""
    found = paper_layers(model)
    parts: list[list[Batch]] = [[] for _ in found]
    for some in torch.split(windows, rows):
        layers = iter(parts)

        def noted(operator: Operator | OperatorPair, leaves: Batch, layers: Iterator[list[Batch]] = layers) -> Batch:
            next(layers).append(leaves)
            return scanned(operator, leaves)

        with with_tree(model, noted):
            model.features(some)
    return [(layer.operators(), torch.cat(part)) for layer, part in zip(found, parts, strict=True)]


def _compared(operator: Operator | OperatorPair, leaves: Batch) -> Iterator[tuple[Law, int, _Sums]]:
    up, down = operator_pair(operator)
    blocks, level = leaves, 0
    while blocks.shape[1] >= 3:
        first, second, last = blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]
        elsewhere = first.roll(1, dims=0)
        pairs = _merged(up, blocks[:, :-1], blocks[:, 1:])
        left_first = _merged(up, pairs[:, :-1], last)
        replaced = _merged(up, _merged(up, elsewhere, second), last)
        yield "up", level, _sums(left_first, _merged(up, first, pairs[:, 1:]), replaced)
        if down is not up:
            folded = _merged(down, blocks[:, :-1], blocks[:, 1:])
            left_first = _merged(down, folded[:, :-1], last)
            replaced = _merged(down, _merged(down, elsewhere, second), last)
            yield "down", level, _sums(left_first, _merged(down, first, folded[:, 1:]), replaced)
            yield "mixed", level, _sums(left_first, _merged(down, first, pairs[:, 1:]), replaced)
        blocks, level = pairs[:, ::2], level + 1


def _merged(operator: Operator, left: Batch, right: Batch) -> Batch:
    rows = (torch.split(side.flatten(0, 1), MERGE_ROWS) for side in (left, right))
    return torch.cat([operator(one, other) for one, other in zip(*rows, strict=True)]).view(left.shape)


def _sums(left_first: Batch, right_first: Batch, replaced: Batch) -> _Sums:
    """Sum over results `[windows, triples, width]`. Unrelated results are those of the same triple in other windows."""
    num_windows = len(left_first)
    apart = (left_first - right_first).norm(dim=-1)
    # Over all pairs of n windows, the mean of ‖x - x'‖² is 2 / (n - 1) times the sum of squares around their mean.
    around_mean = (left_first - left_first.mean(dim=0)).square().sum()
    return _Sums(
        triples=apart.numel(),
        squares=_total(apart.square()),
        unrelated=_total(around_mean) * 2 * num_windows / (num_windows - 1),
        replaced=_total((left_first - replaced).square()),
        relative=_total(apart / left_first.norm(dim=-1)),
        cosine=_total(F.cosine_similarity(left_first, right_first, dim=-1)),
    )


def _total(values: Tensor) -> float:
    return float(values.double().sum())


def _distance(key: _Key, groups: list[_Sums]) -> Distance:
    layer, law, level = key
    whole = _Sums(*(sum(column) for column in zip(*groups, strict=True)))
    each = torch.tensor([one.distance for one in groups], dtype=torch.float64)
    return Distance(
        layer=layer,
        law=law,
        level=level,
        triples=whole.triples,
        distance=whole.distance,
        error=float(each.std()) / math.sqrt(len(groups)) if len(groups) > 1 else None,
        influence=whole.influence,
        relative=whole.relative / whole.triples,
        cosine=whole.cosine / whole.triples,
    )


def _in_order(found: tuple[_Key, list[_Sums]]) -> tuple[int, int, int]:
    layer, law, level = found[0]
    return layer, list(LAWS).index(law), level
