"""Send models to peers and average with the newest of theirs, without waiting: ASP.

    a rank at its round   takes in what has arrived, and averages with the newest of each peer
                          sends to each peer of this round that has received the message before

So at most one message is on the way from a rank to a peer, however fast the rank is: what a slow
peer would receive late anyway is not sent. A send ends when the peer receives it (MPI_Issend), for
short messages, too.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..runtime.elastic_requests import tester
from .mixed_arrays import MixedArrays
from .peer_messages import Sending, Wait, receive_model, send_model
from .peer_plan import PeerPlan


class AsyncMessages:
    """The messages of one rank; the arguments are those of `PeerMessages`.

    Attributes
    ----------
    sent, skipped : int
        The messages that were sent, and those that were not, because the peer was too slow.
    oldest : int
        The most rounds by which a model was older than this rank's own.
    """

    def __init__(self, comm: MPI.Comm, plan: PeerPlan, arrays: MixedArrays):
        self.comm, self.plan, self.arrays = comm, plan, arrays
        self.round = -1
        self.sent = self.skipped = self.oldest = 0
        rounds = range(len(plan.rounds))
        senders = sorted({one for k in rounds for one in plan.receives(comm.rank, k)})
        self._receiving = {one: self._receive(one) for one in senders}
        self._newest: dict[int, np.ndarray] = {}
        self._sending: dict[int, Sending] = {}
        self._counts = np.zeros(comm.size, np.int64)  # the messages sent to each rank
        self._received = np.zeros(comm.size, np.int64)

    def average(self, wait: Wait) -> None:
        """Do the next round. Nothing in it waits."""
        self.round += 1
        self._progress()
        if self._newest:
            self._mix()
        message = None
        for peer in self.plan.sends(self.comm.rank, self.round):
            if peer in self._sending:
                self.skipped += 1
                continue
            if message is None:
                message = np.empty(self.arrays.nbytes, np.uint8)
                self.arrays.pack(message, self.round)
            requests = send_model(self.comm, message, peer, matched=True)
            self._sending[peer] = Sending(message, requests, self.round)
            self._counts[peer] += 1
            self.sent += 1

    def finish(self, wait: Wait) -> None:
        """Receive all messages that are on the way, and forget them. Collective."""
        expected = np.empty_like(self._counts)
        wait(tester(self.comm.Ialltoall(self._counts, expected)))
        wait(lambda: self._progress() and np.array_equal(self._received, expected))
        wait(lambda: self._progress() and not self._sending)
        self._newest.clear()
        self._counts[...] = self._received[...] = 0
        self.round = -1

    def close(self) -> None:
        """Cancel the receives for which no message comes any more."""
        for _, requests in self._receiving.values():
            for request in requests:
                request.Cancel()
                request.Wait()
        self._receiving = {}

    def _receive(self, sender: int) -> tuple[np.ndarray, list]:
        message = np.empty(self.arrays.nbytes, np.uint8)
        return message, receive_model(self.comm, message, sender)

    def _progress(self) -> bool:
        """Take in the messages that have arrived; keep the newest of each peer. Returns True."""
        for sender, (message, requests) in list(self._receiving.items()):
            if MPI.Request.Testall(requests):
                self._received[sender] += 1
                self._newest[sender] = message
                self._receiving[sender] = self._receive(sender)
        for peer in [peer for peer, one in self._sending.items() if one.ended()]:
            del self._sending[peer]
        return True

    def _mix(self) -> None:
        found = []
        for _, message in sorted(self._newest.items()):
            sent_in = self.arrays.round_of(message)
            self.oldest = max(self.oldest, self.round - sent_in)
            found.append((message, self.plan.ratio(self.comm.rank, sent_in)))
        self.arrays.mix(found)
        self._newest.clear()
