"""Job files on data whose first records are bad: they are skipped before the first step (R42)."""

import pytest

from mpidist.errors import ConfigError
from mpidist.training import job as jobs


@pytest.fixture
def table(tmp_path):
    def make(lines):
        path = tmp_path / "data"
        path.write_text("\n".join(lines))
        data = {"name": "libsvm", "path": str(path), "test_path": str(path)}
        return jobs.check_job(
            {
                "epochs": 1,
                "global_batch": 4,
                "data": data,
                "model": {"name": "logistic", "inputs": 4, "classes": 2},
                "optimizer": {"name": "sgd", "lr": 0.1},
            }
        )

    return make


def test_the_first_records_may_be_bad(table):
    """Whether model and data fit is seen by the first record that can be read."""
    parts = jobs.build_run(table(["torn", "1 9", *["1 4:1", "0 2:1"] * 5]), 2)
    assert len(parts.train) == 12
    with pytest.raises(ConfigError, match=r"input has shape \(1, 9\), expected"):
        jobs.build_run(table(["torn", *["1 9:1", "0 2:1"] * 5]), 2)


def test_no_record_can_be_read(table):
    with pytest.raises(ConfigError, match="last attempt failed with: record 15"):
        jobs.build_run(table(["torn"] * 20), 2)
