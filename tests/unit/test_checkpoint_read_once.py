"""Ranks that want the same arrays divide the reads evenly, and read each block only once."""

import random

import numpy as np
import pytest

from mpidist.checkpoint.read.read_once import partition_reads
from mpidist.checkpoint.read.read_plan import ReadItem, RowReadItem

BLOCK = 64


def ranges(wants):
    return sorted((w.file, w.offset, w.offset + w.count) for w in wants)


def joined(spans):
    """Neighbouring ranges as one."""
    found = []
    for file, low, high in sorted(spans):
        if found and found[-1][0] == file and found[-1][2] == low:
            found[-1] = (file, found[-1][1], high)
        else:
            found.append((file, low, high))
    return found


def some(rng):
    """Wants as tensors of some files give them: in any order, side by side, with gaps."""
    wants = []
    for file in range(rng.randint(1, 3)):
        at = rng.randint(0, 200)
        for _ in range(rng.randint(1, 30)):
            count = rng.choice([0, 1, 8, 60, 64, 300, 5000])
            wants.append(ReadItem(file, at, count, np.zeros(count, np.uint8)))
            at += count + rng.choice([0, 0, 13, 700])
    rng.shuffle(wants)
    return wants


@pytest.mark.parametrize("seed", range(60))
def test_everything_once_and_evenly(seed):
    """Issue 4, bytes read: the lists tile the wants, and no block is read by two ranks."""
    rng = random.Random(seed)
    wants, ranks = some(rng), rng.randint(1, 9)
    dealt = partition_reads(wants, BLOCK, ranks)
    assert len(dealt) == ranks
    assert joined(ranges(w for one in dealt for w in one if w.count)) == joined(
        ranges(w for w in wants if w.count)
    )
    readers = {}
    for rank, one in enumerate(dealt):
        for want in one:
            assert want.target.nbytes == want.count
            for block in range(want.offset // BLOCK, -(-(want.offset + want.count) // BLOCK)):
                readers.setdefault((want.file, block), set()).add(rank)
    assert all(len(who) == 1 for who in readers.values())
    total = sum(want.count for want in wants)
    counts = [sum(want.count for want in one) for one in dealt]
    assert max(counts) <= total / ranks + 2 * BLOCK


def test_targets_stay_with_their_bytes():
    """A cut range goes to the same part of its array; rows are not cut."""
    target = np.zeros(1000, np.uint8)
    dealt = partition_reads([ReadItem(0, 40, 1000, target)], BLOCK, 3)
    for part in (part for one in dealt for part in one):
        part.take(0, (np.arange(part.offset, part.offset + part.count) % 251).astype(np.uint8))
    np.testing.assert_array_equal(target, np.arange(40, 1040) % 251)
    rows = RowReadItem(0, 0, (10, 20), (slice(None), slice(3, 9)), np.zeros((10, 6), np.uint8))
    assert [rows] in partition_reads([rows], BLOCK, 3)
