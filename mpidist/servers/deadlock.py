"""Find ranks that wait for each other in different calls, and raise an error on all ranks.

    rank 0   client.pull() ....... waits for the answer of server 2
    rank 2   md.allreduce(comm) .. waits for rank 0

Calls of a group are no operations of the communicator, so numbers cannot tell that these two
disagree. But the second one has said where it waits (`Statuses`): in an operation that rank 0 has
not come to, and cannot come to while it waits for rank 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..events import Trail
from ..runtime.agreement.mismatch import LEFT, WAITING, Status, decode_signature, raised
from ..runtime.context import Context

#: Operations that some ranks may leave before all have come: to wait in one says less.
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter")


def check_stuck(context: Context, trail: Trail, ranks: Sequence[int]) -> None:
    """Raise MismatchError where one of `ranks`, which are waited for, cannot come.

    All ranks of the communicator then get that error: none of them waits for ever.
    """
    if context.size == 1:
        return
    context.statuses.listen()
    for rank in ranks:
        status = context.statuses.known(rank)
        if status is not None and _cannot_come(status, context.sequence):
            context.statuses.fail(_text(context, trail, status))


def _cannot_come(status: Status, sequence: int) -> bool:
    if status.state == LEFT:
        return True
    if raised(status.signature):  # it had a bad argument, and went on
        return False
    signature = decode_signature(status.signature)
    one_sided = signature.kind in _ONE_SIDED and not signature.extra
    return status.state == WAITING and status.sequence > sequence and not one_sided


def _text(context: Context, trail: Trail, status: Status) -> str:
    where = ", ".join(word for word in (status.host, status.site) if word)
    if status.state == LEFT:
        there = f"rank {status.rank} left ({where})"
    else:
        what = decode_signature(status.signature).text()
        there = f"rank {status.rank} is in {what} #{status.sequence} ({where})"
    waiting = [each for each in trail.operations() if each.open]
    here = waiting[-1].text() if waiting else "a call of a server group"
    return (
        f"parameter server: {there}, and rank {context.rank} waits for it in {here} "
        f"({context.host}); all ranks must make the same calls"
    )
