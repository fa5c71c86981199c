"""`run_on_all`: local work whose failure on one rank is an error on all of them.

    every rank   local()                 checks, files, memory: no communication
    agreement    one allreduce           same operation? did any rank fail? did all find the same?
    only where somebody failed, or they differ and something is decided:
    rank 0       <-- gather --           what each rank found, or why it failed
    only where somebody failed, or something is decided:
    rank 0       decide([...])
    every rank   <-- bcast, scatter --   the answer, or one error for all

No rank is left alone in a collective call, because nothing between two of them may raise: also
pickling and the texts of errors stand inside the guarded part. All waits are polled, so a rank in
another operation raises `MismatchError` together with those that are here.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from ...errors import ConfigError, MismatchError, MpidistError, in_one_line, shown
from .mismatch import rank_list
from .rounds import LONGEST, ROOM, Polled, Private


class Failure(NamedTuple):
    """What one rank tells of an error: strings only, since an error need not survive a message.

    `kind` is ``module:class``; `text` one line. `secondary`: it only reports another rank's error.
    """

    kind: str
    text: str
    host: str
    secondary: bool


def run_on_all(
    comm,
    doing: str,
    local: Callable[[], Any],
    decide: Callable[[list], Any] | None = None,
    each: bool = False,
    exchange: Callable[[Any], list] | None = None,
    *,
    fault: Callable[[Exception], type[MpidistError]] | None = None,
    if_differs: bool = False,
    number: Callable[[], int] | None = None,
    agreed: int | None = None,
    room: int = ROOM,
):
    """Run `local` everywhere; what fails on one rank raises on all. Collective over `comm`.

    Only small Python objects travel: control facts, never arrays. Costs one small allreduce where
    nothing fails and nothing is decided.

    Parameters
    ----------
    doing : str
        What this is, for messages. Equal on all ranks: it is what they agree on.
    local : callable
        Work of this rank. It makes no call on `comm` that others may miss.
    decide : callable, optional
        Called on rank 0 with all results of `local`, in rank order.
    each : bool
        `decide` returns a list with one answer for each rank.
    exchange : callable, optional
        Gives an object to all ranks and returns everyone's, for ranks with a channel of their own:
        no context of `comm` is touched then, and `comm` is asked for its rank and size alone.
    fault : callable, optional
        Returns the class that an exception of `local` or `decide` which is not mpidist's is raised
        as on all ranks. By default the failing rank raises it as it is.
    if_differs : bool
        Ask `decide` only where the results of the ranks differ: as cheap as without it.
    number : callable, optional
        Asked on rank 0 when `local` is over, for a number from 0 that all ranks learn in the
        agreement.
    agreed : int, optional
        All ranks are known to come: they have agreed in the same public call. So there is no
        agreement, and each rank tells what it found in a message of so many bytes, the same on all
        ranks. Where one has more to tell, they agree after all.
    room : int
        So many bytes of an answer for all go at once; the same on all ranks.

    Returns
    -------
    object
        What rank 0 decided; this rank's own result where nobody was asked. With `number`: this, and
        rank 0's number.

    Raises
    ------
    MpidistError
        On all ranks, where `local` failed on some or `decide` failed: of the class that failed
        where that is one of mpidist, naming the rank, its host and the cause. What is none of
        mpidist, such as KeyboardInterrupt, goes on as itself on the rank where it was raised.
    MismatchError
        On all ranks, where a rank is in another operation.
    """
    channel = Private(comm, exchange) if exchange else Polled(comm)
    own: list[BaseException] = []  # what this rank raised
    rounds = _Rounds(channel, doing, decide, each, fault, if_differs, number, own)
    with channel.call(doing):
        failure, value = rounds.run(local, agreed, room)
    if failure is None:
        return (value, rounds.number) if number else value
    # Behind the call: all ranks are told, so the communicator stays as good as before.
    cause = own.pop() if own else None
    try:
        if cause is not None and _stays(cause, fault):
            raise cause
        raise _rebuilt(failure, cause) from cause
    finally:
        del cause  # its traceback names this frame


class _Rounds:
    """What `run_on_all` was given, and its rounds. Only `run` is collective."""

    def __init__(self, channel, doing, decide, each, fault, if_differs, number, own):
        self.channel, self.doing, self.decide, self.each = channel, doing, decide, each
        self.fault, self.if_differs, self.own = fault, if_differs, own
        self.number, self._number = 0, number

    def run(self, local, agreed: int | None, room: int) -> tuple[Failure | None, Any]:
        """Return one failure for all ranks, or None and what is returned. Collective."""
        channel, result = self.channel, None
        number = 0
        try:
            result = local()
            packed = _NOTHING if self.decide is None else _pack(None, result)
            number = self._number() if self._number and channel.rank == 0 else 0
        except BaseException as error:
            self.own.append(error)
            packed = _pack(failure_of(error, self.fault), None)
        cause = self.own[0] if self.own else None
        answer = None
        if agreed is not None:
            answer = channel.without_agreement(self.doing, packed, cause, agreed, self._answers)
        if answer is None:
            failed, differs, self.number = channel.begin(self.doing, packed, cause, number)
            if not failed and (self.decide is None or (self.if_differs and not differs)):
                channel.end()
                return None, result
            everyone = channel.gather(packed) if failed or differs else [packed] * channel.size
            answers = self._answers(everyone) if channel.rank == 0 else []
            answer = channel.hand_out(answers, self.each, room)
        channel.end()
        return _unpack(answer)

    def _answers(self, everyone: list[bytes]) -> list[bytes]:
        """Rank 0: return what each rank is told."""
        try:
            return _answers(self.doing, everyone, self.decide, self.each)
        except BaseException as error:
            self.own[:] = [error]
            size = self.channel.size
            return [_pack(_of_rank_0(self.doing, error, self.fault, size), None)] * size


def same_on_all(
    comm,
    doing: str,
    local: Callable[[], dict[str, Any]],
    exchange: Callable[[Any], list] | None = None,
    *,
    fault: Callable[[Exception], type[MpidistError]] | None = None,
    number: Callable[[], int] | None = None,
):
    """Check arguments with `local`, which returns them by name; they must be equal on all ranks.

    Collective over `comm`, in one small allreduce where all is well. Returns this rank's. They
    are compared as their ``repr``: plain numbers and texts, not arrays. Raises as `run_on_all`,
    and MismatchError on all ranks, with the name, values and ranks of the first that differs.
    With `number`, as in `run_on_all`, returns rank 0's number with them.
    """
    mine: dict[str, Any] = {}

    def texts() -> dict[str, str]:
        mine.update(local())
        return {name: _exact(name, value) for name, value in mine.items()}

    def same(everyone: list[dict[str, str]]) -> None:
        text = difference(everyone)
        if text is not None:
            raise MismatchError(f"{doing}: {text}; pass one value everywhere")

    found = run_on_all(
        comm, doing, texts, same, exchange=exchange, fault=fault, if_differs=True, number=number
    )
    return (mine, found[1]) if number else mine


def _exact(name: str, value) -> str:
    try:
        return repr(value)
    except Exception:
        raise ConfigError(f"{name}={shown(value)}; expected a value that can be shown") from None


def difference(everyone: Sequence[Mapping[str, str]]) -> str | None:
    """Name the first entry in which the ranks differ, with the values; fewest ranks first. Pure."""
    for name in {key: None for one in everyone for key in one}:
        groups: dict[str | None, list[int]] = {}
        for rank, one in enumerate(everyone):
            groups.setdefault(one.get(name), []).append(rank)
        if len(groups) > 1:
            told = [
                f"{rank_list(ranks)}: {'nothing' if text is None else in_one_line(text)}"
                for text, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
            ]
            return f"{name} differs: {', '.join(told[:8])}{', ...' if len(told) > 8 else ''}"
    return None


def failure_of(
    error: BaseException, fault: Callable[[Exception], type[MpidistError]] | None = None
) -> Failure:
    """Return the description of an error. Never raises, even if the error's own methods do."""
    try:
        text = in_one_line(str(error), LONGEST)
    except BaseException as other:
        text = f"(its text raises {type(other).__name__})"
    kind: type = MpidistError
    if isinstance(error, MpidistError):
        kind = type(error)
    else:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if fault is not None and isinstance(error, Exception):
            kind = fault(error)
    known = next(one for one in kind.__mro__ if one.__module__.split(".")[0] == "mpidist")
    secondary = bool(getattr(error, "secondary", False))
    return Failure(
        f"{known.__module__}:{known.__qualname__}", text, socket.gethostname(), secondary
    )


def _stays(error: BaseException, fault) -> bool:
    """Whether the rank that raised `error` goes on with it as it is."""
    converted = fault is not None and isinstance(error, Exception)
    return not isinstance(error, MpidistError) and not converted


def _pack(failure: Failure | None, value) -> bytes:
    return MPI.pickle.dumps((failure and tuple(failure), value))


#: What a rank has to tell that neither failed nor is asked.
_NOTHING = _pack(None, None)


def _unpack(data: bytes) -> tuple[Failure | None, Any]:
    failure, value = MPI.pickle.loads(data)
    return failure and Failure(*failure), value


def _answers(doing: str, everyone: list[bytes], decide, each: bool) -> list[bytes]:
    """Rank 0: what each rank is told. Raises what `decide` raises."""
    outcomes = [_unpack(data) for data in everyone]
    verdict = _joined(doing, [failure for failure, _ in outcomes])
    if verdict is not None:
        return [_pack(verdict, None)] * len(everyone)
    chosen = decide([result for _, result in outcomes])
    if not each:
        return [_pack(None, chosen)] * len(everyone)
    answers = [_pack(None, one) for one in chosen]
    if len(answers) != len(everyone):
        raise ValueError(f"{len(answers)} answers for {len(everyone)} ranks")
    return answers


def _joined(doing: str, failures: list[Failure | None]) -> Failure | None:
    """Join the failures of the ranks to one: that of the first who knows the cause. Pure."""
    size = len(failures)
    failed = [(rank, one) for rank, one in enumerate(failures) if one]
    if not failed:
        return None
    rank, first = min(failed, key=lambda item: (item[1].secondary, item[0]))
    if len({one.text for _, one in failed}) == 1 and len(failed) == size > 1:
        return first._replace(text=f"{doing}: all {size} ranks: {first.text}", secondary=False)
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    text = f"{doing}: rank {rank} of {size} ({first.host}): {first.text}{more}"
    return first._replace(text=text, secondary=True)


def _of_rank_0(doing: str, error: BaseException, fault, size: int) -> Failure:
    """What all are told of a failure of `decide`, which knows all ranks and may name others."""
    failure = failure_of(error, fault)
    if isinstance(error, MpidistError):
        return failure._replace(secondary=False)
    text = f"{doing}: rank 0 of {size} ({failure.host}): {failure.text}"
    return failure._replace(text=text, secondary=True)


def _rebuilt(failure: Failure, cause: BaseException | None) -> MpidistError:
    """Return the error of a verdict; on a rank that failed it has the facts of the own error."""
    module, _, name = failure.kind.partition(":")
    kind: Any = MpidistError
    with contextlib.suppress(Exception):
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type) and issubclass(found, MpidistError):
            kind = found
    try:
        error = kind(failure.text)
    except Exception:  # made of something else than a text
        error = kind.__new__(kind, failure.text)
        Exception.__init__(error, failure.text)
    if isinstance(cause, kind):
        error.__dict__.update(cause.__dict__)
    error.everywhere = True  # all ranks raise together; one of them speaks,
    knows = cause is not None and not getattr(cause, "secondary", False)
    error.secondary = failure.secondary and not knows  # one that knows the cause first
    return error
