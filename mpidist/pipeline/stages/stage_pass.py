"""Carry out a rank's part of a pipeline: compute, send, receive, add gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...launch.fault_points import fault_point
from ..pipeline_schedules import RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, StageAction, W
from .stage_messages import Arrival
from .sum_parts import SumQueue


def _nothing(name: str) -> None:
    pass


class StagePass:
    """Does the computations and messages of one step on this rank, and holds its data."""

    def __init__(self, stage, sizes, inputs: dict, labels: dict | None, total: int | None):
        self.stage, self.sizes, self.total = stage, sizes, total
        # microbatch -> array, for the microbatches that this rank has not begun.
        self.inputs, self.labels = inputs, labels
        self.scores: dict[int, Any] = {}
        #: For each chunk, the microbatch whose gradients are added last; and the queue of the sums.
        self.last: dict[int, int] = {}
        self.queue = SumQueue(())
        #: The computations: kind, chunk, microbatch, begin and end (times of `time.perf_counter`).
        self.spans: list[tuple[str, int, int, float, float]] = []
        self._losses: dict[int, float] = {}
        self._arriving: dict[StageAction, Arrival] = {}
        # (chunk, microbatch) -> received arrays whose buffers are still in use.
        self._held: dict[tuple[int, int], list[Arrival]] = {}
        self._made: dict[StageAction, Any] = {}  # action -> the array that it will send or use
        # (chunk, microbatch) -> requests of the send of the input's gradient.
        self._sent: dict[tuple[int, int], list] = {}
        # (chunk, microbatch) whose gradient of the input is sent before the gradients of the
        # weights are computed.
        self._after_send: tuple[int, int] | None = None

    def do(self, action: StageAction) -> None:
        """Do one action, a computation or a message, unless its microbatch has no samples."""
        kind, chunk, i = action
        fault_point("action")
        if not self.sizes[i]:
            self._skip(kind, chunk, i)
            return
        _DOES[kind](self, chunk, i)
        self.stage.messages.progress()

    def _skip(self, kind: str, chunk: int, i: int) -> None:
        """Do an action whose microbatch has no samples: count its gradients as added."""
        if kind in (B, W):
            if chunk == self.stage.last_chunk:
                self.stage.chunks[chunk].note_loss(0.0)
            self.stage.chunks[chunk].add(i, None)
            self.queue.progress()

    def _forward(self, c: int, i: int) -> None:
        stage = self.stage
        x = self._arrived(F, RECV_F, c, i) if c else self.inputs.pop(i)
        began = time.perf_counter()
        chunk = stage.chunks[c]
        y = chunk.forward(i, x, keep=self.total is not None)
        if c < stage.last_chunk:
            self._made[StageAction(SEND_F, c, i)] = y
        elif self.labels is None:
            self.scores[i] = y[0] if stage.xp is np else y[0].get()
        else:
            losses, dy = stage.model.loss(y, self.labels.pop(i))
            self._made[StageAction(B, c, i)] = self._gradient_of_loss(i, float(losses[0]), dy)
        if self.total is not None:  # statistics are for steps, not for predictions
            self._computed(F, c, i, began)
            stage.note_stash()

    def _gradient_of_loss(self, i: int, loss: float, dy):
        """Note the loss of a microbatch; return the gradient of the loss."""
        self._losses[i] = loss
        return dy

    def _computed(self, kind: str, c: int, i: int, began: float) -> None:
        """Record a computation that ends now, with the time when it began."""
        ended = time.perf_counter()
        self.stage.computing += ended - began
        self.spans.append((kind, c, i, began, ended))

    def _backward(self, c: int, i: int) -> None:
        # The previous stages wait for the input's gradient of the last microbatch of a step. So it
        # is sent before the gradients of the weights are computed and added.
        if c and self.last.get(c) == i and self.stage.chunks[c].sends_early:
            self._after_send = (c, i)
            self._input(c, i, halves=True)
            return
        self._input(c, i, halves=False)
        self._add(c, i)

    def _input_half(self, c: int, i: int) -> None:
        self._input(c, i, halves=True)

    def _weights_half(self, c: int, i: int) -> None:
        began = time.perf_counter()
        self._backward_weights(c, i)
        self._computed(W, c, i, began)
        self._add(c, i)
        self._done(c, i)

    def _weights_after_send(self, c: int, i: int) -> None:
        """Compute the gradients of the weights, after the gradient of the input was sent."""
        began = time.perf_counter()
        self._backward_weights(c, i)
        self._after_send = None
        self.stage.computing += time.perf_counter() - began
        self._add(c, i)  # it also ends the span of the backward pass

    def _input(self, c: int, i: int, halves: bool) -> None:
        stage = self.stage
        chunk = stage.chunks[c]
        if c == stage.last_chunk:
            dy = self._made.pop(StageAction(B, c, i))
        else:
            dy = self._arrived(B, RECV_B, c, i) if chunk.learns else None
        began = time.perf_counter()
        dx = chunk.backward_input(i, dy) if halves else self._whole_backward(c, i, dy)
        self._computed(I if stage.halves else B, c, i, began)
        if dx is not None:
            self._made[StageAction(SEND_B, c, i)] = dx
        elif not halves:
            self._done(c, i)

    def _whole_backward(self, c: int, i: int, dy):
        weight = self.sizes[i] / self.total
        return self.stage.chunks[c].backward(i, dy, self._ready(c, i), weight)

    def _backward_weights(self, c: int, i: int) -> None:
        weight = self.sizes[i] / self.total
        self.stage.chunks[c].backward_weights(i, self._ready(c, i), weight)

    def _ready(self, c: int, i: int) -> Callable[[str], None]:
        """Return the function that the backward pass calls when a gradient is final."""
        chunk, names, weight = self.stage.chunks[c], set[str](), self.sizes[i] / self.total
        if c == self.stage.last_chunk:
            chunk.note_loss(self._losses.pop(i))
        if self.last.get(c) != i:
            return _nothing
        if not chunk.in_parts or len(chunk.parts) < 2:
            return self._continue_send if self._after_send == (c, i) else _nothing

        def ready(name: str) -> None:
            names.add(name)
            chunk.add_ready(i, weight, names)
            self.queue.progress()

        return ready

    def _continue_send(self, name: str) -> None:
        self.stage.messages.progress()

    def _add(self, c: int, i: int) -> None:
        """Add the gradients of a microbatch to the sums over the microbatches."""
        began = time.perf_counter()
        self.stage.chunks[c].add(i, self.sizes[i] / self.total)
        ended = time.perf_counter()
        self.stage.computing += ended - began
        # The addition counts as a part of the backward pass before it.
        self.spans[-1] = (*self.spans[-1][:4], ended)
        self.queue.progress()

    def _done(self, c: int, i: int) -> None:
        """Let receives use the buffers of a finished microbatch, once its sends have ended."""
        # A gradient that is sent may be in the same memory as a gradient that was received.
        self.stage.messages.give_back(self._held.pop((c, i), ()), self._sent.pop((c, i), []))

    def _arrived(self, kind: str, receive: str, c: int, i: int):
        """Wait for the array that an action of `kind` needs, and return it."""
        one = self._arriving.pop(StageAction(receive, c, i))
        self.stage.wait(one.test, f"{kind} of microbatch {i} in chunk {c}")
        if self.total is not None:
            self._held.setdefault((c, i), []).append(one)
        return one.array()

    def _receive_forward(self, c: int, i: int) -> None:
        self._receive(RECV_F, c, i, c - 1, 2 * c)

    def _receive_backward(self, c: int, i: int) -> None:
        if self.stage.chunks[c].learns:
            self._receive(RECV_B, c, i, c + 1, 2 * c + 1)

    def _receive(self, kind: str, c: int, i: int, other: int, channel: int) -> None:
        source = self.stage.grid.holder(other, i)
        one = self.stage.messages.receive(source, channel, self.sizes[i])
        self._arriving[StageAction(kind, c, i)] = one

    def _send_forward(self, c: int, i: int) -> None:
        y = self._made.pop(StageAction(SEND_F, c, i))
        self.stage.messages.send(y, self.stage.grid.holder(c + 1, i), 2 * c + 2, self.sizes[i])
        self.stage.cut_bytes[c] += y.nbytes if self.total is not None else 0

    def _send_backward(self, c: int, i: int) -> None:
        dx = self._made.pop(StageAction(SEND_B, c, i), None)
        if dx is None:
            return
        dest = self.stage.grid.holder(c - 1, i)
        self._sent[c, i] = self.stage.messages.send(dx, dest, 2 * c - 1, self.sizes[i])
        self.stage.cut_bytes[c - 1] += dx.nbytes
        if self._after_send == (c, i):
            self._weights_after_send(c, i)
        if not self.stage.halves:
            self._done(c, i)


#: kind of action -> the method that does it.
_DOES = {
    F: StagePass._forward,
    B: StagePass._backward,
    I: StagePass._input_half,
    W: StagePass._weights_half,
    RECV_F: StagePass._receive_forward,
    RECV_B: StagePass._receive_backward,
    SEND_F: StagePass._send_forward,
    SEND_B: StagePass._send_backward,
}
