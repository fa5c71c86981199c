"""Count the bytes that a rank reads of each file, in the calls of the operating system (R133)."""

import os

import numpy as np
import pytest

from mpidist import data
from mpidist.data.readers import tfrecord
from mpidist.data.sharding import shard

RANKS = 5


@pytest.fixture
def bytes_read(monkeypatch):
    """The bytes that were read so far, in a list of one for each call."""
    counts = []

    def counted(function, length):
        def call(descriptor, wanted, *place):
            answer = function(descriptor, wanted, *place)
            counts.append(length(answer))
            return answer

        return call

    monkeypatch.setattr(os, "pread", counted(os.pread, len))
    monkeypatch.setattr(os, "preadv", counted(os.preadv, int))
    return counts


def test_a_rank_reads_its_own_records(tmp_path, bytes_read):
    """By record through an index: all ranks together read each byte of the files once."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{k}" for k in range(3)]
    for path in paths:
        tfrecord.write(path, [rng.bytes(1000 + 17 * k) for k in range(40)])
    records = data.TFRecords(paths)
    parts = [shard("record", records.counts, [2, 3], rank).records for rank in range(RANKS)]
    total = 0
    for mine in parts:
        bytes_read.clear()
        for start in range(0, len(mine), 8):
            records.read(mine[start : start + 8])
        sizes = records._ends[mine] - records._begins[mine]
        assert sum(bytes_read) == sizes.sum(), "bytes of other ranks' records were read"
        total += sum(bytes_read)
    assert total == records.nbytes == sum(path.stat().st_size for path in paths)


def test_an_index_is_made_from_the_lengths(tmp_path, bytes_read):
    """What is needed to find a record is the length of each record before it, not its data."""
    count, longest = 20, 4 * tfrecord._LOOK
    tfrecord.write(tmp_path / "a", [bytes(longest)] * count)
    records = data.TFRecords(tmp_path / "a")
    assert len(records) == count
    assert sum(bytes_read) < records.nbytes / 50
