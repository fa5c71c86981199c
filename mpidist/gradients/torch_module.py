"""``md.attach``: average the gradients of a PyTorch module over all ranks.

    zero_grad()   drops the gradients, as torch does by default: p.grad is None
    backward()    autograd allocates the gradients
    average()     moves each gradient into the arena, and sets p.grad to a view of the arena; then
                  one exchange averages the arena in place
    step()        the optimizer finds the means in p.grad; otherwise a hook raises an error

The arena is memory that all ranks of a node share. With several nodes, a hook copies each gradient
into the arena as soon as autograd has computed it, and gradients are sent while backward still
runs. A parameter that no rank has used in a step has no gradient, and the optimizer does not change
it; a parameter that at least one rank has used gets a mean gradient on all ranks.
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
from ..tensors import finish_work, is_module, tensor_over
from .exchange import Gradients
from .flat_views import EXTRAS, with_extras

#: The name of the tensor with one number per parameter: whether the parameter was used.
USED = "(used)"

#: A dict from the ``id`` of a parameter to the `Attached` object that averages its gradient.
_owners: dict[int, Attached] = {}
_step_hooks: list = []


def attach(comm: MPI.Comm, module) -> Attached:
    """Prepare a PyTorch module so that its gradients can be averaged over all ranks.

    Collective over `comm`. `attach` gives every rank the parameters and buffers of rank 0. The
    method ``average()`` of the result exchanges the gradients:

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
        A module with the same parameters on every rank. The gradients of all parameters that
        require a gradient when `attach` is called are averaged.

    Raises
    ------
    ConfigError
        On all ranks, if `module` is not a PyTorch module, is attached already, has no parameter
        that requires a gradient, or has a parameter without a shape (lazy layers).
    MismatchError
        On all ranks, if the parameters that require a gradient differ in names, shapes, dtypes or
        order.
    """
    return Attached(comm, module)


class Slot:
    """One parameter of the PyTorch module, with the memory for its gradient."""

    __slots__ = ("address", "facts", "name", "parameter", "sent", "tensor", "version")

    def __init__(self, name: str, parameter):
        self.name, self.parameter = name, parameter
        self.sent = False  # whether `ready` was called in this step
        self.version = 0  # torch's count of writes to the tensor, at `ready`

    def bind(self, view) -> None:
        """Set `self.tensor` to a torch tensor that shares the memory of the array `view`."""
        self.tensor: Any = tensor_over(view)
        self.address = self.tensor.data_ptr()  # changes if the module is moved
        self.facts = (self.tensor.dtype, self.tensor.device, self.tensor.shape)

    def is_filled(self) -> bool:
        """Whether the parameter's ``grad`` is `self.tensor`, its gradient in shared memory."""
        grad = self.parameter.grad
        return grad is self.tensor and grad.data_ptr() == self.address


class Attached:
    """Averages the gradients of one PyTorch module over all ranks; made by `attach`.

    Call the method `average` after each backward pass, and the method `close` at the end.

    Attributes
    ----------
    gradients : Gradients
        The object that exchanges the gradients, and owns their memory.
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
        self._closed = self._fresh = False  # fresh: some gradients are not averaged
        self._weighted: bool | None = None
        #: Whether buckets may be sent during backward.
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
        """Hook: before autograd adds to a gradient that is being sent, finish the exchange."""
        if slot.sent and self._leaves():
            with self.context.call("backward"):
                self._exchange(last=False)

    def _noticed(self, parameter) -> None:
        """Hook: after autograd has added to a gradient, record that `average` is needed."""
        self._fresh = True

    def _arrived(self, slot: Slot, parameter) -> None:
        """Hook: after autograd has added to a gradient, send its bucket if it is complete."""
        if not slot.is_filled():
            self._move(slot)
        self._fresh = True
        if self._early and not slot.sent:
            slot.sent, slot.version = True, slot.tensor._version
            self.gradients.ready(slot.name)

    def _leaves(self) -> bool:
        """Whether gradients are sent during backward; False until their order is known."""
        return self._early and self.gradients.order is not None

    def _move(self, slot: Slot) -> None:
        """Copy a gradient into shared memory, and make this copy the parameter's ``grad``."""
        parameter = slot.parameter
        gradient = parameter.grad.detach()
        if slot.tensor.data_ptr() != slot.address:
            slot.bind(self.gradients.views[slot.name])
        if (now := (parameter.dtype, parameter.device, parameter.shape)) != slot.facts:
            self._refuse(
                f"{slot.name!r} is {_words(*now)} now, and was {_words(*slot.facts)}; "
                "call md.attach after this"
            )
        if gradient.layout != sys.modules["torch"].strided:
            self._refuse(f"the gradient of {slot.name!r} is sparse; make its layer sparse=False")
        slot.tensor.copy_(gradient)
        parameter.grad = slot.tensor

    def _refuse(self, text: str) -> NoReturn:
        self.gradients.refuse("attach", ConfigError(f"attach: {text}"))

    # -- the exchange ------------------------------------------------------------------

    def average(self, weight: float | None = None) -> None:
        """Replace every gradient by the mean over all ranks, in place in ``p.grad``.

        Collective over the communicator. Call `average` after the last backward pass of a step,
        before gradients are clipped and before the optimizer's ``step``. If only some ranks have a
        gradient of a parameter, the missing ones count as zero. If no rank has a gradient of a
        parameter, its ``grad`` stays None.

        Parameters
        ----------
        weight : float, optional
            Weight of this rank's gradient, for example its number of samples. Pass a weight at
            every step or at no step.

        Raises
        ------
        ConfigError
            If a weight was passed at the first step but not at this step, or at this step but not
            at the first one, or if `md.allreduce` does not accept the weight.
        MismatchError
            On all ranks, if the ranks differ in the order of their calls, or if gradients are sent
            during backward and the ranks differ in the number of backward passes.
        ProtocolError
            If the program has changed a gradient after backward had already sent it.
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
        """Average all gradients. Collective."""
        self._collect(last)
        if self._early:
            self.gradients.reduce(last)
            here, size = round(float(self.gradients.extras[0])), self.comm.size
            if here not in (0, size):
                raise MismatchError(
                    f"average: {here} of {size} ranks are in average, the others in another "
                    "backward; all ranks must make the same number of backward passes first"
                )
        else:
            arena = self.gradients.arena
            finish_work(self._slots[0].tensor)
            for x in self.gradients.vectors if arena is None else [arena]:
                allreduce(self.comm, x, "mean", weight=weight)
        for slot, used in zip(self._slots, (self._used > 0).tolist(), strict=True):
            slot.parameter.grad = slot.tensor if used else None
        if self._early:
            self._begin()

    def _collect(self, last: bool) -> None:
        """Copy all gradients into shared memory, to average them; missing ones become zeros."""
        self._used[...] = 1
        for k, slot in enumerate(self._slots):
            missing = slot.parameter.grad is None
            if slot.sent and self._leaves():
                changed = not slot.is_filled() or slot.tensor._version != slot.version
                # It is no error if the program has set ``grad`` to None before another backward
                # pass, because it then does not need this gradient any more.
                if changed and (last or not missing):
                    error = ProtocolError(
                        f"average: the gradient of {slot.name!r} was changed after backward, when "
                        "it had already been sent; call average() first, then clip or scale"
                    )
                    self.gradients.refuse("average", error)
            elif missing:
                slot.tensor.zero_()
            elif not slot.is_filled():
                self._move(slot)
            if missing:
                self._used[k] = 0

    def _begin(self) -> None:
        """Begin the next step; the second step also reorders gradients in memory. Collective."""
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
        """Remove all hooks from the module, which keeps its last gradients.

        All ranks must call `close` between the same two collective operations. A second call does
        nothing.
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
    """Check `module`; return a dict name -> parameter of all parameters that require a gradient."""
    if not is_module(module):
        raise ConfigError(f"expected a torch.nn.Module, got {shown(module)}")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the module requires a gradient")
    for name, parameter in trained.items():
        if id(parameter) in _owners:
            raise ConfigError(f"{name!r} is attached already; close() the first attachment")
    return trained


def _words(dtype, device, shape) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)} on {device}"


def _watch_steps() -> None:
    """Set hooks that check gradients at optimizer steps; remove them when no module is attached."""
    if _owners and not _step_hooks:
        from torch.optim import optimizer  # a program that has a module has imported torch

        # The check also runs after the step, because an optimizer that takes a closure computes
        # gradients inside its step.
        _step_hooks.append(optimizer.register_optimizer_step_pre_hook(_check_step))
        _step_hooks.append(optimizer.register_optimizer_step_post_hook(_check_step))
    elif not _owners:
        while _step_hooks:
            _step_hooks.pop().remove()


def _check_step(optimizer, *_) -> None:
    """Raise an error if an optimizer would use gradients that are not averaged over the ranks."""
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
            f"optimizer.step: a parameter of shape {tuple(other.shape)} has a gradient that is "
            "not averaged: the parameter was frozen or missing when the module was attached; close "
            "and attach again, or give the parameter an optimizer of its own"
        ))  # fmt: skip
