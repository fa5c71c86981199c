"""Buckets of gradients are sent while backward still runs, on faked nodes (R100, R103, R36)."""

import threading

import numpy as np
import pytest

import mpidist as md
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import ConfigError, MismatchError
from mpidist.gradients.exchange import Gradients
from mpidist.runtime.context import of, running

SHAPES = {"a": (7, 3), "b": (5,), "c": (400, 10), "d": (), "e": (33,), "f": (2, 2)}
BACKWARD = ["f", "e", "d", "c", "b", "a"]


def parameters(dtypes=None):
    return {name: np.zeros(shape, (dtypes or {}).get(name, "f4")) for name, shape in SHAPES.items()}


def one_step(comm, gradients, step, told=BACKWARD):
    """One backward pass with known values; checks the sums of views and extras."""
    share = (comm.rank + 1) / (comm.size * (comm.size + 1) / 2)
    gradients.begin(share)
    for k, name in enumerate(BACKWARD):
        gradients.views[name][...] = (k + 1) * (comm.rank + step)
        if name in told:
            gradients.ready(name)
    gradients.reduce(comm.rank + 0.5, comm.rank == comm.size - 1)
    shares = np.arange(1, comm.size + 1) / (comm.size * (comm.size + 1) / 2)
    mean = float((shares * (np.arange(comm.size) + step)).sum())
    for k, name in enumerate(BACKWARD):
        np.testing.assert_allclose(gradients.views[name], (k + 1) * mean, rtol=1e-3, atol=1e-3)
    assert gradients.extras[0] == sum(range(comm.size)) + 0.5 * comm.size
    assert gradients.extras[1] == 1
    digest = b"".join(np.ascontiguousarray(view).tobytes() for view in gradients.views.values())
    assert len(set(comm.allgather(digest))) == 1


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3, 4, 5, 8)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2, 3])
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_sums_are_right_in_every_step(comm, ranks_per_node, algorithm):
    memory_of(of(comm), ranks_per_node)
    for dtypes in ({}, {"c": "f8", "e": "f2"}):
        gradients = Gradients(comm, parameters(dtypes), algorithm=algorithm, bucket_bytes=100)
        nodes = gradients.arena.topology.nodes
        assert gradients.overlapping is (nodes > 1)
        for step in range(1, 5):
            one_step(comm, gradients, step)
            if gradients.overlapping and step > 1:
                assert gradients.order == BACKWARD
                assert len(gradients._starts) > 2
        assert not [handle for handle in running if handle.context is of(comm)]
        gradients.close()


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_buckets_leave_before_the_end(comm, ranks_per_node):
    """In the second step the first bucket is under way while later gradients are unknown."""
    if comm.size == ranks_per_node:
        return
    memory_of(of(comm), ranks_per_node)
    gradients = Gradients(comm, parameters(), bucket_bytes=100)
    one_step(comm, gradients, 1)
    gradients.begin(1 / comm.size)
    sent = []
    for name in BACKWARD:
        gradients.views[name][...] = 1
        gradients.ready(name)
        sent.append(gradients._next)
    assert sent == sorted(sent)
    assert sent[1] >= 1
    assert gradients._next < len(gradients._starts)  # the loss is not there yet
    gradients.reduce(0, 0)
    assert all((view == 1).all() for view in gradients.views.values())
    assert 0 <= gradients.hidden() <= 1
    gradients.close()


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_progress_by_a_thread(comm, ranks_per_node):
    memory_of(of(comm), ranks_per_node)
    before = set(threading.enumerate())
    gradients = Gradients(comm, parameters(), bucket_bytes=100, progress="thread")
    for step in range(1, 6):
        one_step(comm, gradients, step)
    added = [thread.name for thread in set(threading.enumerate()) - before]
    assert added == (["mpidist-progress"] if comm.size > ranks_per_node else [])
    gradients.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConfigError, match="'hooks' or 'thread'"):
        Gradients(comm, parameters(), progress="magic")


@pytest.mark.ranks(3)
def test_a_model_that_says_nothing_is_summed_at_the_end(comm):
    memory_of(of(comm), 1)
    gradients = Gradients(comm, parameters(), bucket_bytes=100)
    for step in range(1, 4):
        one_step(comm, gradients, step, told=[])
    assert gradients.order is None
    gradients.close()


@pytest.mark.ranks(3, further=(2,))
def test_an_order_of_an_earlier_run_is_used_from_the_first_step(comm):
    memory_of(of(comm), 1)
    gradients = Gradients(comm, parameters(), bucket_bytes=100, order=BACKWARD)
    first = next(name for name in gradients.arena)
    assert first == "f"
    for step in range(1, 4):
        one_step(comm, gradients, step)
    with pytest.raises(ConfigError, match="not the model's"):
        gradients.arrange(["a", "b"])
    gradients.close()


@pytest.mark.ranks(4)
def test_a_rank_in_another_operation_is_found(comm):
    memory_of(of(comm), 2)
    gradients = Gradients(comm, parameters(), bucket_bytes=100)
    one_step(comm, gradients, 1)
    one_step(comm, gradients, 2)
    gradients.begin(0.25)

    def act():
        if comm.rank == 3:
            md.allreduce(comm, np.zeros(3), algorithm="ring")
        else:
            gradients.reduce(0, 0)

    with pytest.raises(MismatchError):
        act()


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 4, 5)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_training_with_overlap_is_training(comm, ranks_per_node):
    """The same model as without overlap, to float tolerance; and the hidden share is told."""
    rng = np.random.default_rng(3)
    data = rng.standard_normal((64, 8)).astype("f4"), rng.integers(0, 3, 64)
    results = []
    for overlap in (True, False):
        sub = comm.Dup()
        memory_of(of(sub), ranks_per_node)
        model = md.models.mlp([8, 16, 3], seed=1)
        summary = md.train(
            sub, model, data, optimizer=md.optim.momentum(0.1, 0.9), global_batch=10, steps=14,
            strategy=md.AllReduce(overlap=overlap, bucket_bytes=64),
        )  # fmt: skip
        results.append(model.parameters)
        if overlap and comm.size > ranks_per_node:
            assert 0 <= summary.overlap_fraction <= 1
        else:
            assert summary.overlap_fraction is None
        md.free(sub)
        sub.Free()
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=2e-4, atol=2e-5)


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_resumed_run_adds_in_the_same_order(comm, folder, ranks_per_node):
    """The order of backward is stored: the bits are those of a run that was never stopped."""
    rng = np.random.default_rng(3)
    data = rng.standard_normal((64, 8)).astype("f4"), rng.integers(0, 3, 64)

    def run(path, **more):
        sub = comm.Dup()
        memory_of(of(sub), ranks_per_node)
        summary = md.train(
            sub, md.models.mlp([8, 16, 3], seed=1), data, optimizer=md.optim.momentum(0.1, 0.9),
            global_batch=10, steps=12, strategy=md.AllReduce(bucket_bytes=64),
            checkpoint=folder / path, **more,
        )  # fmt: skip
        md.free(sub)
        sub.Free()
        return summary

    whole = run("whole")
    run("stopped", stop_after=5)
    resumed = run("stopped", resume=True)
    assert resumed.resumed_at == 5
    assert resumed.parameters_sha256 == whole.parameters_sha256


class Quiet:
    """A model of a user's own that knows nothing of `ready`."""

    def __init__(self, model):
        self.model, self.parameters = model, model.parameters
        self.predict = model.predict

    def loss_and_gradients(self, batch, gradients):
        return self.model.loss_and_gradients(batch, gradients)


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("quiet", [False, True])
def test_accumulation_exchanges_once(comm, quiet):
    """Parts of a rank's batch are added up first: the same model, the same number of exchanges."""
    rng = np.random.default_rng(5)
    data = rng.standard_normal((60, 8)).astype("f4"), rng.integers(0, 3, 60)
    results, operations = [], []
    for parts in (1, 4):
        sub = comm.Dup()
        memory_of(of(sub), 1)
        model = md.models.mlp([8, 16, 3], seed=1)
        md.train(
            sub, Quiet(model) if quiet else model, data, optimizer=md.optim.momentum(0.1, 0.9),
            global_batch=24, steps=8, strategy=md.AllReduce(accumulate=parts, bucket_bytes=64),
        )  # fmt: skip
        results.append(model.parameters)
        operations.append(of(sub).sequence)
        md.free(sub)
        sub.Free()
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-4, atol=1e-5)
    if not quiet:  # the loop itself tells what is ready when it adds the last part
        assert operations[0] == operations[1]
    with pytest.raises(ConfigError, match="accumulate"):
        md.AllReduce(accumulate=0)


@pytest.mark.ranks(3)
def test_messages_per_step_do_not_depend_on_the_number_of_tensors(comm):
    """R100: many small gradients travel in few buckets; inside a node in none."""
    sent = {}
    for ranks_per_node in (1, 3):
        for tensors in (4, 60):
            sub = comm.Dup()
            memory_of(of(sub), ranks_per_node)
            shapes = {f"t{k}": np.zeros(2400 // tensors, "f4") for k in range(tensors)}
            gradients = Gradients(sub, shapes)
            for _ in range(3):
                before = of(sub).counters.messages_sent
                gradients.begin(1 / 3)
                for name in reversed(list(shapes)):
                    gradients.ready(name)
                gradients.reduce(0, 0)
            sent[ranks_per_node, tensors] = of(sub).counters.messages_sent - before
            gradients.close()
            md.free(sub)
            sub.Free()
    assert sent[1, 4] == sent[1, 60] == 2 * (comm.size - 1)
    assert sent[3, 4] == sent[3, 60] == 0
