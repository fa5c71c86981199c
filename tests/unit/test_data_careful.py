"""R42: what cannot be read or decoded is narrowed down to the record, and the rest is used."""

import numpy as np
import pytest

from mpidist.data import ArraySource
from mpidist.data.careful import Careful, told
from mpidist.errors import BadRecord, ConfigError

X, Y = np.arange(40.0).reshape(20, 2), np.arange(20)


class Broken:
    """Fails whenever one of its bad records is asked for, in the way that `fail` says."""

    def __init__(self, bad, fail):
        self.bad, self.fail, self.calls = set(bad), fail, 0

    def __len__(self):
        return 20

    def take(self, indices):
        self.calls += 1
        for index in indices:
            if index in self.bad:
                self.fail(int(index))
        return X[indices], Y[indices]


def say(index):
    raise BadRecord(index, "the checksum is wrong")


def stumble(index):
    raise UnicodeDecodeError("ascii", b"\xff", 0, 1, "ordinal not in range")


@pytest.mark.parametrize("fail", [say, stumble])
@pytest.mark.parametrize("bad", [[], [4], [4, 9], [9], [2, 4, 9]])
def test_the_good_ones_are_taken(fail, bad):
    indices = np.array([9, 2, 4])
    source = Broken(bad, fail)
    taken = Careful(source).take(indices)
    expected = [place for place, index in enumerate(indices) if index not in bad]
    assert taken.kept.tolist() == expected
    np.testing.assert_array_equal(taken.batch[0], X[indices[expected]])
    np.testing.assert_array_equal(taken.batch[1], Y[indices[expected]])
    assert {record.index for record in taken.bad} == set(bad)
    assert source.calls <= (1 if not bad else 5)
    for record in taken.bad:
        if fail is say:
            assert record.reason == "the checksum is wrong"
        else:
            assert record.reason.startswith("UnicodeDecodeError: 'ascii' codec can't decode")
            assert "(test_data_careful.py:" in record.reason


def test_a_source_that_is_gone_after_a_while():
    """It cannot even take nothing: the form of the samples is known from before."""
    source = Broken([], say)
    careful = Careful(source)
    careful.take(np.arange(3))
    source.take = stumble
    taken = careful.take(np.arange(3))
    assert [len(array) for array in taken.batch] == [0, 0]
    assert taken.batch[0].shape == (0, 2)
    assert len(taken.bad) == 3


def test_a_record_of_another_form():
    """Each can be taken, but not together."""
    records = [np.zeros(3), np.zeros(3), np.zeros(4), np.zeros(3)]

    class Ragged:
        def __len__(self):
            return 4

        def take(self, indices):
            return (np.stack([records[i] for i in indices]),)

    taken = Careful(Ragged()).take(np.arange(4))
    assert taken.kept.tolist() == [0, 1, 3]
    assert [record.index for record in taken.bad] == [2]
    assert "has the form [((4,), '<f8')]" in taken.bad[0].reason


def test_no_record_is_to_blame():
    """What fails together and never alone is not the records' fault; nothing is hidden."""

    class Shy:
        def __len__(self):
            return 4

        def take(self, indices):
            if len(indices) > 2:
                raise MemoryError("too many at once")
            return (np.zeros(len(indices)),)

    with pytest.raises(MemoryError, match="too many at once"):
        Careful(Shy()).take(np.arange(4))


def test_a_source_that_returns_less():
    class Short(ArraySource):
        def take(self, indices):
            return super().take(indices[:-1])

    with pytest.raises(ConfigError, match=r"take of 3 indices returned arrays of \[2, 2\] samples"):
        Careful(Short(X, Y)).take(np.arange(3))


def test_reasons_are_one_short_line():
    try:
        raise ValueError("two\nlines " + "x" * 1000)
    except ValueError as error:
        line = told(error)
    assert "\n" not in line
    assert len(line) < 250
