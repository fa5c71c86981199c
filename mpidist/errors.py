"""The error classes of mpidist and their exit codes.

The text of an error is one line: what happened, the value that was given, the value that was
expected, the rank, host and operation, and what to do. If the attribute ``everywhere`` of an error
is true, all ranks have raised the error together, and only one rank prints it.
"""


class MpidistError(Exception):
    """The base class of all errors that mpidist raises."""

    exit_code = 1
    everywhere = False
    #: True if the error only reports an exception of another rank, which prints that exception.
    secondary = False
    #: True if another process prints the same error, so this process prints nothing.
    quiet = False
    #: True if the error was raised before an MPI call in which the other ranks wait for this rank.
    awaited = False


class ConfigError(MpidistError, ValueError):
    """An input is wrong: an argument, a job file, or a launch."""

    exit_code = 2


class ProtocolError(MpidistError, RuntimeError):
    """Functions are called in a wrong order, an object is closed, or a message cannot be read."""


class ClosedError(ProtocolError):
    """An object is used after it was closed."""

    exit_code = 2


class MismatchError(MpidistError):
    """The ranks of a communicator make different calls or pass different arguments.

    Raised on all ranks.
    """

    everywhere = True
    #: True if ranks wait for each other on two communicators.
    crossed = False


class ReplicaError(MpidistError):
    """The copies of a model on several ranks differ, although they must be equal to the last bit.

    Raised on all ranks. The list ``ranks`` has the ranks whose copies differ from those of most
    ranks; it is empty if there is no majority. ``tensors`` are the names of the tensors that
    differ.
    """

    everywhere = True

    def __init__(self, message: str, ranks: tuple[int, ...] = (), tensors: tuple[str, ...] = ()):
        super().__init__(message)
        self.ranks, self.tensors = tuple(ranks), tuple(tensors)


class RankFailure(MpidistError):
    """A rank has died or has not answered before the deadline. Raised on the living ranks."""

    exit_code = 70
    everywhere = True

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


class CheckpointError(MpidistError):
    """A checkpoint cannot be written or read, or it is damaged, or it belongs to another model."""


class StorageError(CheckpointError):
    """A checkpoint cannot be written or read because of missing space, memory or folders.

    The same call may succeed later. `md.train` prints the error and continues to train.
    """


class ForeignCheckpoint(CheckpointError):
    """A checkpoint is not damaged, but the given state belongs to another model."""

    exit_code = 2


class NoCheckpoint(CheckpointError):
    """There is no usable checkpoint in the given folder."""

    exit_code = 2


class BadRecord(MpidistError, ValueError):
    """One record of a data source cannot be used. Training skips the record."""

    def __init__(self, index: int, reason: str):
        super().__init__(f"record {index}: {reason}")
        self.index, self.reason = index, reason


class SourceError(MpidistError):
    """A data source can no longer be read, even after several attempts."""


class TooManyBadRecords(MpidistError):
    """A data source has more bad records than the run may skip. Raised on all ranks.

    The attribute ``records`` lists (index, reason) of all bad records. It is empty on parameter
    servers, which read no data.
    """

    everywhere = True

    def __init__(self, message: str, records: tuple[tuple[int, str], ...] = ()):
        super().__init__(message)
        self.records = tuple(records)


def in_one_line(text: str, longest: int = 200) -> str:
    """Return `text` as one line of at most `longest` characters that can be sent and printed."""
    text = " ".join(text.split())
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return text.encode(errors="backslashreplace").decode()


def shown(value, longest: int = 200) -> str:
    """Return ``repr(value)`` as one line for an error text. Never raises."""
    try:
        text = repr(value)
    except BaseException as error:
        return f"{type(value).__name__} object (its repr raises {type(error).__name__})"
    return in_one_line(text, longest)


def nearest(given, known) -> str:
    """Return the text ``; did you mean 'x'?`` with the known name nearest to `given`, or ""."""
    import difflib

    if not isinstance(given, str):
        return ""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def described(error: BaseException, longest: int = 300, *, named: bool = True) -> str:
    """Return the text of an exception in one line, even if ``str(error)`` raises an exception."""
    try:
        text = in_one_line(str(error), longest)
    except BaseException as other:
        text = f"(its text raises {type(other).__name__})"
    name = type(error).__name__
    return text if not named else f"{name}: {text}" if text else name
