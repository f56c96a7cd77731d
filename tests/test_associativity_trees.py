"""Other trees than the scan's: each against a slow definition, and as a model that can be evaluated."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from logdepth.associativity import (
    WithTree,
    left_fold,
    scanned,
    shifted,
)
from logdepth.associativity.trees import paper_layers, with_tree
from logdepth.evaluate import evaluate
from logdepth.operators import AffineOperator
from logdepth.scanning import OperatorPair, reference
from tests.small_models import SMALL_MODELS, VOCAB
from tests.tiny_corpus import store_of
from tests.toy import WIDTH, random_elements, toy_pair

TOKENS = torch.randint(VOCAB, (501,), generator=torch.Generator().manual_seed(3)).tolist()
every_tree = pytest.mark.parametrize("tree", [scanned, left_fold, shifted(1), shifted(6)])


def shifted_by_definition(pair: OperatorPair, elements: Tensor, offset: int) -> list[Tensor]:
    """The definition of the scan, for a sequence whose first `offset` elements are missing."""
    up, down = pair

    def merged(operator: Any, left: Tensor | None, right: Tensor | None) -> Tensor | None:
        if left is None or right is None:
            return right if left is None else left
        return operator(left[None], right[None])[0]

    def block(level: int, index: int) -> Tensor | None:
        if level == 0:
            return None if index < offset else elements[index - offset]
        return merged(up, block(level - 1, 2 * index), block(level - 1, 2 * index + 1))

    def prefix(length: int) -> Tensor | None:
        state, done = None, 0
        for level in reversed(range(length.bit_length())):
            if length >> level & 1:
                state = merged(down, state, block(level, done >> level))
                done += 1 << level
        return state

    found = [prefix(offset + length) for length in range(1, len(elements) + 1)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 8, 13, 64, 77])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 13, 32, 33])
def test_a_shifted_tree_is_its_definition(offset: int, length: int) -> None:
    elements, pair = random_elements(2, length, WIDTH), toy_pair()
    expected = torch.stack([torch.stack(shifted_by_definition(pair, row, offset)) for row in elements])
    torch.testing.assert_close(shifted(offset)(pair, elements), expected)


@pytest.mark.parametrize("length", [1, 5, 8, 21])
@pytest.mark.parametrize("multiple", [0, 1, 3])
def test_missing_blocks_as_large_as_the_sequence_change_nothing(length: int, multiple: int) -> None:
    elements, pair = random_elements(2, length, WIDTH), toy_pair()
    offset = multiple * (1 << (length - 1).bit_length())
    by_definition = torch.stack([torch.stack(shifted_by_definition(pair, row, offset)) for row in elements])
    torch.testing.assert_close(by_definition, reference.scan(pair, elements))
    torch.testing.assert_close(shifted(offset)(pair, elements), reference.scan(pair, elements))


def test_another_offset_is_another_tree_of_an_operator_that_is_not_associative() -> None:
    elements, pair = random_elements(1, 16, WIDTH), toy_pair()
    found = [tree(pair, elements) for tree in (scanned, left_fold, *map(shifted, range(1, 16)))]
    assert all((one - other).abs().max() > 1e-3 for one, other in itertools.combinations(found, 2))


def test_a_multiple_of_a_blocks_size_keeps_blocks_of_that_size() -> None:
    elements, pair = random_elements(1, 16, WIDTH), toy_pair()
    plain, moved = scanned(pair, elements), shifted(4)(pair, elements)
    torch.testing.assert_close(moved[:, :7], plain[:, :7])
    assert (moved[:, 7] - plain[:, 7]).abs().max() > 1e-3  # a block of eight in the scan, two of four here


@pytest.mark.parametrize("length", [1, 2, 13, 64])
@every_tree
def test_an_associative_operator_has_one_answer_for_every_tree(tree: Any, length: int) -> None:
    elements = random_elements(3, length, 6)
    operator = AffineOperator(6)
    torch.testing.assert_close(tree(operator, elements), reference.scan(operator, elements))


def test_a_left_fold_takes_one_element_after_another_with_the_down_sweeps_operator() -> None:
    elements, (_, down) = random_elements(2, 4, WIDTH), toy_pair()

    def never(_left: Tensor, _right: Tensor) -> Tensor:
        raise AssertionError("a left fold merges no blocks")

    first, second, third, fourth = elements.unbind(1)
    expected = [first, down(first, second), down(down(first, second), third)]
    expected.append(down(expected[-1], fourth))
    torch.testing.assert_close(left_fold((never, down), elements), torch.stack(expected, dim=1))


def test_what_an_operator_makes_of_missing_states_goes_nowhere() -> None:
    def divided(left: Tensor, right: Tensor) -> Tensor:
        return right / left.norm(dim=-1, keepdim=True)  # NaN or infinite where there is nothing

    assert shifted(5)(divided, random_elements(2, 9, WIDTH)).isfinite().all()
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        shifted(-1)


@pytest.mark.parametrize("name", ["ar-grc", "every-merge", "deep", "plain"])
def test_the_scan_as_a_tree_is_the_model(name: str) -> None:
    model = SMALL_MODELS[name].build(VOCAB).double()
    store = store_of([token if number % 11 else 2 for number, token in enumerate(TOKENS)], separator=2)
    for reset in (False, True):
        plain, same, fold, offset = (
            evaluate(one, store, context=40, reset_at_documents=reset).nats
            for one in (model, *(WithTree(model, tree) for tree in (scanned, left_fold, shifted(3))))
        )
        assert same == pytest.approx(plain, rel=1e-12)
        assert len({round(one, 6) for one in (plain, fold, offset)}) == 3


@every_tree
def test_low_precision_changes_no_tree(tree: Any) -> None:
    model = WithTree(SMALL_MODELS["ar-grc"].build(VOCAB), tree)
    exact, rounded = (evaluate(model, store_of(TOKENS), context=40, precision=one) for one in ("float32", "bfloat16"))
    assert rounded.nats != exact.nats
    assert rounded.nats == pytest.approx(exact.nats, rel=1e-2)


@every_tree
def test_packed_documents_are_as_if_alone(tree: Any) -> None:
    model = WithTree(SMALL_MODELS["deep"].build(VOCAB).double().eval(), tree)
    tokens = torch.tensor(TOKENS[:20])
    packed = model(tokens, cu_seqlens=[0, 7, 7, 8, 20])
    alone = [model(tokens[None, first:last])[0] for first, last in ((0, 7), (7, 8), (8, 20))]
    torch.testing.assert_close(packed, torch.cat(alone))
    with pytest.raises(NotImplementedError, match="only the scan's tree has a state to continue from"):
        model.step(tokens[None], model.init_state)
    with pytest.raises(NotImplementedError, match="only the scan's tree has a state to continue from"):
        model.init_state(1)


def test_after_another_tree_the_model_scans_again() -> None:
    model = SMALL_MODELS["deep"].build(VOCAB).double().eval()
    tokens = torch.tensor(TOKENS[:40]).view(2, 20)
    before = model(tokens)
    with with_tree(model, left_fold):
        assert (model(tokens) - before).abs().max() > 1e-6
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)
    assert len(paper_layers(model)) == 3


@every_tree
def test_losses_are_those_of_the_logits(tree: Any) -> None:
    model = WithTree(SMALL_MODELS["deep"].build(VOCAB).double().eval(), tree)
    inputs, targets = torch.tensor(TOKENS[:40]).view(2, 20), torch.tensor(TOKENS[1:41]).view(2, 20)
    losses = torch.nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(model.token_losses(inputs, targets)[0], losses.detach())
    with pytest.raises(NotImplementedError, match="no state to continue from"):
        model.token_losses(inputs, targets, ())
