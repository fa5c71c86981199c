"""Send models to peers, and average with models of peers, in rounds, under BSP or SSP.

Under BSP (bulk synchronous parallel), a rank waits in each round for all models that its peers send
in this round. Under SSP (stale synchronous parallel), a model may arrive a few rounds late.

    begin    pack the model, post the receives of this round, send to the peers of this round
    wait     until the models that `RoundGate` asks for have arrived
    finish   average with all models that have arrived
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from ..errors import ProtocolError
from .mixed_arrays import MixedArrays
from .peer_plan import PeerPlan
from .round_gate import Expected, RoundGate

#: The largest number of bytes of one MPI call. The counts of MPI calls must be below 2^31.
PIECE = 1 << 30
_TAG = 0

Wait = Callable[[Callable[[], bool]], None]


def send_model(comm: MPI.Comm, message: np.ndarray, peer: int, *, matched: bool = False) -> list:
    """Begin to send a message with a model to the rank `peer`; return the MPI requests.

    With `matched`, a send is complete only when the peer has begun to receive (MPI_Issend).
    """
    call = comm.Issend if matched else comm.Isend
    return [call(piece, peer, _TAG) for piece in message_pieces(message)]


def receive_model(comm: MPI.Comm, message: np.ndarray, peer: int) -> list:
    """Begin to receive a message with a model from the rank `peer`; return the MPI requests."""
    return [comm.Irecv(piece, peer, _TAG) for piece in message_pieces(message)]


def message_pieces(message: np.ndarray) -> list[np.ndarray]:
    """Cut a message into pieces that are short enough for a call of MPI; return the pieces."""
    return [message[start : start + PIECE] for start in range(0, len(message), PIECE)]


class Sending:
    """A message with a model that this rank is sending to some peers."""

    def __init__(self, message: np.ndarray, requests: list, round: int):
        self.message, self.requests, self.round = message, requests, round

    def ended(self) -> bool:
        """Whether all sends of the message are complete, so that the message may be overwritten."""
        return MPI.Request.Testall(self.requests)


class PeerMessages:
    """Sends and receives models on one rank under BSP or SSP, as the module explains.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        A communicator that is used for these messages only.
    plan : PeerPlan
    arrays : MixedArrays
        The arrays that are averaged.
    bound : int
        The number of rounds by which a model may arrive late. With 0 (BSP), a rank waits for all
        models of a round; a larger bound is SSP.
    """

    skipped = 0

    def __init__(self, comm: MPI.Comm, plan: PeerPlan, arrays: MixedArrays, bound: int):
        self.comm, self.plan, self.arrays = comm, plan, arrays
        self.gate = RoundGate(plan, comm.rank, bound)
        self.sent = self.oldest = 0
        self._receiving: dict[Expected, tuple[np.ndarray, list]] = {}
        self._here: dict[Expected, np.ndarray] = {}
        self._sending: list[Sending] = []
        self._free: list[np.ndarray] = []

    def average(self, wait: Wait) -> None:
        """Do the next round: send this rank's model, wait for peers, and average with their models.

        ``wait(test)`` must wait until ``test()`` is true.
        """
        gate = self.gate
        peers, expected = gate.begin()
        for one in expected:
            message = self._buffer()
            self._receiving[one] = message, receive_model(self.comm, message, one.sender)
        message = self._buffer()
        self.arrays.pack(message, gate.round)
        requests = [one for peer in peers for one in send_model(self.comm, message, peer)]
        self._sending.append(Sending(message, requests, gate.round))
        self.sent += len(peers)
        # If this rank receives nothing from a peer to which it sends, the peer may be behind by
        # more rounds than the bound. So this rank also waits for its old sends; otherwise it would
        # keep many copies of its model.
        wait(lambda: self._progress() and self._few() and gate.may_finish())
        self._mix(gate.take())

    def finish(self, wait: Wait) -> None:
        """Receive all models that are on the way, and drop them.

        All ranks must have done the same number of rounds.
        """
        wait(lambda: self._progress() and not self._receiving and not self._sending)
        self._free += self._here.values()
        self._here.clear()
        self.gate.reset()

    def close(self) -> None:
        """Do nothing, because `finish` has received all messages; see `AsyncMessages.close`."""

    def _few(self) -> bool:
        newest = self.gate.round - self.gate.bound - 1
        return all(one.round > newest for one in self._sending)

    def _progress(self) -> bool:
        """Receive messages that have arrived, free the memory of sent ones, and return True."""
        for one, (message, requests) in list(self._receiving.items()):
            if not MPI.Request.Testall(requests):
                continue
            del self._receiving[one]
            if self.arrays.round_of(message) != one.round:
                raise ProtocolError(
                    f"PeerAverage: rank {one.sender} sent round {self.arrays.round_of(message)} "
                    f"of its model, rank {self.comm.rank} expected round {one.round}; all ranks "
                    "must do the same number of steps"
                )
            self._here[one] = message
            self.gate.arrive(one)
        for sending in [one for one in self._sending if one.ended()]:
            self._sending.remove(sending)
            self._free.append(sending.message)
        return True

    def _mix(self, taken: list[Expected]) -> None:
        messages = [self._here.pop(one) for one in taken]
        ratios = [self.plan.ratio(self.comm.rank, one.round) for one in taken]
        self.arrays.mix(list(zip(messages, ratios, strict=True)))
        self.oldest = max([self.oldest, *(self.gate.round - one.round for one in taken)])
        self._free += messages

    def _buffer(self) -> np.ndarray:
        return self._free.pop() if self._free else np.empty(self.arrays.nbytes, np.uint8)
