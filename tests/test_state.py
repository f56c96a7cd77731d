"""The state: what it holds, what it keeps alive, and how rows and processes come and go."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from logdepth import ScanState, scan
from logdepth.scanning.state import table_rows
from tests.toy import WIDTH, Toy, assert_same, padded, random_elements, sequences


def state_of(*lengths: int) -> ScanState:
    return scan(Toy(), padded(sequences(lengths)), lengths=list(lengths)).state


def test_it_knows_itself() -> None:
    state = state_of(5, 0, 8)
    assert len(state) == 3
    assert state.lengths.tolist() == [5, 0, 8]
    assert state.lengths.dtype == torch.int64
    assert (state.width, state.dtype, state.device) == (WIDTH, torch.float64, torch.device("cpu"))
    assert repr(state) == "ScanState(lengths=[5, 0, 8], width=3, dtype=torch.float64, device='cpu')"
    assert "…" in repr(state_of(*range(9)))


def test_lengths_are_a_copy() -> None:
    state = state_of(5, 3)
    state.lengths[0] = 99
    assert state.lengths.tolist() == [5, 3]


@pytest.mark.parametrize("lengths", [(8,), (13,), (13, 13), (5, 0, 8, 1)])
def test_nbytes_is_the_truth(lengths: tuple[int, ...]) -> None:
    state = state_of(*lengths)
    expected = 2 * WIDTH * 8 * sum(length.bit_count() for length in lengths)
    assert state.nbytes == expected
    assert state.blocks.untyped_storage().nbytes() + state.prefixes.untyped_storage().nbytes() == expected


@pytest.mark.parametrize("first", [8, 13])
@pytest.mark.parametrize("then", [0, 1, 3])
def test_it_keeps_no_activations_alive(first: int, then: int) -> None:
    """A projection returns views of its operands, the hardest case: the state must still own what it holds."""
    elements = random_elements(1, first, WIDTH)
    state = scan(lambda left, right: right, elements).state
    if then:
        state = scan(lambda left, right: right, random_elements(1, then, WIDTH), state).state
    ours = {state.blocks.untyped_storage().data_ptr(), state.prefixes.untyped_storage().data_ptr()}
    assert elements.untyped_storage().data_ptr() not in ours
    assert len(ours) == 2
    assert state.nbytes == 2 * WIDTH * 8 * (first + then).bit_count()


def test_overwriting_the_elements_leaves_the_state_alone() -> None:
    elements = random_elements(2, 1, WIDTH)
    state = scan(Toy(), elements).state
    before = state.blocks.clone()
    elements.zero_()
    assert torch.equal(state.blocks, before)


def test_detach_cuts_the_graph_and_releases_it() -> None:
    kept = []

    class Saved:
        """Stands for a tensor that the graph keeps for its backward pass."""

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # an output would hold on to the graph itself
            kept.append(weakref.ref(self))

    elements = random_elements(1, 6, WIDTH).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        state = scan(Toy(), elements).state
    assert state.blocks.requires_grad
    assert state.to(torch.float32).prefixes.requires_grad
    assert any(reference() is not None for reference in kept)
    state = state.detach()
    gc.collect()
    assert all(reference() is None for reference in kept)
    assert state.blocks.grad_fn is None
    assert state.prefixes.grad_fn is None
    assert state.lengths.tolist() == [6]


def test_to() -> None:
    state = state_of(5, 3).to(torch.float32)
    assert state.dtype == state.prefixes.dtype == torch.float32
    assert state.to("meta").device.type == "meta"


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), data=st.data())
def test_select_is_each_row_alone(lengths: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=8))
    chosen = state_of(*lengths).select(torch.tensor(rows, dtype=torch.int64))
    assert chosen.lengths.tolist() == [lengths[row] for row in rows]
    elements = sequences(lengths)
    alone = [scan(Toy(), elements[row][None]).state for row in rows]
    for number, one in enumerate(alone):
        assert_same(chosen.select([number]).blocks, one.blocks)
        assert_same(chosen.select([number]).prefixes, one.prefixes)


@given(
    groups=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_concatenate_undoes_select(groups: list[list[int]]) -> None:
    lengths = [length for group in groups for length in group]
    whole = state_of(*lengths)
    starts = [sum(map(len, groups[:number])) for number in range(len(groups))]
    parts = [whole.select(range(start, start + len(group))) for start, group in zip(starts, groups, strict=True)]
    joined = ScanState.concatenate(parts)
    assert joined.lengths.tolist() == lengths
    assert torch.equal(joined.blocks, whole.blocks)
    assert torch.equal(joined.prefixes, whole.prefixes)


def test_a_newcomer_joins_a_batch() -> None:
    veterans, newcomer = state_of(7, 12), ScanState.empty(1, WIDTH, dtype=torch.float64)
    together = ScanState.concatenate([veterans, newcomer])
    more = random_elements(3, 4, WIDTH)
    prefixes = scan(Toy(), more, together).prefixes
    assert_same(prefixes[:2], scan(Toy(), more[:2], veterans).prefixes)
    assert_same(prefixes[2:], scan(Toy(), more[2:]).prefixes)


def test_table_rows() -> None:
    held, rows = table_rows(np.array([5, 0, 6]), 3)
    assert held.tolist() == [[True, False, True], [False, False, True], [True, False, False]]
    assert rows[held].tolist() == [0, 1, 2, 3]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_last_prefixes(lengths: list[int]) -> None:
    rows = sequences(lengths)
    expected = torch.stack([scan(Toy(), row[None]).prefixes[0, -1] for row in rows])
    state = state_of(*lengths)
    assert_same(state.last_prefixes(), expected)
    state.last_prefixes().zero_()
    assert_same(state.last_prefixes(), expected)


def test_an_empty_row_has_no_last_prefix() -> None:
    with pytest.raises(ValueError, match="row 1 of the state is empty"):
        state_of(3, 0).last_prefixes()
    with pytest.raises(ValueError, match="row 0 of the state is empty"):
        ScanState.empty(2, WIDTH).last_prefixes()


def test_row_errors() -> None:
    state = state_of(5, 3)
    with pytest.raises(IndexError, match="row 2 is out of range for a state of 2 rows"):
        state.select([0, 2])
    with pytest.raises(IndexError, match="row -3"):
        state.select([-3])
    with pytest.raises(TypeError, match="flat list of integers"):
        state.select([0.5])
    with pytest.raises(TypeError, match="rows must be a flat list of integers"):
        state.select([[0]])
    with pytest.raises(TypeError, match="rows must be a flat list of integers"):
        state.select(0)
    with pytest.raises(TypeError, match="concatenate takes states; got NoneType"):
        ScanState.concatenate([state, None])
    with pytest.raises(ValueError, match="must not be negative; got -1 and 3"):
        ScanState.empty(-1, 3)
    with pytest.raises(ValueError, match="at least one state"):
        ScanState.concatenate([])
    with pytest.raises(ValueError, match="states must have the same width, dtype and device"):
        ScanState.concatenate([state, ScanState.empty(1, WIDTH + 1, dtype=torch.float64)])
    with pytest.raises(ValueError, match="states must have the same width, dtype and device"):
        ScanState.concatenate([state, ScanState.empty(1, WIDTH, dtype=torch.float32)])


def test_it_survives_a_process(tmp_path: Path) -> None:
    state = state_of(5, 0, 8)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    save_file(state.state_dict(), tmp_path / "state.safetensors")
    code = (
        "import sys, torch; from logdepth import ScanState\n"
        "state = ScanState.from_state_dict(torch.load(sys.argv[1], weights_only=True), width=3)\n"
        "torch.save(state.state_dict(), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "state.pt"], check=True, cwd=Path(__file__).parent.parent)
    for saved in (torch.load(tmp_path / "state.pt", weights_only=True), load_file(tmp_path / "state.safetensors")):
        loaded = ScanState.from_state_dict(saved)
        assert loaded.lengths.tolist() == [5, 0, 8]
        more = random_elements(3, 6, WIDTH)
        assert torch.equal(scan(Toy(), more, loaded).prefixes, scan(Toy(), more, state).prefixes)


def test_load_errors() -> None:
    saved = state_of(5, 3).state_dict()
    with pytest.raises(ValueError, match="has version 2; this logdepth reads version 1"):
        ScanState.from_state_dict({**saved, "version": torch.tensor(2)})
    with pytest.raises(ValueError, match="has width 3; expected width 4"):
        ScanState.from_state_dict(saved, width=4)
    with pytest.raises(ValueError, match="not a saved scan state: blocks missing"):
        ScanState.from_state_dict({name: one for name, one in saved.items() if name != "blocks"})
    with pytest.raises(ValueError, match=r"inconsistent: lengths \[5, 4\] need tables of 3 rows"):
        ScanState.from_state_dict({**saved, "lengths": torch.tensor([5, 4])})
    with pytest.raises(ValueError, match="inconsistent"):
        ScanState.from_state_dict({**saved, "prefixes": saved["prefixes"][:, :2]})
    with pytest.raises(ValueError, match="inconsistent"):
        ScanState.from_state_dict({**saved, "blocks": saved["blocks"][:3], "prefixes": saved["prefixes"][:3]})
    with pytest.raises(ValueError, match="inconsistent"):
        ScanState.from_state_dict({**saved, "blocks": saved["blocks"].flatten()})
    with pytest.raises(ValueError, match="inconsistent"):
        ScanState.from_state_dict({**saved, "lengths": torch.tensor([-5, 3])})  # as many bits as 5 and 3
    with pytest.raises(ValueError, match=r"blocks are torch.float64 on cpu, prefixes torch.float32 on cpu"):
        ScanState.from_state_dict({**saved, "prefixes": saved["prefixes"].float()})
    with pytest.raises(TypeError, match="the lengths of a saved scan state must be a flat list of integers"):
        ScanState.from_state_dict({**saved, "lengths": torch.tensor([5.0, 3.0])})


def test_a_loaded_state_owns_its_storage() -> None:
    saved = state_of(5, 3).state_dict()
    stacked = torch.stack([saved["blocks"], saved["prefixes"]])
    loaded = ScanState.from_state_dict({**saved, "blocks": stacked[0], "prefixes": stacked[1]})
    assert loaded.nbytes == state_of(5, 3).nbytes
    stacked.zero_()
    assert loaded.blocks.abs().sum() > 0


def test_saved_tensors_are_detached() -> None:
    state = scan(Toy(), random_elements(1, 6, WIDTH).requires_grad_()).state
    assert not any(one.requires_grad for one in state.state_dict().values())


def test_the_default_device_does_not_matter() -> None:
    state = state_of(5, 3)
    with torch.device("meta"):
        assert state.lengths.tolist() == [5, 3]
        assert ScanState.from_state_dict(state.state_dict()).lengths.tolist() == [5, 3]
