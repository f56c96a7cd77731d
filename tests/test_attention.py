"""Attention: every backend and option against its definition, rotary embeddings, ALiBi and sinusoids."""

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import logdepth.ops.attention as module
from logdepth.ops.attention import (
    alibi_slopes,
    attention,
    backend_in_words,
    chosen_backend,
    rotated,
    sinusoids,
    whole_attention,
)
from tests.block_states import close
from tests.small_models import TRANSFORMER, VOCAB

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS, WIDTH = 3, 4
every_backend = pytest.mark.parametrize("backend", ["plain", "sdpa"])
every_window = pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
with_and_without_alibi = pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])


def random_heads(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64).to(dtype)


def slopes_of(alibi: bool) -> Tensor | None:
    return alibi_slopes(HEADS).double() if alibi else None


def by_definition(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    slopes: Tensor | None,
    window: int | None,
) -> Tensor:
    """One query at a time: softmax over the keys that it may read."""
    result = torch.empty_like(queries)
    for row, head, place in torch.cartesian_prod(*(torch.arange(size) for size in queries.shape[:3])).tolist():
        position = int(query_positions[row, place])
        seen = [
            column
            for column, other in enumerate(key_positions[row].tolist())
            if 0 <= other <= position and (window is None or position - other < window)
        ]
        scores = keys[row, head, seen] @ queries[row, head, place] / math.sqrt(WIDTH)
        if slopes is not None:
            scores = scores - slopes[head] * (position - key_positions[row, seen])
        result[row, head, place] = scores.softmax(0) @ values[row, head, seen]
    return result


@every_backend
@every_window
@with_and_without_alibi
@pytest.mark.parametrize("length", [1, 2, 7, 13])
def test_whole_sequences(length: int, alibi: bool, window: int | None, backend: str) -> None:
    queries, keys, values = (random_heads(length) for _ in range(3))
    positions = torch.arange(length)
    both = positions.expand(2, length)
    expected = by_definition(queries, keys, values, both, both, slopes_of(alibi), window)
    settings: dict[str, Any] = {"slopes": slopes_of(alibi), "window": window, "backend": backend}
    close(whole_attention(queries, keys, values, **settings), expected)
    close(attention(queries, keys, values, positions, positions, **settings), expected)
    close(attention(queries, keys, values, both, both, **settings), expected)


@every_backend
@every_window
@with_and_without_alibi
def test_rows_at_any_positions_read_columns_in_any_order(alibi: bool, window: int | None, backend: str) -> None:
    queries, keys, values = random_heads(2), random_heads(6), random_heads(6)
    query_positions = torch.tensor([[4, 5], [1, 2]])
    key_positions = torch.tensor([[3, 5, 2, 4, 1, 0], [2, -1, -1, 0, 1, -1]])  # −1: nothing is there
    keys[1, :, [1, 2, 5]] = values[1, :, [1, 2, 5]] = 1e3
    arguments = (queries, keys, values, query_positions, key_positions)
    expected = by_definition(*arguments, slopes_of(alibi), window)
    close(attention(*arguments, slopes=slopes_of(alibi), window=window, backend=backend), expected)


@every_window
@with_and_without_alibi
def test_gradients_of_the_backends_agree(alibi: bool, window: int | None) -> None:
    inputs = [random_heads(9).requires_grad_() for _ in range(3)]
    direction, found = random_heads(9), []
    for backend in ("plain", "sdpa"):
        result = whole_attention(*inputs, slopes=slopes_of(alibi), window=window, backend=backend)
        found.append(torch.autograd.grad((result * direction).sum(), inputs))
    for one, other in zip(*found, strict=True):
        close(one, other)


@every_window
@with_and_without_alibi
def test_flex_attention_is_the_definition(
    alibi: bool, window: int | None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Without its compiler, which is for CUDA here."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(module, "_compiled_flex", lambda: flex_attention.flex_attention)
    queries, keys, values = (random_heads(13, dtype=torch.float32) for _ in range(3))
    settings: dict[str, Any] = {"slopes": None if not alibi else alibi_slopes(HEADS), "window": window}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        found = whole_attention(queries, keys, values, backend="flex", **settings)
    torch.testing.assert_close(found, whole_attention(queries, keys, values, backend="plain", **settings))


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_values(dtype: torch.dtype, backend: str) -> None:
    queries, keys, values = (random_heads(9) for _ in range(3))
    exact = whole_attention(queries, keys, values, slopes=slopes_of(True), window=4)
    low = [one.to(dtype) for one in (queries, keys, values)]
    found = whole_attention(*low, slopes=slopes_of(True), window=4, backend=backend)
    assert found.dtype == dtype
    tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def test_alibi_slopes_fall_geometrically() -> None:
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-power for power in range(1, 9)]))
    twelve = alibi_slopes(12)
    torch.testing.assert_close(twelve[:8], alibi_slopes(8))
    torch.testing.assert_close(twelve[8:], torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]))


def test_sinusoids_are_their_definition() -> None:
    for width in (1, 2, 6, 7):
        half = (width + 1) // 2
        found = sinusoids(torch.tensor([0, 1, 30]), width)
        for row, position in enumerate((0, 1, 30)):
            angles = [position * 10_000 ** (-index / half) for index in range(half)]
            expected = [*(math.sin(angle) for angle in angles), *(math.cos(angle) for angle in angles)][:width]
            torch.testing.assert_close(found[row], torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(shift=st.integers(0, 10_000), distance=st.integers(0, 500))
def test_rotary_scores_depend_on_distances_alone(shift: int, distance: int) -> None:
    queries, keys = random_heads(1), random_heads(1)

    def scores(query_position: int, key_position: int) -> Tensor:
        turned = rotated(queries, torch.tensor([query_position])), rotated(keys, torch.tensor([key_position]))
        return (turned[0] * turned[1]).sum(-1)

    close(scores(shift + distance, shift), scores(distance, 0))


def test_rotary_embeddings_turn_pairs_of_entries() -> None:
    x, positions = random_heads(5), torch.tensor([0, 1, 2, 7, 300])
    found = rotated(x, positions)
    close(found[:, :, 0], x[:, :, 0])
    close(found.norm(dim=-1), x.norm(dim=-1))
    for index in range(2):
        angles = positions.double() * 10_000 ** (-index / 2)
        as_complex = torch.complex(x[..., index], x[..., index + 2]) * torch.exp(1j * angles)
        close(found[..., index], as_complex.real)
        close(found[..., index + 2], as_complex.imag)
    each = torch.stack([positions, positions + 3])
    by_row = torch.stack([rotated(row[None], place)[0] for row, place in zip(x, each, strict=True)])
    close(rotated(x, each), by_row)
    assert rotated(x.bfloat16(), positions).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "masked", "device", "chosen"),
    [
        ("auto", False, CPU, "sdpa"),
        ("auto", True, CPU, "sdpa"),
        ("auto", False, CUDA, "sdpa"),
        ("auto", True, CUDA, "flex"),
        ("sdpa", True, CUDA, "sdpa"),
        ("plain", True, CUDA, "plain"),
        ("flex", False, CPU, "flex"),
    ],
)
def test_backends_are_chosen_by_mask_and_device(name: Any, masked: bool, device: torch.device, chosen: str) -> None:
    assert chosen_backend(name, masked=masked, head_width=16, device=device) == chosen


def test_narrow_heads_have_no_flex_attention_on_a_gpu() -> None:
    assert chosen_backend("auto", masked=True, head_width=15, device=CUDA) == "sdpa"
    assert chosen_backend("flex", masked=True, head_width=15, device=CPU) == "flex"
    with pytest.raises(ValueError, match="needs heads of width 16 or more on CUDA; got 15: use fewer heads"):
        chosen_backend("flex", masked=True, head_width=15, device=CUDA)


@pytest.mark.parametrize(
    ("backend", "slopes", "window", "words"),
    [
        ("plain", True, 5, "plain matrix products"),
        ("flex", True, None, "FlexAttention, compiled, ALiBi as score modification"),
        ("flex", True, 5, "FlexAttention, compiled, ALiBi and a window of 5 as score modification"),
        ("sdpa", False, None, "SDPA on the cpu, causal"),
        ("sdpa", True, None, "SDPA on the cpu, ALiBi as additive mask"),
        ("sdpa", False, 5, "SDPA on the cpu, a window of 5 as additive mask"),
    ],
)
def test_backends_are_named(backend: str, slopes: bool, window: int | None, words: str) -> None:
    queries = random_heads(8, dtype=torch.float32)
    assert backend_in_words(backend, slopes=slopes, window=window, queries=queries) == words


@pytest.mark.parametrize("length", [1, 127, 128, 129, 384, 500, 1024])
@pytest.mark.parametrize("window", [None, 1, 5, 128, 129, 300])
def test_masks_of_flex_attention_are_those_of_torch(length: int, window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    module._causal_mask.cache_clear()
    found = module._causal_mask(length, window, "cpu")
    expected = create_block_mask(found.mask_mod, None, None, length, length, device="cpu")
    for name, value in vars(expected).items():
        other = getattr(found, name)
        assert torch.equal(other, value) if isinstance(value, Tensor) else other == value or name == "mask_mod", name
        assert not isinstance(value, Tensor) or (other.dtype, other.stride()) == (value.dtype, value.stride()), name


@pytest.mark.parametrize(
    "settings", [{"window": 3}, {"slopes": alibi_slopes(2)}, {"slopes": alibi_slopes(2), "window": 9}]
)
@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_long_masked_sequences_are_attended_in_parts(
    settings: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no gradient, no mask has more rows than a part; the result is the same."""
    queries, keys, values = torch.randn(3, 2, 2, 45, 4, dtype=torch.float64)
    expected = whole_attention(queries, keys, values, backend=backend, **settings)
    rows: list[int] = []
    once = module.attention

    def counted(queries: Tensor, *others: Any, **more: Any) -> Tensor:
        rows.append(queries.shape[2])
        return once(queries, *others, **more)

    monkeypatch.setattr(module, "attention", counted)
    monkeypatch.setattr(module, "LONG", 20)
    monkeypatch.setattr(module, "PART", 8)
    whole_attention(queries, keys, values, backend=backend, **settings)
    with torch.no_grad():
        found = whole_attention(queries, keys, values, backend=backend, **settings)
    assert rows == [45, 8, 8, 8, 8, 8, 5]
    torch.testing.assert_close(found, expected)


def test_compiled_models_make_the_mask_of_flex_attention_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(module, "_compiled_flex", lambda: flex_attention.flex_attention)
    module._causal_mask.cache_clear()
    model = dataclasses.replace(TRANSFORMER, positions="alibi", attention="flex").build(VOCAB).eval()
    plain = dataclasses.replace(TRANSFORMER, positions="alibi", attention="sdpa").build(VOCAB).eval()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="eager")
    tokens = torch.randint(VOCAB, (2, 9))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")  # a traced mask would be made in every pass
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # here on purpose
        for _ in range(2):
            torch.testing.assert_close(compiled(tokens), plain(tokens))
    assert module._causal_mask.cache_info().misses == 1
