"""If a part of a batch cannot be read, only the bad records in it are skipped (R42)."""

import numpy as np
import pytest

from mpidist.data import HDF5, ArraySource, Derived, Items
from mpidist.data import skip_bad as careful
from mpidist.data.readers.hdf5 import write as write_hdf5
from mpidist.data.skip_bad import BadRecordFilter, told
from mpidist.errors import BadRecord, ClosedError, ConfigError, SourceError

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
    taken = BadRecordFilter(source).take(indices)
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
            assert "(test_data_skip_bad.py:" in record.reason


def test_a_source_that_is_gone_after_a_while():
    """It cannot even take nothing: the form of the samples is known from before."""
    source = Broken([], say)
    careful = BadRecordFilter(source)
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

    taken = BadRecordFilter(Ragged()).take(np.arange(4))
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
        BadRecordFilter(Shy()).take(np.arange(4))


class Disk(Broken):
    """A file of 20 records, which is away for the next `away` calls."""

    away = 0

    def __init__(self, error, bad=()):
        super().__init__(bad, lambda index: self.refuse())
        self.error = error

    def refuse(self):
        raise self.error

    def take(self, indices):
        if self.away and len(indices):
            self.away -= 1
            raise self.error
        return super().take(indices)


@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), MemoryError("no room"), FileNotFoundError(2, "away")],
)
def test_a_source_that_is_gone_is_no_bad_record(error, monkeypatch):
    """R42: a disk that is away is waited for, and in the end an error; no record is skipped."""
    waits = []
    monkeypatch.setattr(careful.time, "sleep", waits.append)
    source = Disk(error)
    source.away = 40  # three times 7 calls and 5 elsewhere, and then some
    taken = BadRecordFilter(source).take(np.array([3, 4, 5]))
    assert taken.bad == ()
    np.testing.assert_array_equal(taken.batch[0], X[3:6])
    assert waits == [1, 2, 4]
    source.away = 10**6
    with pytest.raises(
        SourceError, match=r"nothing of Disk can be read: .*; tried 5 times"
    ) as caught:
        BadRecordFilter(source).take(np.array([3]))
    assert caught.value.__cause__ is error
    # The same error of records next to each other, with others good, is their own.
    source = Disk(error, bad=[3, 4, 5])
    taken = BadRecordFilter(source).take(np.array([3, 4, 5]))
    assert [record.index for record in taken.bad] == [3, 4, 5]
    assert [array.shape for array in taken.batch] == [(0, 2), (0,)]


def test_a_map_style_source_that_is_gone(monkeypatch):
    """What `Items` tells as a bad record was an OSError of every one."""
    monkeypatch.setattr(careful, "WAIT", 0.001)

    class Away:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            raise OSError(107, "Transport endpoint is not connected")

    with pytest.raises(SourceError, match="Transport endpoint"):
        BadRecordFilter(Items(Away())).take(np.arange(4))


def test_mistakes_are_not_waited_for(tmp_path):
    """A closed source, and a setting that no record can be used with: at once, and as they are."""
    source = HDF5(_file(tmp_path), ["x"])
    source.close()
    with pytest.raises(ClosedError):
        BadRecordFilter(source).take(np.arange(3))

    def wrong(x):
        raise ConfigError("no such column")

    with pytest.raises(ConfigError, match="no such column"):
        BadRecordFilter(Derived(ArraySource(X), wrong)).take(np.arange(3))


def _file(folder):
    write_hdf5(folder / "a.h5", {"x": X})
    return folder / "a.h5"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite(value):
    """R42: as bad as those that cannot be read, where they count as such."""
    x = X.copy()
    x[4, 1] = x[7, 0] = value
    source = ArraySource(x, Y)
    taken = BadRecordFilter(source, finite=True).take(np.array([9, 4, 2, 7]))
    assert taken.kept.tolist() == [0, 2]
    np.testing.assert_array_equal(taken.batch[0], X[[9, 2]])
    np.testing.assert_array_equal(taken.batch[1], Y[[9, 2]])
    found = [(record.index, record.reason) for record in taken.bad]
    assert found == [(4, "a number in it is not finite"), (7, "a number in it is not finite")]
    assert BadRecordFilter(source).take(np.array([4])).bad == ()
    mixed = Broken([2], say)
    mixed.take = lambda i, real=mixed.take: (x[i], real(i)[1])
    taken = BadRecordFilter(mixed, finite=True).take(np.array([9, 4, 2, 7]))
    assert taken.kept.tolist() == [0]
    assert [record.index for record in taken.bad] == [2, 4, 7]


def test_a_source_that_returns_less():
    class Short(ArraySource):
        def take(self, indices):
            return super().take(indices[:-1])

    with pytest.raises(ConfigError, match=r"take of 3 indices returned arrays of \[2, 2\] samples"):
        BadRecordFilter(Short(X, Y)).take(np.arange(3))


def test_reasons_are_one_short_line():
    try:
        raise ValueError("two\nlines " + "x" * 1000)
    except ValueError as error:
        line = told(error)
    assert "\n" not in line
    assert len(line) < 250
