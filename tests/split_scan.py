"""Scans of one sequence over ranks, compared with those of one process, values and gradients; for test_across_ranks.

`python -m tests.split_scan RANKS` forks the ranks: they share the time of importing torch.
"""

import os
import random
import sys
import tempfile
import traceback
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from logdepth.operators import GRC, MLPLDRU
from logdepth.scanning import scan
from logdepth.scanning.across_ranks import scan_across_ranks

WIDTH = 6
CASES = 12


def _random_case(chance: random.Random, ranks: int) -> tuple[list[int], list[int] | None]:
    """Where pieces and documents begin."""
    total = chance.choice([ranks, 17, 64, 97, 131, 256])
    inner = sorted(chance.randint(0, total) for _ in range(ranks - 1))  # some pieces are empty
    if chance.random() < 0.4:
        inner = [total * one // ranks for one in range(1, ranks)]
    documents = sorted({chance.randint(1, total - 1) for _ in range(chance.choice([1, 3, 9]))})
    return [0, *inner, total], None if chance.random() < 0.5 else [0, *documents, total]


def _compare(rank: int, ranks: int) -> None:
    for number in range(CASES):
        chance = random.Random(number)
        cuts, documents = _random_case(chance, ranks)
        torch.manual_seed(number)
        operator: Any = [GRC, MLPLDRU][number % 2](WIDTH)
        other = GRC(WIDTH)
        pair = (operator, other) if number % 3 == 0 else operator
        modules = nn.ModuleList([operator, other])
        elements, weights = torch.randn(cuts[-1], WIDTH, requires_grad=True), torch.randn(cuts[-1], WIDTH)
        whole = scan(pair, elements, cu_seqlens=documents or [0, cuts[-1]]).prefixes
        (whole * weights).sum().backward()
        expected = {name: one.grad for name, one in modules.named_parameters()}
        modules.zero_grad(set_to_none=True)

        mine = slice(cuts[rank], cuts[rank + 1])
        piece = elements.detach()[mine].requires_grad_()
        with _counted() as sent:
            found = scan_across_ranks(pair, piece, cuts, cu_seqlens=documents)
            (found * weights[mine]).sum().backward()
        torch.testing.assert_close(found, whole[mine], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(piece.grad, elements.grad[mine], atol=2e-5, rtol=2e-5)
        for name, parameter in modules.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            if expected[name] is not None:
                torch.testing.assert_close(grad, expected[name], atol=1e-4, rtol=1e-4)
        # One message per direction, of at most 2 ⌈log2⌉ blocks, counted in bytes.
        longest = max(stop - start for start, stop in pairwise(cuts))
        most = max(1, 2 * (longest - 1).bit_length()) * WIDTH * 4
        assert len(sent) in (0, 2), sent
        assert all(count <= most for count in sent), (sent, most)
        if documents is None and cuts[1:-1] != [cuts[-1]] * (ranks - 1) and longest < cuts[-1]:
            assert len(sent) == 2, "nothing was sent, so this case tests nothing"


class _counted:  # noqa: N801
    """The bytes that this rank sends in each message of a scope."""

    def __enter__(self) -> list[int]:
        self.patch, sent = pytest.MonkeyPatch(), []
        gather, scatter = dist.all_gather, dist.reduce_scatter
        self.patch.setattr(
            dist, "all_gather", lambda out, one, **rest: (sent.append(one.nbytes), gather(out, one, **rest))
        )
        self.patch.setattr(
            dist, "reduce_scatter", lambda out, one, **rest: (sent.append(out.nbytes), scatter(out, one, **rest))
        )
        return sent

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def main(ranks: int) -> int:
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=rank, world_size=ranks)
                    _compare(rank, ranks)
                    dist.barrier()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(code)
            children.append(child)
        return max(os.waitpid(child, 0)[1] for child in children) and 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
