"""A scan over ranks is the scan of one process: values, gradients, any pieces, packed documents, bytes."""

import subprocess
import sys

import pytest

from logdepth.scanning.across_ranks import _Block, _blocks_sent
from tests.ranks import ROOT, plain_environment


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_scan_as_one_process_does(ranks: int) -> None:
    command = [sys.executable, "-m", "tests.split_scan", str(ranks)]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_piece_is_the_fewest_blocks_of_the_tree_of_its_document() -> None:
    assert _blocks_sent((5, 16), [(0, 100)]) == [_Block(5, 0), _Block(6, 1), _Block(8, 3)]
    assert _blocks_sent((5, 16), [(0, 3), (3, 100)]) == [_Block(2, 1), _Block(4, 2), _Block(8, 2), _Block(12, 0)]
    assert _blocks_sent((0, 16), [(0, 100)]) == [_Block(0, 4)]
    assert _blocks_sent((0, 16), [(0, 16), (16, 20)]) == []  # its document ends with it
    assert _blocks_sent((7, 7), [(0, 100)]) == []
    for stop in range(2, 300):
        blocks = _blocks_sent((1, stop), [(0, 1000)])
        assert sum(1 << one.level for one in blocks) == stop - 1
        assert len(blocks) <= max(1, 2 * (stop - 2).bit_length())
