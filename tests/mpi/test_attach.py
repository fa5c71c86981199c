"""md.attach puts means into p.grad in any kind of loop, or raises; on PyTorch and on a stand-in."""

import numpy as np
import pytest

import mpidist as md
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import ClosedError, ConfigError, MismatchError, ProtocolError
from mpidist.runtime.context import of

SHAPES = {"a": (7, 3), "b": (5,), "c": (400, 10), "d": (), "e": (33,), "none": (0, 2)}
BACKWARD = ["none", "e", "d", "c", "b", "a"]
#: Ranks per node: all on one, and faked nodes between which buckets leave during backward.
NODES = pytest.mark.parametrize("ranks_per_node", [None, 1, 2])


class Model:
    """A module whose parameters say whose they are, and its optimizer."""

    def __init__(self, torch, comm, dtypes=None, names=SHAPES, frozen=()):
        self.torch, self.comm, self.module = torch, comm, torch.nn.Module()
        self.p = {}
        for name in names:
            dtype = getattr(torch, (dtypes or {}).get(name, "float32"))
            x = torch.from_numpy(np.full(SHAPES[name], comm.rank + 1, "f4")).to(dtype)
            self.p[name] = torch.nn.Parameter(x)
            self.p[name].requires_grad = name not in frozen
            self.module.register_parameter(name, self.p[name])
        self.module.register_buffer("seen", torch.from_numpy(np.full(2, comm.rank, "f8")))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5)

    def backward(self, value, names=BACKWARD):
        """Add gradients of `value` times the place of each name."""
        grads = {
            self.p[n]: np.full(SHAPES[n], value * (BACKWARD.index(n) + 1), "f4") for n in names
        }
        if hasattr(self.torch, "backward"):
            self.torch.backward(grads)
        else:
            given = [(p * self.torch.from_numpy(g).to(p.dtype)).sum() for p, g in grads.items()]
            sum(x.float() for x in given).backward()

    def gradients(self):
        return {name: None if p.grad is None else host(p.grad) for name, p in self.p.items()}

    def check(self, gradients, value, names=BACKWARD):
        """Every gradient is `value` times its place, rounded once, in the arena, on all ranks."""
        for name, found in self.gradients().items():
            if name not in names:
                assert found is None, name
                continue
            expected = np.float32(value * (BACKWARD.index(name) + 1)).astype(found.dtype)
            np.testing.assert_allclose(
                found.astype("f8"), float(expected), rtol=1e-6 if found.itemsize > 2 else 0
            )
            place = gradients.gradients.views[name].ctypes.data
            assert self.p[name].grad.data_ptr() == place or not found.size
        text = repr({n: None if g is None else g.tobytes() for n, g in self.gradients().items()})
        assert len(set(self.comm.allgather(text))) == 1


def host(tensor):
    from mpidist.arrays import as_array

    return np.array(as_array(tensor.detach()))


def fake(comm, ranks_per_node):
    if ranks_per_node is not None:
        memory_of(of(comm), ranks_per_node)


def mean(comm, step):
    """Of rank + step over the ranks."""
    return (comm.size - 1) / 2 + step


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3, 5)
@NODES
@pytest.mark.parametrize(
    "dtypes", [{}, dict.fromkeys(SHAPES, "bfloat16"), {"c": "bfloat16", "e": "float64"}]
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_means(comm, torch, ranks_per_node, dtypes, set_to_none):
    """Issue 10 point 10: zero_grad() as torch has it; float32 and bfloat16, rounded once."""
    fake(comm, ranks_per_node)
    model = Model(torch, comm, dtypes)
    with md.attach(comm, model.module) as gradients:
        assert gradients.gradients.overlapping is (gradients.gradients.arena.topology.nodes > 1)
        assert all((host(p) == 1).all() for p in model.p.values()), "not those of rank 0"
        for step in range(4):
            model.optimizer.zero_grad(set_to_none=set_to_none)
            model.backward(comm.rank + step)
            gradients.average()
            model.check(gradients, mean(comm, step))
            model.optimizer.step()
        md.check_replicas(comm, model.module)


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@NODES
@pytest.mark.parametrize("passes", [2, 3])
def test_several_backward_passes_add_up(comm, torch, ranks_per_node, passes):
    """Accumulation, with and without zero_grad between steps."""
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    with md.attach(comm, model.module) as gradients:
        total = 0
        for step in range(5):
            if step != 3:
                model.optimizer.zero_grad()
                total = 0
            for k in range(passes):
                model.backward(comm.rank + step + k)
            gradients.average()
            total += sum(mean(comm, step + k) for k in range(passes))
            model.check(gradients, total)


@pytest.mark.ranks(3, further=(2,))
@NODES
def test_what_is_not_used_has_no_gradient(comm, torch, ranks_per_node):
    """None on all ranks stays None, as an optimizer expects; on one it is zero there."""
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    with md.attach(comm, model.module) as gradients:
        for step in range(4):
            model.optimizer.zero_grad()
            used = ["e", "c", "a"] if comm.rank == step % 2 else ["e", "a"]
            model.backward(comm.size, used)
            gradients.average()
            found = model.gradients()
            assert found["b"] is None
            assert found["d"] is None
            np.testing.assert_allclose(found["a"], comm.size * 6, rtol=1e-6)
            np.testing.assert_allclose(found["c"], 4, rtol=1e-6)
            model.optimizer.step()
        md.check_replicas(comm, model.module)


@pytest.mark.ranks(3, further=(2,))
@NODES
def test_tied_weights(comm, torch, ranks_per_node):
    """One parameter under two names is one gradient."""
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    model.module.register_parameter("again", model.p["a"])
    with md.attach(comm, model.module) as gradients:
        for step in range(3):
            model.optimizer.zero_grad()
            model.backward(comm.rank + step)
            gradients.average()
            model.check(gradients, mean(comm, step))


@pytest.mark.ranks(2, further=(3,))
@NODES
def test_weights(comm, torch, ranks_per_node):
    """A rank with no sample gives no gradient; weights at every step or at none."""
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    with md.attach(comm, model.module) as gradients:
        for step in range(3):
            model.optimizer.zero_grad()
            if comm.rank != step % 2:
                model.backward(comm.rank + step)
            weights = [0 if rank == step % 2 else rank + 2 for rank in range(comm.size)]
            gradients.average(weight=weights[comm.rank])
            total = sum(w * (rank + step) for rank, w in enumerate(weights))
            model.check(gradients, total / sum(weights))
        with pytest.raises(ConfigError, match="at the first step there was one; pass a weight"):
            gradients.average()


@pytest.mark.ranks(2)
@NODES
def test_a_step_without_average_is_refused(comm, torch, ranks_per_node):
    """Else the replicas part in silence."""
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    other = torch.optim.SGD(Model(torch, comm).module.parameters(), lr=1)
    with md.attach(comm, model.module) as gradients:
        model.backward(1)
        gradients.average()
        model.optimizer.step()
        other.step()
        model.backward(1)
        before = host(model.p["c"])
        with pytest.raises(ProtocolError, match=r"optimizer\.step before average\(\)"):
            model.optimizer.step()
        assert (host(model.p["c"]) == before).all()
        other.step()
        if not gradients.gradients.overlapping:
            gradients.average()
            model.optimizer.step()
    model.optimizer.step()  # nobody's concern any more


@pytest.mark.ranks(2)
def test_a_gradient_that_nobody_averages_is_refused(comm, torch):
    """A layer that was frozen when it was attached, or has come to the module since."""
    model = Model(torch, comm, frozen=["c"])
    with md.attach(comm, model.module) as gradients:
        model.backward(1, ["a", "b", "d", "e", "none"])
        gradients.average()
        model.optimizer.step()
        model.p["c"].requires_grad = True
        model.backward(1)
        gradients.average()
        with pytest.raises(ConfigError, match=r"shape \(400, 10\) has a gradient that is not"):
            model.optimizer.step()
        model.p["c"].grad = None
        model.optimizer.step()


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("how", ["written", "replaced", "dropped"])
def test_what_has_left_is_not_to_be_touched(comm, torch, ranks_per_node, how):
    """Between nodes a gradient is on its way from backward to average()."""
    if comm.size == ranks_per_node:
        return
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    gradients = md.attach(comm, model.module)
    for _ in range(2):
        model.optimizer.zero_grad()
        model.backward(1)
        gradients.average()
    model.backward(1)
    if how == "written":
        model.p["a"].grad.mul_(2)
    else:
        model.p["a"].grad = model.p["a"].grad.clone() if how == "replaced" else None
    with pytest.raises(ProtocolError, match=r"'a' was changed after backward.*average\(\) first"):
        gradients.average()
    gradients.close()


@pytest.mark.ranks(2, further=(4,))
@NODES
def test_gradients_that_are_given_up(comm, torch, ranks_per_node):
    """A backward whose gradients are dropped (another loss, a bad batch) leaves no trace."""
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    with md.attach(comm, model.module) as gradients:
        for step in range(4):
            model.backward(100)
            model.optimizer.zero_grad()
            model.backward(comm.rank + step)
            gradients.average()
            model.check(gradients, mean(comm, step))
            model.optimizer.zero_grad()


@pytest.mark.ranks(2, further=(4,))
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_ranks_with_more_passes_are_told(comm, torch, ranks_per_node):
    if comm.size == ranks_per_node:
        return
    fake(comm, ranks_per_node)
    model = Model(torch, comm)
    gradients = md.attach(comm, model.module)
    for _ in range(2):
        model.optimizer.zero_grad()
        model.backward(1)
        gradients.average()
    model.optimizer.zero_grad()
    model.backward(1)
    text = f"{comm.size - 1} of {comm.size} ranks are in average, the others in another backward"
    with pytest.raises(MismatchError, match=text):
        model.backward(1) if comm.rank == 1 else gradients.average()
    gradients.close()


def odd(case, torch, comm):
    """What rank 1 attaches instead of the others' model."""
    if comm.rank != 1:
        return Model(torch, comm).module
    if case == "order":
        return Model(torch, comm, names=dict(reversed(SHAPES.items()))).module
    if case == "frozen":
        return Model(torch, comm, frozen=["b"]).module
    if case == "dtype":
        return Model(torch, comm, {"b": "bfloat16"}).module
    if case == "all frozen":
        return Model(torch, comm, frozen=SHAPES).module
    if case == "less":
        return Model(torch, comm, names=["a", "b"]).module
    return [1.0]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("order", MismatchError, "Gradients: parameter 0 differs: rank 1: .*none"),
        ("frozen", MismatchError, "Gradients: parameter 1 differs: rank 1: .*'c'"),
        ("dtype", MismatchError, r"rank 1 has 'b' \(5,\) bfloat16, rank 0 \(root\) has 'b'"),
        ("less", MismatchError, "rank 1 has no 'c'"),
        ("all frozen", ConfigError, "rank 1 of 3 .*: no parameter of the module requires"),
        ("no module", ConfigError, "rank 1 of 3 .*: expected a torch.nn.Module, got"),
    ],
)
def test_one_rank_with_another_module(comm, torch, case, error, text):
    """R97: told on all ranks; the communicator lives on."""
    with pytest.raises(error, match=text) as caught:
        md.attach(comm, odd(case, torch, comm))
    assert caught.value.everywhere
    x = np.ones(3)
    md.allreduce(comm, x)
    assert (x == 3).all()


@pytest.mark.ranks(2)
def test_attached_once_and_closed(comm, torch):
    model = Model(torch, comm)
    gradients = md.attach(comm, model.module)
    with pytest.raises(ConfigError, match="'a' is attached already"):
        md.attach(comm, model.module)
    model.backward(1)
    gradients.average()
    gradients.close()
    gradients.close()
    with pytest.raises(ClosedError, match=r"call md\.attach again"):
        gradients.average()
    with md.attach(comm, model.module) as again:
        model.optimizer.zero_grad()
        model.backward(comm.rank)
        again.average()
        model.check(again, 0.5)


@pytest.mark.ranks(2)
def test_a_module_that_was_converted_is_refused(comm, torch):
    """``module.to(dtype)`` takes gradients out of the arena, behind the same objects."""
    model = Model(torch, comm)
    with md.attach(comm, model.module) as gradients:
        model.backward(1)
        gradients.average()
        model.module.to(torch.float64)
        with pytest.raises(ConfigError, match=r"'a' is float64 .*, and was float32 .*attach after"):
            gradients.average()


@pytest.mark.ranks(2)
def test_a_sparse_gradient_is_refused(comm, torch):
    if hasattr(torch, "backward"):
        grad = torch.Tensor(np.zeros((7, 3), "f4"))
        grad.layout = torch.sparse_coo
    else:
        grad = torch.zeros(7, 3).to_sparse()
    model = Model(torch, comm)
    with md.attach(comm, model.module) as gradients:
        model.p["a"].grad = grad
        with pytest.raises(ConfigError, match="gradient of 'a' is sparse; make its layer"):
            gradients.average()


@pytest.mark.ranks(1, 3)
def test_broadcast_parameters_takes_a_module(comm, torch):
    """Parameters and buffers; a lazy layer is named."""
    model = Model(torch, comm, {"a": "bfloat16"})
    assert md.broadcast_parameters(comm, model.module, root=comm.size - 1) is model.module
    assert all((host(p) == comm.size).all() for p in model.p.values())
    assert (host(dict(model.module.named_buffers())["seen"]) == comm.size - 1).all()
    with pytest.raises(ConfigError, match="'w' belongs to a lazy layer and has no shape yet"):
        md.broadcast_parameters(comm, Lazy())
    if comm.rank == 1:
        model.p["c"].detach().zero_()
    if comm.size > 1:
        with pytest.raises(md.ReplicaError, match="rank 1's 'c' differs"):
            md.check_replicas(comm, model.module)


class Lazy:
    def named_parameters(self):
        yield "w", self

    def named_buffers(self):
        return []

    def detach(self):
        raise ValueError("Attempted to use an uninitialized parameter")
