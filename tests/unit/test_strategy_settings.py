"""Settings of parameter servers in a job file: each belongs to a mode."""

import pytest

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.training.checks import check_elastic
from mpidist.training.strategies import from_settings


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, md.BSP()),
        ({"consistency": "ssp", "staleness": 2}, md.SSP(2)),
        ({"consistency": "dssp"}, md.DSSP()),
        ({"consistency": "backup_workers", "count": 2}, md.BackupWorkers(2)),
        ({"consistency": "dssp", "low": 1, "high": 4, "rule": "paper"}, md.DSSP(1, 4, "paper")),
    ],
)
def test_a_mode_and_its_settings(settings, mode):
    assert from_settings("parameter_server", settings).consistency == mode


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"staleness": 2}, "staleness=2 needs consistency='ssp', got 'bsp'"),
        ({"consistency": "ssp", "low": 2}, "low=2 needs consistency='dssp', got 'ssp'"),
        ({"consistency": "dssp", "low": 5, "high": 2}, "low=5 is above high=2"),
        ({"consistency": "dssp", "low": "1"}, "DSSP: low is '1'"),
        ({"count": 2}, "count=2 needs consistency='backup_workers', got 'bsp'"),
        ({"consistency": "dsp"}, "unknown consistency 'dsp'.*did you mean"),
        ({"push_every": 2}, "push_every=2 needs consistency ASP, SSP.1. or more, or DSSP, got BSP"),
        ({"consistency": "asp", "pull_every": 0}, "pull_every"),
        ({"consistency": "asp", "push_every": 1.5}, "push_every"),
        ({"rebalance": "yes"}, "rebalance='yes'; expected 'auto', every how many steps"),
        ({"consistency": "backup_workers", "rebalance": 5}, "needs workers that make all steps"),
        ({"nonfinite": "keep"}, "nonfinite is 'keep'; give 'raise' or 'drop'"),
        ({"changes": 3}, r"changes=3; expected a list of \[step, mode\]"),
        ({"changes": [[3, "asp"], [2, "bsp"]]}, "are not in ascending order"),
        ({"changes": [[2, "asp"], [2, "bsp"]]}, "a step is in the list twice"),
        ({"changes": [[2, "backup_workers"]]}, "may change between BSP, SSP, DSSP and ASP"),
        ({"changes": [[1, "asp"]]}, "changes: step is 1, expected a whole number of at least 2"),
        ({"changes": [[2, {"name": "ssp", "low": 1}]]}, "low"),
    ],
)
def test_bad_settings(settings, text):
    with pytest.raises(ConfigError, match=text):
        from_settings("parameter_server", settings)


def test_changes_of_the_mode():
    changes = [[2, "asp"], [5, {"name": "ssp", "staleness": 4}]]
    made = from_settings("parameter_server", {"changes": changes})
    assert made == md.ParameterServer(changes={2: md.ASP(), 5: md.SSP(4)})
    modes = [made.changes(step) for step in range(1, 7)]
    assert modes == [None, *[md.ASP()] * 3, *[md.SSP(4)] * 2]
    with pytest.raises(ConfigError, match="changes: after a death"):
        check_elastic(True, made, None)
    with pytest.raises(ConfigError, match="changes: push_every and pull_every need one mode"):
        md.ParameterServer(1, md.ASP(), push_every=2, changes={3: md.SSP(2)})


def test_rebalance():
    made = from_settings("parameter_server", {"rebalance": {"every": 50, "gain": 0.2}})
    assert made == md.ParameterServer(rebalance=md.Rebalance(50, 0.2))
    assert md.ParameterServer(rebalance="auto").rebalance == md.Rebalance()
    assert check_elastic(True, made, None) is not None


def test_rare_pushes_and_pulls():
    made = from_settings(
        "parameter_server", {"consistency": "asp", "push_every": 2, "pull_every": 3}
    )
    assert made == md.ParameterServer(1, md.ASP(), push_every=2, pull_every=3)
    with pytest.raises(ConfigError, match="a death would lose gradients"):
        check_elastic(True, made, None)
