"""Turn the arguments of pushes and pulls (names, rows, arrays) into 1-D host arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...arrays import as_array, copy_into, host_empty, is_device, is_writable
from ...errors import ConfigError, nearest, shown
from ..rows.row_sums import last_of_equal_rows, sum_equal_rows
from .dealt_rows import dealt_order, dealt_places
from .placement import ServerLayout, Tensor


class Selection:
    """Checks the arguments of a client's pushes and pulls, and converts them for messages.

    The attribute `assigns` says whether pushes contain new values instead of gradients.
    """

    assigns = False

    def __init__(self, model: str, layout: ServerLayout):
        self.model, self.layout = model, layout
        self.number = {tensor.name: i for i, tensor in enumerate(layout.tensors)}

    def tensor(self, name: str) -> Tensor:
        """Return the tensor called `name`, or raise ConfigError with the nearest name."""
        if not isinstance(name, str) or name not in self.number:
            close = nearest(name, self.number)
            raise ConfigError(f"model {self.model!r} has no parameter {shown(name)}{close}")
        return self.layout.tensors[self.number[name]]

    def rows(self, name: str, rows) -> np.ndarray:
        """Check row indices of the tensor called `name`, and return the indices as int64."""
        tensor = self.tensor(name)
        try:
            rows = rows.get() if is_device(rows) else np.asarray(rows)
        except ValueError:  # `rows` contains lists of different lengths
            rows = np.empty((0, 0))
        # NumPy converts an empty list to an array of floats.
        whole = rows.size == 0 or rows.dtype.kind in "iu"
        if rows.ndim != 1 or not whole or not tensor.shape:
            raise ConfigError(
                f"rows of {name!r}: expected a 1-D integer array, got {rows.dtype} of shape "
                f"{rows.shape} for a tensor of shape {tensor.shape}"
            )
        rows = rows.astype(np.int64, copy=False)
        if tensor.open is not None:
            return rows  # in an open table any integer of 64 bits is a key
        if rows.size and not 0 <= rows.min() <= rows.max() < tensor.shape[0]:
            raise ConfigError(
                f"rows of {name!r}: {rows.min()} ... {rows.max()} are outside "
                f"0 ... {tensor.shape[0] - 1}"
            )
        return rows

    def wanted(self, what, out: Mapping | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two dicts for a pull: name to wanted rows (None for all), and name to array.

        `what` and `out` are the arguments of `Client.pull`. The arrays receive the values.
        """
        if out is not None and not isinstance(out, Mapping):
            raise ConfigError(
                f"pull {self.model!r}: out={shown(out)}; expected a mapping of name to array"
            )
        if what is not None and not isinstance(what, Iterable):
            raise ConfigError(
                f"pull {self.model!r}: what={shown(what)}; expected a name, names, or a mapping "
                "of name to rows"
            )
        if what is None:
            wanted = dict.fromkeys(self.number if out is None else out)
        elif isinstance(what, Mapping):
            wanted = {n: r if r is None else self.rows(n, r) for n, r in what.items()}
        else:
            one = isinstance(what, str) or getattr(what, "shape", None) == ()
            names: list[Any] = [what] if one else list(what)
            wanted = dict.fromkeys(self.tensor(name).name for name in names)
        return wanted, {name: self._receiver(name, wanted[name], out) for name in wanted}

    def _checked_open(self, call: str, name: str, rows) -> Tensor:
        """Return the tensor called `name`; raise ConfigError if it is open and `rows` is None."""
        tensor = self.tensor(name)
        if rows is None and tensor.open is not None:
            form = "what={%r: keys}" if call == "pull" else "{%r: (keys, values)}"
            raise ConfigError(
                f"{call} {name!r}: an open table has no fixed rows; give keys, as {form % name}"
            )
        return tensor

    def _receiver(self, name: str, rows, out: Mapping | None):
        tensor = self._checked_open("pull", name, rows)
        shape = _shape(tensor, rows)
        given = None if out is None else out.get(name)
        if given is None:
            return np.empty(shape, tensor.dtype)
        array = checked_array(f"pull {name!r}: out", given)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise ConfigError(
                f"pull {name!r}: out is {array.dtype}, which cannot hold the values of "
                f"{tensor.dtype}; give a floating-point array"
            )
        if array.shape != shape or not is_writable(array):
            lock = "" if is_writable(array) else " (read-only)"
            raise ConfigError(
                f"pull {name!r}: out has shape {array.shape}{lock}, expected a writable array of "
                f"shape {shape}"
            )
        return array

    def targets(self, wanted: dict, results: dict) -> tuple[dict, Callable[[], None]]:
        """Return 1-D host arrays to receive into, and a function that copies them to `results`.

        The caller calls the function when the data have arrived. `wanted` maps the name of each
        tensor to the wanted row numbers, and is changed in place. If the rows of a table are dealt
        to the servers one by one, the row numbers become positions in an order in which all rows of
        server 0 come first, then those of server 1, and so on. If servers hold parts of rows of a
        tensor, None replaces the row numbers, and the whole tensor is received.
        """
        flat: dict[str, np.ndarray] = {}
        copies: list[tuple[Any, Any, Any]] = []
        for name, rows in wanted.items():
            # Dealt rows get their positions in dealt order. Of a tensor that is cut within rows,
            # which has few, long rows, the whole tensor is wanted.
            tensor, array = self.tensor(name), results[name]
            if tensor.dealt and rows is None:
                places = dealt_places(np.arange(tensor.shape[0]), tensor.shape[0], tensor.dealt)
                everything = np.empty(tensor.shape, tensor.dtype)
                flat[name] = everything.reshape(-1)
                copies.append((array, everything, places))
                continue
            if tensor.dealt:
                wanted[name] = dealt_places(rows, tensor.shape[0], tensor.dealt)
            if rows is not None and not tensor.by_rows:
                everything = np.empty(tensor.shape, tensor.dtype)
                flat[name], wanted[name] = everything.reshape(-1), None
                copies.append((array, everything, rows))
            elif is_device(array) or not array.flags.c_contiguous or array.dtype != tensor.dtype:
                flat[name] = host_empty(array.size, tensor.dtype, like=array)
                copies.append((array, flat[name], None))
            else:
                flat[name] = array.reshape(-1)

        def finish():
            for array, source, rows in copies:
                copy_into(array, source if rows is None else source[rows])

        return flat, finish

    def split(self, gradients: Mapping) -> dict[str, tuple[Any, np.ndarray]]:
        """Return the gradients of a push, as a dict: name to (rows or None, 1-D host array).

        Each array has the dtype of its tensor. None means that the gradient is of all rows.
        """
        if not isinstance(gradients, Mapping):
            raise ConfigError(
                f"push {self.model!r}: gradients={shown(gradients)}; expected a mapping of name "
                "to array"
            )
        return {name: self._gradient(name, gradients[name]) for name in gradients}

    def _gradient(self, name: str, gradient) -> tuple[Any, np.ndarray]:
        tensor, rows = self.tensor(name), None
        if isinstance(gradient, tuple):
            if len(gradient) != 2:
                raise ConfigError(
                    f"push {name!r}: gradients: got a tuple of {len(gradient)}; expected an array, "
                    "or (rows, values)"
                )
            rows, gradient = self.rows(name, gradient[0]), gradient[1]
        self._checked_open("push", name, rows)
        gradient = checked_array(f"push {name!r}: gradients", gradient, written=False)
        if is_device(gradient):
            staged = host_empty(gradient.size, gradient.dtype, like=gradient)
            copy_into(staged, gradient)
            gradient = staged.reshape(gradient.shape)
        shape = _shape(tensor, rows)
        number = gradient.dtype.kind in "fiub" or gradient.dtype.name == "bfloat16"
        if gradient.shape != shape or not number:
            raise ConfigError(
                f"push {name!r}: gradient is {gradient.dtype} of shape {gradient.shape}, expected "
                f"{tensor.dtype} of shape {shape}"
            )
        if rows is not None and not tensor.by_rows:
            if self.assigns:
                raise ConfigError(
                    f"push {name!r}: servers hold parts of its rows, so single rows cannot be "
                    "assigned; push the whole tensor"
                )
            dense = np.zeros(tensor.shape, tensor.dtype)
            np.add.at(dense, rows, gradient)
            rows, gradient = None, dense
        elif rows is not None:
            if tensor.dealt:
                rows = dealt_places(rows, tensor.shape[0], tensor.dealt)
            merge = last_of_equal_rows if self.assigns else sum_equal_rows
            rows, gradient = merge(rows, gradient)
        elif tensor.dealt:
            gradient = gradient[dealt_order(tensor.shape[0], tensor.dealt)]
        # A finite number may become infinite in the dtype of the parameters.
        with np.errstate(over="ignore", invalid="ignore"):
            return rows, gradient.reshape(-1).astype(tensor.dtype, copy=False)


def _shape(tensor: Tensor, rows) -> tuple[int, ...]:
    return tensor.shape if rows is None else (len(rows), *tensor.shape[1:])


def checked_array(what: str, x, written: bool = True):
    """Return `x` as an array, or raise ConfigError with a text that begins with `what`."""
    try:
        return as_array(x, written)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
