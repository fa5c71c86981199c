"""`checksums=True`: a bit that flips on the way is an error on all ranks; values are as without."""

import zlib

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ProtocolError
from mpidist.servers import link as links
from mpidist.servers.pieces import checksums as sums
from mpidist.servers.wire import node_share, wire_pieces

SIZES = {"small": 50, "pieces": 40_000}  # of float64: 320 kB in pieces of 16 kB


@pytest.fixture(autouse=True)
def messages(monkeypatch):
    """Ranks of one host send messages, in short pieces."""
    monkeypatch.setattr(node_share, "enabled", False)
    monkeypatch.setattr(wire_pieces, "PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(wire_pieces, "NODE_PIECE_BYTES", 16 << 10)


def work(comm, size, mode, checksums=True, placement="dedicated"):
    """The parameters after some steps of every kind of call."""
    start = {"x": np.zeros(size), "t": np.zeros((9, 2))}
    with md.ServerGroup(
        comm, servers=max(1, comm.size - 2), placement=placement, checksums=checksums
    ) as group:
        client = group.add("m", start, optimizer=md.optim.sgd(1.0), consistency=mode)
        group.add("other", {"z": np.zeros(3)}, optimizer=md.optim.sgd(1.0))
        if client is None:
            group.serve()
            return None
        gradients = {"x": np.arange(size, dtype=float), "t": np.ones((9, 2))}
        client.pull(out=start)
        for _ in range(3):
            client.push_pull(gradients, out=start)
        client.push(gradients)
        client.clock()
        client.pull({"t": [1, 3]})
        client.push_pull({"t": ([2], np.ones((1, 2)))}, out=start)
        group.barrier()
        client.pull(out=start)
        return start["x"].tobytes(), start["t"].tobytes()


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.parametrize("mode", [md.BSP(), md.SSP(0)], ids=str)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_values_are_as_without(comm, monkeypatch, size, mode, placement):
    """And the sums are made and compared."""
    plain = work(comm, size, mode, False, placement)
    made, crc32 = [], zlib.crc32
    monkeypatch.setattr(sums.zlib, "crc32", lambda data: made.append(1) or crc32(data))
    assert work(comm, size, mode, True, placement) == plain
    assert len(made) > (20 if size == 50 else 40)


def flips(comm, tag, least, bit):
    """From now on, this rank's next message with `tag`, of so many bytes or more, is damaged."""
    todo = [1]

    class Wire:
        """A communicator that damages what it sends, and not the memory of the caller."""

        def __getattr__(self, name):
            return getattr(comm, name)

        def Isend(self, message, dest, which):
            data, kind = message
            ours = which % links.TAGS == (links.FIRST_TAG + tag) % links.TAGS
            if todo and ours and len(data) >= least:
                todo.clear()
                data = np.array(data)
                data[bit // 8 % len(data)] ^= 1 << bit % 8
            return comm.Isend([data, kind], dest, which)

    return Wire()


#: The sending rank of 3 (2 workers, 1 server), the tag, the size, bytes at least, what and between.
DAMAGES = {
    "a request": (
        0,
        1,
        "small",
        300,
        r"push\+clock\+pull\) of model 'm' from worker 0 .rank 0. to",
    ),
    "its header": (1, 1, "small", 300, r"of model 'm' from worker 1 .rank 1. to server 0 .rank 2."),
    "an answer": (2, 2, "small", 300, r"of model 'm' from server 0 .rank 2. to worker \d .rank"),
    "a piece up": (
        1,
        9,
        "pieces",
        300,
        r"a piece\) of model 'm' from worker 1 .rank 1. to server 0",
    ),
    "a piece down": (2, 10, "pieces", 300, r"a piece\) of model 'm' from server 0 .* to worker"),
    "initial values": (0, 4, "small", 300, r"from worker 0 .rank 0. to server 0"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", [md.BSP(), md.ASP()], ids=str)
@pytest.mark.parametrize("what", DAMAGES)
def test_a_bit_that_flips_on_the_way(comm, monkeypatch, what, mode):
    """All ranks get the error, which names the ranks, the model and the bytes."""
    sender, tag, size, least, text = DAMAGES[what]
    bit = 8 * 24 + 1 if what == "its header" else 8 * 250 + 5  # the clock; some value

    class Damaging(links.Link):
        def __init__(self, *args):
            super().__init__(*args)
            if self.comm.rank == sender:
                self.comm = flips(self.comm, tag, least, bit)

    monkeypatch.setattr("mpidist.servers.group.Link", Damaging)
    with pytest.raises(ProtocolError, match=r"\d+ bytes .*" + text) as caught:
        work(comm, SIZES[size], mode)
    assert "have changed on the way: CRC-32 0x" in str(caught.value)


@pytest.mark.ranks(2)
def test_without_checksums_nothing_notices(comm, monkeypatch):
    """So the tests above damage what they mean to."""
    expected = work(comm, 50, md.BSP(), False)

    class Damaging(links.Link):
        def __init__(self, *args):
            super().__init__(*args)
            if self.comm.rank == 0:
                self.comm = flips(self.comm, 1, 300, 8 * 250 + 5)

    monkeypatch.setattr("mpidist.servers.group.Link", Damaging)
    found = work(comm, 50, md.BSP(), False)
    if expected is not None:
        assert found != expected
