"""Random server groups against a serial model; ``make fuzz`` makes 500.

    mpiexec -n 5 python tests/mpi/fuzz_servers.py [groups] [seed]

Every group draws from one seed: servers and their placement, a mode, pieces, checksums, votes
and copies as in elastic runs, an optimizer of the user's own, and the calls of each worker.
Gradients are small integers, so that every sum is exact. A whole push has one number in all
elements, so a pull that mixes two versions of a server is found.
"""

import sys
import time
from collections import Counter
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.servers import server as servers_module
from mpidist.servers.layout import capacity
from mpidist.servers.replicas.elastic_servers import ElasticServerGroup
from mpidist.servers.wire import node_share, wire_pieces

MODES = {
    "bsp": md.BSP(),
    "asp": md.ASP(),
    "ssp0": md.SSP(0),
    "ssp": md.SSP(2),
    "dssp": md.DSSP(1, 4),
    "backup0": md.BackupWorkers(0),
    "backup1": md.BackupWorkers(1),
}
MEAN = ("bsp", "backup0", "backup1")
SHAPES = {"a": (37, 5), "c": (), "d": (301,), "t": (20, 3)}
WHOLE = ("a", "c", "d")  # only whole pushes have these


class Own:
    """An optimizer that counts its calls, so that it cannot update piece by piece."""

    elementwise = True

    def __init__(self):
        self.calls = 0

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters, weight=1.0):
        self.calls += 1
        for name in parameters:
            parameters[name] -= weight * gradients[name]


@contextmanager
def pieces_of(nbytes, window=4, room=64 << 20, shared=False):
    """Pieces of so many bytes, of which so many are on the way; a server's room for pushes."""
    places = [
        (wire_pieces, "PIECE_BYTES", nbytes),
        (wire_pieces, "NODE_PIECE_BYTES", nbytes),
        (wire_pieces, "WINDOW", window),
        (capacity, "ROOM_BYTES", room),
        (servers_module, "ROOM_BYTES", room),
        (node_share, "enabled", shared),
    ]
    before = [getattr(module, name) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)


def one_version(layout, found):
    """Each server's part of the tensors that only whole pushes change has one number."""
    for held in layout.pieces:
        values = set()
        for tensor, start, stop in held:
            if (name := layout.tensors[tensor].name) in WHOLE and name in found:
                values |= set(np.ravel(found[name])[start:stop].tolist())
        assert len(values) <= 1, values


def work(client, rng, steps):
    """What one worker does; returns (clock, number, rows or None) of each of its pushes."""
    me, layout, pushed = client.group.workers.rank, client.layout, []
    out = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(steps):
        number, kind = 60 * int(rng.integers(-9, 9)), int(rng.integers(0, 8))
        clock = client.finished
        full = {name: np.full(shape, float(number)) for name, shape in SHAPES.items()}
        if kind <= 2:
            found = client.push_pull(full, out=[None, out, full][kind], samples=1)
        elif kind == 3:  # some rows, some of them twice
            rows = rng.integers(0, 20, 5)
            found = client.push_pull({"t": (rows, np.full((5, 3), float(number)))}, samples=1)
            pushed.append((clock, number, rows))
        elif kind == 4:  # the push of a whole model, the pull of a part
            found = client.push_pull(full, what="d", samples=1)
        elif kind == 5:
            client.push(full, samples=1)
            full["d"][:] = 1e9  # it is sent already
            client.clock()
            found = client.pull(out=out)
        elif kind == 6:
            client.clock()
            found = client.pull()
        else:
            client.push(full, samples=1)
            client.clock()
            found = {}
            time.sleep(0.0005 * me)
        if kind in (0, 1, 2, 4, 5, 7):
            pushed.append((clock, number, None))
        one_version(layout, found)
        if rng.integers(0, 25) == 0:
            client.close()
            break
    return pushed


def expected(everyone, mode):
    """The number in `WHOLE`, and the table `t`, after the pushes of all workers, in any order."""
    whole, table = Fraction(0), np.zeros((20, 3))
    clocks = Counter(clock for pushed in everyone for clock, *_ in pushed)
    for pushed in everyone:
        for clock, number, rows in pushed:
            part = Fraction(number, clocks[clock] if mode in MEAN else 1)
            if rows is None:
                whole -= part
                table -= float(part)
            else:
                np.add.at(table, rows, -float(part))
    return float(whole), table


def run(comm, seed):
    """Make and check one group; return what was drawn."""
    rng = np.random.default_rng((seed, 1))
    servers = int(rng.integers(1, max(2, comm.size)))
    placement = str(rng.choice(["dedicated", "colocated"])) if comm.size > 1 else "colocated"
    servers = servers if placement == "dedicated" else int(rng.integers(1, comm.size + 1))
    workers = comm.size if placement == "colocated" else comm.size - servers
    modes = [name for name in MODES if workers > 1 or name != "backup1"]
    mode = modes[seed % len(modes)]
    limit, window = int(rng.choice([8, 64, 300, 5000])), int(rng.integers(1, 5))
    room = int(rng.choice([1, 4000, 64 << 20]))
    elastic = servers > 1 and not mode.startswith("backup") and bool(rng.integers(0, 3) == 0)
    copies = elastic and bool(rng.integers(0, 2))
    own, shared = bool(rng.integers(0, 4) == 0), bool(rng.integers(0, 3) == 0)
    checked = bool(rng.integers(0, 3) == 0)
    drawn = (seed, servers, placement, mode, limit, window, room, shared, elastic, copies, own)
    drawn += (checked,)
    kind = ElasticServerGroup if elastic else md.ServerGroup
    with (
        pieces_of(limit, window, room, shared),
        kind(comm, servers=servers, placement=placement, checksums=checked) as group,
    ):
        if elastic:
            group.vote(copies=copies)
        client = group.add(
            "m",
            {name: np.zeros(shape) for name, shape in SHAPES.items()},
            optimizer=Own() if own else md.optim.sgd(1.0),
            consistency=MODES[mode],
            global_batch=1,
        )
        if elastic:
            group.fill_copies("m")
        pushed = []
        if client is not None:
            pushed = work(client, np.random.default_rng((seed, 2, comm.rank)), 8)
        elif not group.is_worker:
            group.serve()
    assert not group.link.receiving, drawn
    held = group.hosted("m")
    parts = [] if held is None else held[1].shard.export()["parameters"]
    everyone = [each for each in comm.allgather(pushed) if each]
    parts = [part for each in comm.allgather(parts) for part in each]
    ends = {name: np.full(int(np.prod(shape)), np.nan) for name, shape in SHAPES.items()}
    for name, start, array in parts:
        ends[name][start : start + array.size] = array
    whole, table = expected(everyone, mode)
    values = {float(x) for name in WHOLE for x in ends[name]}
    if mode == "backup1":  # the workers cannot know whose pushes count, but all servers agree
        assert len(values) == 1, drawn
    else:
        assert values == {whole}, (drawn, values, whole)
        assert (ends["t"] == table.ravel()).all(), drawn
    return drawn


def play(run, groups: int) -> None:
    """Make groups until the number is reached; the first failure names what was drawn.

    The command line may give the number of groups (else `groups`), and the first seed.
    """
    given = [int(word) for word in sys.argv[1:3]]
    groups, seed = [*given, *(groups, 1)[len(given) :]]
    comm, start = MPI.COMM_WORLD, time.monotonic()
    for k in range(groups):
        run(comm, seed + k)
    if comm.rank == 0:
        print(f"{groups} groups from seed {seed} in {time.monotonic() - start:.0f} s: as expected")


if __name__ == "__main__":
    play(run, 500)
