"""Parameters of which some are for `make test-all` only: cases of what other cases show as well."""

import pytest


def tiers(cases, *further):
    """Return the names of `cases` as parameters; those of `further` are exhaustive."""
    assert set(further) < set(cases), set(further) - set(cases)
    return [exhaustive(name) if name in further else name for name in cases]


def exhaustive(*values, **options):
    """A parameter that only `make test-all` plays."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)
