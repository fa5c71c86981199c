"""What a step works on: good samples of this rank's part of the global batch, read ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from .. import events
from ..arrays import array_module
from ..data import Position, Sampler
from ..data.loader import Loader, Loading, Starved
from ..data.skip_bad import Batch, told
from ..errors import BadRecord, SourceError
from ..gradients.flat_views import flat_views
from .quarantine import Quarantine

#: What a model says of a record that it cannot use. Other exceptions are mistakes in a program.
REJECTIONS = (ValueError, ArithmeticError, IndexError)


def beside(batch: tuple, model) -> tuple:
    """Return a batch of host arrays where the model's parameters are."""
    xp = array_module(next(iter(model.parameters.values())))
    return batch if xp is np else tuple(xp.asarray(array) for array in batch)


class Feed:
    """Brings in one worker's samples, without the bad ones.

    Parameters
    ----------
    source : Source
    run : Progress
        Says where the run stands and whose samples they are; its quarantine is told what is bad.
    loading : Loading, optional

    Attributes
    ----------
    starved : float
        Seconds that were waited for this step's samples in vain, or 0.
    """

    def __init__(self, source, run, loading: Loading | None = None):
        self.model, self.quarantine = run.model, run.quarantine
        self.starved = 0.0
        self._run = run
        self._gone = self._closed = False
        self._state: dict = {}
        self._loader = Loader(source, self._plan, loading)

    @property
    def unusual(self) -> bool:
        """Whether the other workers must hear of something before this step counts."""
        return bool(self.starved or self.quarantine.found)

    @property
    def waited(self) -> float:
        """Seconds that were waited for samples so far."""
        return self._loader.waited

    def _plan(self) -> Iterator[np.ndarray]:
        """Return the parts of this rank, from the batch of this step on."""
        # A sampler of its own: the thread must not touch what the loop's has computed.
        own = self._run.sampler
        sampler = Sampler(own.count, own.global_batch, own.seed, own.shuffle)
        return _parts(sampler, self._run.position, self._run.exchange.part, self.quarantine)

    def take(
        self, indices: np.ndarray, meanwhile: Callable[[], object] | None = None
    ) -> Batch | None:
        """Return the good samples at `indices`, or None where they have not come in time.

        `meanwhile` is called again and again while a thread reads them.
        """
        self.starved = 0.0
        # A call of the model that counts for nothing must leave no trace in running statistics.
        self._state = {k: array.copy() for k, array in getattr(self.model, "state", {}).items()}
        began = time.monotonic()
        try:
            taken = self._loader.take(indices, meanwhile)
        except Starved as error:
            self.starved = error.seconds
            return None
        except SourceError:
            if self._gone:
                raise
            # Once it is as if the source did not answer: the state is saved before the run ends.
            self._gone, self.starved = True, time.monotonic() - began
            return None
        self._gone = False
        self.quarantine.note(taken.bad)
        return taken

    def undo(self) -> None:
        """Put the model's state back to what it was when this step's samples were taken."""
        for name, array in self._state.items():
            self.model.state[name][...] = array

    def tolerate(self, batch: tuple, indices, call: Callable[[tuple], float]) -> tuple[float, int]:
        """Return (result, samples) of `call` on the samples that the model does not reject.

        Where the model rejects a batch it is asked about every sample alone.
        """
        while len(indices):
            try:
                return call(batch), len(indices)
            except REJECTIONS as error:
                self.undo()
                good = self._sift(batch, indices, error)
                batch, indices = tuple(array[good] for array in batch), indices[good]
        return 0.0, 0

    def _sift(self, batch: tuple, indices: np.ndarray, error: Exception) -> list[int]:
        """Return the places of the samples that the model takes, one by one.

        Raises `error` where it takes each of them alone, or none of several: then no record is to
        blame, but the model.
        """
        gradients, _ = flat_views(self.model.parameters)
        bad: dict[int, BadRecord] = {}
        for place, index in enumerate(indices):
            one = tuple(array[place : place + 1] for array in batch)
            try:
                self.model.loss_and_gradients(one, gradients)
            except REJECTIONS as reason:
                bad[place] = BadRecord(int(index), f"the model says {told(reason)}")
        self.undo()
        if not bad or len(bad) == len(indices) > 1:
            raise error
        self.quarantine.note(bad.values())
        return [place for place in range(len(indices)) if place not in bad]

    def close(self) -> None:
        """End the reading; says what it has taken, beside what MPI has sent (R130).

        A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._loader.close()
        events.emit(
            "loader", bytes=self._loader.nbytes, seconds=round(self._loader.seconds, 6),
            waited=round(self._loader.waited, 6), sent_bytes=events.total.bytes_sent,
        )  # fmt: skip


def _parts(sampler: Sampler, position: Position, part, quarantine: Quarantine):
    while True:
        indices, position = sampler.batch(position)
        wanted = quarantine.wanted(indices)
        start, stop = part(len(wanted))
        yield wanted[start:stop]
