"""Free unused rows of open tables, and report how much memory the tables take.

An open table gets a row when a new key is pushed.

worker   drop, unused_for   -> all servers: free rows -> number of rows   -> their sum
"""

from __future__ import annotations

from ...errors import ConfigError
from ...registry import checked_whole
from ..layout.placement import ServerLayout
from ..protocol import DROP, HEADER_BYTES, TO_SERVER, TO_WORKER, Header
from .open_table import most_rows

#: Bytes per row of an open table besides values and state: the key, the clock, and the cells of the
#: hash table (after the hash table has grown).
_KEY_BYTES = 72


def ask_to_drop(client, unused_for: int) -> int:
    """Let all servers free rows that had no push for `unused_for` steps; return how many rows."""
    whole = checked_whole(f"drop rows of {client.name!r}: unused_for", unused_for, 1)
    if not any(tensor.open is not None for tensor in client.layout.tensors):
        raise ConfigError(f"drop rows of {client.name!r}: the model has no table of open rows")
    link, requests = client.group.link, client.requests
    replies = []
    for rank in requests.servers:
        replies.append(link.receive(rank, TO_WORKER, HEADER_BYTES))
        buffer = link.pool.take(HEADER_BYTES)
        Header(
            DROP, requests.model, requests.clock, samples=min(whole, (1 << 62) - 1)
        ).write(buffer)  # fmt: skip
        link.send(buffer, HEADER_BYTES, rank, TO_SERVER)
    requests.started = True
    link.wait_for(replies, "server")
    for reply in replies:
        link.received(HEADER_BYTES)
        link.pool.give(reply.buffer)
    link.touched = False
    return sum(reply.header.version for reply in replies)


def drop_rows(link, model, rank: int, header: Header) -> None:
    """Free unused rows of a model on this server; send the number of freed rows to rank `rank`."""
    before = model.gate.slowest() - header.samples
    count = sum(table.drop(before) for table in model.shard.open.values())
    buffer = link.pool.take(HEADER_BYTES)
    Header(DROP, version=count).write(buffer)
    link.send(buffer, HEADER_BYTES, rank, TO_WORKER)


def table_facts(shard) -> dict[str, dict[str, int]]:
    """Return {name of an open table: result of `OpenTable.facts`} for one server."""
    return {table.name: table.facts() for table in shard.open.values()}


def open_bytes(layout: ServerLayout, server: int, copies: float) -> int:
    """Return how many bytes a server's open tables take with as many rows as `max_rows` allows.

    An open table gets a row when a new key is pushed.
    """
    total = 0.0
    # Only tables with `max_rows` count.
    for tensor in layout.tensors:
        if tensor.open is not None and tensor.open.max_rows is not None:
            # `copies`: bytes of optimizer state per byte of parameters.
            row = tensor.width * tensor.dtype.itemsize * (1 + copies) + _KEY_BYTES
            total += most_rows(tensor.open.max_rows, layout.shares[server]) * row
    return round(total)
