"""A source that makes samples on request, so that no process holds the data set (R81, R2)."""

import numpy as np
import pytest

import mpidist as md


class Stream:
    """Beds that report: sample i is what a generator seeded with i says. Length without limit."""

    def __init__(self, length):
        self.length = length
        self.taken = []

    def __len__(self):
        return self.length

    def take(self, indices):
        """Make the samples at `indices`."""
        self.taken += [int(i) for i in indices]
        rows = [np.random.default_rng(int(i)).standard_normal(6) for i in indices]
        inputs = np.array(rows, np.float32).reshape(len(rows), 6)
        return inputs, (inputs[:, 0] > inputs[:, 1]).astype(np.int64)


@pytest.mark.ranks(1, 2, 3, further=(5,))
def test_a_stream_is_shared_out(comm):
    """R81: each sample is made once, on one rank, and the model is that of one rank."""
    model, stream = md.models.logistic(6, 2), Stream(100_000)
    steps, batch = 6, 50
    md.train(
        comm, model, stream, optimizer=md.optim.sgd(0.2), global_batch=batch, steps=steps, seed=4,
        strategy=md.AllReduce("ring"),
    )  # fmt: skip
    everything = [i for taken in comm.allgather(stream.taken) for i in taken]
    assert len(everything) == len(set(everything)) == steps * batch
    assert abs(len(stream.taken) - steps * batch / comm.size) <= steps

    expected = md.models.logistic(6, 2)
    optimizer, whole = md.optim.sgd(0.2), Stream(100_000)
    sampler, position = md.data.Sampler(100_000, batch, 4), md.data.Position()
    state = optimizer.init(expected.parameters)
    gradients = {name: np.zeros_like(p) for name, p in expected.parameters.items()}
    for _ in range(steps):
        indices, position = sampler.batch(position)
        expected.loss_and_gradients(whole.take(indices), gradients)
        optimizer.update(gradients, state, expected.parameters)
    assert sorted(whole.taken) == sorted(everything)
    for name, array in expected.parameters.items():
        np.testing.assert_allclose(model.parameters[name], array, atol=1e-5)
