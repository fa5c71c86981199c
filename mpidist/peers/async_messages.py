"""Send models to peers and average with the newest models of peers, without waiting (ASP).

ASP (asynchronous parallel) means that no rank waits for another rank.

    in each round, a rank   receives the models that have arrived, and averages its own model with
                            the newest model of each peer
                            sends its model to the peers of this round that have received its
                            previous message
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..runtime.elastic_requests import tester
from .mixed_arrays import MixedArrays
from .peer_messages import Sending, Wait, receive_model, send_model
from .peer_plan import PeerPlan


class AsyncMessages:
    """Sends and receives models on one rank under ASP: no rank waits for another rank.

    The arguments are explained in the docstring of `PeerMessages`.

    Attributes
    ----------
    sent, skipped : int
        The number of messages that were sent, and the number that were left out because the peer
        had not yet received the previous message.
    oldest : int
        The largest number of rounds by which a received model was older than this rank's model.
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
        self._counts = np.zeros(comm.size, np.int64)  # the number of messages sent to each rank
        self._received = np.zeros(comm.size, np.int64)

    def average(self, wait: Wait) -> None:
        """Average this rank's model with those that have arrived, then send it to peers."""
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
        """Receive all models that are on the way, and drop them. Collective."""
        expected = np.empty_like(self._counts)
        wait(tester(self.comm.Ialltoall(self._counts, expected)))
        wait(lambda: self._progress() and np.array_equal(self._received, expected))
        wait(lambda: self._progress() and not self._sending)
        self._newest.clear()
        self._counts[...] = self._received[...] = 0
        self.round = -1

    def close(self) -> None:
        """Cancel the receives that are still posted, because no peer sends any more models."""
        for _, requests in self._receiving.values():
            for request in requests:
                request.Cancel()
                request.Wait()
        self._receiving = {}

    def _receive(self, sender: int) -> tuple[np.ndarray, list]:
        message = np.empty(self.arrays.nbytes, np.uint8)
        return message, receive_model(self.comm, message, sender)

    def _progress(self) -> bool:
        """Receive messages that have arrived; keep the newest of each peer. Always returns True."""
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
