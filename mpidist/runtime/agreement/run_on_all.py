"""`run_on_all`: local work whose failure on one rank raises an error on all ranks.

    every rank   local()                 checks, files, memory: no communication
    agreement    one allreduce           same operation? did a rank fail? are all results equal?
    only if a rank failed, or if results differ and there is a `decide`:
    rank 0       <-- gather --           the result of each rank, or its error
    only if a rank failed, or if there is a `decide`:
    rank 0       decide([...])
    every rank   <-- bcast, scatter --   the answer, or one error for all

A waiting rank polls, and so notices if another rank is in another operation; both ranks then raise
`MismatchError`.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from ...errors import ConfigError, MismatchError, MpidistError, described, in_one_line, shown
from .mismatch import rank_list
from .rounds import LONGEST, ROOM, Polled, Private


class Failure(NamedTuple):
    """A description of one rank's exception in strings, as not every exception can be pickled.

    `kind` is ``module:class``, and `text` is one line. `secondary` is true for an exception that
    only reports another rank's exception.
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
    """Run `local` on all ranks; if one rank fails, all raise an error. Collective over `comm`.

    If no rank fails and the caller passes no function `decide`, the cost is one small allreduce.

    Parameters
    ----------
    doing : str
        The name of this work for error texts, equal on all ranks.
    local : callable
        The work of this rank, which may call a collective on `comm` only if all ranks call it.
    decide : callable, optional
        A function that rank 0 calls with the results of `local` of all ranks, in rank order.
    each : bool
        Whether `decide` returns a list with one answer for each rank, instead of one for all.
    exchange : callable, optional
        A function that sends one object of this rank to all ranks and returns the objects of all
        ranks. `run_on_all` then itself sends nothing on `comm`.
    fault : callable, optional
        A function that takes an exception of `local` or `decide` that is no error of mpidist, and
        returns the class of the error that all ranks raise instead.
    if_differs : bool
        Call `decide` only if the results differ between ranks.
    number : callable, optional
        A function that rank 0 calls after `local`; it returns an integer >= 0, which is sent to all
        ranks.
    agreed : int, optional
        How many bytes each rank reserves for its result in its message to rank 0, equal on all
        ranks. Pass it only if all ranks are known to make this call, because the allreduce that
        checks this is then left out.
    room : int
        The size in bytes of the first message with rank 0's answer, equal on all ranks; a longer
        answer needs a second message.

    Returns
    -------
    object
        The answer of `decide`, or this rank's own result if `decide` was not called. If `number` is
        given, the result is a pair of this object and the integer that `number` returned on rank 0.

    Raises
    ------
    MpidistError
        On all ranks, if `local` failed on some rank or if `decide` failed. The text names the rank
        that failed, its host and the cause. If the exception is an error of mpidist, all ranks
        raise an error of its class; otherwise the failing rank raises its own exception, unless
        `fault` returns another class.
    MismatchError
        On all ranks, if a rank is in another operation.
    """
    channel = Private(comm, exchange) if exchange else Polled(comm)
    own: list[BaseException] = []  # the exception of this rank

    def answers(everyone: list[bytes]) -> list[bytes]:
        """On rank 0, compute the pickled answer for each rank from the messages of all ranks."""
        try:
            return _answers(doing, everyone, decide, each)
        except BaseException as error:
            own[:] = [error]
            told = _of_rank_0(doing, error, fault, channel.size)
            return [_pack(told, None)] * channel.size

    with channel.call(doing):
        result, mine, largest, answer = None, 0, 0, None
        try:
            result = local()
            packed = _NOTHING if decide is None else _pack(None, result)
            mine = number() if number and channel.rank == 0 else 0
        except BaseException as error:
            own.append(error)
            packed = _pack(failure_of(error, fault), None)
        cause = own[0] if own else None
        if agreed is not None:
            answer = channel.without_agreement(doing, packed, cause, agreed, answers)
        failure, value = None, result
        if answer is None:
            failed, differs, largest = channel.begin(doing, packed, cause, mine)
            if failed or (decide is not None and (differs or not if_differs)):
                everyone = channel.gather(packed) if failed or differs else [packed] * channel.size
                told = answers(everyone) if channel.rank == 0 else []
                answer = channel.hand_out(told, each, room)
        channel.end()
        if answer is not None:
            failure, value = _unpack(answer)
    if failure is None:
        return (value, largest) if number else value
    # The error is raised outside the ``with`` block, because the guard of the block would send the
    # error to the other ranks. All ranks have the error already, so the communicator stays usable.
    cause = own[0] if own else None
    own.clear()
    try:
        converted = fault is not None and isinstance(cause, Exception)
        if cause is not None and not isinstance(cause, MpidistError) and not converted:
            raise cause
        raise _rebuilt(failure, cause) from cause
    finally:
        del cause  # this breaks a cycle: the traceback of `cause` refers to this frame


def same_on_all(
    comm,
    doing: str,
    local: Callable[[], dict[str, Any]],
    exchange: Callable[[Any], list] | None = None,
    *,
    fault: Callable[[Exception], type[MpidistError]] | None = None,
    number: Callable[[], int] | None = None,
):
    """Check that the arguments in the dict that `local` returns are equal on all ranks.

    Collective over `comm`. Returns the arguments of this rank. They are compared by their ``repr``,
    so they should be numbers and texts, not arrays. If an argument differs, all ranks raise
    MismatchError. The errors of `run_on_all` are raised, too. If the function `number` is given,
    rank 0 calls it, and `same_on_all` returns a pair: the arguments, and the integer that `number`
    returned on rank 0.
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
    """Return a text on the first key whose value differs between the ranks' dicts, or None."""
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
    """Return the description of an error. Never raises, even if methods of `error` raise."""
    ours = isinstance(error, MpidistError)
    text = described(error, LONGEST, named=not ours)
    kind: type = type(error) if ours else MpidistError
    if fault is not None and not ours and isinstance(error, Exception):
        kind = fault(error)
    known = next(one for one in kind.__mro__ if one.__module__.split(".")[0] == "mpidist")
    name, secondary = f"{known.__module__}:{known.__qualname__}", getattr(error, "secondary", False)
    return Failure(name, text, socket.gethostname(), bool(secondary))


def _pack(failure: Failure | None, value) -> bytes:
    return MPI.pickle.dumps((failure and tuple(failure), value))


#: The message of a rank that has not failed, if there is no function `decide` to use its result.
_NOTHING = _pack(None, None)


def _unpack(data: bytes) -> tuple[Failure | None, Any]:
    failure, value = MPI.pickle.loads(data)
    return failure and Failure(*failure), value


def _answers(doing: str, everyone: list[bytes], decide, each: bool) -> list[bytes]:
    """Return the pickled answers of rank 0, one for each rank. Raises what `decide` raises."""
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
    """Return the `Failure` that all ranks raise: from the lowest rank that knows the cause."""
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
    """Return the `Failure` that all ranks raise if `decide` raised `error` on rank 0."""
    failure = failure_of(error, fault)
    if isinstance(error, MpidistError):
        return failure._replace(secondary=False)
    text = f"{doing}: rank 0 of {size} ({failure.host}): {failure.text}"
    return failure._replace(text=text, secondary=True)


def _rebuilt(failure: Failure, cause: BaseException | None) -> MpidistError:
    """Return the exception that `failure` describes, with the attributes of `cause`."""
    module, _, name = failure.kind.partition(":")
    kind: Any = MpidistError
    with contextlib.suppress(Exception):
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type) and issubclass(found, MpidistError):
            kind = found
    try:
        error = kind(failure.text)
    except Exception:  # the constructor of the class takes other arguments
        error = kind.__new__(kind, failure.text)
        Exception.__init__(error, failure.text)
    if isinstance(cause, kind):
        error.__dict__.update(cause.__dict__)
    error.everywhere = True  # a rank that knows the cause prints the error
    knows = cause is not None and not getattr(cause, "secondary", False)
    error.secondary = failure.secondary and not knows
    return error
