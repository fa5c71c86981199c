"""Batch normalisation (R118) and clipping over ranks equal those of one rank with all samples."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError, MismatchError

SIZES = (1, 2, 3, 5, 8)
EPS = 1e-3


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def parts(p, whole, axis=0):
    """Uneven parts of the whole batch, one of them empty where there are three or more."""
    n = whole.shape[axis]
    cuts = sorted((k * k * n) // (p * p) for k in range(1, p))
    if p > 2:
        cuts[0] = 0
    return np.split(whole, cuts, axis=axis)


def reference(x, axis):
    x = x.astype("f8")
    mean, variance = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    return (x - mean) / np.sqrt(variance + EPS), mean.squeeze(axis), variance.squeeze(axis)


#: Shape of the whole batch, the axes that are summed over, and the one that samples lie along.
CASES = [((29, 6), 0, 0), ((29, 3, 4, 5), (0, 2, 3), 0), ((3, 4, 5, 29), (1, 2, 3), 3)]


@pytest.mark.covering
@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize(("shape", "axis", "samples"), CASES)
def test_forward_equals_the_whole_batch(comm, xp, shape, axis, samples):
    """Issue 3 point 6: moments and output over uneven parts, large means included."""
    rng = np.random.default_rng(1)
    whole = (rng.standard_normal(shape) * 3 + 1000).astype("f4")
    mine = parts(comm.size, whole, samples)[comm.rank]
    y, mean, variance = reference(whole, axis)
    got_mean, got_variance = models.sync_moments(comm, xp.asarray(mine), axis)
    assert got_mean.dtype == np.float32
    np.testing.assert_allclose(host(got_mean), mean, rtol=1e-6)
    np.testing.assert_allclose(host(got_variance), variance, rtol=1e-4)
    out, *_ = models.sync_batch_norm(comm, xp.asarray(mine), axis, EPS)
    np.testing.assert_allclose(host(out), parts(comm.size, y, samples)[comm.rank], atol=2e-4)
    bits = host(got_mean).tobytes() + host(got_variance).tobytes()
    assert len(set(comm.allgather(bits))) == 1


@pytest.mark.covering
@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize(("shape", "axis", "samples"), CASES)
def test_backward_is_the_gradient_of_the_whole(comm, shape, axis, samples):
    """Finite differences of the mean loss over all samples, through the common moments."""
    rng = np.random.default_rng(2)
    x, slope = rng.standard_normal(shape), rng.standard_normal(shape)
    count = shape[samples]

    def loss(x):
        return (np.sin(reference(x, axis)[0]) * slope).sum() / count

    mine, weights = (parts(comm.size, a, samples)[comm.rank] for a in (x, slope))
    y, _, _, saved = models.sync_batch_norm(comm, mine, axis, EPS)
    local = mine.shape[samples]
    dy = np.cos(y) * weights / max(local, 1)  # of this rank's mean loss
    dx = models.sync_batch_norm_backward(comm, dy, saved)
    assert dx.shape == mine.shape
    # Weighted as md.train weights gradients, the ranks' parts are the gradient of the whole.
    gathered = np.concatenate(comm.allgather(dx * local / count), axis=samples)
    for _ in range(12):
        i = tuple(rng.integers(n) for n in shape)
        up, down = x.copy(), x.copy()
        up[i] += 1e-5
        down[i] -= 1e-5
        assert gathered[i] == pytest.approx((loss(up) - loss(down)) / 2e-5, abs=1e-7)


@pytest.mark.ranks(2)
def test_half_precision_and_errors(comm):
    x = np.full((8, 2), 300, np.float16)  # its squares are beyond float16
    x[:, 1] = np.arange(8) + 8 * comm.rank
    mean, variance = models.sync_moments(comm, x, 0)
    assert mean.dtype == variance.dtype == np.float32
    np.testing.assert_allclose(mean, [300, 7.5])
    np.testing.assert_allclose(variance, [0, 21.25], atol=1e-6)
    assert models.sync_batch_norm(comm, x, 0)[0].dtype == np.float16
    with pytest.raises(ConfigError, match="no rank has an element along axis 0"):
        models.sync_moments(comm, np.empty((0, 2)), 0)
    with pytest.raises(MismatchError):
        models.sync_moments(comm, np.ones((4, 2 + comm.rank)), 0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", ["moments", "axis", "eps", "backward", "saved"])
def test_a_bad_argument_of_one_rank_is_an_error_on_all(comm, call):
    """The other ranks are in the allreduce by then: they raise with the words of that rank."""
    own, odd, x = comm.Dup(), comm.rank == 1, np.arange(12.0).reshape(6, 2)
    axis, eps = (7, "small") if odd else (0, EPS)
    saved = models.sync_batch_norm(own, x, 0)[3] if call in ("backward", "saved") else None
    calls = {
        "moments": lambda: models.sync_moments(own, x, axis),
        "axis": lambda: models.sync_batch_norm(own, x, axis),
        "eps": lambda: models.sync_batch_norm(own, x, 0, eps),
        "backward": lambda: models.sync_batch_norm_backward(own, x, saved._replace(axis=axis)),
        "saved": lambda: models.sync_batch_norm_backward(own, x, None if odd else saved),
    }
    error, words = {
        "eps": (ValueError, "ValueError: could not convert string to float"),
        "saved": (TypeError, "TypeError: cannot unpack"),
    }.get(call, (ConfigError, "ConfigError: axis is 7, expected an axis, or a tuple of axes"))
    began = time.monotonic()
    with pytest.raises(error if odd else MismatchError) as caught:
        calls[call]()
    assert time.monotonic() - began < 5
    if not odd:
        assert "rank 1" in str(caught.value)
        assert words in str(caught.value)
    md.free(own)
    own.Free()


@pytest.mark.ranks(1, 3)
def test_a_bad_axis_on_all_ranks_leaves_the_communicator_usable(comm):
    for _ in range(2):
        with pytest.raises(ConfigError, match="axis is 7"):
            models.sync_moments(comm, np.ones((4, 2)), 7)
        np.testing.assert_array_equal(models.sync_moments(comm, np.ones((4, 2)), 0)[0], 1)


@pytest.mark.ranks(1, 3)
def test_clipping_on_replicas_needs_no_message(comm):
    """Every rank clips the reduced gradients alike: as on one rank, and replicas stay equal."""
    rng = np.random.default_rng(5)
    data = rng.standard_normal((60, 4)).astype("f4") * 30, rng.integers(0, 3, 60)

    def fit(comm, clip):
        net = models.mlp([4, 16, 3], seed=1)
        made = optim.momentum(0.05)
        md.train(comm, net, data, optimizer=optim.clipped(made, clip) if clip else made,
                 global_batch=20, epochs=4, check_replicas=1)  # fmt: skip
        return net.parameters

    ours, free = fit(comm, 0.1), fit(comm, None)
    alone = comm.Split(comm.rank)
    serial = fit(alone, 0.1)
    md.free(alone)
    alone.Free()
    for name, p in serial.items():
        np.testing.assert_allclose(ours[name], p, rtol=1e-4, atol=1e-5)
    assert max(np.abs(ours[name] - free[name]).max() for name in ours) > 0.01
