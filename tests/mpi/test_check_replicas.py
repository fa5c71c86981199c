"""md.check_replicas, alone and in md.train, finds and names differences, on all ranks."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist import optim
from mpidist.errors import ConfigError, ReplicaError
from mpidist.runtime import context

RNG = np.random.default_rng(0)
TRAIN = RNG.standard_normal((120, 1, 4, 4)).astype("f4"), RNG.integers(0, 3, 120)


def model(seed=0):
    return md.models.mlp([[1, 4, 4], 8, 3], seed=seed)


@pytest.mark.ranks(1, 2, 3, 5, 8)
def test_equal_replicas_pass(comm, xp):
    params = {"w": xp.ones((30, 4)), "b": xp.zeros(0), "n": xp.asarray(np.array(3))}
    md.check_replicas(comm, params)
    md.check_replicas(comm, model(), step=4)


@pytest.mark.ranks(2, 4)
def test_it_costs_one_small_exchange(comm):
    """O(1) bytes in the good case, however many tensors there are."""
    counters = context.of(comm).counters
    before = counters.native_bytes, counters.bytes_sent
    md.check_replicas(comm, {str(i): np.ones(100) for i in range(50)})
    counters = context.of(comm).counters
    assert counters.native_bytes - before[0] <= 64
    assert counters.bytes_sent - before[1] <= 64 * comm.size


@pytest.mark.ranks(4)
def test_rank_and_tensor_are_named(comm):
    """R28: one bit of one element on one rank."""
    params = {"conv1.w": np.ones((6, 25), "f4"), "dense.b": np.ones(10)}
    if comm.rank == 2:
        params["conv1.w"].view(np.uint32)[3, 4] ^= 1
    with pytest.raises(ReplicaError) as caught:
        md.check_replicas(comm, params, step=300)
    expected = "replicas differ after step 300: rank 2's 'conv1.w' differs from the other 3 ranks"
    assert str(caught.value).startswith(expected)
    assert (caught.value.ranks, caught.value.tensors) == ((2,), ("conv1.w",))
    params["conv1.w"][:] = 1
    md.check_replicas(comm, params)  # the communicator lives on


@pytest.mark.ranks(2)
def test_other_names_shapes_and_bad_input(comm):
    with pytest.raises(ReplicaError, match="'b' and 1 more of 3 tensors differ between both ranks"):
        md.check_replicas(comm, {"a": np.ones(2), "abc"[1 + comm.rank]: np.ones(2)})
    with pytest.raises(ReplicaError, match="'w'"):
        md.check_replicas(comm, {"w": np.zeros((2, 3) if comm.rank else (3, 2))})
    with pytest.raises(ConfigError, match="check_replicas: params: expected a mapping"):
        md.check_replicas(comm, [np.ones(3)])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("settings", [{"check_replicas": 4}, {"checkpoint_every": 6}])
def test_training_stops_at_the_next_look(comm, folder, settings):
    """R28: every N steps, and before each checkpoint, of which none is then written."""
    net, steps = model(), []

    def disturb(step):
        steps.append(step.step)
        if step.step == 3 and comm.rank == 1:
            net.parameters["dense1.weight"][0, 0] += 1e-6

    with pytest.raises(ReplicaError, match="rank 1's 'dense") as caught:
        md.train(comm, net, TRAIN, optimizer=optim.sgd(0.1), global_batch=12, epochs=2,
                 checkpoint=folder, callbacks=[disturb], **settings)  # fmt: skip
    look = next(iter(settings.values()))
    assert f"after step {look}: " in str(caught.value)
    assert steps[-1] == look
    comm.Barrier()
    assert list(folder.glob("step-*")) == []


@pytest.mark.ranks(2)
def test_it_changes_nothing_and_is_refused_with_servers(comm):
    def fit(**settings):
        net = model()
        result = md.train(comm, net, TRAIN, optimizer=optim.momentum(0.1), global_batch=12,
                          epochs=1, **settings)  # fmt: skip
        return result.parameters_sha256

    assert fit(strategy=md.AllReduce("ring")) == fit(
        strategy=md.AllReduce("ring"), check_replicas=1
    )
    with pytest.raises(ConfigError, match="check_replicas=3 needs the allreduce strategy"):
        fit(strategy=md.ParameterServer(1), check_replicas=3)
    with pytest.raises(ConfigError, match="check_replicas=0: expected a whole number"):
        fit(check_replicas=0)


@pytest.mark.ranks(2)
def test_its_price(comm, capsys):
    """Printed: microseconds per look at LeNet's 61,706 parameters, and GB/s at 32 MB."""
    for params in (md.models.lenet().parameters, {"w": np.ones(8 << 20, "f4")}):
        seconds = []
        for _ in range(7):
            comm.Barrier()
            start = time.perf_counter()
            md.check_replicas(comm, params)
            seconds.append(time.perf_counter() - start)
        nbytes, best = sum(x.nbytes for x in params.values()), min(seconds)
        assert best < 5
        if comm.rank == 0:
            with capsys.disabled():
                print(f"\nreplica guard: {nbytes} bytes in {best * 1e6:.0f} us, "
                      f"{nbytes / best / 1e9:.1f} GB/s")  # fmt: skip
