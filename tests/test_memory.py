"""The memory: token by token it is its definition, its state is as small as it says, and it stays stable."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from logdepth import LM, MemoryLayer
from logdepth.blocks import Layout, TensorState
from logdepth.blocks.memory import MemoryConfig, MemoryState
from logdepth.blocks.pieces import pieces_of
from logdepth.ops.delta_rule_reference import folded, level_weighted, tokens_of
from logdepth.runs import TrainConfig
from logdepth.scanning import TreeState
from logdepth.training.optimizer import ModelOptimizer
from tests.block_states import clones_of, same_state, tensors_of
from tests.small_models import shake
from tests.toy import assert_same, boundaries, gradients, random_elements

DIM = 12
LAYERS: dict[str, dict[str, Any]] = {
    "levels": {"heads": 2, "chunk": 4, "write_strength": 2},
    "levels-share-weights": {"heads": 3, "chunk": 2, "levels": 2, "conv": 0, "key_width": 3, "value_width": 5},
    "chunks-of-one": {"heads": 1, "chunk": 1, "levels": 4, "gate": False},
    "fold": {"heads": 2, "chunk": 4, "reading": "fold", "write_strength": 2},
    "summary": {"heads": 2, "chunk": 2, "levels": 2, "summary": 3},
    "summary-by-grc": {"heads": 2, "chunk": 2, "levels": 1, "summary": 2, "summary_merge": "grc"},
    "gated": {"heads": 2, "chunk": 2, "summary": 2, "merge_gate": True, "key_width": 3, "write_strength": 2},
    "gated-by-grc": {"heads": 1, "chunk": 1, "summary": 4, "summary_merge": "grc", "merge_gate": True, "conv": 0},
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def layer_of(name: str) -> MemoryLayer:
    """In float64, with weights off their first values."""
    torch.manual_seed(1)
    layer = MemoryLayer(DIM, **LAYERS[name]).double()
    shake(layer, 0.3)
    return layer


class Summaries:
    """Of the blocks of one sequence `[length, dim]`: merged pair by pair, and read token by token."""

    def __init__(self, layer: MemoryLayer, x: Tensor) -> None:
        self.layer, self.operator = layer, layer.summarising
        self.summarised, self.queries = x @ layer.into_summary.weight.T, x @ layer.summary_query.weight.T
        self.made: dict[tuple[int, int], Tensor] = {}

    def block(self, level: int, number: int) -> Tensor:
        if (level, number) not in self.made:
            self.made[level, number] = self.leaf(number) if level == 0 else self.merged(*self.halves(level, number))
        return self.made[level, number]

    def leaf(self, number: int) -> Tensor:
        mean = self.summarised[number * self.layer.chunk : (number + 1) * self.layer.chunk].mean(0)
        norm = self.operator.leaf_norm
        return mean if norm is None else F.layer_norm(mean, mean.shape, norm.weight, norm.bias)

    def halves(self, level: int, number: int) -> tuple[Tensor, Tensor]:
        return self.block(level - 1, 2 * number), self.block(level - 1, 2 * number + 1)

    def merged(self, left: Tensor, right: Tensor) -> Tensor:
        return (left + right) / 2 if self.operator.grc is None else self.operator.grc(left[None], right[None])[0]

    def logit(self, head: int, level: int) -> Tensor:
        """What each token's weight of its block of a level gets; 0 where it reads none of this level."""
        own, terms = slice(head * self.layer.summary, (head + 1) * self.layer.summary), []
        for position, query in enumerate(self.queries):
            number = (position // self.layer.chunk >> level) - 1
            is_read = position // self.layer.chunk >> level & 1
            terms.append(query[own] @ self.block(level, number)[own] if is_read else query.new_zeros(()))
        return torch.stack(terms)

    def gate(self, head: int) -> Callable[[int, int], Tensor] | None:
        gates, width = self.operator.gates, self.layer.key_width
        if gates is None:
            return None
        weight, bias = (one[head * width : (head + 1) * width] for one in (gates.weight, gates.bias))
        return lambda level, number: 1 / (1 + torch.exp(-weight @ torch.cat(self.halves(level, number)) - bias))


def definition(layer: MemoryLayer, x: Tensor) -> Tensor:
    """The output for one sequence `[length, dim]`, head by head and token by token."""
    length, heads = len(x), layer.heads
    projected = x @ layer.into_heads.weight.T
    if layer.conv is None:
        projected = F.silu(projected)
    else:
        projected, _ = layer.conv(projected[None], None, Layout(torch.Size((1, length))))
        projected = projected[0]
    rates = x @ layer.rates.weight.T
    summaries = Summaries(layer, x) if layer.summary else None
    outputs = []
    for head, own in enumerate(projected.chunk(heads, dim=1)):
        queries, keys, values = own.split([layer.key_width, layer.key_width, layer.value_width], dim=1)
        queries, keys = (one / (one.square().sum(1, keepdim=True) + 1e-6).sqrt() for one in (queries, keys))
        log_decay = -torch.log1p(torch.exp(rates[:, head] + layer.decay_bias[head]))
        strength = layer.write_strength / (1 + torch.exp(-rates[:, heads + head]))
        tokens = tokens_of(keys, values, log_decay, strength)
        if layer.reads_levels:
            constant, slope = (x @ layer.level_slopes.weight[2 * head : 2 * head + 2].T).unbind(1)
            weights = []
            for level in range(length.bit_length()):
                known = min(level, layer.levels - 1)
                bias = layer.level_bias[known * heads + head]
                logit = constant + slope * known / 2 + bias + np.log(np.e - 1)
                if summaries is not None:
                    logit = logit + summaries.logit(head, level)
                weights.append(torch.log1p(torch.exp(logit)))
            gate = None if summaries is None else summaries.gate(head)
            output = level_weighted(queries, tokens, torch.stack(weights, dim=1), layer.chunk, gate)
        else:
            output, _ = folded(queries, tokens)
        outputs.append(output / (output.square().mean(1, keepdim=True) + 1e-6).sqrt() * layer.head_norm.weight)
    mixed = torch.cat(outputs, dim=1)
    if layer.gate is not None:
        mixed = mixed * F.silu(x @ layer.gate.weight.T)
    return mixed @ layer.out.weight.T


@every_layer
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 11, 16, 23, 37])
def test_it_is_its_definition(name: str, length: int) -> None:
    layer, x = layer_of(name), random_elements(length, DIM).requires_grad_()
    actual, expected = layer(x[None])[0], definition(layer, x)
    assert_same(actual, expected, 1e-10)
    inputs = [x, *layer.parameters()]
    for one, other in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(one, other, 1e-8)


@every_layer
def test_continued_from_the_middle_of_a_chunk_it_is_its_definition(name: str) -> None:
    """Also with gradients of what is before the state, of which the later outputs know through the state alone."""
    layer, x = layer_of(name), random_elements(29, DIM).requires_grad_()
    _, state = layer.step(x[None, :7], layer.init_state(1))
    _, state = layer.step(x[None, 7:13], state)
    actual, expected = layer.step(x[None, 13:], state)[0][0], definition(layer, x)[13:]
    assert_same(actual, expected, 1e-10)
    inputs = [x, *layer.parameters()]
    for one, other in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(one, other, 1e-8)


@every_layer
@pytest.mark.parametrize(("absorbed", "new"), [([5, 8], 3), ([6, 0], 6), ([9, 3], 1)])
def test_gradcheck_into_the_incoming_state(name: str, absorbed: list[int], new: int) -> None:
    layer = layer_of(name)
    _, state = layer.step(random_elements(2, max(absorbed), DIM), layer.init_state(2), lengths=absorbed)
    x = random_elements(2, new, DIM, seed=1).requires_grad_()

    def run(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        before: Any = TensorState(tensors)
        if isinstance(state, MemoryState):
            tree = TreeState(state.tree.row_lengths, tensors[0])
            before = MemoryState(state.lengths, tree, TensorState(tensors[1:]))
        y, after = layer.step(x, before)
        return y, *(one for one in tensors_of(after) if one.is_floating_point())

    tensors = [one.detach().requires_grad_() for one in tensors_of(state) if one.is_floating_point()]
    assert torch.autograd.gradcheck(run, (x, *tensors), fast_mode=True)


@pytest.mark.parametrize("write_strength", [1.0, 2.0])
def test_untrained_both_readings_are_equal(write_strength: float) -> None:
    levels = MemoryLayer(DIM, heads=2, chunk=4, write_strength=write_strength).double()
    fold = MemoryLayer(DIM, heads=2, chunk=4, write_strength=write_strength, reading="fold").double()
    fold.load_state_dict(levels.state_dict(), strict=False)
    x = random_elements(2, 61, DIM)
    assert_same(levels(x), fold(x))
    shake(levels.level_slopes, 0.3)
    assert not torch.allclose(levels(x), fold(x))


@pytest.mark.parametrize("merge", ["mean", "grc"])
def test_untrained_summaries_change_nothing_and_learn_at_once(merge: Any) -> None:
    torch.manual_seed(0)
    summarised = MemoryLayer(DIM, heads=2, chunk=4, summary=3, summary_merge=merge).double()
    plain = MemoryLayer(DIM, heads=2, chunk=4).double()
    plain.load_state_dict(summarised.state_dict(), strict=False)
    x = random_elements(2, 61, DIM)
    y = summarised(x)
    assert_same(y, plain(x))
    (grad,) = torch.autograd.grad(y.square().sum(), summarised.summary_query.weight)
    assert grad.any()


def test_untrained_gates_keep_nearly_everything() -> None:
    torch.manual_seed(0)
    gated = MemoryLayer(DIM, heads=2, chunk=4, summary=3, merge_gate=True).double()
    plain = MemoryLayer(DIM, heads=2, chunk=4).double()
    plain.load_state_dict(gated.state_dict(), strict=False)
    x = random_elements(2, 61, DIM)
    difference = (gated(x) - plain(x)).norm() / plain(x).norm()
    assert 1e-4 < difference < 0.1


def test_a_language_model_starts_with_weights_of_one_and_slow_decay() -> None:
    model = LM(50, dim=16, blocks=("memory:heads=4",), initialisation="gpt2")
    layer = model.blocks[0].layer
    assert not layer.level_slopes.weight.any()
    assert not layer.level_bias.any()
    torch.testing.assert_close(layer.decay_bias.detach(), torch.linspace(-6, -2, 4))
    assert layer.into_heads.weight.std().item() == pytest.approx(0.02, rel=0.2)
    decayed, kept = ModelOptimizer(model, TrainConfig(weight_decay=0.1)).adamw.param_groups
    assert {id(layer.decay_bias), id(layer.level_bias)} <= {id(one) for one in kept["params"]}
    assert kept["weight_decay"] == 0
    assert id(layer.level_slopes.weight) in {id(one) for one in decayed["params"]}


def test_a_language_model_leaves_merges_their_first_weights() -> None:
    model = LM(50, dim=16, blocks=("memory:heads=4,summary=8,summary_merge=grc,merge_gate=true",))
    layer = model.blocks[0].layer
    assert not layer.summary_query.weight.any()
    assert layer.into_summary.weight.std().item() == pytest.approx(0.02, rel=0.2)
    operator = layer.summarising
    assert operator.grc.hidden.weight.std() > 0.05
    assert not operator.gates.weight.any()
    assert (operator.gates.bias == 4).all()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 192, 200])
def test_a_state_holds_a_block_for_each_bit_and_the_open_chunk(length: int) -> None:
    layer = MemoryLayer(16, heads=2, chunk=64, conv=4)
    _, state = layer.step(torch.randn(3, length, 16), layer.init_state(3))
    matrix = 2 * 8 * (8 + 8) * 4
    window = 3 * 2 * 24 * 4
    assert state.tree.lengths.tolist() == [length // 64] * 3
    assert state.lengths.tolist() == [length] * 3
    assert state.nbytes == 3 * (matrix * ((length // 64).bit_count() + 1) + window)
    layer = MemoryLayer(16, heads=2, chunk=64, conv=4, summary=5)
    _, state = layer.step(torch.randn(3, length, 16), layer.init_state(3))
    assert state.nbytes == 3 * ((matrix + 2 * 5 * 4) * ((length // 64).bit_count() + 1) + window)
    fold = MemoryLayer(16, heads=2, reading="fold")
    _, state = fold.step(torch.randn(3, length, 16), fold.init_state(3))
    assert state.nbytes == 3 * (matrix // 2 + window)


def test_as_a_layer_of_any_model() -> None:
    layer = layer_of("levels").eval()
    lengths = [19, 0, 6, 13]
    rows = [random_elements(length, DIM, seed=length) for length in lengths]
    batch = torch.full((4, 19, DIM), 1e6, dtype=torch.float64)
    for number, row in enumerate(rows):
        batch[number, : len(row)] = row
    padded = layer(batch, lengths=lengths)
    packed = layer(torch.cat(rows), cu_seqlens=boundaries(lengths))
    for row, found, document in zip(rows, padded, packed.split(lengths), strict=True):
        if len(row):
            assert_same(found[: len(row)], layer(row[None])[0], 1e-10)
            assert_same(document, layer(row[None])[0], 1e-10)
    _, state = layer.step(batch, layer.init_state(4), lengths=lengths)
    before = clones_of(state)
    again = state.select([-1, 2])
    assert again.lengths.tolist() == [13, 6]
    more = random_elements(2, 5, DIM, seed=9)
    found, _ = layer.step(more, again.detach())
    for number, row in enumerate((3, 2)):
        assert_same(found[number], layer(torch.cat([rows[row], more[number]])[None])[0, -5:], 1e-10)
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(state), before, strict=True))
    assert not any(one.requires_grad for one in tensors_of(again.detach()))
    with pytest.raises(ValueError, match="x has 3 rows, but the state has 4"):
        layer.step(random_elements(3, 1, DIM), state)
    with pytest.raises(ValueError, match="x has 3 rows, but the state has 2"):
        layer_of("fold").step(random_elements(3, 1, DIM), layer_of("fold").init_state(2))


def test_nothing_new_changes_nothing() -> None:
    for name in LAYERS:
        layer = layer_of(name)
        _, state = layer.step(random_elements(2, 7, DIM), layer.init_state(2))
        y, after = layer.step(random_elements(2, 3, DIM), state, lengths=[0, 0])
        same_state(after, state)
        assert y.shape == (2, 3, DIM)
        assert layer.step(random_elements(2, 0, DIM), state)[0].shape == (2, 0, DIM)


@pytest.mark.parametrize("reading", ["levels", "fold"])
def test_under_autocast_memories_stay_in_float32(reading: Any) -> None:
    """Inputs are rounded to bfloat16; sums of log α and products of M are not."""
    torch.manual_seed(0)
    layer = MemoryLayer(32, heads=2, chunk=16, reading=reading)
    x = torch.randn(2, 200, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer.step(x, layer.init_state(2))
        loss = y.float().square().mean()
    loss.backward()
    assert y.dtype == torch.bfloat16
    memories = [one for one in tensors_of(state) if one.is_floating_point()][: 2 if reading == "levels" else 1]
    assert all(one.dtype == torch.float32 for one in memories)
    assert all(one.grad.isfinite().all() for one in layer.parameters())
    exact = copy.deepcopy(layer).double()(x.double())
    assert (y.double() - exact).abs().max() < 0.03 * exact.abs().max()


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_weights_in_low_precision_memories_stay_in_float32(name: str, dtype: torch.dtype) -> None:
    exact, x = layer_of(name), random_elements(2, 21, DIM)
    layer = copy.deepcopy(exact).to(dtype)
    y, state = layer.step(x[:, :13].to(dtype), layer.init_state(2))
    more, state = layer.step(x[:, 13:].to(dtype), state)
    assert y.dtype == more.dtype == dtype
    memories = [one for one in tensors_of(state) if one.is_floating_point()][: 2 if layer.reads_levels else 1]
    assert all(one.dtype == torch.float32 for one in memories)
    expected = exact(x)
    assert (torch.cat([y, more], dim=1) - expected).norm() < 0.1 * expected.norm()
    more.sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in layer.parameters())


@pytest.mark.parametrize("reading", ["levels", "fold"])
@pytest.mark.parametrize("decay", [-20.0, 0.0, 20.0], ids=["none", "some", "all"])
def test_float32_stays_close_to_float64(reading: Any, decay: float) -> None:
    """Over many chunks, with the strongest writes, keys that repeat, and any decay."""
    torch.manual_seed(0)
    layer = MemoryLayer(32, heads=2, chunk=64, conv=0, reading=reading, write_strength=2)
    with torch.no_grad():
        layer.decay_bias.fill_(decay)
        layer.rates.weight[2:].mul_(20)  # strengths near 0 and 2
    x = torch.randn(1, 40, 32)[:, torch.randint(40, (1000,))].requires_grad_()
    exact = copy.deepcopy(layer).double()
    y, expected = layer(x), exact(x.double())
    assert_same(y.double(), expected, 2e-4)
    direction = torch.randn_like(y)
    (grad,) = torch.autograd.grad((y * direction).sum(), x)
    (exact_grad,) = torch.autograd.grad((expected * direction).sum(), x)
    assert (grad - exact_grad).norm() < 1e-3 * exact_grad.norm()


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), max_size=5),
    chunk=st.sampled_from([1, 2, 8]),
    packed=st.booleans(),
)
def test_pieces_are_the_tokens_of_each_chunk(rows: list[tuple[int, int]], chunk: int, packed: bool) -> None:
    opened, new = np.array([one % chunk for one, _ in rows], dtype=np.int64), [length for _, length in rows]
    if packed:
        layout = Layout(torch.Size((sum(new),)), cu_seqlens=boundaries(new))
    else:
        layout = Layout(torch.Size((len(rows), max(new, default=0) + 1)), lengths=new)
    pieces = pieces_of(layout, chunk, opened, torch.device("cpu"))
    tokens = torch.arange(1.0, layout.shape.numel() + 1)
    cut, expected, complete, first, last, still_open = pieces.cut(tokens), [], [], [], [], []
    for row, (length, start) in enumerate(zip(new, boundaries(new), strict=False)):
        place = start if packed else row * layout.shape[1]
        own = tokens[place : place + length].tolist()
        sizes = [min(chunk - opened[row], length)] if length else []
        while sum(sizes) < length:
            sizes.append(min(chunk, length - sum(sizes)))
        for number, size in enumerate(sizes):
            first += [len(expected)] * (number == 0)
            last += [len(expected)] * (number == len(sizes) - 1)
            ends = (opened[row] if number == 0 else 0) + size == chunk
            (complete if ends else still_open).append(len(expected))
            expected.append((row, number, own[:size]))
            own = own[size:]
    assert [(row, number) for row, number, _ in expected] == list(zip(pieces.row, pieces.number, strict=True))
    assert [[token for token in piece if token] for piece in cut.tolist()] == [piece for _, _, piece in expected]
    assert (pieces.first.tolist(), pieces.last.tolist()) == (first, last)
    assert sorted([*first, *pieces.later.tolist()]) == list(range(len(expected)))
    assert (pieces.complete.tolist(), pieces.open.tolist()) == (complete, still_open)
    assert pieces.open_rows.tolist() == [expected[one][0] for one in still_open]
    assert pieces.rows.tolist() == [row for row, length in enumerate(new) if length]
    assert pieces.bounds.tolist() == [sum(row < one for row, _, _ in expected) for one in range(len(rows) + 1)]
    there = torch.isin(tokens, cut.flatten())
    assert torch.equal(pieces.joined(cut), tokens.where(there, 0))
    assert int(there.sum()) == sum(new)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"heads": 0}, "heads, levels, key_width and value_width must be at least 1"),
        ({"levels": 0}, "must be at least 1"),
        ({"key_width": 0}, "must be at least 1"),
        ({"conv": -1}, "conv at least 0"),
        ({"chunk": 48}, "chunk must be a power of two; got 48"),
        ({"chunk": 0}, "chunk must be a power of two; got 0"),
        ({"reading": "all"}, "reading must be levels or fold; got 'all'"),
        ({"write_strength": 2.5}, "write_strength must be above 0 and at most 2; got 2.5"),
        ({"summary": -1}, "summary must be at least 0; got -1"),
        ({"summary": 4, "reading": "fold"}, "a summary needs reading=levels"),
        ({"summary": 4, "summary_merge": "max"}, "summary_merge must be mean or grc; got 'max'"),
        ({"summary_merge": "grc"}, "summary_merge and merge_gate need a summary; give its width"),
        ({"merge_gate": True}, "summary_merge and merge_gate need a summary"),
        ({"heads": 5}, "dim 12 does not divide into 5 heads; give key_width and value_width"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MemoryLayer(DIM, **fields)
    if fields != {"heads": 5}:
        with pytest.raises(ValueError, match=says):
            MemoryConfig(**fields)
    with pytest.raises(ValueError, match="dropout must be from 0 to below 1"):
        MemoryConfig(dropout=1.0)
