"""A push_pull of the arrays of an earlier call, with one short message to each server and back.

For a small model, checking the arguments of a call takes longer than its messages. So a client
remembers the arrays of a call and their places in the messages, and need not check the same arrays
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ...arrays import all_finite
from ...errors import ProtocolError
from ...events import OPEN
from ...runtime.elastic_requests import test_one
from .. import protocol
from ..layout.placement import ServerLayout
from ..layout.routing import WholeShard
from ..link import Link
from ..protocol import ALL, HEADER_BYTES, TO_SERVER, TO_WORKER, Header, read_header, write_header
from .node_share import SMALL_BYTES

#: The requests in such a message.
FLAGS = protocol.PUSH | protocol.CLOCK | protocol.PULL


def finite_test(view: np.ndarray) -> Callable[[], bool]:
    """Return a function that says whether all values of an array are finite."""
    if view.dtype.char not in "fd":
        return partial(all_finite, view)
    # For few values, `all_finite` would take three times as long.
    found = np.empty(view.shape, bool)
    words, isfinite = found.data, np.isfinite

    def is_finite() -> bool:
        isfinite(view, found)
        return b"\0" not in words.tobytes()

    return is_finite


class BoundExchange:
    """The messages of repeated push_pulls with one server, in buffers that are used again.

    A push_pull sends gradients to the server and receives new parameters.
    """

    by_messages = True

    def __init__(
        self, rank: int, shard: WholeShard, gradients: Mapping, out: Mapping,
        memory: tuple[np.ndarray, np.ndarray] | None = None,
    ):  # fmt: skip
        self.rank = rank
        nbytes = HEADER_BYTES + shard.nbytes
        self.push, self.answer = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        if memory is not None:
            self.push, self.answer = memory
        self.packs: list[tuple[np.ndarray, np.ndarray]] = []
        self.unpacks: list[tuple[np.ndarray, np.ndarray]] = []
        for room, arrays, copies in (
            (self.push, gradients, self.packs),
            (self.answer, out, self.unpacks),
        ):
            for part, view in shard.views(room, HEADER_BYTES):
                tensor, start, stop = part.piece
                copies.append((view, arrays[tensor][start:stop]))
        kinds = {view.dtype for view, _ in self.packs}
        # The gaps between tensors are zero, so one test of the whole memory checks all tensors.
        checked = [view for view, _ in self.packs]
        if len(kinds) == 1:
            checked = [self.push[HEADER_BYTES:].view(kinds.pop())]
        self.checks = [finite_test(view) for view in checked]
        self.sent = self.received = MPI.REQUEST_NULL
        self.operation: list = []
        self.header = Header(0)

    def post(
        self, link: Link, name: str, model: int, clock: int, samples: int, entered: int, note: tuple
    ) -> None:
        """Begin to receive the answer, and send the request, which already has the gradients."""
        # The receive is posted before the send, so that MPI need not buffer the answer.
        memory = [self.answer, MPI.BYTE]
        self.received = link.comm.Irecv(memory, self.rank, link.tag + TO_WORKER)
        self.operation = link.trail.begin(protocol.NAMES[FLAGS], self.rank, name, clock)
        total = self.push.size
        write_header(
            self.push, FLAGS, model, clock, total, ALL, ALL, samples, 0, entered, 0, 0, 0, *note
        )  # fmt: skip
        if link.checksums is not None:
            link.checksums.seal(self.push, total)
        self.sent = link.comm.Isend([self.push, MPI.BYTE], self.rank, link.tag + TO_SERVER)
        link.sent[self.rank] += 1

    def is_here(self, link: Link, status: MPI.Status) -> bool:
        """Whether the answer has arrived (and is copied to the arrays) and the request is sent."""
        if self.operation[OPEN]:
            if not test_one(self.received, status):
                return False
            self.take(status.Get_count(MPI.BYTE), link)
        return test_one(self.sent, status)

    def take(self, nbytes: int, link: Link) -> None:
        """Copy the parameters in an answer of `nbytes` bytes to the arrays of the caller."""
        self.header = header = read_header(self.answer, nbytes, self.rank)
        if header.total != self.answer.size:
            raise ProtocolError(
                f"parameter server: rank {self.rank} answers {header.total} bytes, expected "
                f"{self.answer.size}"
            )
        if self.by_messages and link.checksums is not None:
            link.checksums.check(self.answer, header, self.rank, link.tag + TO_WORKER)
        self.operation[OPEN] = False
        for view, target in self.unpacks:
            target[...] = view


class BoundPushPull:
    """A push_pull whose arrays are remembered, so that later calls need not check them again."""

    def __init__(
        self,
        link: Link,
        layout: ServerLayout,
        make: Sequence[Callable[[Mapping, Mapping], BoundExchange]],
        gradients: Mapping,
        out: Mapping,
    ):
        self._link = link
        self._arrays = [
            (tensor.name, gradients[tensor.name], out[tensor.name], tensor.shape, tensor.dtype)
            for tensor in layout.tensors
        ]
        flat = [
            {number: arrays[t.name].reshape(-1) for number, t in enumerate(layout.tensors)}
            for arrays in (gradients, out)
        ]
        self._results = {name: target for name, _, target, _, _ in self._arrays}
        # `make` has a function for each server that returns a `BoundExchange`.
        self._exchanges = [each(*flat) for each in make]
        self._open: list[BoundExchange] = []
        self._status = MPI.Status()
        sent = [one.push.size for one in self._exchanges if one.by_messages]
        self._number, self._nbytes = len(sent), sum(sent)

    def fits(self, gradients: Any, out: Any) -> bool:
        """Whether the arguments are the remembered arrays, with unchanged shapes and dtypes."""
        try:
            if not len(gradients) == len(out) == len(self._arrays):
                return False
            for name, gradient, target, shape, dtype in self._arrays:
                if gradients[name] is not gradient or out[name] is not target:
                    return False
                if not gradient.shape == target.shape == shape:
                    return False
                # Their strides may have been set. An array with `carray` is also writeable.
                if not (gradient.flags.c_contiguous and target.flags.carray):
                    return False
                one, other = gradient.dtype, target.dtype
                if one is not dtype and one != dtype:  # the comparison is slow
                    return False
                if other is not dtype and other != dtype:
                    return False
        except (TypeError, KeyError):
            return False
        return True

    def pack(self) -> bool:
        """Copy the gradients into the requests; return whether all gradients are finite."""
        for one in self._exchanges:
            for view, gradient in one.packs:
                view[...] = gradient
        for one in self._exchanges:
            for check in one.checks:
                if not check():
                    return False
        return True

    def exchange(
        self,
        name: str,
        model: int,
        clock: int,
        samples: int | None,
        entered: int,
        note: tuple[int, int],
    ) -> tuple[float, list[Header]]:
        """Send the gradients; return the seconds waited, and the headers of the answers."""
        link = self._link
        count = -1 if samples is None else samples
        link.touched = True
        # After an exception the link keeps this object, because MPI may still use the memory.
        link.receiving.add(self)
        link.reap()
        self._open = self._exchanges.copy()
        for one in self._exchanges:
            one.post(link, name, model, clock, count, entered, note)
            note = (0, 0)
        if self._number:
            link.count_pieces(self._number, self._nbytes, self._number, self._nbytes)
        waited = link.wait(self._all_here, self._missing)
        link.receiving.discard(self)
        return waited, [one.header for one in self._exchanges]

    def results(self) -> dict[str, np.ndarray]:
        """Return the arrays that have received the parameters, by name."""
        return self._results.copy()

    def _missing(self) -> list[int]:
        return [one.rank for one in self._open]

    def _all_here(self) -> bool:
        link, status = self._link, self._status
        while self._open:
            if not self._open[-1].is_here(link, status):
                return False
            self._open.pop()
        return True


def bind(
    link: Link, shards: Sequence[WholeShard], make: Sequence[Callable], gradients: Any, out: Any
) -> BoundPushPull | None:
    """Return a `BoundPushPull` of `gradients` and `out`, or None if the arrays do not suit it.

    The model must be small. `gradients` and `out` must each have an array for every tensor: a
    C-contiguous NumPy array of the tensor's shape and dtype.
    """
    layout = shards[0].layout
    sizes = [HEADER_BYTES + shard.nbytes for shard in shards]
    if sum(sizes) > SMALL_BYTES or max(sizes) > protocol.MESSAGE_BYTES:
        return None
    if out is None or not len(gradients) == len(out) == len(layout.tensors):
        return None
    for tensor in layout.tensors:
        for array in (gradients[tensor.name], out[tensor.name]):
            # Rows that are dealt to the servers are in another order in messages.
            plain = type(array) is np.ndarray and array.flags.c_contiguous and not tensor.dealt
            if not plain or array.dtype != tensor.dtype or array.shape != tensor.shape:
                return None
    return BoundPushPull(link, layout, make, gradients, out)
