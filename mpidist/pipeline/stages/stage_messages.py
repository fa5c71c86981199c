"""The messages between stages: arrays that arrive with the memory layout of the sender.

Before the first array with a new number of samples, the sender sends its layout (dtype, shape and
strides) in a short message. Later arrays of this size have the same layout. A receive begins before
the stage needs the data:

    sender      layout | data 0 | data 1 | ...
    receiver    waits for the layout, then receives 0; receives of 1, 2, ... begin ahead

Each chunk (group of consecutive layers) has one channel for arrays of the forward pass and one for
arrays of the backward pass.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ... import events
from ...errors import ProtocolError
from ...partition import pieces
from ...runtime.elastic_requests import test_all
from ...tensors import dtype_of
from ..activation_wire import from_wire, to_wire

#: The bytes of a message with a layout, and the largest number of bytes of one message of data.
_LAYOUT_BYTES, _MOST = 1024, 1 << 30
#: The addresses of buffers are multiples of this number of bytes.
_ALIGN = 64


class ArrayLayout(NamedTuple):
    """The dtype, shape and strides of an array."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def encode(self, samples: int) -> np.ndarray:
        """Return a message that tells a receiver: arrays of `samples` samples have this layout."""
        text = json.dumps([samples, self.dtype, self.shape, self.strides]).encode()
        return np.frombuffer(text.ljust(_LAYOUT_BYTES), np.uint8)

    @classmethod
    def decode(cls, data: np.ndarray) -> tuple[int, ArrayLayout]:
        """Return the number of samples and the layout from a message that `encode` has made."""
        samples, dtype, shape, strides = json.loads(data.tobytes())
        return samples, cls(dtype, tuple(shape), tuple(strides))

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Arrival:
    """An array that another stage sends to this rank.

    The object is made when the receive is requested, and is used until the array's buffer is free
    for other receives.
    """

    def __init__(self, messages: StageMessages, source: int, channel: int, samples: int):
        self.messages, self.source, self.channel = messages, source, channel
        self.samples = samples
        self.requests: list[MPI.Request] | None = None
        self.layout: ArrayLayout | None = None
        self.buffer: Any = None
        self._here = False

    def test(self) -> bool:
        """Return whether the array has arrived."""
        if self.requests is None:
            self.messages.begin_receives(self.source, self.channel)
        if not self._here and self.requests is not None:
            self._here = test_all(self.requests)
        return self._here

    def array(self):
        """Return the array, after `test` has returned True. It is valid until `give_back`."""
        assert self.layout is not None  # because `test` has returned True
        events.total.messages_received += 1
        events.total.bytes_received += self.layout.nbytes
        xp = self.messages.xp
        memory = (self.buffer if xp is np else xp.asarray(self.buffer)).view(
            dtype_of(self.layout.dtype)
        )
        return from_wire(memory, self.layout.shape, self.layout.strides)


class StageMessages:
    """The sends and receives of one rank.

    Parameters
    ----------
    comm : MPI.Comm
        A communicator that carries no other messages.
    xp : module
        The array module of the received arrays.
    """

    def __init__(self, comm, xp):
        self.comm, self.xp = comm, xp
        self.bytes_sent = 0
        # (rank, channel, number of samples) -> the layout that was received, or that was sent
        self._known: dict[tuple[int, int, int], ArrayLayout] = {}
        self._told: dict[tuple[int, int, int], ArrayLayout] = {}
        self._noted: dict[tuple[int, int], deque[Arrival]] = defaultdict(deque)
        self._sending: list[tuple[list[MPI.Request], Any, Sequence[Arrival]]] = []
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def send(self, array, dest: int, channel: int, samples: int) -> list[MPI.Request]:
        """Begin to send an array, which must not change until it is sent; return its requests."""
        buffer, shape, strides = to_wire(array)
        layout, memory = ArrayLayout(buffer.dtype.name, shape, strides), buffer.view(np.uint8)
        memory = memory if self.xp is np else memory.get()
        key, requests = (dest, channel, samples), list[MPI.Request]()
        # Stored before the first send begins, so that an exception does not free the memory.
        self._sending.append((requests, memory, ()))
        if self._told.get(key) != layout:
            if key in self._told:
                raise ProtocolError(
                    f"a layer returned an array of {layout}, and earlier, for the same number of "
                    f"samples, one of {self._told[key]}; the layout may only depend on this number"
                )
            self._told[key] = layout
            header = layout.encode(samples)
            self._sending.append(([self.comm.Isend(header, dest, 2 * channel)], header, ()))
        for start, stop in pieces(0, len(memory), _MOST):
            requests.append(self.comm.Isend(memory[start:stop], dest, 2 * channel + 1))
        self.bytes_sent += len(memory)
        events.total.messages_sent += len(requests)
        events.total.bytes_sent += len(memory)
        return requests

    def receive(self, source: int, channel: int, samples: int) -> Arrival:
        """Begin to receive an array of `samples` samples from the rank `source`.

        Each chunk (group of consecutive layers) has one `channel` number for arrays of the forward
        pass, and one for arrays of the backward pass.
        """
        one = Arrival(self, source, channel, samples)
        self._noted[source, channel].append(one)
        self.begin_receives(source, channel)
        return one

    def begin_receives(self, source: int, channel: int) -> None:
        """Begin the receives that have waited for the dtype, shape and strides of their arrays."""
        noted = self._noted[source, channel]
        while noted:
            one = noted[0]
            layout = self._known.get((source, channel, one.samples))
            if layout is None:
                if not self.comm.Iprobe(source, 2 * channel):
                    return
                data = np.empty(_LAYOUT_BYTES, np.uint8)
                self.comm.Recv(data, source, 2 * channel)
                samples, layout = ArrayLayout.decode(data)
                self._known[source, channel, samples] = layout
                continue
            noted.popleft()
            one.layout, one.buffer = layout, self._take(layout.nbytes)
            one.requests = []
            for start, stop in pieces(0, layout.nbytes, _MOST):
                view = one.buffer[start:stop]
                one.requests.append(self.comm.Irecv(view, source, 2 * channel + 1))

    def _take(self, nbytes: int) -> np.ndarray:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        memory = np.empty(nbytes + _ALIGN, np.uint8)
        start = -memory.ctypes.data % _ALIGN
        return memory[start : start + nbytes]

    def give_back(self, arrived: Sequence[Arrival], after: list[MPI.Request]) -> None:
        """Let later receives write into the memory of the received arrays `arrived`.

        They may write as soon as the requests in `after` are complete.
        """
        self._sending.append((after, None, arrived))

    def drop(self, arrived: Arrival) -> None:
        """Free the buffer of a received array, and forget that its layout was received."""
        del self._known[arrived.source, arrived.channel, arrived.samples]

    def drop_sent(self, dest: int, channel: int, samples: int) -> None:
        """Forget that the layout (dtype, shape, strides) of an array was sent."""
        del self._told[dest, channel, samples]

    def progress(self) -> bool:
        """Release the buffers of completed sends; return whether all sends are complete."""
        still = []
        for one in self._sending:
            if test_all(one[0]):
                for arrived in one[2]:
                    self._free[len(arrived.buffer)].append(arrived.buffer)
            else:
                still.append(one)
        self._sending = still
        return not still
