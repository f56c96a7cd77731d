"""The fused GRC is the plain one: in every layout and continuation of the scan, and in the language model.

Kernels run on a GPU where there is one, else in Triton's interpreter.
"""

import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from logdepth import ScanState, reduce, scan
from logdepth.fused import FusedGRC, merges, operators, why_not_fused
from logdepth.models import ScanLM, ScanLMConfig
from logdepth.operators import GRC, GRCConfig, MLPLDRUConfig, PostMerge
from logdepth.operators.activation import ActivationName
from logdepth.scanning import Operator, OperatorPair, reference

WIDTH = 8
VOCAB = 5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
every_kind = pytest.mark.parametrize("kind", ["grc", "up", "every"])


@pytest.fixture(autouse=True)
def reproducible_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a program, and a partial sum, at a time."""
    if DEVICE.type == "cpu":
        for module in [one for name, one in sys.modules.items() if name.startswith("logdepth.")]:
            for limit in {"MAX_PROGRAMS", "MULTIPROCESSORS", "MOST"} & set(vars(module)):
                monkeypatch.setattr(module, limit, 2)


def shaken(module: nn.Module) -> None:
    """Every parameter off its first value: biases of nought and scales of one would hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)


def operator_of(
    kind: str, *, activation: ActivationName = "silu", dropout: float = 0.0, width: int = WIDTH
) -> Operator | OperatorPair:
    """A GRC alone, or with a net after merges of the up-sweep, or after every merge."""
    grc = GRC(width, activation=activation, dropout=dropout)
    post = PostMerge(grc, width, activation=activation, dropout=dropout)
    shaken(post)
    post.to(DEVICE)
    pair: dict[str, Operator | OperatorPair] = {"grc": grc, "up": (post, grc), "every": post}
    return pair[kind]


def weights_of(operator: Operator | OperatorPair) -> dict[str, nn.Parameter]:
    module = operator[0] if isinstance(operator, tuple) else operator
    assert isinstance(module, nn.Module)
    return dict(module.named_parameters())


def elements_of(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH).to(DEVICE).requires_grad_()


def state_of(operator: Operator | OperatorPair, lengths: Sequence[int]) -> ScanState:
    """A state of rows of these lengths, its tables to be differentiated."""
    state = scan(operator, elements_of(len(lengths), max(lengths)), lengths=lengths).state
    tables = (one.detach().requires_grad_() for one in (state.blocks, state.prefixes))
    return ScanState(state.row_lengths, *tables)


class Outcome(NamedTuple):
    results: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


def projected(results: Sequence[Tensor]) -> Tensor:
    """A fixed random projection of results: no symmetry hides an error."""
    generator = torch.Generator().manual_seed(99)
    parts = [(one * torch.randn(one.shape, generator=generator).to(DEVICE)).sum() for one in results]
    return torch.stack(parts).sum()


def outcome(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> Outcome:
    gradients = torch.autograd.grad(projected(results), inputs, allow_unused=True, materialize_grads=True)
    return Outcome(tuple(one.detach() for one in results), gradients)


def assert_same(actual: Outcome, expected: Outcome, tolerance: float = 1e-4) -> None:
    """Values closely, gradients by norm: what counts of a rounding error is how it adds up."""
    for one, other in zip(actual.results, expected.results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for one, other in zip(actual.gradients, expected.gradients, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= tolerance * max(1.0, float(other.norm()))


def assert_scans_agree(
    operator: Operator | OperatorPair, elements: Tensor, state: ScanState | None = None, **layout: Any
) -> Outcome:
    """Prefixes and tables, and the gradients of elements, of the old tables and of every weight."""
    inputs = [elements, *weights_of(operator).values(), *(() if state is None else (state.blocks, state.prefixes))]
    outcomes = []
    for one in (operator, FusedGRC(operator)):
        prefixes, after = scan(one, elements, state, **{"checkpoint": False, **layout})
        outcomes.append(outcome((prefixes, after.blocks, after.prefixes), inputs))
    assert_same(outcomes[1], outcomes[0])
    return outcomes[1]


# The scan


@pytest.mark.parametrize(
    ("kind", "length"),
    [*(("up", length) for length in range(1, 18)), *itertools.product(["grc", "every"], [1, 2, 7, 12])],
)
def test_it_is_the_definition_and_the_plain_scan(kind: str, length: int) -> None:
    operator, elements = operator_of(kind), elements_of(1 if length > 5 else 2, length)
    fused = assert_scans_agree(operator, elements)
    torch.testing.assert_close(fused.results[0], reference.scan(operator, elements), rtol=1e-4, atol=1e-4)


@every_kind
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_every_activation(kind: str, activation: ActivationName) -> None:
    assert_scans_agree(operator_of(kind, activation=activation), elements_of(1, 7))


@every_kind
@pytest.mark.parametrize("lengths", [(5, 0, 6, 1), (0, 3)])
def test_ragged(kind: str, lengths: tuple[int, ...]) -> None:
    elements = torch.randn(len(lengths), max(lengths) + 2, WIDTH, device=DEVICE)
    for row, length in zip(elements, lengths, strict=True):
        row[length:] = float("nan")  # what is read of it shows
    assert_scans_agree(operator_of(kind), elements.requires_grad_(), lengths=lengths)


@every_kind
def test_packed(kind: str) -> None:
    assert_scans_agree(operator_of(kind), elements_of(12), cu_seqlens=[0, 5, 5, 6, 12])


@pytest.mark.parametrize(
    ("kind", "before"), [*(("up", before) for before in range(1, 9)), *itertools.product(["grc", "every"], [3, 6])]
)
def test_it_continues_from_a_state_of_every_small_length(kind: str, before: int) -> None:
    operator = operator_of(kind)
    for length in (1, 4):
        assert_scans_agree(operator, elements_of(1, length), state_of(operator, [before]))


@every_kind
def test_it_continues_rows_that_stand_at_different_lengths(kind: str) -> None:
    operator = operator_of(kind)
    assert_scans_agree(operator, elements_of(4, 5), state_of(operator, [3, 0, 4, 5]), lengths=[5, 2, 0, 3])


def test_a_stream_is_the_whole() -> None:
    operator, elements = operator_of("up"), elements_of(1, 11)
    fused, state = FusedGRC(operator), None
    prefixes = []
    for part in elements.split([1, 1, 1, 4, 1, 3], dim=1):
        some, state = scan(fused, part, state)
        prefixes.append(some)
    whole = scan(operator, elements).prefixes
    inputs = [elements, *weights_of(operator).values()]
    assert_same(outcome([torch.cat(prefixes, dim=1)], inputs), outcome([whole], inputs))


@every_kind
def test_reduce(kind: str) -> None:
    operator, elements, lengths = operator_of(kind), elements_of(3, 7), [7, 1, 6]
    inputs = [elements, *weights_of(operator).values()]
    fused, plain = (reduce(one, elements, lengths=lengths) for one in (FusedGRC(operator), operator))
    assert_same(outcome([fused], inputs), outcome([plain], inputs))


def test_odd_widths() -> None:
    operator = operator_of("up", width=5)
    elements = torch.randn(2, 6, 5, device=DEVICE).requires_grad_()
    assert_scans_agree(operator, elements)


def test_elements_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="operator has width 8, but elements have width 5"):
        scan(FusedGRC(operator_of("grc")), torch.randn(1, 3, 5, device=DEVICE))


# What the backward pass keeps, and what it computes again


@pytest.fixture
def kept_traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward pass kept traces."""
    kept: list[bool] = []
    forward = merges.Merges.forward

    def watched(self: merges.Merges, traces: merges.Traces | None) -> None:
        kept.append(traces is not None)
        forward(self, traces)

    monkeypatch.setattr(merges.Merges, "forward", watched)
    return kept


def test_traces_are_kept_where_something_learns(kept_traces: list[bool]) -> None:
    operator = operator_of("up")
    fused, elements = FusedGRC(operator), elements_of(2, 5)
    scan(fused, elements)
    scan(fused, elements.detach())
    scan(fused, elements, checkpoint=True)
    with torch.no_grad():
        assert scan(fused, elements).prefixes.grad_fn is None
    with torch.inference_mode():
        scan(fused, elements)
    for weight in weights_of(operator).values():
        weight.requires_grad_(False)
    scan(fused, elements.detach())
    assert kept_traces == [True, True, False, False, False, False]


@every_kind
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_computing_again_gives_the_same_gradients(kind: str, dropout: float) -> None:
    operator, elements = operator_of(kind, dropout=dropout), elements_of(1, 7)
    inputs, outcomes = [elements, *weights_of(operator).values()], []
    for checkpoint in (False, True):
        torch.manual_seed(3)
        outcomes.append(outcome([scan(FusedGRC(operator), elements, checkpoint=checkpoint).prefixes], inputs))
    assert_same(*outcomes, tolerance=1e-6)


@every_kind
def test_computing_again_is_the_plain_scan(kind: str) -> None:
    operator = operator_of(kind)
    assert_scans_agree(operator, elements_of(3, 5), state_of(operator, [3, 0, 6]), lengths=[5, 2, 0], checkpoint=True)


def test_the_backward_pass_can_run_twice() -> None:
    operator, elements = operator_of("up"), elements_of(2, 6)
    loss = projected([scan(FusedGRC(operator), elements).prefixes])
    inputs = [elements, *weights_of(operator).values()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(one, other)


# Dropout


@every_kind
def test_dropout_follows_the_seed_and_the_mode(kind: str) -> None:
    operator, elements = operator_of(kind, dropout=0.4), elements_of(1, 5).detach()
    fused = FusedGRC(operator)

    def prefixes(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return scan(fused, elements).prefixes

    assert torch.equal(prefixes(1), prefixes(1))
    assert not torch.equal(prefixes(1)[:, 1:], prefixes(2)[:, 1:])
    (operator[0] if isinstance(operator, tuple) else operator).eval()  # type: ignore[union-attr]
    assert torch.equal(prefixes(1), prefixes(2))
    torch.testing.assert_close(prefixes(1), scan(operator, elements).prefixes, rtol=1e-4, atol=1e-4)


def test_pairs_hidden_layers_and_what_the_net_adds_are_dropped() -> None:
    """After a single merge, a dropped number shows as a line of noughts in the gradient of the matrix beside it."""
    for dropout in (0.0, 0.4):
        operator = operator_of("up", dropout=dropout)
        loss = projected([scan(FusedGRC(operator), elements_of(1, 2)).prefixes])
        weights = weights_of(operator)
        matrices = [weights[name] for name in ("operator.hidden.weight", "operator.gates.weight", "out.weight")]
        pair, hidden, added = torch.autograd.grad(loss, matrices)
        for lines in (pair.t(), hidden.t(), added):
            dropped = (lines == 0).all(dim=1)
            assert not dropped.all()
            assert dropped.any() == (dropout > 0)


def assert_slopes(loss: Callable[[], Tensor], groups: Sequence[Sequence[Tensor]]) -> None:
    """The gradients of each group are the slope of the loss along themselves; `loss` fixes its own seed."""
    every = [one for group in groups for one in group]
    all_gradients = iter(torch.autograd.grad(loss(), every))
    for group in groups:
        gradients = [next(all_gradients) for _ in group]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        losses = []
        with torch.no_grad():
            for step in (1e-2, -2e-2, 1e-2):  # there, to the other side, and back
                for one, gradient in zip(group, gradients, strict=True):
                    one += step * gradient / norm
                if step != 1e-2 or not losses:
                    losses.append(float(loss()))
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(norm), rel=2e-2)


@every_kind
def test_gradients_under_dropout_are_the_slope(kind: str) -> None:
    operator, elements = operator_of(kind, dropout=0.3), elements_of(1, 5)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return projected([scan(FusedGRC(operator), elements).prefixes])

    assert_slopes(loss, [[elements], *([weight] for weight in weights_of(operator).values())])


# The language model

SMALL = ScanLMConfig(embed_width=6, operator=GRCConfig(width=WIDTH))
BARE = dataclasses.replace(SMALL, embedding_net=False, post_merge="none", leaf_norm=False)
CONFIGS = {
    "paper": SMALL,
    "bare": BARE,
    "every-merge": dataclasses.replace(BARE, post_merge="every"),
    "leaf-norm": dataclasses.replace(BARE, leaf_norm=True, input_residual=0.0),
    "untied": dataclasses.replace(BARE, tied=False, post_merge="up"),
    "deep": dataclasses.replace(BARE, depth=2, leaf_norm=True),
    "recompute": dataclasses.replace(BARE, recompute=True, post_merge="up"),
    "embed-dropout": dataclasses.replace(BARE, embed_dropout=0.4),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def plain_and_fused(config: ScanLMConfig = SMALL, vocab: int = VOCAB) -> tuple[ScanLM, ScanLM]:
    plain = config.build(vocab)
    shaken(plain)
    fused = copy.deepcopy(plain.to(DEVICE))
    assert fused.accelerate() is None
    assert fused.fused
    return plain, fused


def tokens_of(*shape: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, shape).to(DEVICE)


def learnt(model: ScanLM, tokens: Tensor, targets: Tensor, **layout: Any) -> Outcome:
    torch.manual_seed(4)
    loss = model.loss(tokens, targets, **layout)
    return Outcome((loss.detach(),), torch.autograd.grad(loss, list(model.parameters())))


@every_config
@pytest.mark.parametrize("length", [2, 5], ids=["fewer-tokens-than-vocabulary", "more"])
def test_loss_and_gradients_are_the_plain_models(config: ScanLMConfig, length: int) -> None:
    plain, fused = plain_and_fused(config)
    tokens, targets = tokens_of(2, length), tokens_of(2, length)
    assert_same(learnt(fused, tokens, targets), learnt(plain, tokens, targets))


def test_packed_documents() -> None:
    plain, fused = plain_and_fused(CONFIGS["leaf-norm"])
    tokens, targets = tokens_of(11), tokens_of(11)
    cu_seqlens = [0, 4, 5, 11]
    assert_same(
        learnt(fused, tokens, targets, cu_seqlens=cu_seqlens), learnt(plain, tokens, targets, cu_seqlens=cu_seqlens)
    )


@every_config
def test_logits_and_steps_are_the_plain_models(config: ScanLMConfig) -> None:
    plain, fused = (one.eval() for one in plain_and_fused(config))
    tokens = tokens_of(2, 8)
    with torch.no_grad():
        expected = plain(tokens)
        torch.testing.assert_close(fused(tokens), expected, rtol=1e-4, atol=1e-4)
        ragged = fused(tokens, lengths=[8, 3])
        torch.testing.assert_close(ragged[0], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ragged[1, :3], expected[1, :3], rtol=1e-4, atol=1e-4)
        state, logits = fused.init_state(2), []
        for part in tokens.split([1, 5, 2], dim=1):
            some, state = fused.step(part, state)
            logits.append(some)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_low_precision() -> None:
    """As far from float32 as the plain model is in low precision, or nearer."""
    plain, fused = plain_and_fused()
    tokens, targets = tokens_of(2, 5), tokens_of(2, 5)
    expected = learnt(plain, tokens, targets)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        actual, plain_low = (learnt(one, tokens, targets) for one in (fused, plain))
    assert all(one.dtype == torch.float32 for one in actual.gradients)
    torch.testing.assert_close(actual.results[0], expected.results[0], rtol=2e-2, atol=0.0)
    assert distance(actual.gradients, expected.gradients) < max(
        0.1, 2 * distance(plain_low.gradients, expected.gradients)
    )


def distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of all gradients together, over their norm."""
    off = torch.stack([(one - other).norm() for one, other in zip(actual, expected, strict=True)]).norm()
    return float(off / torch.stack([one.norm() for one in expected]).norm())


@pytest.mark.parametrize("length", [2, 5], ids=["fewer-tokens-than-vocabulary", "more"])
def test_gradients_of_a_model_under_dropout_are_the_slope(length: int) -> None:
    config = dataclasses.replace(
        CONFIGS["leaf-norm"],
        operator=GRCConfig(width=WIDTH, dropout=0.2),
        leaf_dropout=0.3,
        output_dropout=0.2,
        post_merge="up",
        post_merge_dropout=0.2,
    )
    fused = plain_and_fused(config)[1]
    tokens, targets = tokens_of(2, length), tokens_of(2, length)

    def loss() -> Tensor:
        torch.manual_seed(4)
        return fused.loss(tokens, targets)

    layer = fused.layers[0]
    assert layer.leaf_norm is not None
    assert_slopes(loss, [[layer.leaf_norm.weight], [layer.leaf_norm.bias], [layer.into_state.weight]])
    assert_slopes(loss, [list(fused.parameters())])


# The kept table of leaves


def change_in_place(model: ScanLM) -> None:
    with torch.no_grad():
        model.layers[0].into_state.weight[0, 0] += 1.0


def load_others(model: ScanLM) -> None:
    model.load_state_dict({name: weight + 0.1 for name, weight in model.state_dict().items()})


def learn(model: ScanLM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.loss(tokens_of(1, 3), tokens_of(1, 3)).backward()
    optimizer.step()


def learn_fused(model: ScanLM) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model.loss(tokens_of(1, 3), tokens_of(1, 3)).backward()
    optimizer.step()


def replace_weight(model: ScanLM) -> None:
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach() + 0.3)


def change_behind_its_back(model: ScanLM) -> None:
    model.embedding.weight.data.mul_(1.5).add_(0.1)


@pytest.mark.parametrize(
    "change", [change_in_place, load_others, learn, learn_fused, replace_weight, change_behind_its_back]
)
def test_leaves_are_kept_while_weights_are_held_and_no_longer(
    change: Callable[[ScanLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fused = (one.eval() for one in plain_and_fused())
    tokens = tokens_of(2, 5)
    made = 0
    refined = type(fused.layers[0].embedding_net).fused

    def counted(*arguments: Any) -> Tensor:
        nonlocal made
        made += 1
        return refined(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(fused.layers[0].embedding_net), "fused", counted)

    def logits_agree() -> None:
        with torch.no_grad():
            torch.testing.assert_close(fused(tokens), plain(tokens), rtol=1e-4, atol=1e-4)

    with fused.weights_held(), fused.weights_held():  # an evaluation inside another scope
        logits_agree()
        logits_agree()
    assert made == 1
    before = plain(tokens)
    change(fused)
    plain.load_state_dict(fused.state_dict())
    assert not torch.allclose(plain(tokens), before, rtol=1e-2)
    made = 0
    logits_agree()
    logits_agree()
    assert made == 2
    with fused.weights_held():
        logits_agree()


def test_inference_mode_and_other_modes_do_not_share_a_table_that_breaks() -> None:
    plain, fused = (one.eval() for one in plain_and_fused(CONFIGS["leaf-norm"]))
    tokens, targets = tokens_of(2, 5), tokens_of(2, 5)
    with fused.weights_held():
        with torch.inference_mode():
            torch.testing.assert_close(fused(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(fused(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
        assert_same(learnt(fused, tokens, targets), learnt(plain, tokens, targets))


def test_tokens_outside_the_vocabulary_are_not_answered() -> None:
    _, fused = plain_and_fused(CONFIGS["leaf-norm"])
    tokens = tokens_of(2, 5)
    tokens[1, 2] = VOCAB + 3
    with torch.no_grad():
        logits = fused.eval()(tokens)
    assert logits[1, 2:].isnan().all()
    assert logits[0].isfinite().all()


def test_nothing_at_all() -> None:
    plain, fused = (one.eval() for one in plain_and_fused(CONFIGS["leaf-norm"]))
    for shape in ((2, 0), (0, 3), (0, 0)):
        tokens = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
        with torch.no_grad():
            assert fused(tokens).shape == plain(tokens).shape


def test_an_evaluation_draws_no_random_numbers() -> None:
    _, fused = plain_and_fused()
    tokens = tokens_of(2, 5)
    before = torch.get_rng_state()
    with torch.no_grad():
        fused.eval()(tokens)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_operators_that_are_made_from_a_grc_are_not_taken_for_one() -> None:
    class Other(GRC):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return super().forward(right, left)

    assert why_not_fused(Other(WIDTH), torch.empty(0, device=DEVICE)) is not None


# An accelerated model is a model


def test_a_copy_is_accelerated_and_apart() -> None:
    plain, fused = (one.eval() for one in plain_and_fused(CONFIGS["untied"]))
    tokens = tokens_of(2, 5)
    with torch.no_grad():
        before = fused(tokens)
        other = copy.deepcopy(fused)
        assert other.fused
        for weight in other.parameters():
            weight += 0.3 * torch.randn_like(weight)
        plain.load_state_dict(other.state_dict())
        torch.testing.assert_close(other(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
        assert torch.equal(fused(tokens), before)


def test_weights_are_saved_as_the_plain_models() -> None:
    plain, fused = plain_and_fused()
    fused.eval()(tokens_of(2, 5))
    saved = fused.state_dict()
    assert list(saved) == list(plain.state_dict())
    assert all(torch.equal(saved[name], weight) for name, weight in plain.state_dict().items())


def test_what_cannot_be_fused_says_why_in_one_line_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(1, 3)
    ldru = dataclasses.replace(BARE, operator=MLPLDRUConfig(width=WIDTH)).build(VOCAB).to(DEVICE)
    assert ldru.accelerate() == "there are fused kernels for GRC alone; this is MLPLDRU"
    monkeypatch.setattr(operators, "usable_on", lambda device: False)
    grc = BARE.build(VOCAB).to(DEVICE)
    reason = grc.accelerate()
    assert reason is not None
    assert "Triton" in reason
    assert "\n" not in reason
    for model in (ldru, grc):
        assert not model.fused
        assert model(tokens).shape == (1, 3, VOCAB)


def test_pairs_of_different_cells_are_not_fused() -> None:
    one, other = GRC(WIDTH), GRC(WIDTH)
    assert why_not_fused((one, other), torch.empty(0, device=DEVICE)) is not None
    assert why_not_fused((PostMerge(one, WIDTH), other), torch.empty(0, device=DEVICE)) is not None
    assert why_not_fused((one, PostMerge(one, WIDTH)), torch.empty(0, device=DEVICE)) is not None
    assert why_not_fused((one, one), torch.empty(0, device=DEVICE)) is None


# On a GPU, at sizes that interest


@on_gpu
@pytest.mark.parametrize("vocab", [300, 5000], ids=["fewer-words-than-tokens", "more"])
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("recompute", [False, True])
def test_low_precision_on_a_gpu(width: int, vocab: int, recompute: bool) -> None:
    """2 · 700 tokens in bfloat16 against float32."""
    config = ScanLMConfig(embed_width=width, operator=GRCConfig(width=width), recompute=recompute)
    plain = config.build(vocab).cuda()
    fused = copy.deepcopy(plain)
    assert fused.accelerate() is None
    tokens, targets = tokens_of(2, 700, vocab=vocab), tokens_of(2, 700, vocab=vocab)
    with torch.autocast("cuda", torch.bfloat16):
        actual = learnt(fused, tokens, targets)
    expected = learnt(plain, tokens, targets)
    torch.testing.assert_close(actual.results[0], expected.results[0], rtol=2e-2, atol=0.0)
    assert distance(actual.gradients, expected.gradients) < 5e-2
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        logits = fused.eval()(tokens)
    with torch.no_grad():
        exact = plain.eval()(tokens)
    assert (logits - exact).norm() < 5e-2 * exact.norm()


@on_gpu
@pytest.mark.parametrize("kind", ["grc", "up", "every"])
def test_many_rows_on_a_gpu(kind: str) -> None:
    """Enough for the products that are made for many rows, where nothing is kept."""
    operator = operator_of(kind, width=64)
    elements = torch.randn(20, 1000, 64, device="cuda")
    with torch.no_grad():
        exact = scan(operator, elements).prefixes
        with torch.autocast("cuda", torch.bfloat16):
            prefixes, plain = (scan(one, elements).prefixes for one in (FusedGRC(operator), operator))
    assert (prefixes - exact).norm() < 1.5 * (plain - exact).norm()  # weights shaken so much make much of rounding
