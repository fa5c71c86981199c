"""The bits on which the living ranks of an elastic group agree, see `ulfm.Membership`.

Each rank gives an integer, and MPI combines them by "and". So the result has a bit only if all
ranks have given it. An exit code of 8 bits stands above the other bits.
"""

from __future__ import annotations

#: All are well, the job goes on, the work is done, all exit, all are spares.
WELL, GO_ON, DONE, LEAVE, SPARE = 1, 2, 4, 8, 16
_CODE = 8
#: The code bits of a rank that has no exit code to tell.
NO_CODE = 0xFF << _CODE


def ending(code: int) -> int:
    """Return the bits of a rank that ends the job by an error with this exit code."""
    return code << _CODE


def exiting(code: int) -> int:
    """Return the bits of a rank that exits with this code, for the spares."""
    # The opposite, because the result must be 0 only if all ranks exit with 0.
    return GO_ON | LEAVE | (NO_CODE ^ code << _CODE)


def end_code(value: int) -> int | None:
    """Return the exit code with which the job ends, or None if it goes on."""
    return None if value & GO_ON else value >> _CODE or 1


def leave_code(value: int) -> int | None:
    """Return the code with which spares exit, or None if they do not."""
    leave = value & LEAVE and not value & SPARE
    return (NO_CODE & ~value) >> _CODE if leave else None
