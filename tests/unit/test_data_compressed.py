"""TFRecord files in gzip or zlib: any record can be read, damage is reported (R133, R42)."""

import gzip
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import wire

from mpidist import data
from mpidist.data.readers import compression, tfrecord
from mpidist.data.sampler import Sampler
from mpidist.errors import ConfigError

RNG = np.random.default_rng(0)
#: Some that deflate makes small, some that it cannot, one longer than a few blocks of the tests.
RECORDS = [RNG.bytes(k % 50) + bytes(k % 700) for k in range(500)] + [RNG.bytes(30_000), b""]
FILE = wire.tfrecord(RECORDS)
PACKED = {
    "gzip": gzip.compress(FILE),
    "zlib": zlib.compress(FILE),
    "stored": zlib.compress(FILE, 0),
    "members": b"".join(gzip.compress(FILE[k : k + 777]) for k in range(0, len(FILE), 777)),
    "zeros": gzip.compress(FILE[:5000]) + bytes(99_000) + gzip.compress(FILE[5000:]) + bytes(512),
}


@pytest.fixture
def small(monkeypatch):
    """Blocks of 1,000 bytes, of which two are kept, and four points."""
    monkeypatch.setattr(compression, "_BLOCK", 1000)
    monkeypatch.setattr(compression, "_BLOCKS", 2)
    monkeypatch.setattr(compression, "_POINTS", 4)
    monkeypatch.setattr(compression, "_CALL", 100)


@pytest.mark.parametrize("packed", PACKED)
def test_any_record_of_a_packed_file(tmp_path, small, packed):
    """In order, backwards, in a sampler's order, beside plain files; the memory is bounded."""
    (tmp_path / "a").write_bytes(PACKED[packed])
    (tmp_path / "b").write_bytes(FILE)
    (tmp_path / "c").write_bytes(gzip.compress(b""))
    for paths in ([tmp_path / "a"], [tmp_path / n for n in "bacab"]):
        records = data.TFRecords(paths)
        count = len(RECORDS)
        expected = RECORDS * sum(path.name != "c" for path in paths)
        assert len(records) == len(expected)
        assert records.counts == [count if path.name != "c" else 0 for path in paths]
        assert records.nbytes == len(FILE) * (len(expected) // count)
        order = Sampler(len(expected), 37, seed=1).order(0)
        for batch in (np.arange(len(expected)), np.arange(len(expected))[::-1], [0, 0, 501, 500]):
            assert records.read(batch) == [expected[k] for k in batch]
        for start in range(0, len(order), 37):
            batch = order[start : start + 37]
            assert records.read(batch) == [expected[k] for k in batch]
        assert len(records._cache.blocks) <= 2
        assert sum(len(file._points) for file in records._packed.values()) <= 4
        records.close()
        assert records.read([3]) == [RECORDS[3]], "files are opened again when they are needed"
        records.close()


def test_what_is_unpacked_for_a_record(tmp_path, small, monkeypatch):
    """Its block from the nearest point; what follows in order is unpacked once."""
    monkeypatch.setattr(compression, "_POINTS", 1000)
    (tmp_path / "a").write_bytes(PACKED["gzip"])
    records = data.TFRecords(tmp_path / "a")
    taken, take = [], compression._Cursor.take
    monkeypatch.setattr(
        compression._Cursor, "take", lambda c, count: taken.append(r := take(c, count)) or r
    )
    records.read([333])
    assert sum(map(len, taken)) <= 2000
    records.read([333])
    assert sum(map(len, taken)) <= 2000, "it is kept"
    taken.clear()
    for k in range(len(RECORDS)):
        records.read([k])
    assert sum(map(len, taken)) == len(FILE), "each block once"


def test_plain_lengths_that_look_like_a_packed_file(tmp_path):
    """A first record of 35,615 bytes begins a file with the two bytes of gzip."""
    for length in (0x8B1F, 0x9C78):
        (tmp_path / "a").write_bytes(wire.tfrecord([bytes(length), b"x"]))
        assert compression.is_compressed((tmp_path / "a").read_bytes())
        assert data.TFRecords(tmp_path / "a").read([1]) == [b"x"]


@pytest.mark.parametrize("packed", ["gzip", "zlib", "stored"])
def test_a_packed_file_that_was_cut_off(tmp_path, packed):
    """What came before is read, and one bad record says that something is missing."""
    whole, path = PACKED[packed], tmp_path / "a"
    for length in [*RNG.integers(12, len(whole), 40).tolist(), len(whole) - 1, len(whole) - 4]:
        path.write_bytes(whole[:length])
        records = data.TFRecords(path)
        good = len(records) - 1
        assert records.read(range(good)) == RECORDS[:good]
        with pytest.raises(Exception, match=rf"record {good}: it is cut off, at byte .*, unpacked"):
            records.read([good])
        records.close()
    assert good == len(RECORDS), "also where nothing is missing but the end of the packing"


def said(path):
    """The records that are good, or the line that is said of the file."""
    try:
        records = data.TFRecords(path)
    except ConfigError as error:
        return str(error)
    found = {}
    for k in range(len(records)):
        try:
            found[k] = records.read([k])[0]
        except tfrecord.BadRecord:
            continue
    records.close()
    return found


@pytest.mark.parametrize("packed", ["gzip", "zlib", "stored"])
def test_a_damaged_packed_file(tmp_path, packed):
    """One flipped bit: one line, or the right records; never wrong ones, never another error."""
    whole, lines = PACKED[packed], 0
    for bit in RNG.integers(0, 8 * len(whole), 60).tolist() + list(range(0, 80, 3)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        (tmp_path / "a").write_bytes(broken)
        found = said(tmp_path / "a")
        if isinstance(found, str):
            assert "damaged or this is no TFRecord file" in found
            assert "\n" not in found
            lines += 1
        else:
            assert found.items() <= dict(enumerate(RECORDS)).items()
    assert lines > 40
    for text in (gzip.compress(b"no TFRecord file"), PACKED["gzip"] + b"garbage"):
        (tmp_path / "a").write_bytes(text)
        assert "damaged or this is no TFRecord file" in said(tmp_path / "a")


def test_a_packed_file_that_changes(tmp_path, small):
    """Cut or overwritten after it was opened: bad records, as of a plain file."""
    path = tmp_path / "a"
    for text in (PACKED["zlib"][:5000], PACKED["zlib"][:5000] + bytes(30_000), b""):
        path.write_bytes(PACKED["zlib"])
        records = data.TFRecords(path)
        path.write_bytes(text)
        for k in range(400, 420):
            with pytest.raises(tfrecord.BadRecord, match=f"record {k}: .*, at byte .*, unpacked"):
                records.read([k])
        path.write_bytes(PACKED["zlib"])
        if len(text) <= 5000:
            assert records.read([419]) == [RECORDS[419]], "what was missing is not kept"
        records.close()


def test_a_few_bytes_that_stand_for_many(tmp_path, monkeypatch):
    """A record that unpacks to more than anybody wants is a bad record, before it has memory."""
    head = struct.pack("<Q", 1 << 24)
    bomb = wire.tfrecord([b"x"]) + head + wire.masked(head) + bytes(1 << 24)
    (tmp_path / "a").write_bytes(gzip.compress(bomb))
    monkeypatch.setattr(tfrecord, "_LONGEST", 1 << 20)
    records = data.TFRecords(tmp_path / "a")
    assert records.read([0]) == [b"x"]
    with pytest.raises(Exception, match="1: it unpacks to 16777228 bytes, more than 1048576"):
        records.read([1])


CHILD = """
import re, sys
import numpy as np
from mpidist import data
records = data.TFRecords(sys.argv[1])
order = np.random.default_rng(0).permutation(len(records))[:40]
for k in order:
    assert records.read([k])[0][:8] == int(k).to_bytes(8, "little")
# Not ru_maxrss, which begins with what the process that started this one held.
print(len(records), re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def test_memory_is_bounded(tmp_path):
    """300 MiB of records in 300 kB: they are never in memory together."""
    # The pages of a record are zeros behind its number, so the packed file is small.
    packer, crc = zlib.compressobj(1, wbits=31), tfrecord._checksum()
    with (tmp_path / "a").open("wb") as file:
        for k in range(300):
            record = k.to_bytes(8, "little") + bytes((1 << 20) - 8)
            head = struct.pack("<Q", len(record))
            for part in (head, tfrecord.masked(crc(head)).to_bytes(4, "little"), record,
                         tfrecord.masked(crc(record)).to_bytes(4, "little")):  # fmt: skip
                file.write(packer.compress(part))
        file.write(packer.flush())
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "a")], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    count, used = map(int, child.stdout.split())
    assert count == 300
    assert used < 250 << 10, "KiB, of which Python and NumPy are 60 to 120"
