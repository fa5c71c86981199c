"""Make a few hundred of the random calls of ``make fuzz``."""

import pytest
from fuzz import DTYPES, KINDS, LAYOUTS, Fuzz


@pytest.mark.ranks(1, 2, further=(5,))
def test_mixed_calls_against_numpy(comm):
    fuzz = Fuzz(comm, seed=3)
    assert fuzz.run(120) == []
    fuzz.close()


@pytest.mark.ranks(3)
def test_what_is_drawn(comm):
    """Every kind of call, communicator, dtype and layout comes to its turn."""
    fuzz = Fuzz(comm, seed=4)
    assert fuzz.run(250) == []
    names = {*KINDS, *fuzz.comms, *(each.__name__ for each in LAYOUTS), "no axis", "empty"}
    assert names | {str(dtype) for dtype in DTYPES} == set(fuzz.seen)
    assert len(DTYPES) == 18
    fuzz.close()
