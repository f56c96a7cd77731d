"""A toy operator that is far from associative, and the ways in which tests compare scans."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from logdepth.scanning import reference

WIDTH = 3
LENGTHS = (*range(1, 66), 67, 71, 97, 127, 128, 129, 251, 257)


class Toy(nn.Module):
    """tanh(W [left; right] + b): small, smooth, ordered, and associative for no W to speak of."""

    def __init__(self, seed: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(2 * width, width, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(width, generator=generator, dtype=torch.float64))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(torch.cat([left, right], dim=-1) @ self.weight + self.bias)


class Counting:
    """An operator that counts its calls and the rows in them."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        self.calls.append(left.shape[0])
        return left + right

    @property
    def rows(self) -> int:
        return sum(self.calls)


def toy_pair() -> tuple[Toy, Toy]:
    """Two operators, so that a merge made with the wrong one shows."""
    return Toy(1), Toy(2)


def random_elements(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sequences(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """One `[length, WIDTH]` sequence a length."""
    return [random_elements(length, WIDTH, seed=seed + number) for number, length in enumerate(lengths)]


def padded(rows: Sequence[Tensor]) -> Tensor:
    """The rows as a right-padded batch; the padding is NaN, so that reading it shows."""
    length = max((len(row) for row in rows), default=0)
    batch = torch.full((len(rows), length, WIDTH), float("nan"), dtype=torch.float64)
    for number, row in enumerate(rows):
        batch[number, : len(row)] = row
    return batch


def boundaries(lengths: Iterable[int]) -> list[int]:
    """cu_seqlens of documents of the given lengths."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def definition(pair: tuple[Toy, Toy], sequence: Tensor) -> Tensor:
    """The prefixes of one sequence, from the reference."""
    return reference.scan(pair, sequence[None])[0]


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(prefixes: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a fixed random projection of the prefixes: no symmetry hides an error."""
    loss = sum((one * random_elements(*one.shape, seed=99 + n)).sum() for n, one in enumerate(prefixes))
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return tuple(torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, grads, strict=True))
