"""What the living ranks of an elastic group make of each other's bits (R46, R48)."""

from functools import reduce
from operator import and_

import pytest

from mpidist.runtime.agreement.agreed_bits import (
    DONE,
    GO_ON,
    LEAVE,
    NO_CODE,
    SPARE,
    WELL,
    end_code,
    ending,
    exiting,
    leave_code,
)

WAITING_SPARE = GO_ON | WELL | DONE | LEAVE | SPARE | NO_CODE
WORKING = GO_ON | WELL | NO_CODE


def agreed(*ranks):
    value = reduce(and_, ranks)
    return end_code(value), leave_code(value)


def test_the_work_goes_on():
    assert agreed(WORKING, WORKING, WAITING_SPARE) == (None, None)
    assert agreed(WAITING_SPARE, WAITING_SPARE) == (None, None)


@pytest.mark.parametrize("code", [1, 2, 70, 75, 255])
def test_one_rank_ends_the_job(code):
    assert agreed(WORKING, ending(code), WAITING_SPARE) == (code, None)
    assert agreed(ending(code), ending(code))[0] == code


def test_ranks_that_end_the_job_with_different_codes_end_it_with_an_error():
    assert agreed(ending(1), ending(2), WORKING)[0] == 1


@pytest.mark.parametrize("codes", [(0, 0), (75, 75), (0, 3), (3, 0), (5, 2)])
def test_spares_leave_with_the_others(codes):
    """With code 0 only if all others do."""
    end, leave = agreed(*map(exiting, codes), WAITING_SPARE)
    assert end is None
    assert (leave == 0) == (set(codes) == {0})
    if len(set(codes)) == 1:
        assert leave == codes[0]
