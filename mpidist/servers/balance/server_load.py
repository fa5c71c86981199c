"""The measured work of a server: busy seconds, bytes, requests and rows; uses no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..layout.routing import ShardPart, WholeShard
from ..protocol import MEMORY, PULL, PUSH, STREAM, Header


@dataclass
class ServerLoad:
    """The work of one server, for all models.

    Attributes
    ----------
    busy_seconds : float
        Seconds in which the server received requests, updated parameters or wrote answers.
    bytes_in, bytes_out : int
        The bytes of requests and of answers, including headers.
    pushes, pulls : int
        The numbers of requests with a push and with a pull, including requests that name no tensor
        of this server.
    rows : int
        How many table rows the requests for single rows have named; a row that several requests
        name counts several times.
    """

    busy_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    pushes: int = 0
    pulls: int = 0
    rows: int = 0

    def count(
        self,
        header: Header,
        whole: WholeShard,
        pushed: Sequence[ShardPart],
        pulled: Sequence[ShardPart],
    ) -> None:
        """Count a request of a worker, and the tensors or rows that it pushes and pulls.

        `header` is the header of the request. `pushed` and `pulled` list the tensors or rows.
        `whole` is all that the server holds of the model. Gradients that follow in further
        messages, or that the server reads in shared memory or in the memory of the worker, are
        counted here, too.
        """
        self.bytes_in += header.total + whole.nbytes * (header.push_words in (STREAM, MEMORY))
        self.bytes_out += whole.nbytes * (header.pull_words == STREAM)
        self.pushes += bool(header.flags & PUSH)
        self.pulls += bool(header.flags & PULL)
        if pushed is not whole.parts or pulled is not whole.parts:
            self.rows += sum(len(rows) for _, rows in (*pushed, *pulled) if rows is not None)

    def facts(self) -> dict[str, float]:
        """Return all counts in a dict: name of the attribute -> its value."""
        return asdict(self)
