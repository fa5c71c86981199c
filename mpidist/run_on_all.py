"""`run_on_all`: local work whose failure on one rank is an error on all of them.

    every rank   local()                 checks, files, memory: no communication
    agreement    one allreduce           same operation? did any rank fail?
    only where somebody failed, or something is decided:
    rank 0       <-- gather --           what each rank found, or why it failed
                 decide([...])
    every rank   <-- bcast, scatter --   the answer, or one error for all

No rank is left alone in a collective call, because nothing between two of them may raise: also
pickling and the texts of errors stand inside the guarded part. All waits are polled, so a rank in
another operation raises `MismatchError` together with those that are here.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import itertools
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from .context import of
from .errors import MismatchError, MpidistError
from .mismatch import Signature

#: Bytes that rank 0 may receive in messages that are filled up to one length, in place of two
#: rounds: the lengths, then the data.
_FILLED_UP = 1 << 20
#: Bytes of the first message of an answer: its length, and as much of it as there is room for.
_HEAD = 1024
_LONGEST_TEXT = 4000


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

    Returns
    -------
    object
        What rank 0 decided; without `decide` this rank's own result.

    Raises
    ------
    MpidistError
        On all ranks, where `local` failed on some or `decide` failed: of the class that failed
        where that is one of mpidist, naming the rank, its host and the cause. What is none of
        mpidist, such as KeyboardInterrupt, goes on as itself on the rank where it was raised.
    MismatchError
        On all ranks, where a rank is in another operation.
    """
    rank, size = comm.rank, comm.size
    channel = _Private(comm, exchange) if exchange else _Polled(comm)
    cause: BaseException | None = None
    result = None
    try:
        try:
            result = local()
            packed = _NOTHING if decide is None else _pack(None, result)
        except BaseException as error:
            cause, packed = error, _pack(failure_of(error, fault), None)
        if not channel.begin(doing, packed, cause) and decide is None:
            return result
        everyone = channel.gather(packed)
        answers: list[bytes] = []
        if rank == 0:
            try:
                answers = _answers(doing, everyone, decide, each)
            except BaseException as error:
                cause = error
                answers = [_pack(_of_rank_0(doing, error, fault, size), None)] * size
        failure, value = _unpack(channel.hand_out(answers, each))
        if failure is None:
            return value
        if cause is not None and _stays(cause, fault):
            raise cause
        raise _rebuilt(failure, cause) from cause
    finally:
        cause = None  # its traceback names this frame


def shown(value, longest: int = 200) -> str:
    """Return ``repr(value)`` for a message: one line, cut, and never an exception. Local."""
    try:
        text = repr(value)
    except BaseException as error:
        return f"{type(value).__name__} object (its repr raises {type(error).__name__})"
    return _line(text, longest)


def failure_of(
    error: BaseException, fault: Callable[[Exception], type[MpidistError]] | None = None
) -> Failure:
    """Return what is told of an error; never raises, whatever the error's own methods do. Local."""
    try:
        text = _line(str(error), _LONGEST_TEXT)
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
    secondary = bool(getattr(error, "consequence", False))
    return Failure(
        f"{known.__module__}:{known.__qualname__}", text, socket.gethostname(), secondary
    )


def _line(text: str, longest: int) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return text.encode(errors="backslashreplace").decode()


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
    knows = cause is not None and not getattr(cause, "consequence", False)
    error.consequence = failure.secondary and not knows  # one that knows the cause first
    return error


class _Polled:
    """Rounds on the context of a communicator."""

    def __init__(self, comm):
        self.context = of(comm)
        self.rank, self.size = comm.rank, comm.size
        self.longest = 0

    def begin(self, doing: str, packed: bytes, cause: BaseException | None) -> bool:
        """Agree that all ranks are here; return whether one of them failed."""
        context = self.context
        if cause is not None and context.stopped:
            raise cause  # which is why there is nobody to tell any more
        signature = Signature(_line(doing, _LONGEST_TEXT), "", "")
        try:
            context.begin(signature)
            failed, self.longest = context.agree(signature, cause is not None, len(packed))
        except MismatchError as error:
            raise error from cause
        return bool(failed)

    def gather(self, data: bytes) -> list[bytes]:
        """Return everyone's `data` on rank 0."""
        if self.size == 1:
            return [data]
        control, root, size = self.context.control, self.rank == 0, self.size
        if size * self.longest <= _FILLED_UP:
            mine = np.zeros(self.longest, np.uint8)
            mine[: len(data)] = np.frombuffer(data, np.uint8)
            rows = np.empty((size if root else 0, self.longest), np.uint8)
            self._wait(control.Igather(mine, rows if root else None, 0))
            return [row.tobytes() for row in rows]  # pickle stops where its data end
        lengths = np.zeros(size, np.int64)
        number = np.array([len(data)], np.int64)
        self._wait(control.Igather(number, lengths if root else None, 0))
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        everything = np.empty(starts[-1], np.uint8)
        target = [everything, lengths.tolist(), starts[:-1], MPI.BYTE]
        self._wait(control.Igatherv([data, MPI.BYTE], target if root else None, 0))
        if not root:
            return []
        ends = itertools.pairwise(starts)
        return [everything[start:end].tobytes() for start, end in ends]

    def hand_out(self, answers: list[bytes], each: bool) -> bytes:
        """Return this rank's of rank 0's answers."""
        if self.size == 1:
            return answers[0]
        return self._scatter(answers) if each else self._bcast(answers)

    def _bcast(self, answers: list[bytes]) -> bytes:
        control = self.context.control
        head = np.zeros(_HEAD, np.uint8)
        room = _HEAD - 8
        if self.rank == 0:
            head[:8] = np.frombuffer(len(answers[0]).to_bytes(8, "little"), np.uint8)
            first = answers[0][:room]
            head[8 : 8 + len(first)] = np.frombuffer(first, np.uint8)
        self._wait(control.Ibcast(head, 0))
        length = int.from_bytes(head[:8].tobytes(), "little")
        if length <= room:
            return head[8 : 8 + length].tobytes()
        rest = np.empty(length - room, np.uint8)
        if self.rank == 0:
            rest[:] = np.frombuffer(answers[0], np.uint8)[room:]
        self._wait(control.Ibcast(rest, 0))
        return head[8:].tobytes() + rest.tobytes()

    def _scatter(self, answers: list[bytes]) -> bytes:
        control, root = self.context.control, self.rank == 0
        lengths = np.array([len(one) for one in answers], np.int64)
        number = np.zeros(1, np.int64)
        self._wait(control.Iscatter(lengths if root else None, number, 0))
        mine = np.empty(int(number[0]), np.uint8)
        source: Any = None
        if root:
            starts = (np.cumsum(lengths) - lengths).tolist()
            everything = np.frombuffer(b"".join(answers), np.uint8)
            source = [everything, lengths.tolist(), starts, MPI.BYTE]
        self._wait(control.Iscatterv(source, [mine, MPI.BYTE], 0))
        return mine.tobytes()

    def _wait(self, request: MPI.Request) -> None:
        self.context.wait(request.Test)


class _Private:
    """Rounds on a channel that the caller has: it brings an object of each rank to all."""

    def __init__(self, comm, exchange: Callable[[Any], list]):
        self.rank, self.exchange = comm.rank, exchange
        self._everyone: list[bytes] = []

    def begin(self, doing: str, packed: bytes, cause: BaseException | None) -> bool:
        """Tell all ranks what this one found; return whether one of them failed."""
        failed = cause is not None
        try:
            told = self.exchange([failed, _text(packed)])
        except Exception as error:
            if cause is not None:
                raise cause from error  # nobody else listens any more
            raise
        self._everyone = [_bytes(text) for _, text in told]
        return any(failed for failed, _ in told)

    def gather(self, data: bytes) -> list[bytes]:
        return self._everyone

    def hand_out(self, answers: list[bytes], each: bool) -> bytes:
        said = [_text(one) for one in (answers if each else answers[:1])]
        told = self.exchange(said)[0]
        return _bytes(told[self.rank if each else 0])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()  # an exchange may know JSON only


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
