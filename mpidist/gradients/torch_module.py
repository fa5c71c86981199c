"""``md.attach``: the gradients of a PyTorch module become means over all ranks.

    zero_grad()   drops the gradients, as torch does by default: p.grad is None
    backward()    autograd makes a gradient wherever it likes
    average()     moves it into the arena, and p.grad is a view of the arena from then on; then one
                  exchange of the arena, where it lies
    step()        the optimizer finds the means in p.grad; a hook refuses anything else

Between nodes a hook moves each gradient as soon as it is there, and a bucket leaves while backward
still runs (`exchange.py`). A second backward before
`average` finishes what is under way and adds to it: the mean of means that are equal is itself.

What was never used has no gradient, and an optimizer leaves it alone. Whether a parameter was used
anywhere rides with the gradients, one number each; used on one rank, it has a mean on all.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NoReturn

from mpi4py import MPI

from ..arrays import array_module, as_array
from ..collectives.allreduce import allreduce
from ..collectives.broadcast_parameters import broadcast_parameters
from ..errors import ClosedError, ConfigError, MismatchError, ProtocolError, shown
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.context import of
from ..tensors import is_module, tensor_over
from .exchange import Gradients
from .flat_views import EXTRAS, with_extras

#: The tensor beside the gradients that tells which of them there are.
USED = "(used)"

#: id of a parameter -> what averages its gradient, and keeps it alive.
_owners: dict[int, Attached] = {}
_step_hooks: list = []


def attach(comm: MPI.Comm, module) -> Attached:
    """Make the gradients of a PyTorch module means over all ranks.

    Collective over `comm`. Every rank begins with the parameters and buffers of rank 0. From then
    on backward leaves the gradients in an arena, and ``average()`` exchanges them:

    >>> gradients = md.attach(comm, model)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss(model(x), y).backward()
    ...     gradients.average()
    ...     optimizer.step()

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    module : torch.nn.Module
        The same on every rank. What requires a gradient now is averaged.

    Raises
    ------
    ConfigError
        On all ranks: what is no module, has nothing to train, is attached already, or has a
        parameter without a shape (lazy layers).
    MismatchError
        On all ranks, where names, shapes, dtypes, order, or what requires a gradient differ.
    """
    return Attached(comm, module)


class Slot:
    """One parameter, and where its gradient belongs."""

    __slots__ = ("address", "facts", "name", "parameter", "sent", "tensor", "version")

    def __init__(self, name: str, parameter):
        self.name, self.parameter = name, parameter
        self.tensor: Any = None  # over the arena
        self.address = 0  # of the tensor: a module that is moved takes p.grad's memory along
        self.facts: tuple = ()  # dtype, device and shape of the tensor
        self.sent = False  # `ready` was said in this step
        self.version = 0  # torch's count of writes when it was said

    def bind(self, view) -> None:
        """Take a tensor over `view`, as it is now."""
        self.tensor = tensor_over(view)
        self.address = self.tensor.data_ptr()
        self.facts = (self.tensor.dtype, self.tensor.device, self.tensor.shape)

    def is_filled(self) -> bool:
        """Whether p.grad is the tensor over the arena."""
        grad = self.parameter.grad
        return grad is self.tensor and grad.data_ptr() == self.address

    def was_touched(self) -> bool:
        """Whether p.grad was written or replaced since it was sent."""
        return not self.is_filled() or self.tensor._version != self.version


class Attached:
    """What `attach` returns: `average` after each backward, `close` or ``with`` at the end.

    Attributes
    ----------
    gradients : Gradients
        The exchange, with its arena.
    """

    def __init__(self, comm: MPI.Comm, module):
        self.comm, self.context = comm, of(comm)
        trained = run_on_all(comm, "attach", partial(_trained, module))
        broadcast_parameters(comm, module)
        arrays = {name: as_array(p.detach()) for name, p in trained.items()}
        shapes = {name: (x.shape, x.dtype) for name, x in arrays.items()}
        kind, xp = with_extras(shapes)[EXTRAS][1], array_module(next(iter(arrays.values())))
        self.gradients = Gradients(comm, {**arrays, USED: xp.zeros(len(arrays), kind)})
        self._slots = [Slot(name, p) for name, p in trained.items()]
        self._bind()
        self._closed = self._fresh = False  # fresh: gradients that were not averaged
        self._weighted: bool | None = None
        #: Whether buckets may leave during backward.
        self._early = self.gradients.overlapping
        if self._early:
            self.gradients.begin(1 / comm.size)
        self._hooks: list = []
        for slot in self._slots:
            parameter = slot.parameter
            _owners[id(parameter)] = self
            behind = partial(self._arrived, slot) if self._early else self._noticed
            self._hooks.append(parameter.register_post_accumulate_grad_hook(behind))
            if self._early:
                self._hooks.append(parameter.register_hook(partial(self._comes, slot)))
        _watch_steps()

    def _bind(self) -> None:
        views = self.gradients.views
        self._used = views[USED]
        for slot in self._slots:
            slot.bind(views[slot.name])

    # -- in backward -------------------------------------------------------------------

    def _comes(self, slot: Slot, gradient) -> None:
        """Before autograd adds a gradient: what has left with the one before must be back."""
        if slot.sent and self._leaves():
            with self.context.call("backward"):
                self._exchange(last=False)

    def _noticed(self, parameter) -> None:
        """After autograd has added a gradient, where all of them wait for `average`."""
        self._fresh = True

    def _arrived(self, slot: Slot, parameter) -> None:
        """After autograd has added a gradient that may leave at once, wherever it is."""
        if not slot.is_filled():
            self._move(slot)
        self._fresh = True
        if self._early and not slot.sent:
            slot.sent, slot.version = True, slot.tensor._version
            self.gradients.ready(slot.name)

    def _leaves(self) -> bool:
        """Whether what is said to be ready may have left: not before the order is known."""
        return self._early and self.gradients.order is not None

    def _move(self, slot: Slot) -> None:
        """Move a gradient to where it belongs, and let p.grad be that."""
        parameter = slot.parameter
        gradient = parameter.grad.detach()
        if slot.tensor.data_ptr() != slot.address:
            slot.bind(self.gradients.views[slot.name])
        if (now := (parameter.dtype, parameter.device, parameter.shape)) != slot.facts:
            self._refuse(
                f"{slot.name!r} is {_words(*now)} now, and was {_words(*slot.facts)}; "
                "attach after this"
            )
        if gradient.layout != sys.modules["torch"].strided:
            self._refuse(f"the gradient of {slot.name!r} is sparse; make its layer sparse=False")
        slot.tensor.copy_(gradient)
        parameter.grad = slot.tensor

    def _refuse(self, text: str) -> NoReturn:
        self.gradients.refuse("attach", ConfigError(f"attach: {text}"))

    # -- the exchange ------------------------------------------------------------------

    def average(self, weight: float | None = None) -> None:
        """Make every gradient the mean over all ranks, in place: ``p.grad`` holds it.

        Collective over the communicator: after the last backward of a step, before gradients are
        clipped and the optimizer steps. A parameter without gradient on some ranks has zero there;
        one that has none on any keeps none.

        Parameters
        ----------
        weight : float, optional
            Of this rank's gradient, such as its number of samples: at every step or at none, for
            with weights nothing is sent before all are known.

        Raises
        ------
        ConfigError
            A weight where there was none at the first step or the reverse; weights as for
            `md.allreduce`.
        MismatchError
            On all ranks, where some are in another call, or have made another number of backward
            passes while gradients were under way.
        ProtocolError
            A gradient was written between backward and this call when it had left already.
        """
        with self.context.call("average"):
            if self._closed:
                raise ClosedError("average: this was closed; call md.attach again")
            weighted = weight is not None
            if self._weighted is None:
                self._weighted = weighted
                self._early = self._early and not weighted
            elif self._weighted != weighted:
                raise ConfigError(
                    f"average: weight={weight}, and at the first step there was "
                    f"{'one' if self._weighted else 'none'}; pass a weight at every step or at none"
                )
            self._exchange(last=True, weight=weight)
            self._fresh = False

    def _exchange(self, *, last: bool, weight: float | None = None) -> None:
        """Average what there is. Collective."""
        self._collect(last)
        if self._early:
            self.gradients.reduce(last)
            self._check_passes()
        else:
            arena = self.gradients.arena
            for x in self.gradients.vectors if arena is None else [arena]:
                allreduce(self.comm, x, "mean", weight=weight)
        for slot, used in zip(self._slots, (self._used > 0).tolist(), strict=True):
            slot.parameter.grad = slot.tensor if used else None
        if self._early:
            self._begin()

    def _collect(self, last: bool) -> None:
        """Put every gradient into its place, and zeros where there is none."""
        self._used[...] = 1
        for k, slot in enumerate(self._slots):
            missing = slot.parameter.grad is None
            if slot.sent and self._leaves():
                # One that was dropped before another backward is one that the user gave up.
                if slot.was_touched() and (last or not missing):
                    self.gradients.refuse("average", _touched(slot.name))
            elif missing:
                slot.tensor.zero_()
            elif not slot.is_filled():
                self._move(slot)
            if missing:
                self._used[k] = 0

    def _check_passes(self) -> None:
        here = round(float(self.gradients.extras[0]))
        if here not in (0, self.comm.size):
            raise MismatchError(
                f"average: {here} of {self.comm.size} ranks are in it, the others in another "
                "backward; all ranks must make the same number of backward passes before it"
            )

    def _begin(self) -> None:
        """Begin the next step; with the order of backward the gradients move, once. Collective."""
        learning, kept = self.gradients.order is None, {}
        for slot in self._slots:
            slot.sent = False
            if learning and slot.parameter.grad is not None:
                kept[slot] = slot.parameter.grad.clone()
        self.gradients.begin(1 / self.comm.size)
        if learning:
            self._bind()
        for slot, gradient in kept.items():
            slot.tensor.copy_(gradient)
            slot.parameter.grad = slot.tensor

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """Let the module be as it was; its last gradients stay. Idempotent.

        Sends nothing; all ranks must call it between the same two operations.
        """
        if not self._closed:
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            for slot in self._slots:
                del _owners[id(slot.parameter)]
            _watch_steps()
            self.gradients.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _trained(module) -> dict:
    """Return name -> parameter of all that require a gradient, checked."""
    if not is_module(module):
        raise ConfigError(f"expected a torch.nn.Module, got {shown(module)}")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the module requires a gradient")
    for name, parameter in trained.items():
        if id(parameter) in _owners:
            raise ConfigError(f"{name!r} is attached already; close() what averages it first")
    return trained


def _words(dtype, device, shape) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)} on {device}"


def _touched(name: str) -> ProtocolError:
    return ProtocolError(
        f"average: the gradient of {name!r} was changed after backward, when it had left already; "
        "call average() first, then clip or scale"
    )


def _watch_steps() -> None:
    """Look at every step of an optimizer while there is something attached."""
    if _owners and not _step_hooks:
        from torch.optim import optimizer  # who has a module has torch

        # Also behind: a closure makes its gradients inside the step.
        _step_hooks.append(optimizer.register_optimizer_step_pre_hook(_check_step))
        _step_hooks.append(optimizer.register_optimizer_step_post_hook(_check_step))
    elif not _owners:
        while _step_hooks:
            _step_hooks.pop().remove()


def _check_step(optimizer, *_) -> None:
    """Refuse a step with gradients of one rank alone: the replicas would part in silence."""
    stepping = [p for group in optimizer.param_groups for p in group["params"]]
    owners = {id(p): _owners.get(id(p)) for p in stepping if p.grad is not None}
    known = {owner for owner in owners.values() if owner is not None}
    for owner in known:
        if owner._fresh:
            owner.gradients.refuse("optimizer.step", ProtocolError(
                "optimizer.step before average(): the gradients are those of this rank alone; "
                "call average() after backward"
            ))  # fmt: skip
    if known and None in owners.values():
        other = next(p for p in stepping if owners.get(id(p), p) is None)
        known.pop().gradients.refuse("optimizer.step", ConfigError(
            f"optimizer.step: a parameter of shape {tuple(other.shape)} has a gradient that nobody "
            "averages: it was frozen, or not there, when the module was attached; close() and "
            "attach again, or give it an optimizer of its own"
        ))  # fmt: skip
