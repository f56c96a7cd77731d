"""Laws of every block, at the level of the contract `block(x, state, layout) -> (x, state)`."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from logdepth.blocks import BLOCKS, Block, BlockState, KeyValueState, Layout, StepLayout, TensorState
from logdepth.blocks.attention import SMALLEST_CACHE, AttentionConfig, StaticKeyValues
from logdepth.blocks.block import StaticTensors
from logdepth.blocks.short_conv import ShortConv
from logdepth.blocks.spec import block_config
from logdepth.scanning.step import next_step
from tests.block_states import clones_of, close, same_state, tensors_of
from tests.small_models import LM_BLOCKS, SMALL_BLOCKS, shake
from tests.toy import boundaries

DIM = 24
"""A width that all numbers of heads divide."""
TEXTS = sorted({*SMALL_BLOCKS.values(), *(text for blocks in LM_BLOCKS.values() for text in blocks)} - {"attention"})
every_block = pytest.mark.parametrize("text", ["attention:heads=3", *TEXTS])


def built(text: str) -> Block:
    """In float64, with weights off their first values."""
    torch.manual_seed(1)
    block: Any = block_config(text).build(DIM).double().eval()
    shake(block, 0.2)
    return block


def stream(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(block: Block, x: Tensor) -> Tensor:
    result, _ = block(x, None, Layout(x.shape[:-1]))
    return result


def continued(block: Block, x: Tensor, state: Any, absorbed: list[int], lengths: list[int] | None = None) -> Any:
    return block(x, state, Layout(x.shape[:-1], lengths=lengths, absorbed=np.array(absorbed)))


def prefilled(block: Block, lengths: list[int]) -> Any:
    x = stream(len(lengths), max(lengths), seed=7)
    return continued(block, x, block.init_state(len(lengths)), [0] * len(lengths), lengths)[1]


def test_every_block_is_tested() -> None:
    assert {type(block_config(text)) for text in ["attention", *TEXTS]} == set(BLOCKS.values())
    for kind in BLOCKS.values():
        assert kind.__doc__, "the command line shows it"


@every_block
def test_shapes_and_dtypes_are_those_of_the_stream(text: str) -> None:
    block = built(text)
    for shape in ((2, 5), (1, 1), (3, 0), (0, 4)):
        x = stream(*shape)
        result = whole(block, x)
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
    assert whole(block.float(), stream(2, 5).float()).dtype == torch.float32


@every_block
def test_outputs_depend_on_the_past_alone(text: str) -> None:
    block, x = built(text), stream(2, 21)
    before = whole(block, x)
    for position in (0, 7, 15, 20):
        changed = x.clone()
        changed[:, position] += 1.0
        after = whole(block, changed)
        close(after[:, :position], before[:, :position])
        assert (after[:, position] - before[:, position]).abs().max() > 1e-3


@every_block
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 13), max_size=4))
def test_chunks_give_the_output_of_the_whole(text: str, cuts: list[int]) -> None:
    block, x = built(text), stream(2, 13)
    state, parts = block.init_state(2), []
    for start, end in itertools.pairwise([0, *sorted(cuts), 13]):
        part, state = continued(block, x[:, start:end], state, [start] * 2)
        parts.append(part)
    close(torch.cat(parts, dim=1), whole(block, x))


@every_block
def test_padded_rows_are_as_if_alone_in_every_chunk(text: str) -> None:
    block = built(text)
    rows = [stream(length, seed=length) for length in (9, 1, 14, 7)]
    state, absorbed = block.init_state(4), [0] * 4
    for lengths in ([4, 0, 7, 7], [5, 1, 7, 0]):
        chunk = stream(4, max(lengths), seed=99)
        for row, (start, length) in enumerate(zip(absorbed, lengths, strict=True)):
            chunk[row, :length] = rows[row][start : start + length]
        found, state = continued(block, chunk, state, absorbed, lengths)
        for row, (start, length) in enumerate(zip(absorbed, lengths, strict=True)):
            if length:
                close(found[row, :length], whole(block, rows[row][None])[0, start : start + length])
        absorbed = [start + length for start, length in zip(absorbed, lengths, strict=True)]


@every_block
def test_packed_documents_are_separate(text: str) -> None:
    block, lengths = built(text), [5, 0, 1, 17]
    documents = [stream(length, seed=length) for length in lengths]
    x = torch.cat(documents)
    found, _ = block(x, None, Layout(x.shape[:-1], cu_seqlens=boundaries(lengths)))
    close(found, torch.cat([whole(block, document[None])[0] for document in documents if len(document)]))


@every_block
def test_documents_can_be_continued_packed(text: str) -> None:
    """What no model does yet, but the contract allows: the state of each document is a row of the state."""
    block, lengths = built(text), [3, 0, 6]
    state = prefilled(block, [4, 2, 0])
    chunk = stream(3, max(lengths), seed=3)
    x = torch.cat([row[:length] for row, length in zip(chunk, lengths, strict=True)])
    bounds = boundaries(lengths)
    found, after = block(x, state, Layout(x.shape[:-1], cu_seqlens=bounds, absorbed=np.array([4, 2, 0])))
    expected, expected_after = continued(block, chunk, state, [4, 2, 0], lengths)
    for row, length in enumerate(lengths):
        close(found[bounds[row] : bounds[row + 1]], expected[row, :length])
    more = stream(3, 2, seed=4)
    totals = [7, 2, 6]
    close(continued(block, more, after, totals)[0], continued(block, more, expected_after, totals)[0])


@every_block
def test_a_state_is_never_changed_in_place(text: str) -> None:
    block = built(text)
    state = prefilled(block, [6, 2])
    before = clones_of(state)
    first, after = continued(block, stream(2, 5, seed=1), state, [6, 2])
    continued(block, stream(2, 5, seed=2), state, [6, 2], [1, 5])
    if state is not None:
        block.static_state(state)
        state.select([1])
        state.detach()
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(state), before, strict=True))
    again, same = continued(block, stream(2, 5, seed=1), state, [6, 2])
    close(again, first)
    same_state(same, after)


@every_block
def test_states_of_chosen_rows(text: str) -> None:
    block, lengths, rows = built(text), [7, 2, 5], [2, 0, 0, 1]
    state = prefilled(block, lengths)
    if state is None:
        assert block.init_state(3) is None
        return
    x, chosen = stream(4, 4, seed=5), [lengths[row] for row in rows]
    tensors = [one for one in tree_leaves(state) if isinstance(one, Tensor)]
    assert state.nbytes > 0 or not any(one.numel() for one in tensors)
    found, _ = continued(block, x, state.select(rows), chosen)
    same, _ = continued(block, x, state.select(torch.tensor(rows)), chosen)
    close(same, found)
    more = stream(1, 3, seed=6)
    for number, row in enumerate(rows):
        own = x[number : number + 1]
        alone, after = continued(block, own, state.select([row]), [lengths[row]])
        close(found[number : number + 1], alone)
        later, _ = continued(block, more, after, [lengths[row] + 4])
        history = torch.cat([stream(3, 7, seed=7)[row : row + 1, : lengths[row]], own, more], dim=1)
        close(later, whole(block, history)[:, -3:])


@every_block
def test_gradients_reach_every_weight_and_flow_through_states(text: str) -> None:
    block, x, direction = built(text).train(), stream(2, 9).requires_grad_(), stream(2, 9, seed=3)
    inputs = [x, *block.parameters()]
    expected = torch.autograd.grad((whole(block, x) * direction).sum(), inputs, allow_unused=True)
    named = zip(["x", *(name for name, _ in block.named_parameters())], expected, strict=True)
    # the affine operator starts where its right operand's decay is not yet used
    assert [name for name, grad in named if (grad is None or not grad.any()) and "affine" not in text] == []
    first, state = continued(block, x[:, :4], block.init_state(2), [0, 0])
    second, _ = continued(block, x[:, 4:], state, [4, 4])
    parts = (torch.cat([first, second], dim=1) * direction).sum()
    for one, other in zip(torch.autograd.grad(parts, inputs, allow_unused=True), expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)
    if state is not None:
        assert not any(one.requires_grad for one in tensors_of(state.detach()))


@every_block
@pytest.mark.parametrize("lengths", [[6, 6, 6], [6, 0, 3], [1, 70, 4]], ids=["together", "apart", "far apart"])
def test_static_states_give_the_same_outputs(text: str, lengths: list[int]) -> None:
    block = built(text)
    state = prefilled(block, lengths)
    static = block.static_state(state)
    if static is None:
        assert state is None
        return
    now = np.array(lengths)
    same_state(static.state(now, np.arange(3)), state)
    for x in stream(70, 3, 1, seed=2):
        static.make_room(int(now.max()) + 1)
        step = next_step(now, padded=False)
        layout = StepLayout(torch.from_numpy(now[:, None]).clone(), step.shape, torch.from_numpy(step.lists))
        with torch.no_grad():
            expected, state = continued(block, x, state, now.tolist())
            found, after = block(x, static, layout)
        static.update(after)
        now = now + 1
        close(found, expected)
    same_state(static.state(now, np.arange(3)), state)
    rows = np.array([2, 0])
    same_state(static.state(now, rows), state.select(rows.tolist()))
    assert static.nbytes >= static.state(now, np.arange(3)).nbytes
    again = block.static_state(static.state(now, np.arange(3)))
    same_state(again.state(now, np.arange(3)), state)


@every_block
def test_room_moves_memory_only_where_more_is_needed(text: str) -> None:
    block = built(text)
    static = block.static_state(prefilled(block, [3, 1]))
    if static is None:
        return
    now, rows = np.array([3, 1]), np.arange(2)
    before, size = static.state(now, rows), static.nbytes
    assert static.capacity >= 4
    static.make_room(4)
    assert static.nbytes == size
    enough = static.capacity >= 10_000
    static.make_room(10_000)
    assert static.capacity >= 10_000
    assert (static.nbytes == size) == enough
    larger = static.nbytes
    static.make_room(10_000)
    assert static.nbytes == larger
    same_state(static.state(now, rows), before)


@every_block
def test_no_state_is_the_state_of_the_beginning(text: str) -> None:
    block, x = built(text), stream(2, 6)
    found, state = continued(block, x, block.init_state(2), [0, 0])
    close(found, whole(block, x))
    state_of_none = block.init_state(0)
    result, _ = continued(block, stream(0, 3), state_of_none, [])
    assert result.shape == (0, 3, DIM)
    assert (state is None) == (block.init_state(2) is None)


@every_block
def test_a_block_whose_output_is_zero_passes_the_stream_on(text: str) -> None:
    """As at the start of a model with the initialisation "zero-output": every linear map that writes is listed."""
    block, x = built(text), stream(2, 6)
    outputs = block.residual_outputs()
    assert outputs, "residual_outputs must list the linear maps that write to the residual stream"
    assert {id(one) for one in outputs} <= {id(module) for module in block.modules()}
    for one in outputs:
        nn.init.zeros_(one.weight)
        if one.bias is not None:
            nn.init.zeros_(one.bias)
    config = block_config(text)
    share = getattr(config, "input_residual", 0.0) + getattr(config, "residual", 1.0)
    close(whole(block, x), share * x)


@every_block
def test_initial_weights_have_the_deviation_asked_for(text: str) -> None:
    block: Any = block_config(text).build(96)
    block.initialise(0.5)
    for one in block.residual_outputs():
        if "paper-layer" not in text:  # whose own initialisation is the paper's
            assert one.weight.std().item() == pytest.approx(0.5, rel=0.1)
        if one.bias is not None and "paper-layer" not in text:
            assert not one.bias.any()


@every_block
def test_a_block_built_without_memory_is_the_same_after_loading(text: str) -> None:
    block, x = built(text), stream(2, 5)
    with torch.device("meta"):
        other: Any = block_config(text).build(DIM).double()
    other.to_empty(device="cpu")
    other.reset_buffers()
    other.load_state_dict(block.state_dict())
    close(whole(other.eval(), x), whole(block, x))


def test_a_state_of_its_own_kind_needs_a_static_form_of_its_own() -> None:
    class Remembering(Block):
        def forward(self, x: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
            return x, state

    block = Remembering()
    assert block.static_state(None) is None
    assert isinstance(block.static_state(TensorState((torch.zeros(2, 1),))), StaticTensors)
    with pytest.raises(NotImplementedError, match="Remembering has a state of its own kind: it must override"):
        block.static_state([1])


def test_tensor_states() -> None:
    state: BlockState = TensorState((torch.arange(6.0).view(3, 2), torch.arange(3.0)))
    assert state.nbytes == 36
    chosen = state.select([2, 0, 2])
    assert [one.tolist() for one in chosen.tensors] == [[[4, 5], [0, 1], [4, 5]], [2, 0, 2]]
    static = StaticTensors(state)
    static.update(TensorState(tuple(one + 1 for one in state.tensors)))
    assert state.tensors[1].tolist() == [0, 1, 2]
    assert static.state(np.array([1, 1, 1]), np.array([1])).tensors[1].tolist() == [2]
    assert not static.steps_differ
    assert static.capacity > 10**12


@every_block
def test_a_state_keeps_nothing_else_alive(text: str) -> None:
    """After a whole chunk it is as large as after the same chunk token by token."""
    block, x = built(text), stream(2, 130)
    if block.init_state(2) is None:
        return
    _, chunk = continued(block, x, block.init_state(2), [0, 0])
    steps = block.init_state(2)
    for position, some in enumerate(x.split(1, dim=1)):
        _, steps = continued(block, some, steps, [position] * 2)
    assert chunk.nbytes <= steps.nbytes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_short_convolution_is_its_definition(size: int) -> None:
    conv, x = ShortConv(3, size).double(), torch.randn(2, 7, 3, dtype=torch.float64)
    found, _ = conv(x, None, Layout(x.shape[:-1]))
    for position in range(7):
        total = torch.zeros(2, 3, dtype=torch.float64)
        for back in range(min(size, position + 1)):
            total = total + conv.weight[size - 1 - back] * x[:, position - back]
        close(found[:, position], total * total.sigmoid())


@pytest.mark.parametrize("window", [None, 1, 5])
def test_keys_and_values_are_kept_up_to_the_window(window: int | None) -> None:
    block = AttentionConfig(heads=2, window=window).build(DIM).double().eval()
    state = prefilled(block, [9, 2, 7])
    assert isinstance(state, KeyValueState)
    kept = 9 if window is None else window - 1
    assert state.keys.shape == state.values.shape == (3, 2, kept, 12)
    for row, length in enumerate((9, 2, 7)):
        found = sorted(position for position in state.positions[row].tolist() if position >= 0)
        assert found == list(range(max(0, length - kept), length))
    assert state.nbytes == 2 * 8 * state.keys.numel()
    _, later = continued(block, stream(3, 40), state, [9, 2, 7])
    assert later.nbytes == 2 * 8 * later.keys.numel()  # nothing else is kept alive
    _, same_lengths = continued(block, stream(3, 40), block.init_state(3), [0] * 3)
    assert same_lengths.nbytes == 2 * 8 * same_lengths.keys.numel() == 2 * 8 * 3 * 24 * min(40, kept if window else 40)
    static = block.static_state(state)
    assert isinstance(static, StaticKeyValues)
    assert static.keys.shape[2] == (SMALLEST_CACHE if window is None else window)
    assert (static.capacity >= SMALLEST_CACHE + 1) == (window is not None)
    static.make_room(SMALLEST_CACHE + 1)
    assert static.keys.shape[2] == (2 * SMALLEST_CACHE if window is None else window)


def test_keys_and_values_of_rows_that_end_are_dropped() -> None:
    """The cache is as long as the longest row that is left needs at its next step."""
    block = AttentionConfig(heads=2).build(DIM).double().eval()
    state = prefilled(block, [90, 2, 3]).select([1, 2])
    _, state = continued(block, stream(2, 1), state, [2, 3])
    assert state.keys.shape[2] == 4
