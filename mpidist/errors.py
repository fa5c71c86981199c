"""Every error that mpidist raises by name, and the exit code each one stands for.

A message is one line: what happened, what was given, what was expected, where (rank, host,
operation), what to do. An error whose ``everywhere`` is true has been raised on all ranks
together, so one rank speaks for all of them.
"""


class MpidistError(Exception):
    """Base of all errors raised by mpidist."""

    exit_code = 1
    everywhere = False
    #: It only reports another rank's exception, so the rank that knows the cause speaks first.
    secondary = False
    #: Another process tells the same; this one keeps silent.
    quiet = False
    #: It came on the way to MPI, where ranks without it wait for this one.
    awaited = False


class ConfigError(MpidistError, ValueError):
    """Bad input: an argument, a job file, a launch that cannot work."""

    exit_code = 2


class ProtocolError(MpidistError, RuntimeError):
    """A call in the wrong order or on a closed object, or a message that cannot be read."""


class ClosedError(ProtocolError):
    """Something was used after it was closed."""

    exit_code = 2


class MismatchError(MpidistError):
    """The ranks of a communicator do not agree on what they are doing. Raised on all ranks."""

    everywhere = True
    #: Ranks wait for each other on two communicators, and neither can go on.
    crossed = False


class ReplicaError(MpidistError):
    """Replicas that must be equal to the last bit are not. Raised on all ranks.

    ``ranks`` are those that differ from the most, empty where no side has more; ``tensors`` are
    the names of what differs.
    """

    everywhere = True

    def __init__(self, message: str, ranks: tuple[int, ...] = (), tensors: tuple[str, ...] = ()):
        super().__init__(message)
        self.ranks, self.tensors = tuple(ranks), tuple(tensors)


class RankFailure(MpidistError):
    """A rank died or did not answer before its deadline. Raised on the living ranks."""

    exit_code = 70

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


class CheckpointError(MpidistError):
    """A checkpoint could not be written, or what was read is damaged or foreign."""


class StorageError(CheckpointError):
    """A checkpoint could not be written or read for want of space, memory, or a folder.

    The same call may work later: `md.train` says so and goes on.
    """


class ForeignCheckpoint(CheckpointError):
    """A checkpoint is good, but of another model than the one it is restored to."""

    exit_code = 2


class NoCheckpoint(CheckpointError):
    """There is no good checkpoint where one was asked for."""

    exit_code = 2


class BadRecord(MpidistError, ValueError):
    """One record of a data source cannot be used. A source raises it; training skips the record."""

    def __init__(self, index: int, reason: str):
        super().__init__(f"record {index}: {reason}")
        self.index, self.reason = index, reason


class SourceError(MpidistError):
    """Nothing of a data source can be read any more, however often it is tried."""


class TooManyBadRecords(MpidistError):
    """More records are bad than the run was allowed to skip. Raised on all ranks.

    ``records`` are all (index, reason); a server, which reads no data, has none of them.
    """

    everywhere = True

    def __init__(self, message: str, records: tuple[tuple[int, str], ...] = ()):
        super().__init__(message)
        self.records = tuple(records)


def in_one_line(text: str, longest: int = 200) -> str:
    """Return `text` as one line that can be sent and printed, cut."""
    text = " ".join(text.split())
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return text.encode(errors="backslashreplace").decode()


def shown(value, longest: int = 200) -> str:
    """Return ``repr(value)`` for a message: one line, cut, and never an exception."""
    try:
        text = repr(value)
    except BaseException as error:
        return f"{type(value).__name__} object (its repr raises {type(error).__name__})"
    return in_one_line(text, longest)


def nearest(given, known) -> str:
    """Name the known key closest to `given`, as ``did you mean 'x'?``; "" for no text."""
    import difflib

    if not isinstance(given, str):
        return ""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def described(error: BaseException) -> str:
    """Describe an exception in one line, even if its own text cannot be made."""
    try:
        text = in_one_line(str(error), 300)
    except BaseException as other:
        text = f"(its text raises {type(other).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
