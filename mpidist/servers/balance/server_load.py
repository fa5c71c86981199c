"""The measured work of a server: busy seconds, bytes, requests and rows; uses no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..layout.routing import ShardPart, WholeShard
from ..protocol import MEMORY, PULL, PUSH, STREAM, Header


@dataclass
class ServerLoad:
    """Measurements of one server's work for all models: busy seconds, bytes, requests and rows."""

    # Seconds in which it received requests, updated parameters or wrote answers.
    busy_seconds: float = 0.0
    # The bytes of requests and of answers, including headers.
    bytes_in: int = 0
    bytes_out: int = 0
    # Also requests that name no tensor of this server.
    pushes: int = 0
    pulls: int = 0
    # Rows named by requests for single rows, counted once for each request.
    rows: int = 0

    def count(
        self,
        header: Header,
        whole: WholeShard,
        pushed: Sequence[ShardPart],
        pulled: Sequence[ShardPart],
    ) -> None:
        """Count a request of a worker, and the tensors or rows that it pushes and pulls."""
        # Gradients that do not come in this message are counted as well.
        self.bytes_in += header.total + whole.nbytes * (header.push_words in (STREAM, MEMORY))
        self.bytes_out += whole.nbytes * (header.pull_words == STREAM)
        self.pushes += bool(header.flags & PUSH)
        self.pulls += bool(header.flags & PULL)
        if pushed is not whole.parts or pulled is not whole.parts:
            self.rows += sum(len(rows) for _, rows in (*pushed, *pulled) if rows is not None)

    def facts(self) -> dict[str, float]:
        """Return all counts as a dict, by the names of the attributes."""
        return asdict(self)
