"""The errors for unknown names and settings in a job file."""

import pytest

from mpidist.errors import ConfigError
from mpidist.registry import build, look_up


def thing(a, b=2):
    return a, b


def test_build():
    """R149: what a job file may say follows from the table and the signatures."""
    assert build({"thing": thing}, "thing", {"a": 1}, "gadget") == (1, 2)
    assert look_up({"thing": thing}, "thing", "gadget") is thing


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("thin", {}, "unknown gadget 'thin': expected one of 'thing'; did you mean 'thing'"),
        (7, {}, "unknown gadget 7: expected one of 'thing'"),
        (
            "thing",
            {"a": 1, "bb": 2},
            "gadget 'thing': unknown setting 'bb': expected 'a', 'b'; did",
        ),
        ("thing", {"b": 1}, "gadget 'thing': setting 'a' is missing"),
    ],
)
def test_bad_names(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        build({"thing": thing}, name, settings, "gadget")
