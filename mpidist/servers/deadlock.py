"""Find ranks that wait for each other in different calls, and raise an error on all ranks.

    rank 0   client.pull() ....... waits for the answer of server 2
    rank 2   md.allreduce(comm) .. waits for rank 0

A rank that has waited for some time in an mpidist collective sends a status message, which names
the collective. In the picture, rank 0 learns in this way that rank 2 waits in an allreduce, which
rank 0 has not begun and cannot begin while it waits. Workers that wait for each other in calls of
one server group are found by the server (`stalled`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..events import Trail
from ..runtime.agreement.mismatch import LEFT, WAITING, Status, decode_signature, raised
from ..runtime.context import Context
from .consistency import ConsistencyGate

#: Operations that some ranks may finish before all ranks have begun them.
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter")


def check_stuck(
    context: Context, trail: Trail, ranks: Sequence[int], test: Callable[[], bool]
) -> None:
    """Raise MismatchError if a rank in `ranks` has left, or waits for this rank in another call.

    All ranks of the communicator get the same MismatchError. ``test()`` says whether the awaited
    messages of `ranks` have arrived; if so, no error is raised.
    """
    if context.size == 1:
        return
    with context.statuses.quiet:  # a thread may wait in another group of this communicator
        context.statuses.listen()
    for rank in ranks:
        status = context.statuses.known(rank)
        # `test` last: the rank may have sent its messages, and be in its next call already.
        if status is not None and _cannot_come(status, context.sequence) and not test():
            context.statuses.fail(_text(context, trail, status))


def stalled(waits: Mapping[int, tuple[Collection[int], int]]) -> list[int]:
    """Return the workers that can never go on, because they wait for each other.

    ``waits[worker]`` has the workers for which `worker` waits, and how many of these workers must
    go on before `worker` can go on.
    """
    stuck = set(waits)
    while free := {w for w in stuck if len(set(waits[w][0]) - stuck) >= waits[w][1]}:
        stuck -= free
    return sorted(stuck)


def who_waits(
    ranks: Sequence[int],
    present: Collection[int],
    paused: Collection[int],
    barriers: Mapping[int, int],
    models: Sequence[tuple[str, ConsistencyGate]],
) -> str:
    """Return a text that says which workers of a server wait for each other; "" if none do.

    ``barriers[worker]`` is the number of barriers that the worker has entered. `present` has the
    workers that have not left, and `paused` those that wait in `ServerGroup.pause`.
    """
    waits: dict[int, tuple[list[int], int]] = {}
    calls: dict[int, str] = {}
    for worker in range(len(ranks)):
        late = [w for w in range(len(ranks)) if barriers[w] < barriers[worker]]
        if worker not in present:
            waits[worker], calls[worker] = ([worker], 1), "has left the group"
        elif worker in paused:
            away = [other for other in sorted(present) if other not in paused]
            waits[worker], calls[worker] = (away, len(away)), "waits in pause"
        elif late:
            waits[worker], calls[worker] = (late, len(late)), "waits in barrier"
    for name, gate in models:
        for worker in gate.waiting:
            waits[worker] = gate.blockers(worker)
            calls[worker] = f"waits in a pull of {name!r}"

    def told(worker: int) -> str:
        others = waits[worker][0]
        gone = "" if {*others} & {*present} else ", which has left the group"
        who = ", ".join(str(ranks[other]) for other in others)
        return f"rank {ranks[worker]} {calls[worker]} for rank {who}{gone}"

    stuck = [worker for worker in stalled(waits) if worker in present]
    if not stuck:
        return ""
    return (
        f"workers wait for each other: {'; '.join(map(told, stuck[:4]))}; "
        "all workers must make the same calls of clients and of the group in one order"
    )


def _cannot_come(status: Status, sequence: int) -> bool:
    if status.state == LEFT:
        return True
    if raised(status.signature):  # the rank has raised an error and goes on after it
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
