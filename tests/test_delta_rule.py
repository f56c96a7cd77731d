"""The gated delta rule: its definition, chunks and steps against it, and the operator that merges chunks."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logdepth import build_tree, scan
from logdepth.operators.matrix_affine import MatrixAffineOperator
from logdepth.ops.delta_rule import delta_chunk, delta_step, normalised
from logdepth.ops.delta_rule_reference import Memory, folded, level_weighted, merge, product, tokens_of
from logdepth.scanning import reference
from tests.toy import assert_same, gradients, random_elements

KEY, VALUE = 4, 3
OPERATOR = MatrixAffineOperator(1, KEY, VALUE)


class Tokens(NamedTuple):
    """Queries, keys, values, log α and β, as a model makes them, of one head."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decay: Tensor
    strength: Tensor


def random_tokens(length: int, seed: int = 0, largest: float = 1.0) -> Tokens:
    """With strengths from 0 to `largest`."""
    queries, keys, values = random_elements(length, 2 * KEY + VALUE, seed=seed).split([KEY, KEY, VALUE], dim=1)
    log_decay, strength = random_elements(length, 2, seed=seed + 1).unbind(1)
    log_decay, strength = -torch.nn.functional.softplus(log_decay - 2), largest * strength.sigmoid()
    return Tokens(*(one.detach().requires_grad_() for one in (queries, normalised(keys), values, log_decay, strength)))


def batched(tokens: Tokens) -> list[Tensor]:
    """As one chunk of one head."""
    return [one[None, None] for one in tokens]


def row(memory: Memory) -> Tensor:
    return torch.cat(memory, dim=-1).flatten()


def test_the_definition_is_the_gated_delta_rule() -> None:
    """S ← S α (I − β k kᵀ) + β v kᵀ and o = S q, as papers write it, with S transposed."""
    tokens = random_tokens(9)
    memory, expected = torch.zeros(VALUE, KEY, dtype=torch.float64), []
    for query, key, value, log_decay, strength in zip(*tokens, strict=True):
        erase = torch.eye(KEY, dtype=torch.float64) - strength * key[:, None] * key[None]
        memory = memory @ (log_decay.exp() * erase) + strength * value[:, None] * key[None]
        expected.append(memory @ query)
    outputs, after = folded(tokens.queries, tokens_of(*tokens[1:]))
    assert_same(outputs, torch.stack(expected))
    assert_same(after, memory.T)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_with_weights_of_one_both_readings_are_equal(chunk: int) -> None:
    tokens = random_tokens(27, largest=2.0)
    every = tokens_of(*tokens[1:])
    ones = torch.ones(27, 5, dtype=torch.float64)
    found = level_weighted(tokens.queries, every, ones, chunk)
    assert_same(found, folded(tokens.queries, every)[0])
    other = level_weighted(tokens.queries, every, 1 + 0.1 * ones.cumsum(1), chunk)
    assert_same(other[:chunk], found[:chunk])  # a token's own chunk has weight 1
    assert ((other[chunk:] - found[chunk:]).abs().amax(1) > 1e-6).all()


def test_weights_are_of_levels_above_the_own_chunk() -> None:
    """Token 27 of chunks of 4 reads tokens 24 … 27, then levels 1 (chunks 4 and 5) and 2 (chunks 0 … 3)."""
    tokens = random_tokens(28)
    every, weights = tokens_of(*tokens[1:]), random_elements(28, 3, seed=5)
    own, late, early = product(every[24:28]), product(every[16:24]), product(every[:16])
    query = tokens.queries[27]
    expected = query @ own.written + weights[27, 1] * (query @ own.transition @ late.written)
    expected = expected + weights[27, 2] * (query @ own.transition @ late.transition @ early.written)
    assert_same(level_weighted(tokens.queries, every, weights, 4)[27], expected)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 31])
@pytest.mark.parametrize("largest", [1.0, 2.0])
def test_a_chunk_is_its_definition(size: int, largest: float) -> None:
    tokens = random_tokens(size, largest=largest)
    before = random_elements(KEY, VALUE, seed=7).requires_grad_()
    chunk = delta_chunk(*batched(tokens))
    every = tokens_of(*tokens[1:])
    outputs, after = folded(tokens.queries, every, before)
    actual = [chunk.outputs[0, 0] + chunk.queries[0, 0] @ before, chunk.matrices[0, 0]]
    expected = [outputs, torch.cat(product(every), dim=-1)]
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)
    assert_same(actual[1] @ torch.cat([before, torch.eye(VALUE).double()]), after)
    inputs = [*tokens, before]
    for one, other in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(one, other, 1e-10)


def test_padding_is_inert_wherever_it_is() -> None:
    tokens, places = random_tokens(5), [1, 2, 5, 6, 9]
    padded = [
        one.new_zeros(1, 1, 12, *one.shape[1:]).index_copy(2, torch.tensor(places), one[None, None]) for one in tokens
    ]
    found, expected = delta_chunk(*padded), delta_chunk(*batched(tokens))
    assert_same(found.matrices, expected.matrices)
    assert_same(found.outputs[:, :, places], expected.outputs)
    assert_same(found.queries[:, :, places], expected.queries)


@pytest.mark.parametrize("largest", [1.0, 2.0])
def test_steps_are_a_chunk(largest: float) -> None:
    tokens = random_tokens(7, largest=largest)
    matrices = OPERATOR.matrices(OPERATOR.identity(1, dtype=torch.float64, device=torch.device("cpu")))
    for _, *one in zip(*tokens, strict=True):
        matrices = delta_step(matrices, *(part[None, None] for part in one))
    expected = delta_chunk(*batched(tokens)).matrices
    assert_same(matrices, expected)
    for one, other in zip(gradients([matrices], tokens[1:]), gradients([expected], tokens[1:]), strict=True):
        assert_same(one, other, 1e-10)


@pytest.mark.parametrize("log_decay", [0.0, -1e-4, -30.0, -2e4])
def test_float32_is_close_however_much_decays(log_decay: float) -> None:
    """Also where keys repeat, so that I + A is far from the identity, and where decays underflow."""
    tokens = random_tokens(64, largest=2.0)
    keys = tokens.keys.detach()[torch.arange(64) % 3]
    exact = tokens._replace(keys=keys, log_decay=torch.full((64,), log_decay, dtype=torch.float64))
    exact = Tokens(*(one.detach().requires_grad_() for one in exact))
    rounded = Tokens(*(one.detach().float().requires_grad_() for one in exact))
    found, expected = delta_chunk(*batched(rounded)), delta_chunk(*batched(exact))
    for one, other in zip(found, expected, strict=True):
        assert_same(one.double(), other, 2e-5)
    for one, other in zip(gradients(found, rounded), gradients(expected, exact), strict=True):
        assert_same(one.double(), other, 2e-3)


def test_normalised_vectors_have_finite_gradients_at_zero() -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1e-20, 0.0]]).requires_grad_()
    found = normalised(vectors)
    assert_same(found, torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.0, 0.0]]), 1e-6)
    found.sum().backward()
    assert vectors.grad.isfinite().all()
    assert (vectors.grad.abs() <= 1000).all()
    assert (normalised(random_elements(50, 8)).norm(dim=1) <= 1).all()


def test_the_operator_is_its_definition() -> None:
    operator = MatrixAffineOperator(2, KEY, VALUE)
    left, right = random_elements(5, operator.width), random_elements(5, operator.width, seed=1)
    merged = operator.matrices(operator(left, right))
    for number in range(5):
        for head in range(2):
            operands = [Memory(*(part[number, head] for part in operator.parts(one))) for one in (left, right)]
            assert_same(merged[number, head], torch.cat(merge(*operands), dim=-1))
    identity = operator.identity(5, dtype=torch.float64, device=torch.device("cpu"))
    assert torch.equal(operator(identity, right), right)
    assert torch.equal(operator(left, identity), left)
    third = random_elements(5, operator.width, seed=2)
    assert_same(operator(operator(left, right), third), operator(left, operator(right, third)))
    with pytest.raises(ValueError, match="heads and widths must be at least 1; got 2, 0 and 3"):
        MatrixAffineOperator(2, 0, 3)


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_a_scan_of_tokens_is_the_definition(lengths: list[int]) -> None:
    """The operator under the scan's own laws: values, gradients, states."""
    tokens = random_tokens(sum(lengths))
    elements = torch.stack([row(one) for one in tokens_of(*tokens[1:])])
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    prefixes, _ = scan(OPERATOR, elements, cu_seqlens=bounds)
    _, written = OPERATOR.parts(prefixes)
    actual = (tokens.queries[:, None, None] @ written)[:, 0, 0]
    every = tokens_of(*tokens[1:])
    expected = torch.cat([folded(tokens.queries[a:b], every[a:b])[0] for a, b in pairwise(bounds)])
    assert_same(actual, expected)
    for one, other in zip(gradients([actual], tokens), gradients([expected], tokens), strict=True):
        assert_same(one, other, 1e-10)


def test_the_scan_of_the_operator_is_the_scans_definition() -> None:
    tokens = random_tokens(21)
    elements = torch.stack([row(one) for one in tokens_of(*tokens[1:])])[None].detach().requires_grad_()
    actual, expected = scan(OPERATOR, elements).prefixes, reference.scan(OPERATOR, elements)
    assert_same(actual, expected)
    assert_same(gradients([actual], [elements])[0], gradients([expected], [elements])[0], 1e-10)


@pytest.mark.parametrize("length", [1, 7, 8, 29])
def test_a_tree_of_chunks_is_the_level_weighted_definition(length: int) -> None:
    """Without a model around it: chunks of 4, of which the last may be open."""
    tokens, weights = random_tokens(length, largest=2.0), random_elements(length, 3, seed=5).requires_grad_()
    pieces = [delta_chunk(*(one[None, None, start : start + 4] for one in tokens)) for start in range(0, length, 4)]
    elements = torch.cat([one.matrices.flatten(1) for one in pieces])[: length // 4]
    readers = [number // 4 for number in range(length)]
    queries = torch.cat([one.queries[0, 0] for one in pieces])
    actual = torch.cat([one.outputs[0, 0] for one in pieces])
    for read in build_tree(OPERATOR, elements[None]).reads([0] * length, readers):
        transition, written = (part[:, 0] for part in OPERATOR.parts(read.blocks))
        query = queries.index_select(0, read.readers)[:, None]
        output = weights[:, read.level].index_select(0, read.readers)[:, None] * (query @ written)[:, 0]
        actual = actual.index_add(0, read.readers, output)
        queries = queries.index_copy(0, read.readers, (query @ transition)[:, 0])
    expected = level_weighted(tokens.queries, tokens_of(*tokens[1:]), weights, 4)
    assert_same(actual, expected)
    inputs = [*tokens, weights]
    for one, other in zip(gradients([actual], inputs), gradients([expected], inputs), strict=True):
        assert_same(one, other, 1e-10)
