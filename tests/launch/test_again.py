"""`best_of_three` repeats a run that was not as usual, and hides no real error."""

import again
import pytest


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """What is played here is not told at the end of the report."""
    monkeypatch.setattr(again, "played_again", again.Counter())
    return again.played_again


def equal_to(wanted):
    def check(result):
        assert result == wanted
        return result

    return check


def test_the_first_that_is_as_usual_is_the_last(counted):
    runs = iter([1, 2, 3])
    assert again.best_of_three(equal_to(2), lambda: next(runs)) == 2
    assert list(runs) == [3]
    (test,) = counted
    assert test.endswith("test_the_first_that_is_as_usual_is_the_last")
    assert counted.total() == 1


def test_the_third_must_be_as_usual(counted):
    runs = iter([1, 2, 3])
    with pytest.raises(AssertionError):
        again.best_of_three(equal_to(4), lambda: next(runs), first=0)
    assert list(runs) == [3]
    assert counted.total() == 2


def test_a_mistake_is_not_played_again(counted):
    runs = iter([1, 2])

    def check(result):
        raise KeyError(result)

    with pytest.raises(KeyError):
        again.best_of_three(check, lambda: next(runs))
    assert list(runs) == [2]
    assert not counted
