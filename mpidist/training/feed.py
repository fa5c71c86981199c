"""Read the good samples of this rank's part of each global batch ahead of time."""

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
from ..runtime import polling
from .quarantine import Quarantine

#: Exceptions by which a model rejects a record. Any other exception of a model is a mistake in the
#: program.
REJECTIONS = (ValueError, ArithmeticError, IndexError)


def beside(batch: tuple, model) -> tuple:
    """Return a batch as arrays on the device on which the model's parameters are."""
    like = next(iter(model.parameters.values()), None)
    xp = np if like is None else array_module(like)
    return batch if xp is np else tuple(xp.asarray(array) for array in batch)


class Feed:
    """Reads the samples of one worker, and leaves out the bad ones.

    Parameters
    ----------
    source : Source
    run : Progress
        The run for which samples are read. It knows the position in the data, this worker's part of
        each batch, and the bad records.
    loading : Loading, optional
        How many bytes to read ahead, how fast, and how long to wait.

    Attributes
    ----------
    starved : float
        How many seconds this worker has waited for the samples of this step, if they could not be
        read in time; otherwise 0.
    """

    def __init__(self, source, run, loading: Loading | None = None):
        self.model, self.quarantine = run.model, run.quarantine
        self.starved = 0.0
        self._run = run
        self._gone = self._closed = False
        self._taken_at = -1  # the newest step whose samples were taken
        self._state: dict = {}
        self._loader = Loader(source, self._plan, loading)

    @property
    def unusual(self) -> bool:
        """Whether this step has bad or late samples, so that the workers must agree what to do."""
        return bool(self.starved or self.quarantine.found)

    @property
    def waited(self) -> float:
        """Seconds spent waiting for samples so far."""
        return self._loader.waited

    def _plan(self) -> Iterator[np.ndarray]:
        """Return an iterator over the sample indices of this rank, from the current batch on."""
        # The loader's thread needs a sampler of its own, because a sampler stores the order that it
        # has computed last.
        own = self._run.sampler
        sampler = Sampler(own.count, own.global_batch, own.seed, own.shuffle)
        run = self._run
        return _parts(sampler, run.position, run.step, run.exchange.part, self.quarantine)

    def take(
        self, indices: np.ndarray, meanwhile: Callable[[], object] | None = None
    ) -> Batch | None:
        """Return the good samples at `indices`, or None if they were not read in time."""
        self.starved, self._taken_at = 0.0, self._run.step
        # If the results of a model call are discarded, the model's running statistics must not
        # change either.
        self._state = {k: array.copy() for k, array in getattr(self.model, "state", {}).items()}
        began = time.monotonic()
        try:
            with polling.phase("data"):
                taken = self._loader.take(indices, meanwhile)
        except Starved as error:
            self.starved = error.seconds
            return None
        except SourceError:
            if self._gone:
                raise
            # The first SourceError is handled like a source that does not answer, so the state is
            # saved. A second SourceError ends the run.
            self._gone, self.starved = True, time.monotonic() - began
            return None
        self._gone = False
        self.quarantine.note(taken.bad)
        return taken

    def undo(self) -> None:
        """Restore the model's state (such as running means) from before this step."""
        for name, array in self._state.items():
            self.model.state[name][...] = array

    def tolerate(self, batch: tuple, indices, call: Callable[[tuple], float]) -> tuple[float, int]:
        """Call `call` with those samples of a batch that the model accepts.

        Returns (the result of `call`, the number of these samples). A model rejects a batch by
        raising ValueError, ArithmeticError or IndexError (`REJECTIONS`).
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
        """Give each sample alone to the model; return the positions of the accepted samples.

        Raises `error` if the model accepts each sample alone, or if it rejects all of several
        samples.
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
        """Stop reading; emit an event with the bytes and the time of all reads."""
        if self._closed:
            return
        self._closed = True
        if self._taken_at == self._run.step:
            self.undo()
        self._loader.close()
        events.emit(
            "loader", bytes=self._loader.nbytes, seconds=round(self._loader.seconds, 6),
            waited=round(self._loader.waited, 6), sent_bytes=events.total.bytes_sent,
        )  # fmt: skip


def _parts(sampler: Sampler, position: Position, step: int, part, quarantine: Quarantine):
    """Yield, for each batch, the indices of this rank's samples."""
    while True:
        indices, position = sampler.batch(position)
        wanted = quarantine.wanted(indices)
        mine = part(len(wanted), step)  # (start, stop), or all positions in the batch
        yield wanted[slice(*mine)] if isinstance(mine, tuple) else wanted[mine]
        step += 1
