"""The bits with which the ranks of an elastic group tell each other how they go on.

An elastic group is a group of ranks that goes on after a rank has died. Each rank passes an int,
and `ulfm.Membership` combines the ints of all living ranks by a bitwise "and". The low bits say,
for example, that the rank is well or that it exits. The bits from 8 on are an exit code.
"""

from __future__ import annotations

#: The meaning of each bit if it is 1 on all ranks: all ranks are well, the job continues, the work
#: is done, all ranks exit, all ranks are spares.
WELL, GO_ON, DONE, LEAVE, SPARE = 1, 2, 4, 8, 16
_CODE = 8
#: The bits of the exit code on a rank that has no exit code.
NO_CODE = 0xFF << _CODE


def ending(code: int) -> int:
    """Return the int with which a failed rank ends the job with exit code `code`."""
    return code << _CODE


def exiting(code: int) -> int:
    """Return the int with which a rank tells the other ranks that it exits with `code`."""
    # The bits of the code are inverted, because the spares must get code 0 only if all ranks exit
    # with code 0.
    return GO_ON | LEAVE | (NO_CODE ^ code << _CODE)


def end_code(value: int) -> int | None:
    """Return the exit code with which the job ends, or None if the job continues.

    `value` is the bitwise "and" of the ints that all ranks have passed.
    """
    return None if value & GO_ON else value >> _CODE or 1


def leave_code(value: int) -> int | None:
    """Return the code with which the spares must exit, or None if they go on waiting.

    A spare is a rank that waits to replace a dead one. `value` is the bitwise "and" of the ints
    that all ranks have passed.
    """
    leave = value & LEAVE and not value & SPARE
    return (NO_CODE & ~value) >> _CODE if leave else None
