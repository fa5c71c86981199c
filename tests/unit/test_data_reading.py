"""The common base of file sources: ranges of bytes, memory that is used again, few open files."""

import os
import queue
import threading

import numpy as np
import pytest

from mpidist.data.byte_runs import ByteRun, LRUCache, Rooms, RunReader
from mpidist.data.message_layouts import Layouts, between

CONTENT = np.random.default_rng(0).bytes(200_000)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "a").write_bytes(CONTENT)
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_runs_in_any_order(file):
    """In order and not, more than are told at once, and read on from where the last ended."""
    runs = RunReader([file].__getitem__)
    begins = [*range(0, 90_000, 1000), 5, 100_000, 101_000, 102_000, 7]
    for some in (begins, begins[::-1], begins[:1], begins[1:2], []):
        got = [bytearray(1000) for _ in some]
        assert runs.read(
            [ByteRun(0, at, memoryview(b)) for at, b in zip(some, got, strict=True)]
        ) == (len(some))
        assert [bytes(part) for part in got] == [CONTENT[at : at + 1000] for at in some]


def test_a_file_that_became_shorter(file):
    """What is not there is zero, never what lay in the memory before."""
    got = [bytearray(b"x" * 100) for _ in range(4)]
    begins = [0, 199_950, 300_000, 50]
    runs = [ByteRun(0, at, memoryview(part)) for at, part in zip(begins, got, strict=True)]
    assert RunReader([file].__getitem__).read(runs) == 1
    assert got[1] == CONTENT[199_950:] + bytes(50)
    assert got[2] == bytes(100)
    assert got[3] == CONTENT[50:150]


def test_memory_is_used_again_when_nothing_sees_it():
    rooms = Rooms()
    first = rooms.empty((100, 1000), np.float32)
    first[...] = 1
    address = first.ctypes.data
    part = first[3:5][:, ::2].T
    seen = memoryview(part)
    del first
    assert rooms.empty((100, 1000), np.float32).ctypes.data != address, "a part of it is in use"
    del part
    other = rooms.empty((100, 1000), np.float32)
    assert other.ctypes.data != address, "somebody looks at it"
    assert np.asarray(seen).sum() == 1000
    del seen
    addresses = [rooms.empty((100, 990), np.float32).ctypes.data for _ in range(4)]
    assert address in addresses
    assert rooms.empty((90_000,), np.uint8).shape == (90_000,)
    assert rooms.empty((0, 5), np.float32).shape == (0, 5)


def test_what_is_kept_is_bounded():
    rooms = Rooms()
    arrays = [rooms.empty((1 << 20,), np.uint8) for _ in range(100)]
    del arrays
    rooms.empty((1 << 20,), np.uint8)
    assert 60 << 20 <= sum(map(len, rooms._free)) <= 64 << 20
    assert not rooms._lent


def test_arrays_that_other_threads_let_go():
    """The loop drops batches while the loader's thread makes new ones: none is given twice."""
    rooms, batches = Rooms(), queue.Queue(maxsize=5)
    wrong = []

    def consume():
        while (item := batches.get()) is not None:
            number, array = item
            if not (array == number).all():
                wrong.append(number)

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    for number in range(400):
        array = rooms.empty((20_000 + 100 * (number % 7),), np.float32)
        array[...] = number
        batches.put((number, array))
    for _ in consumers:
        batches.put(None)
    for consumer in consumers:
        consumer.join()
    assert wrong == []
    # At most a dozen of each of the 7 sizes are in use at a time.
    assert len(rooms._free) + len(rooms._returned) < 100, "they are used again"


def test_open_files_are_bounded(monkeypatch):
    """R137: the one used longest ago makes room; a second close does nothing."""
    opened, closed = [], []
    monkeypatch.setattr(os, "close", closed.append)
    files = LRUCache(lambda key: opened.append(key) or key, 3, os.close)
    assert [files[key] for key in (1, 2, 3, 1, 4, 1, 2)] == [1, 2, 3, 1, 4, 1, 2]
    assert opened == [1, 2, 3, 4, 2]
    assert closed == [2, 3]
    files.close()
    files.close()
    assert sorted(closed[2:]) == [1, 2, 4]
    assert len(files) == 0
    with pytest.raises(KeyError):
        LRUCache({}.__getitem__, 3)[1]


def test_layouts_of_one_length():
    """Known by every byte that is no value: one byte of these makes another layout."""
    layouts, asked = Layouts(1), []

    def decoded(data):
        asked.append(data)
        return [(4, 8)], [(4, 8)]

    good = b"headXXXXtail-of-more-than-eight-bytes"
    for data in (good, good.replace(b"XXXX", b"YYYY")):
        assert layouts.of(data, decoded).tolist() == [[4, 8]]
    assert len(asked) == 1
    for at in range(len(good)):
        other = bytearray(good)
        other[at] ^= 1
        layouts.of(bytes(other), decoded)
        assert (bytes(other) in asked) == (not 4 <= at < 8), at
    assert len(layouts.spans) == 1 + len(asked)


def test_a_layout_of_nothing_but_values():
    layouts, asked = Layouts(1), []
    for data in (b"1234", b"5678"):
        found = layouts.of(data, lambda data: asked.append(data) or ([(0, 4)], [(0, 4)]))
        assert found.tolist() == [[0, 4]]
    assert asked == [b"1234"]


def test_layouts_are_bounded():
    layouts = Layouts(1)
    for k in range(3000):
        layouts.of(k.to_bytes(4, "little"), lambda data: ([(0, 1)], []))
    assert len(layouts.spans) <= 2049


def test_between():
    assert between([(3, 5), (7, 7), (5, 6)], 9) == [(0, 3), (6, 7), (7, 9)]
    with pytest.raises(ValueError, match="overlap"):
        between([(3, 5), (4, 6)], 9)
