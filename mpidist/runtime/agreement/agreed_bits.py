"""The bits on which the living ranks of an elastic group agree, see `ulfm.Membership`.

An elastic group is a group of ranks that goes on after a rank has died.
"""

from __future__ import annotations

#: The meaning of each bit if it is 1 on all ranks: all ranks are well, the job continues, the work
#: is done, all ranks exit, all ranks are spares.
WELL, GO_ON, DONE, LEAVE, SPARE = 1, 2, 4, 8, 16
_CODE = 8
#: The bits of the exit code on a rank that has no exit code.
NO_CODE = 0xFF << _CODE


def ending(code: int) -> int:
    """Return the bits of a rank that ends the job with exit code `code` because of an error."""
    return code << _CODE


def exiting(code: int) -> int:
    """Return the bits of a rank that exits with `code`."""
    # The bits of the code are inverted, because the spares must get code 0 only if all ranks exit
    # with code 0.
    return GO_ON | LEAVE | (NO_CODE ^ code << _CODE)


def end_code(value: int) -> int | None:
    """Return the exit code with which the job ends, or None if the job continues.

    `value` is the bitwise "and" of all ranks' bits.
    """
    return None if value & GO_ON else value >> _CODE or 1


def leave_code(value: int) -> int | None:
    """Return the code with which ranks that wait to replace a dead one exit, or None.

    `value` is the bitwise "and" of all ranks' bits. None means that they go on waiting.
    """
    leave = value & LEAVE and not value & SPARE
    return (NO_CODE & ~value) >> _CODE if leave else None
