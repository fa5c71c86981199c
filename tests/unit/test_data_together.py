"""A sample does not depend on the other samples of its batch, as `microbatches` requires."""

import numpy as np
import pytest

from mpidist import data

JOBS = [
    {},
    {"distort": {"copies": 3, "shift": 0.5, "turn": 10, "scale": 0.1}},
]


@pytest.mark.parametrize("settings", JOBS)
def test_any_company_gives_the_same_bits(settings):
    """Issue 3, point 5: ranks take their pieces at once, so other samples on other rank counts."""
    source, _ = data.from_settings("digits", settings)
    indices = np.random.default_rng(0).integers(0, len(source), 64)
    whole = source.take(indices)
    for cut in (1, 3, 4, 7, 16, 21):
        parts = [source.take(indices[k : k + cut]) for k in range(0, 64, cut)]
        for k, array in enumerate(whole):
            assert np.concatenate([part[k] for part in parts]).tobytes() == array.tobytes()
