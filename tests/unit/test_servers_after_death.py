"""After deaths, shards and copies of the living servers give all of the new shards: R51."""

import itertools

import numpy as np
import pytest

import mpidist as md
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.replicas.after_death import (
    Held,
    Move,
    holders,
    moves,
    targets,
    up_to_date,
)
from mpidist.servers.replicas.shard_ranges import (
    all_ranges,
    are_shared,
    pack,
    range_bytes,
    scalars_of,
    set_scalars,
    shared_ranges,
    unpack,
)
from mpidist.servers.shards import ServerShard

SPECS = {
    "a": ((97, 5), "f4"), "b": ((3,), "f8"), "c": ((64,), "f2"), "d": ((), "f4"),
    "e": ((0, 4), "f4"),
}  # fmt: skip
ADAM = md.optim.adam(0.01, eps=1e-4)
RNG = np.random.default_rng(7)
#: Each element of a tensor has its own number in each kind of array.
WHOLE = {
    name: [RNG.permutation(int(np.prod(shape))) + k for k in (0, 1000, 2000)]
    for name, (shape, _) in SPECS.items()
}


def arrays_of(shard):
    """(kind, name, start, array) of all arrays of a shard that belong to tensors."""
    held = shard.export()
    kinds = [held["parameters"], *(held["optimizer"][slot] for slot in sorted(held["optimizer"]))]
    return [(k, *each) for k, triples in enumerate(kinds) for each in triples]


def make(layout, server, filled):
    shard = ServerShard(layout, server, ADAM, {}, 0)
    for kind, name, start, array in arrays_of(shard) if filled else ():
        array[...] = WHOLE[name][kind][start : start + array.size]
    return shard


def held_by(layout, size):
    return [
        Held(i, make(layout, i, True), make(layout, (i - 1) % size, True) if size > 1 else None,
             {9: 4}, {9: 3}, [5, 5], 2)
        for i in range(size)
    ]  # fmt: skip


def give(everyone, old, new, servers, voted=True):
    """Move as `move_shards` does, between ranks that are all here; return the new shards."""
    facts = [None if one is None else one.facts() for one in everyone]
    wanted = targets(servers)
    made = {(rank, j): make(new, j, False) for rank, j in wanted}
    current = up_to_date(facts, voted)
    for source, target, i, j in moves(old, new, wanted, holders(facts), current):
        given = shared_ranges(everyone[source].shards()[i], new, j)
        for array, to in zip(given, shared_ranges(made[target, j], old, i), strict=True):
            to[...] = array
    return made


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_deaths_that_leave_a_copy(size):
    """Every set of dead servers of which no two are neighbours; the new shards are whole."""
    old, seen = place_tensors(SPECS, size), 0
    for dead in itertools.chain(*(itertools.combinations(range(size), k) for k in range(size))):
        everyone = [None if i in dead else one for i, one in enumerate(held_by(old, size))]
        there = holders([None if one is None else one.facts() for one in everyone])
        neighbours = any(i in dead and (i + 1) % size in dead for i in range(size))
        assert (len(there) < size) == neighbours, dead
        if neighbours:
            continue
        seen += 1
        living = [i for i in range(size) if i not in dead]
        new = place_tensors(SPECS, len(living))
        made = give(everyone, old, new, living)
        assert len(made) == len(living) * (2 if len(living) > 1 else 1)
        for shard in made.values():
            for kind, name, start, array in arrays_of(shard):
                whole = WHOLE[name][kind][start : start + array.size].astype(array.dtype)
                assert (array == whole).all(), (dead, name, kind)
    assert seen >= size


def test_who_gives():
    """The server itself, and else its copy, with the clocks that this one has."""
    layout = place_tensors(SPECS, 3)
    facts = [one.facts() for one in held_by(layout, 3)]
    assert {k: one[:2] for k, one in holders(facts).items()} == {
        0: (0, False), 1: (1, False), 2: (2, False),
    }  # fmt: skip
    there = holders([facts[0], None, facts[2]])
    assert there[1] == (2, True, {9: 3})
    assert there[0].clocks == {9: 4}


def test_a_copy_that_is_behind_is_not_used():
    """Where no server votes, a copy may lack the last updates, and is filled anew."""
    layout = place_tensors(SPECS, 3)
    everyone = held_by(layout, 3)
    everyone[1].updates[1] = 4  # the copy of shard 0 lacks one of 5 updates
    facts = [one.facts() for one in everyone]
    assert up_to_date(facts, True) == [{0, 2}, {1, 0}, {2, 1}]
    assert up_to_date(facts, False) == [{0, 2}, {1}, {2, 1}]
    assert up_to_date([None, facts[1], facts[2]], False)[1] == {1, 0}  # the best that is left
    wanted = [(1, 0)]
    found = moves(layout, layout, wanted, holders(facts), up_to_date(facts, False))
    assert found == [Move(0, 1, 0, 0)]
    everyone[1].count(0, 9, 3)
    assert (everyone[1].copied, everyone[1].updates) == ({9: 4}, [5, 5])
    everyone[1].count(1, 9, 6)
    assert (everyone[1].clocks, everyone[1].updates) == ({9: 7}, [6, 5])


def test_ranges_and_scalars_round_trip():
    layout = place_tensors(SPECS, 2)
    one, other = make(layout, 0, True), make(layout, 0, False)
    for step in range(3):
        ADAM.update({k: np.ones_like(v) for k, v in one.parameters.items()}, one.state,
                    one.parameters, weight=0.1 + step)  # fmt: skip
    buffer = np.empty(range_bytes(all_ranges(one)), np.uint8)
    pack(all_ranges(one), buffer)
    unpack(all_ranges(other), buffer)
    assert scalars_of(one) == scalars_of(other)
    again = np.empty_like(buffer)
    pack(all_ranges(other), again)
    assert (again == buffer).all()
    fresh = make(layout, 1, False)
    assert scalars_of(fresh) != scalars_of(one)
    set_scalars(fresh, scalars_of(one))
    assert scalars_of(fresh) == scalars_of(one)
    assert not are_shared(layout, 0, layout, 1)
