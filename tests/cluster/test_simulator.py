"""The simulator, fitted at 2 ranks, predicts times on four hosts of a shaped network (issue 3)."""

import pytest
from benchmarks import simulate_check
from onebox.network import unavailable

pytestmark = pytest.mark.network

MIB = 1 << 20


@pytest.mark.skipif(unavailable() is not None, reason=f"no shaped network: {unavailable()}")
def test_predictions_come_true(openmpi):
    """Median error 15 %; of five attempts the best, since other work can only slow us down."""
    errors = []
    for _ in range(5):
        rows = simulate_check.check(
            "1gbit", [(4, 1)], [MIB, 4 * MIB], ["ring", "butterfly", "double_tree"], python=openmpi
        )
        errors.append(simulate_check.median_error(rows))
        if errors[-1] <= 0.15:
            return
    pytest.fail(f"median errors {errors}, expected at most 0.15")
