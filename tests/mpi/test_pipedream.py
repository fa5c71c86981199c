"""The schedule "pipedream": updates by microbatch, with kept versions (R83, R85, R86, R87)."""

import itertools
import math

import numpy as np
import pytest
from test_stage import even_cuts, network, tree
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


def serial(kind, optimizer, cuts, replicas, pieces, flush, data, steps, drained=()):
    """One process: stage s computes microbatch i with version max(0, i // r - depth) of its layers.

    i is counted from the last time that the pipeline was empty: after each `flush` microbatches,
    and after the steps in `drained`. Version v is that after v updates since then.
    """
    model, stages = network(kind), len(cuts) + 1
    bounds = (0, *cuts, len(model.layers))
    own = [
        {n: model.parameters[n] for layer in model.layers[a:b] for n in layer.shapes()}
        for a, b in itertools.pairwise(bounds)
    ]
    states = [optimizer.init(parameters) for parameters in own]
    inputs, labels = data
    first = next(k for k, layer in enumerate(model.layers) if layer.shapes())
    whole = math.lcm(*replicas)
    padded = -(-pieces // whole) * whole
    versions, rounds, entered = [[] for _ in own], [[] for _ in own], 0

    def begin():
        for s, parameters in enumerate(own):
            versions[s][:] = [{name: array.copy() for name, array in parameters.items()}]

    for step in range(steps):
        for i in range(padded):
            if entered == flush or entered == 0 or (i == 0 and step in drained):
                begin()
                entered = 0
            used = {}
            for s, r in enumerate(replicas):
                depth = -(-sum(replicas[s:]) // r) - 1
                used.update(versions[s][max(0, entered // r - depth)])
            mine = slice(*BlockPartition(len(inputs), pieces).range(i)) if i < pieces else slice(0)
            count = len(labels[mine])
            gradients = {name: np.zeros_like(a)[None] for name, a in model.parameters.items()}
            if count:
                x, tape = inputs[mine][None], []
                for layer in model.layers:
                    x, saved = layer.forward(used, x)
                    tape.append(saved)
                _, dy = model.loss(x, labels[mine][None])
                for k in range(len(model.layers) - 1, first - 1, -1):
                    dy = model.layers[k].backward(used, tape.pop(), dy, gradients, first=k == first)
            for s, r in enumerate(replicas):
                rounds[s].append((count / len(inputs), {n: gradients[n][0] for n in own[s]}))
                if len(rounds[s]) < r:
                    continue
                weight = sum(each for each, _ in rounds[s])
                if weight:
                    shares = [np.float32(each / weight) for each, _ in rounds[s]]
                    found = [g for _, g in rounds[s]]
                    total = found[0]
                    if r > 1:
                        total = {
                            n: tree([a * g[n] for a, g in zip(shares, found, strict=True)])
                            for n in own[s]
                        }
                    optimizer.update(total, states[s], own[s], weight)
                versions[s].append({name: array.copy() for name, array in own[s].items()})
                rounds[s].clear()
            entered += 1
    assert stages == len(replicas)
    return model.parameters


def run(comm, kind, name, cuts, replicas, pieces, flush, samples, steps=1, drained=()):
    """Compare `steps` steps of a stage with the serial program; return the closed stage."""
    data = batch(kind, samples)
    optimizer = OPTIMIZERS[name]()
    expected = serial(kind, optimizer, cuts, replicas, pieces, flush, data, steps, drained)
    model = network(kind)
    grid = plan_stages(
        len(model.layers), cuts=cuts, ranks=comm.size, microbatches=pieces, replicas=replicas,
        schedule="pipedream", flush=flush,
    )  # fmt: skip
    stage = md.Stage(comm, model, grid, gradients=md.Gradients)
    state = optimizer.init(stage.parameters)

    def update(gradients, parameters, weight):
        optimizer.update(gradients, state, parameters, weight)

    for step in range(steps):
        if step in drained:
            stage.drain()
        stage.step(data, update)
    scores = stage.predict(data[0])  # finishes what is under way
    for key, array in stage.parameters.items():
        assert array.tobytes() == expected[key].tobytes(), (replicas, pieces, flush, key)
    whole = network(kind)
    whole.parameters = expected
    np.testing.assert_allclose(scores, whole.predict(data[0]), atol=1e-5)
    stage.close()
    return stage


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_the_bits_of_a_serial_program_with_these_versions(comm, name, kind):
    """24 microbatches at once, and emptied after each 5; some of another size, some empty."""
    cuts, each = even_cuts(kind, comm.size), [1] * comm.size
    for pieces, flush, samples in ((24, None, 48), (16, 5, 40), (6, 4, 4)):
        stage = run(comm, kind, name, cuts, each, pieces, flush, samples)
        if samples >= pieces and stage.parameters:
            kept = check_actions(action_lists("pipedream", comm.size, flush or pieces))
            assert stage.versions == kept.versions_kept[comm.rank] <= comm.size - comm.rank
            assert flush or stage.versions == comm.size - comm.rank


@pytest.mark.ranks(2, 3, further=(4,))
def test_microbatches_are_under_way_from_step_to_step(comm):
    """Steps shorter and longer than the pipeline, flushes across steps, and a drain between."""
    cuts, each = even_cuts("mlp", comm.size), [1] * comm.size
    for pieces, flush, steps, drained in ((2, None, 5, ()), (5, 7, 4, ()), (4, None, 4, (2,))):
        run(comm, "mlp", "momentum", cuts, each, pieces, flush, 4 * pieces, steps, drained)


@pytest.mark.ranks(2, 3, 4, further=(5,))
def test_replicas_add_the_gradients_of_a_round(comm):
    """Also in rounds that the microbatches do not fill, and with empty microbatches."""
    for replicas in {2: [[2]], 3: [[2, 1], [1, 2], [3]], 4: [[2, 1, 1], [1, 3], [2, 2], [1, 2, 1]],
                     5: [[3, 1, 1], [2, 3]]}[comm.size]:  # fmt: skip
        cuts, whole = even_cuts("mlp", len(replicas)), math.lcm(*replicas)
        for pieces, flush, samples in ((12, None, 48), (7, None, 20), (5, whole, 4)):
            stage = run(comm, "mlp", "adam", cuts, replicas, pieces, flush, samples, 3)
            if pieces == 12 and stage.parameters:
                depth = -(-sum(replicas[stage.stage :]) // replicas[stage.stage]) - 1
                assert (stage.versions, stage.staleness()[0]) == (1 + depth, depth)


def fit(comm, **settings):
    model = models.mlp([12, 16, 16, 16, 3], seed=7)
    settings.setdefault("optimizer", optim.momentum(0.05))
    return model, md.train(
        comm, model, TRAIN, global_batch=20, seed=1, test_data=TEST,
        **{
            "epochs": 4, "microbatches": 10, "strategy": md.Pipeline(schedule="pipedream"),
            **settings,
        },
    )  # fmt: skip


@pytest.mark.ranks(3, further=(2,))
def test_it_learns_and_a_resume_has_the_same_bits(comm, folder):
    """The pipeline is empty at the end of each step, where a checkpoint finishes it otherwise."""
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


@pytest.mark.ranks(3, further=(4,))
def test_a_run_with_replicas_resumes_with_the_updates_of_each_stage(comm, folder):
    """Stages make different numbers of updates, and adam counts them; empty at each checkpoint."""
    replicas = [2, 1, 1][: comm.size - 1]
    strategy = md.Pipeline(cuts=[2, 4][: len(replicas) - 1], replicas=replicas,
                           schedule="pipedream")  # fmt: skip
    given = {"strategy": strategy, "optimizer": optim.adam(0.05), "checkpoint_every": 7}
    _, whole = fit(comm, checkpoint=folder / "whole", **given)
    assert whole.test_accuracy > 0.6
    assert whole.pipeline["staleness"] == [1] * (comm.size - 1) + [0]
    fit(comm, checkpoint=folder / "parts", stop_after=7, **given)
    _, resumed = fit(comm, checkpoint=folder / "parts", resume=True, **given)
    assert (resumed.resumed_at, resumed.parameters_sha256) == (7, whole.parameters_sha256)
    _, other = fit(comm, checkpoint=folder / "parts", resume=True, epochs=5,
                   strategy=md.AllReduce(), optimizer=optim.adam(0.01))  # fmt: skip
    assert other.resumed_at == whole.steps


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
        (
            md.Pipeline(schedule="pipedream", replicas=[2], flush=3),
            r"flush=3: expected a multiple of all replicas=\[2\], such as 4",
        ),
        (md.Pipeline(flush=4), "flush=4 is for the schedule 'pipedream', not '1f1b'"),
    ):
        with pytest.raises(ConfigError, match=told):
            fit(comm, strategy=strategy)
    with pytest.raises(ConfigError, match="flush=0: expected a whole number"):
        md.Pipeline(schedule="pipedream", flush=0)
    grid = plan_stages(8, cuts=[], ranks=2, microbatches=4, schedule="pipedream")
    with pytest.raises(ConfigError, match=r"replicas=\[2\] with 'pipedream' add gradients"):
        md.Stage(comm, model, grid)
    for schedule, update in (("pipedream", None), ("1f1b", print)):
        grid = plan_stages(8, cuts=[4], ranks=2, microbatches=4, schedule=schedule)
        stage = md.Stage(comm, model, grid)
        with pytest.raises(ConfigError, match="update is"):
            stage.step(batch("mlp", 8), update)
        stage.step(batch("mlp", 8), None if update else lambda *given: None)
        stage.close()
