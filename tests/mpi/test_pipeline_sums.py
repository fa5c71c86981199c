"""Sums over replicas on several hosts are sent while the last backward pass goes on (R88)."""

import gc
import weakref

import numpy as np
import pytest
from test_stage import batches, even_cuts, network, run

import mpidist as md
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import MpidistError
from mpidist.models.layers import Relu
from mpidist.pipeline import plan_stages
from mpidist.pipeline.stages import stage_chunk, sum_parts
from mpidist.runtime.context import of


@pytest.fixture
def hosts(monkeypatch):
    """Each replica on a host of its own, and parts as small as possible."""

    def is_sent(comm):
        memory_of(of(comm), 1)
        return comm.size > 1

    monkeypatch.setattr(stage_chunk, "is_sent", is_sent)
    monkeypatch.setattr(sum_parts, "LEAST", 1)


@pytest.mark.ranks(2, 3, 4, further=(5,))
def test_the_bits_are_those_of_one_rank(comm, hosts):
    """Also with more replicas than microbatches, whose last ranks add nothing."""
    grids = {
        2: [[2]], 3: [[2, 1], [1, 2], [3]], 4: [[3, 1], [2, 2], [1, 2, 1], [4]],
        5: [[1, 3, 1], [2, 3]],
    }[comm.size]  # fmt: skip
    for replicas in grids:
        for kind, pieces in (("mlp", 16), ("lenet", 5), ("mlp", 2)):
            cuts = even_cuts(kind, len(replicas))
            run(comm, kind, cuts=cuts, replicas=replicas, microbatches=pieces)
            if len(set(replicas)) == 1:
                run(comm, kind, cuts=cuts, replicas=replicas, microbatches=pieces,
                    schedule="zero_bubble")  # fmt: skip
    if comm.size == 4:
        run(comm, "mlp", cuts=[2, 4, 6], replicas=[2, 2], microbatches=8, chunks=2,
            schedule="interleaved")  # fmt: skip


class Looks(Relu):
    """Notes how many sums are under way in each of its backward passes."""

    def __init__(self):
        self.begun, self.stage = [], None

    def backward(self, *given, **more):
        if self.stage is not None:
            self.begun.append(self.stage._steps._queue._begun)
        return super().backward(*given, **more)


@pytest.mark.ranks(2)
def test_sums_begin_in_the_last_backward_pass(comm, hosts):
    model = network("mlp")
    [place] = [k for k, layer in enumerate(model.layers) if isinstance(layer, Relu)][:1]
    model.layers[place] = looks = Looks()
    grid = plan_stages(len(model.layers), cuts=[], ranks=2, microbatches=8)
    stage = md.Stage(comm, model, grid)
    looks.stage = stage
    assert stage.chunks[0].parts[0].names == {"dense4.bias"}
    stage.step(batches("mlp")[0])
    # Of 4 passes, the last one finds the sums of the three layers behind begun, each in two parts.
    assert looks.begun == [0, 0, 0, 6]
    stage.close()


class Fails(Looks):
    def backward(self, *given, **more):
        result = super().backward(*given, **more)
        if self.begun and self.begun[-1]:
            raise ZeroDivisionError("the layer failed")
        return result


@pytest.mark.ranks(3)
def test_an_exception_while_sums_are_under_way_ends_all_ranks(comm, hosts):
    model = network("mlp")
    model.layers[[type(layer) for layer in model.layers].index(Relu)] = fails = Fails()
    stage = md.Stage(comm, model, plan_stages(8, cuts=[6], ranks=3, microbatches=8,
                                              replicas=[2, 1]))  # fmt: skip
    fails.stage = stage
    with pytest.raises((ZeroDivisionError, MpidistError), match="the layer failed"):
        stage.step(batches("mlp")[0])
    stage.close()


def owner(array):
    """The array that owns the memory of another one, or the first view of memory that is none."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def sums_are_freed(comm, **plan):
    stage = md.Stage(comm, network("mlp"), plan_stages(8, ranks=comm.size, microbatches=5, **plan))
    stage.step(batches("mlp")[0])
    parts = [part for chunk in stage.chunks.values() for part in chunk.parts]
    memory = [weakref.ref(owner(part.sums.rows)) for part in parts]
    for part in parts:  # partial sums of microbatches that came in another order
        memory += [weakref.ref(array) for array in getattr(part._adding, "_free", ())]
    assert memory
    assert all(one() is not None for one in memory)
    stage.close()
    gc.collect()
    assert [one() for one in memory] == [None] * len(memory)


@pytest.mark.ranks(1, 3)
def test_a_closed_stage_frees_its_sums(comm, request):
    """Also the program that keeps the stage: in memory of the host, and for messages."""
    for _ in range(2):
        sums_are_freed(comm, cuts=[])
        if comm.size == 3:
            sums_are_freed(comm, cuts=[4], replicas=[2, 1])
        request.getfixturevalue("hosts")


def test_parts_are_whole_arrays(monkeypatch):
    monkeypatch.setattr(sum_parts, "LEAST", 100)
    names, sizes = ["a", "b", "c", "d"], [30, 3, 20, 6]
    assert sum_parts.parts_of_vector(names, sizes, 4) == [
        (33, 59, {"c", "d"}), (0, 33, {"a", "b"}),
    ]  # fmt: skip
    assert sum_parts.parts_of_vector([], [], 4) == [(0, 0, set())]
    assert np.sum(sizes) == 59
