"""Training with a model on a device, as ``device = "gpu"`` of a job file does it (`xp`)."""

import numpy as np
import pytest
from on_gpu import host, late, other_stream, same

import mpidist as md
from mpidist import arrays, models, optim
from mpidist.errors import ConfigError, MpidistError

RNG = np.random.default_rng(4)
INPUTS = RNG.standard_normal((96, 12)).astype("f4")
LABELS = INPUTS[:, :3].argmax(axis=1)
DATA = (INPUTS, LABELS)
IMAGES = (RNG.standard_normal((48, 1, 12, 12)).astype("f4"), RNG.integers(0, 3, 48))


def to(xp, model):
    """Move a model as `mpidist train` does."""
    if xp is not np:
        for tree in (model.parameters, getattr(model, "state", {})):
            for name, array in tree.items():
                tree[name] = arrays.to_device(array, 0)
    return model


def fit(comm, xp, strategy, make=None, data=DATA, optimizer=None, **settings):
    model = to(xp, make() if make else models.mlp([12, 16, 16, 3], seed=7))
    settings.setdefault("steps", 4)
    result = md.train(
        comm, model, data, optimizer=optimizer or optim.adam(0.02), global_batch=12, seed=1,
        strategy=strategy, test_data=data, **settings,
    )  # fmt: skip
    return model, result


def both(comm, xp, *given, **settings):
    """The run on the device, and the same on the host."""
    there = fit(comm, xp, *given, **settings)
    return there, there if xp is np else fit(comm, np, *given, **settings)


def check_near(comm, xp, there, here, looks=True):
    """A run on the device and one on the host are the same but for rounding. Collective."""
    problem = None
    try:
        if looks:
            compare(xp, there, here)
    except AssertionError as error:
        problem = str(error)
    problems = comm.allgather(problem)  # a rank that failed alone would let the others wait
    assert problems == [None] * comm.size, problems


def compare(xp, there, here):
    (model, result), (other, expected) = there, here
    for name, array in model.parameters.items():
        assert isinstance(array, xp.ndarray)
        same(array, host(other.parameters[name]), rtol=2e-3, atol=2e-4)
    facts = ("steps", "finished", "epochs", "ranks")
    assert [getattr(result, one) for one in facts] == [getattr(expected, one) for one in facts]
    assert abs(result.test_accuracy - expected.test_accuracy) < 0.05
    assert result.train_loss == pytest.approx(expected.train_loss, rel=0.01)


#: Name -> strategy, and whether all ranks have the whole model at the end.
STRATEGIES = {
    "allreduce": (md.AllReduce(), {}, True),
    "accumulate": (md.AllReduce("ring", accumulate=2), {"check_replicas": 2}, True),
    "microbatches": (md.AllReduce(), {"microbatches": 5}, True),
    "bsp": (md.ParameterServer(1), {}, False),
    "colocated": (md.ParameterServer(1, placement="colocated"), {}, True),
    "downpour": (md.ParameterServer(1, md.ASP(), push_every=2, pull_every=3), {}, False),
    "peers": (md.PeerAverage("ring", 2), {}, True),
    "peers of all": (md.PeerAverage("all", 1), {}, True),
    "pipeline": (md.Pipeline(cuts=[3]), {"microbatches": 4}, False),
    "pipedream": (md.Pipeline(cuts=[3], schedule="pipedream"), {"microbatches": 4}, False),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_a_model_on_a_device(comm, xp, name):
    strategy, settings, whole = STRATEGIES[name]
    there, here = both(comm, xp, strategy, **settings)
    check_near(comm, xp, there, here, whole or comm.rank == 0)
    if whole:
        md.check_replicas(comm, there[0])


@pytest.mark.ranks(2)
def test_servers_without_order(comm, xp):
    """ASP: the order of updates is free, so only what all orders share is asserted."""
    model, result = fit(comm, xp, md.ParameterServer(1, consistency=md.ASP()), steps=40)
    if comm.rank == 0:
        assert all(isinstance(array, xp.ndarray) for array in model.parameters.values())
        assert result.test_accuracy > 0.5


@pytest.mark.ranks(3)
def test_three_ranks(comm, xp):
    for strategy, settings in (
        (md.AllReduce("butterfly"), {}),
        (md.Pipeline(cuts=[3], replicas=[2, 1]), {"microbatches": 4}),
        (md.ParameterServer(2), {}),
    ):
        there, here = both(comm, xp, strategy, **settings)
        check_near(comm, xp, there, here, comm.rank == 0)


@pytest.mark.ranks(2)
def test_convolutions(comm, xp):
    """LeNet: windows by strides, pooling, products into given arrays."""

    def make():
        return models.lenet([1, 12, 12], 3, seed=2, channels=[3, 4], hidden=[9, 8])

    for strategy in (md.AllReduce(), md.Pipeline(cuts=[3])):
        settings = {"optimizer": optim.momentum(0.01), "steps": 3, "microbatches": 4}
        there, here = both(comm, xp, strategy, make, IMAGES, **settings)
        check_near(comm, xp, there, here, comm.rank == 0)


@pytest.mark.ranks(2)
def test_optimizers(comm, xp):
    """One step of each, and of clipping, on the device and on the host; rows as well."""
    values = {"w": RNG.standard_normal((9, 4)).astype("f4"), "b": np.ones((), "f4")}
    each = {"sgd": optim.sgd(0.1, weight_decay=0.1), "momentum": optim.momentum(0.1),
            "adam": optim.adam(0.1, weight_decay=0.1), "adagrad": optim.adagrad(0.1),
            "ftrl": optim.ftrl(0.1, l1=0.01, l2=0.1),
            "clipped": optim.clipped(optim.sgd(0.1), 0.5)}  # fmt: skip
    rows = np.array([1, 7])
    for name, optimizer in each.items():
        found = []
        for kind in (xp, np):
            parameters = {key: kind.asarray(value.copy()) for key, value in values.items()}
            state = optimizer.init(parameters)
            for step in range(3):
                gradients = {key: kind.asarray(value - step) for key, value in values.items()}
                optimizer.update(gradients, state, parameters)
            if name != "clipped":
                some = kind.asarray(rows), kind.asarray(values["w"][rows])
                optimizer.update({"w": some}, state, {"w": parameters["w"]})
            found.append(parameters)
        for key, array in found[0].items():
            same(array, host(found[1][key]), rtol=1e-4, atol=1e-5)
    assert comm.size == 2


class Wide:
    """A user's model: float64, a loss that stays on the device, and statistics."""

    def __init__(self):
        self.parameters = {"w": np.zeros((12, 3)), "b": np.zeros(3)}
        self.state = {"mean": np.zeros(12)}

    def loss_and_gradients(self, batch, gradients, ready=None):
        x, labels = batch
        self.state["mean"] += 0.1 * (x.mean(axis=0) - self.state["mean"])
        one = (labels[:, None] == arrays.array_module(x).arange(3)).astype("f8")
        apart = x @ self.parameters["w"] + self.parameters["b"] - one
        gradients["w"][...] = x.T @ apart / len(x)
        gradients["b"][...] = apart.mean(axis=0)
        return (apart**2).sum(axis=1).mean() / 2

    def predict(self, inputs):
        return inputs @ self.parameters["w"] + self.parameters["b"]


@pytest.mark.ranks(2)
def test_a_model_of_the_user(comm, folder, xp):
    """Its checkpoint is continued on the host and on the device, with another strategy."""
    data, every = (INPUTS.astype("f8"), LABELS), {"checkpoint_every": 2}
    for name, strategy in (
        ("a", md.AllReduce()), ("p", md.PeerAverage("ring", 1)), ("s", md.ParameterServer(1)),
    ):  # fmt: skip
        there, here = (
            fit(comm, kind, strategy, Wide, data, checkpoint=folder / f"{name}{on}", **every)
            for on, kind in enumerate((xp, np))
        )
        check_near(comm, xp, there, here, comm.rank == 0)
    here = fit(comm, np, md.AllReduce(), Wide, data, steps=9)
    for kind, name in ((np, "a0"), (xp, "a1"), (xp, "s1")):
        there = fit(comm, kind, md.AllReduce(), Wide, data, checkpoint=folder / name, steps=9)
        assert there[1].resumed_at == 4
        check_near(comm, kind, there, here)


@pytest.mark.ranks(2)
def test_what_needs_the_host_says_so(comm, xp):
    """Hogwild shares host memory; a model of two memories cannot be summed."""
    if xp is np:
        assert fit(comm, xp, md.Hogwild(), steps=2)[1].finished
        return
    with pytest.raises(ConfigError, match="Hogwild: the parameters are on a device"):
        fit(comm, xp, md.Hogwild())

    def half():
        model = models.mlp([12, 16, 3], seed=7)
        name = next(iter(model.parameters))
        model.parameters[name] = arrays.to_device(model.parameters[name], 0)
        return model

    for strategy in (md.AllReduce(), md.PeerAverage(), md.ParameterServer(1)):
        with pytest.raises(ConfigError, match=r"is on the host, .* on a device; move all to one"):
            fit(comm, np, strategy, half)


@pytest.mark.ranks(2)
def test_a_client_of_servers(comm, xp):
    """Gradients and rows whose numbers are on the device; into a stream that is busy."""
    table = np.zeros((20, 3), "f4")
    with md.parameter_server(
        comm, {"t": table, "v": np.zeros(2000)}, optimizer=optim.sgd(1.0)
    ) as c:
        if c is not None:
            with other_stream(xp):
                rows = xp.asarray(np.array([3, 11]))
                c.push({"t": (rows, late(xp, np.ones((2, 3), "f4"))),
                        "v": late(xp, np.arange(2000.0))})  # fmt: skip
                c.clock()
                out = {"t": xp.zeros((2, 3), "f4"), "v": xp.zeros(2000)}
                found = c.pull({"t": rows, "v": None}, out=out)
                same(found["t"] * 2, np.full((2, 3), -2))
                same(found["v"] * 2, -2 * np.arange(2000.0))


@pytest.mark.ranks(2)
def test_attach_a_module_on_cupy_and_torch(comm):
    """A module on the GPU, whose backward pass runs in a stream of torch's own."""
    torch = pytest.importorskip("torch", reason="no PyTorch here")
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch finds none")
    torch.manual_seed(comm.rank)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2), torch.nn.Linear(5, 1)
    ).to("cuda")
    used = torch.nn.Sequential(*list(module)[:3])
    with md.attach(comm, module) as gradients:
        md.check_replicas(comm, module)
        for step in range(4):
            stream = torch.cuda.Stream() if step % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                module.zero_grad()
                x = torch.full((8, 6), 1.0 + comm.rank + step, device="cuda")
                torch.cuda._sleep(20_000_000)
                used(x).sum().backward()
                alone = [p.grad.clone() for p in used.parameters()]
                gradients.average(weight=comm.rank + 1.0)
                for p, mine in zip(used.parameters(), alone, strict=True):
                    theirs = comm.allgather(mine.cpu().numpy())
                    weights = np.arange(1, comm.size + 1)
                    mean = np.average(theirs, axis=0, weights=weights)
                    same(p.grad.cpu().numpy(), mean, rtol=1e-5, atol=1e-6)
                assert all(p.grad is None for p in module[3].parameters())
                with torch.no_grad():  # torch's own optimizers take seconds to import
                    for p in used.parameters():
                        p -= 0.1 * p.grad
            torch.cuda.synchronize()
        md.check_replicas(comm, module)
    x = torch.full((300,), float(comm.rank), device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        y = x + 1
        assert md.allreduce(comm, y) is y
        assert (y == sum(range(1, comm.size + 1))).all()
        half = torch.ones(300, dtype=torch.bfloat16, device="cuda")
        assert (md.allreduce(comm, half) == comm.size).all()
    locked = torch.ones(3, device="cuda", requires_grad=True)
    with pytest.raises(MpidistError, match="cannot be shared"):
        md.allreduce(comm, locked)
