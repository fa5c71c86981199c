"""The schedule "pipedream": updates by microbatch, with kept versions (R83, R85, R86, R87)."""

import numpy as np
import pytest
from test_stage import even_cuts, network
from test_train import TEST, TRAIN

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError, MpidistError
from mpidist.partition import BlockPartition
from mpidist.pipeline import action_lists, check_actions, plan_stages

OPTIMIZERS = {"momentum": lambda: optim.momentum(0.05), "adam": lambda: optim.adam(0.01)}


def batch(kind, n):
    rng = np.random.default_rng(5)
    shape = network(kind).sample_shape
    return rng.standard_normal((n, *shape)).astype(np.float32), rng.integers(0, 3, n)


def serial(kind, optimizer, cuts, pieces, flush, data):
    """One process: stage s computes microbatch i of a block with version max(0, i - (S-1-s))."""
    model, stages = network(kind), len(cuts) + 1
    bounds = (0, *cuts, len(model.layers))
    state, gradients = optimizer.init(model.parameters), {}
    inputs, labels = data
    versions = []
    first = next(k for k, layer in enumerate(model.layers) if layer.shapes())
    for i in range(pieces):
        if i % flush == 0:
            versions.clear()
        versions.append({name: array.copy() for name, array in model.parameters.items()})
        used = {}
        for s in range(stages):
            version = versions[max(0, i % flush - (stages - 1 - s))]
            for layer in model.layers[bounds[s] : bounds[s + 1]]:
                used.update({name: version[name] for name in layer.shapes()})
        mine = slice(*BlockPartition(len(inputs), pieces).range(i))
        if mine.start == mine.stop:
            continue
        x, tape = inputs[mine][None], []
        for layer in model.layers:
            x, saved = layer.forward(used, x)
            tape.append(saved)
        _, dy = model.loss(x, labels[mine][None])
        gradients = {name: np.empty_like(a)[None] for name, a in model.parameters.items()}
        for k in range(len(model.layers) - 1, first - 1, -1):
            dy = model.layers[k].backward(used, tape.pop(), dy, gradients, first=k == first)
        plain = {name: gradient[0] for name, gradient in gradients.items()}
        weight = (mine.stop - mine.start) / len(inputs)
        optimizer.update(plain, state, model.parameters, weight)
    return model.parameters


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_the_bits_of_a_serial_program_with_these_versions(comm, name, kind):
    """64 microbatches at once, and emptied after each 5; some of another size, some empty."""
    cuts = even_cuts(kind, comm.size)
    for pieces, flush, samples in ((64, None, 128), (16, 5, 40), (6, 4, 4)):
        data = batch(kind, samples)
        optimizer = OPTIMIZERS[name]()
        expected = serial(kind, optimizer, cuts, pieces, flush or pieces, data)
        model = network(kind)
        grid = plan_stages(
            len(model.layers), cuts=cuts, ranks=comm.size, microbatches=pieces,
            schedule="pipedream", flush=flush,
        )  # fmt: skip
        stage = md.Stage(comm, model, grid)
        state = optimizer.init(stage.parameters)

        def update(gradients, parameters, weight, optimizer=optimizer, state=state):
            optimizer.update(gradients, state, parameters, weight)

        stage.step(data, update)
        for key, array in stage.parameters.items():
            assert array.tobytes() == expected[key].tobytes(), (pieces, key)
        if samples >= pieces and stage.parameters:
            kept = check_actions(action_lists("pipedream", comm.size, flush or pieces))
            assert stage.versions == kept.versions_kept[comm.rank] <= comm.size - comm.rank
            assert flush or stage.versions == comm.size - comm.rank
        stage.close()


def fit(comm, **settings):
    model = models.mlp([12, 16, 16, 16, 3], seed=7)
    settings.setdefault("optimizer", optim.momentum(0.05))
    return model, md.train(
        comm, model, TRAIN, global_batch=20, seed=1, test_data=TEST, epochs=4,
        **{"microbatches": 10, "strategy": md.Pipeline(schedule="pipedream"), **settings},
    )  # fmt: skip


@pytest.mark.ranks(2, 3)
def test_it_learns_and_a_resume_has_the_same_bits(comm, folder):
    """Nothing is on its way at the end of a step, so a checkpoint has the whole state."""
    strategy = md.Pipeline(cuts=list(range(2, 1 + comm.size)), schedule="pipedream", flush=5)
    model, whole = fit(comm, strategy=strategy)
    assert whole.test_accuracy > 0.6
    assert whole.pipeline["versions"][-1] == 1
    assert whole.pipeline["staleness"] == list(range(comm.size - 1, -1, -1))
    # The pipeline is filled anew for each 5 microbatches: 0 + 1 + 1 + 1 + 1 of 2 stages.
    assert whole.pipeline["staleness_mean"][-2:] == [0.8, 0.0]
    # Rank 0 keeps the old parameters, too.
    parameters = sum(array.nbytes for array in model.parameters.values())
    assert comm.rank or whole.pipeline["stash_bytes"][0] > (comm.size - 1) * parameters
    fit(comm, strategy=strategy, checkpoint=folder, stop_after=7)
    _, resumed = fit(comm, strategy=strategy, checkpoint=folder, resume=True)
    assert (resumed.resumed_at, resumed.parameters_sha256) == (7, whole.parameters_sha256)


class Poisoned(models.Network):
    """The loss and its gradient are not numbers from some call on."""

    calls = 0

    def loss(self, scores, labels):
        self.calls += 1
        losses, gradient = super().loss(scores, labels)
        if self.calls > 45:
            losses, gradient = losses * np.nan, gradient * np.float32(np.nan)
        return losses, gradient


@pytest.mark.ranks(2)
def test_a_bad_loss_leaves_finite_parameters(comm, folder):
    model = Poisoned(network("mlp").layers, (12,), 7)
    with pytest.raises(MpidistError, match="loss is nan"):
        md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=9,
            microbatches=10, checkpoint=folder, strategy=md.Pipeline(schedule="pipedream"),
        )  # fmt: skip
    comm.Barrier()
    saved = md.load(folder)
    assert saved["run"]["step"] == 4
    assert all(np.isfinite(array).all() for array in saved["parameters"].values())


@pytest.mark.ranks(2)
def test_what_is_refused(comm):
    model = network("mlp")
    for strategy, told in (
        (md.Pipeline(schedule="pipedream", replicas=[2]), "with 'pipedream' each stage has one"),
        (md.Pipeline(flush=4), "flush=4 is for the schedule 'pipedream', not '1f1b'"),
    ):
        with pytest.raises(ConfigError, match=told):
            fit(comm, strategy=strategy)
    with pytest.raises(ConfigError, match="flush=0: expected a whole number"):
        md.Pipeline(schedule="pipedream", flush=0)
    for schedule, update in (("pipedream", None), ("1f1b", print)):
        grid = plan_stages(8, cuts=[4], ranks=2, microbatches=4, schedule=schedule)
        stage = md.Stage(comm, model, grid)
        with pytest.raises(ConfigError, match="update is"):
            stage.step(batch("mlp", 8), update)
        stage.close()
