"""The type of all optimizers (a pair of functions over dicts of arrays), and their common code.

    state = optimizer.init(parameters)                     # {"step": 0-d int64, ...}
    optimizer.update(gradients, state, parameters)         # in place, gradients untouched

The state of an optimizer is a dict. It contains arrays by parameter name, such as ``{"velocity":
{name: array}}``, and two 0-d NumPy arrays, ``step`` (int64, the number of updates) and ``progress``
(float64, the sum of the arguments `weight` of all updates, which are 1 by default). Checkpoints
contain the whole state.

An elementwise optimizer computes each element of a parameter from the same element of the gradient
and of the state. With an elementwise optimizer, updating an array part by part gives the same bits
as updating the whole array, so parameter servers can split large arrays.

The gradient of a parameter may be a tuple (rows, values) for some rows of the first axis, as for an
embedding. The update then reads and writes only these rows: see `row_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from importlib import import_module

import numpy as np

from ..errors import ConfigError, shown
from .row_gradients import checked_rows, row_groups
from .schedules import Rate, as_schedule

#: Elements per piece, so that the arrays of one piece fit a level-2 cache. On 16 Mi float32
#: elements sgd takes 9.3 ms (14.7 ms on whole arrays), momentum 14 (22), adam 31 (54).
PIECE = 1 << 16


@dataclass(frozen=True, repr=False)
class Optimizer:
    """A named pair of functions, `init` and `update`, which do not communicate.

    `update` may have an attribute ``bind``. ``bind(gradients, state, parameters)`` returns None, or
    a function of `weight` that updates the given arrays faster than `update`, with the same bits.

    Attributes
    ----------
    name : str
        The name of the optimizer, such as "adam", which is its key in the dict ``OPTIMIZERS``.
    init : callable
        ``init(parameters) -> state``; `parameters` is a dict of floating-point arrays.
    update : callable
        ``update(gradients, state, parameters, weight=1.0)`` changes `state` and `parameters` in
        place and does not change `gradients`. `weight` multiplies the learning rate of this update.
        It is also added to ``progress`` in `state`, the number from which a schedule computes the
        learning rate. A parameter server may make a separate update for the gradients of each
        worker; `weight` is then the worker's part of the global batch. If `update` gets only some
        of the parameters that `init` got, it updates only these parameters.
    elementwise : bool
        True if updating the parts of an array one by one gives the same bits as updating the whole
        array.
    settings : dict
        The arguments of the function that made the optimizer, as numbers and strings, for summaries
        and checkpoints.
    rows : str
        "": `update` takes whole gradients only. "lazy": a gradient may also be a tuple ``(rows,
        values)`` with distinct rows of the first axis, and `update` changes nothing in the other
        rows. "exact": as "lazy", and in addition the result has the same bits as with zero
        gradients in the other rows.
    inner : Optimizer or None
        The optimizer that gets the gradients after they are clipped (see `clipped`); None if this
        optimizer does not clip gradients.
    """

    name: str
    init: Callable[[Mapping], dict]
    update: Callable[..., None]
    elementwise: bool
    settings: dict
    rows: str = ""
    inner: Optimizer | None = None

    def __repr__(self):
        given = ", ".join(f"{key}={shown(value)}" for key, value in self.settings.items())
        whole = "" if self.elementwise else "; not elementwise"
        return f"<Optimizer {self.name}: {given}{whole}>"

    def __reduce__(self):
        # The functions of an optimizer are closures, which cannot be pickled. So the receiver makes
        # the optimizer again from its name and settings. The receiver cannot make an optimizer
        # whose schedule is a function of the user's program, because this function has no name.
        made = _made_again(self.name, self.settings)
        for mine, its in ((self.init, made.init), (self.update, made.update)):
            if getattr(mine, "__code__", None) is not its.__code__:
                raise TypeError(
                    f"optimizer {self.name} has functions of the program, so it cannot be pickled"
                )
        return _made_again, (self.name, self.settings)

    def __deepcopy__(self, memo):
        # The copy is not made from name and settings, because the functions may be those of the
        # user's program.
        names = [one.name for one in fields(self)]
        return replace(self, **{name: deepcopy(getattr(self, name), memo) for name in names})


def _made_again(name: str, settings: Mapping) -> Optimizer:
    return import_module(__package__).from_settings(name, settings)


def elementwise(
    name: str,
    lr: Rate,
    settings: dict,
    slots: tuple[str, ...],
    coefficients: Callable[[float, int, float], tuple],
    kernel: Callable[..., None],
    rows: str = "lazy",
) -> Optimizer:
    """Make an optimizer from functions that compute each element on its own.

    Parameters
    ----------
    slots
        Names of the state arrays. For each name, every parameter has an array of the parameter's
        shape, at first filled with zeros.
    coefficients
        ``coefficients(rate, count, weight)`` returns all scalars of update number `count` (from 1);
        `rate` is the learning rate times the update's `weight`. The kernel gets these scalars in
        the dtype of the parameter.
    kernel
        ``kernel(parameter, gradient, *slots, scratch, *coefficients)`` works in place on some
        elements of the parameter and the same elements of the state arrays; `scratch` is an
        uninitialised array of their shape and dtype.
    rows
        The attribute `Optimizer.rows`: "exact" if the kernel changes nothing where the gradient is
        zero, otherwise "lazy".
    """
    schedule = as_schedule(lr)

    def init(parameters: Mapping) -> dict:
        for key, parameter in parameters.items():
            # bfloat16 comes from ml_dtypes and is of NumPy's kind "V".
            if parameter.dtype.kind != "f" and parameter.dtype.name != "bfloat16":
                raise ConfigError(
                    f"{name}: parameter {key!r} is {parameter.dtype}, expected a floating-point "
                    "array; keep integer tables in model.state"
                )
            small = settings.get("eps", 1)
            if small and parameter.dtype == np.float16 and not np.float16(small):
                raise ConfigError(
                    f"{name}: eps={small:g} is 0 in float16, the dtype of parameter {key!r}, and "
                    "updates would divide 0 by 0; give eps=1e-4, or keep float32 parameters"
                )
        state: dict = {
            slot: {key: np.zeros_like(value) for key, value in parameters.items()} for slot in slots
        }
        state["step"] = np.zeros((), np.int64)
        state["progress"] = np.zeros((), np.float64)
        return state

    def update(gradients: Mapping, state: dict, parameters: Mapping, weight: float = 1.0) -> None:
        # All arrays are looked up before the first write, so a missing name changes no array.
        groups = [
            (parameter, _gradient(name, gradients, key, parameter), *(state[s][key] for s in slots))
            for key, parameter in parameters.items()
        ]
        rate = schedule(float(state["progress"])) * weight
        scalars = coefficients(rate, int(state["step"]) + 1, weight)
        for group in groups:
            # The coefficients are converted to the dtype of the parameter, because bfloat16 arrays
            # do not accept Python floats.
            typed = [group[0].dtype.type(scalar) for scalar in scalars]
            whole = not isinstance(group[1], tuple)
            for piece in _pieces(group) if whole else row_groups(group, PIECE):
                kernel(*piece, *typed)
        state["step"][...] += 1
        state["progress"][...] += weight

    def bind(gradients: Mapping, state: dict, parameters: Mapping) -> Callable | None:
        groups = []
        for key, array in parameters.items():
            group = array, _gradient(name, gradients, key, array), *(state[s][key] for s in slots)
            if array.size > PIECE or not all(type(one) is np.ndarray for one in group):
                return None
            groups.append(((*group, np.empty_like(array)), array.dtype.type))

        def again(weight: float = 1.0) -> None:
            step, progress = state["step"], state["progress"]
            rate = schedule(float(progress)) * weight
            scalars = coefficients(rate, int(step) + 1, weight)
            for arrays, kind in groups:
                kernel(*arrays, *map(kind, scalars))
            np.add(step, 1, out=step)
            np.add(progress, weight, out=progress)

        return again

    update.bind, bind.of = bind, update  # type: ignore[attr-defined]
    constant = schedule.name == "constant"
    rate = schedule.settings["lr"] if constant else {"schedule": schedule.name, **schedule.settings}
    return Optimizer(name, init, update, True, {"lr": rate, **settings}, rows)


def _gradient(optimizer: str, gradients: Mapping, name: str, parameter):
    gradient = gradients.get(name)
    if isinstance(gradient, tuple):
        return checked_rows(f"{optimizer}: parameter {name!r}", gradient, parameter)
    if gradient is None or gradient.shape != parameter.shape:
        got = "no gradient" if gradient is None else f"a gradient of shape {gradient.shape}"
        raise ConfigError(
            f"{optimizer}: parameter {name!r} of shape {parameter.shape} got {got}; "
            "gradients must have the names and shapes of parameters"
        )
    return gradient


def _pieces(arrays: tuple) -> Iterator[tuple]:
    """Cut `arrays` (of one shape) into pieces; yield a tuple of arrays for each piece.

    Only contiguous NumPy arrays are cut; other arrays are one piece.
    """
    first = arrays[0]
    plain = all(isinstance(a, np.ndarray) and a.flags.c_contiguous for a in arrays)
    if not plain or first.size <= PIECE:
        yield *arrays, np.empty_like(first)
        return
    flat = [a.reshape(-1) for a in arrays]
    scratch = np.empty(PIECE, first.dtype)
    for start in range(0, first.size, PIECE):
        stop = min(start + PIECE, first.size)
        yield *(a[start:stop] for a in flat), scratch[: stop - start]
