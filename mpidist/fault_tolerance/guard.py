"""Stop a training loop well: all ranks at the same step, with a checkpoint, to be requeued.

A signal reaches a rank at any moment, and not all ranks at the same one. Its handler therefore
only sets a flag; once per step the flags are combined, so that all ranks learn of it at the same
step, save the same state and leave with exit code 75, which tells a batch script to requeue.

    rank 0   step 7 . . . . . . . . . step 8 |  all: save(8), exit 75
    rank 1   step 7 . SIGTERM, flag . step 8 |

What comes while MPI blocks is handled when it returns. Slurm sends ``--signal=USR1@120``. Ctrl-C is
such a signal too; pressed again it ends the process at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from mpi4py import MPI

from .. import events
from ..collectives.allreduce import allreduce
from ..errors import MismatchError, MpidistError, ProtocolError, StorageError
from ..launch import heartbeat
from ..launch.claims import claimed_size
from ..runtime.agreement.run_on_all import difference, run_on_all, same_on_all
from ..runtime.context import of
from ..runtime.failure import failing
from ..runtime.polling import wait_until
from .finite import is_finite
from .guard_settings import settings_of
from .signals import Handlers
from .stragglers import OwnTime, Stragglers, crowded_ranks
from .time_limit import Allotment, seconds_left

#: The exit code of a run that stopped to be requeued (EX_TEMPFAIL of sysexits.h).
REQUEUE = 75

failing.append(heartbeat.fail)  # `mpidist launch` wants to know on which host a job failed first

# Why to stop; the larger one is told. Signals are _SIGNAL + their number.
_TIME, _CODE, _SIGNAL = 1, 2, 100


class Stopped(SystemExit):
    """All ranks agreed to stop and have saved what they had; ends the program with code 75.

    A SystemExit: a loop that does not care about it ends the program rightly. Has ``step, reason``.
    """

    def __init__(self, step: int, reason: str):
        super().__init__(REQUEUE)
        self.step, self.reason = step, reason

    def __str__(self):
        return f"stopped at step {self.step}: {self.reason}"


def guard(
    comm: MPI.Intracomm,
    state: Mapping | Callable[[], Mapping] | None = None,
    store=None,
    *,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT),
    time_limit: float | str | None = None,
    patience: int | None = None,
    every: int = 1,
    deciders: MPI.Intracomm | None = None,
) -> Guard:
    """Return a `Guard`, which watches for signals, a time limit and a bad loss around a loop.

    Collective over `comm`, as is entering it: all ranks give the same settings. To be entered in
    the main thread, where Python delivers signals. ``with md.guard(comm) as run`` is how it reads.

    >>> with md.guard(comm, state, store) as run:
    ...     for step in range(first, last):
    ...         loss = train_one_step()         # reduced: the same on all ranks
    ...         run.check_loss(loss, step)
    ...         if run.should_stop(step):
    ...             run.leave(step)             # store.save(step, state), then exit code 75

    Parameters
    ----------
    comm : MPI.Intracomm
    state : dict or callable, optional
        What `leave` saves; a callable is asked for it at that time.
    store : object with ``save(step, state)``, optional
        Usually a CheckpointStore.
    signals : iterable of signal numbers
        Handlers are set on entering and the former ones put back on leaving.
    time_limit : float or "auto", optional
        Seconds from entering after which the loop is stopped as by a signal. "auto": so long
        before the end of a Slurm allocation that a step and a save, as measured, still fit in.
    patience : int, optional
        `check_loss` stops the run when the mean loss of so many steps is not less than that of
        all such blocks of steps before.
    every : int
        Combine the flags at every n-th step only.
    deciders : MPI.Intracomm, optional
        The ranks that run the loop and call `should_stop`, if that is not all of `comm`; the
        others (servers) pass ``MPI.COMM_NULL``, and get their Stopped when they leave the block.
    """
    check = partial(
        settings_of, state=state, store=store, signals=signals, time_limit=time_limit,
        patience=patience, every=every, deciders=deciders,
    )  # fmt: skip
    return Guard(comm, same_on_all(comm, "guard", check), state, store, deciders)


class Guard:
    """What `guard` returns; its methods are for the loop in the ``with``."""

    def __init__(self, comm: MPI.Intracomm, agreed: Mapping, state, store, deciders):
        self.state, self.store = state, store
        self.every = agreed["every"]
        self.reason, self.exit_code = "", 0
        self._given, self._deciders = comm, deciders
        self._time_limit = agreed["time_limit"]
        self._deadline = math.inf
        self._allotment: Allotment | None = None
        self._patience, self._best = agreed["patience"], math.inf
        self._losses = list[float]()
        alone = claimed_size(os.environ) is None
        self._handlers = Handlers(agreed["signals"], self._hear, comm.rank == 0, alone)
        self._asked = self._agreed = 0
        # The ranks of the loop, for what is exchanged when all are known to be at one place.
        self._loop = of(comm).control if deciders is None else deciders
        self._own = OwnTime()

    # ------------------------------------------------------------------------------- around it

    def __enter__(self) -> Guard:
        left = run_on_all(self._given, "guard: entering", self._entering, lambda all: all[0])
        heartbeat.join()
        # Ranks outside the loop take turns with those in it, and are not there when it is asked.
        everyone = of(self._given).control
        crowded = None if self._deciders is None else crowded_ranks(everyone)
        if self._loop != MPI.COMM_NULL:
            names = self._gather(everyone.rank)
            self._stragglers = Stragglers(self._loop, ("work",), names, crowded)
            self._own.begin()
        if left is not None:
            self._allotment = Allotment(left, time.monotonic())
        elif self._time_limit not in (None, "auto"):
            self._deadline = time.monotonic() + self._time_limit
        self._handlers.set()
        return self

    def _entering(self) -> float | None:
        """Check that this rank can enter; rank 0 tells how long the allocation lasts."""
        if threading.current_thread() is not threading.main_thread():
            raise ProtocolError("guard: enter it in the main thread; Python delivers signals there")
        asked = self._time_limit == "auto" and self._given.rank == 0
        return seconds_left(os.environ) if asked else None

    def __exit__(self, kind, error, trace) -> None:
        self._handlers.put_back()
        if error is not None and not isinstance(error, Stopped):
            return  # this rank leaves alone: anything collective here would wait for the others
        if self._deciders is not None and error is None:
            self._end_with_the_loop()

    def _end_with_the_loop(self) -> None:
        """Tell the ranks outside the loop how it ended; there, raise Stopped if it was stopped."""
        step, code = self._of_all(-1, 0)
        if code and not self.exit_code:
            self._note(code)
            raise Stopped(step, self.reason)

    # ------------------------------------------------------------------------------ in the loop

    @property
    def flag(self) -> int:
        """1 if this rank wants to stop, otherwise 0: for loops that reduce it with their data.

        To be asked once per step.
        """
        return int(self._wish() != 0)

    def fits(self, comm: MPI.Intracomm | None = None, wait=wait_until) -> bool:
        """Whether a save that begins now can end before the allocation does. Collective.

        Over `comm`, the ranks that save; by default those of the loop. As far as is known: without
        ``time_limit="auto"``, or a save before, it is taken to fit. `wait(test)` waits: where ranks
        serve others, it serves.
        """
        if self._allotment is None:
            return True
        late = int(not self._allotment.fits(time.monotonic()))
        return not (self._agree(late) if comm is None else self._reduce(comm, (late,), wait))[0]

    def stop(self, reason: str | None = None) -> None:
        """Ask for a stop at the next `should_stop`. One rank's wish is enough."""
        self._asked = max(self._asked, _CODE)
        events.emit("stop_requested", reason=reason or "stop() was called")

    def should_stop(self, step: int) -> bool:
        """Whether all ranks stop at this step. Collective over the ranks that run the loop.

        Costs one reduction of three integers. Every tenth time the ranks also tell each other how
        long they worked, and name one that is slow.

        Raises
        ------
        MismatchError
            The ranks are at different steps. On all ranks.
        """
        heartbeat.note_steps(step)
        self._stragglers.window.note(self._own.stop())
        self._own.begin()
        if step % self.every:
            return False
        low, code, high = self._agree(-step, self._code(), step)
        if -low != high:
            there = difference([{"step": str(each)} for each in self._gather(step)])
            raise MismatchError(f"guard: should_stop: {there}; call it once per step on every rank")
        if code:
            self._note(code)
        else:
            self._stragglers.look()
            self._own.begin()
        return bool(code)

    def computed(self) -> None:
        """Say that this rank's work of a step is done, and what follows is exchange.

        So that a slow rank is found where the others wait for it in calls of MPI's own. Waits of
        mpidist's are known without.
        """
        self._own.stop()

    def heard(self, flags: float) -> bool:
        """Take the sum or the maximum of all ranks' `flag`; whether all ranks stop.

        For a loop that lets the flag ride in a reduction of its own instead of `should_stop`.
        """
        if flags:
            self._note(self._code() or _CODE << 32)
        return bool(flags)

    def leave(self, step: int, state: Mapping | None = None) -> None:
        """Save the state as `step`, if there is a store, and raise Stopped. Collective.

        Nothing is saved where it cannot end in time: half a checkpoint is worth nothing, and the
        one before is there.
        """
        if not self.exit_code:
            raise ProtocolError("guard: leave() without a stop that all ranks agreed on")
        self._settle()
        if self.fits():
            self._save(step, state)
        else:
            events.emit("save_does_not_fit", step=step)
        if self._deciders is not None:
            self._of_all(step, self._agreed)
        events.emit("stopped", step=step, reason=self.reason)
        raise Stopped(step, self.reason)

    def check_loss(self, loss: float, step: int) -> None:
        """Stop the run with a checkpoint when the loss is not a number, or does not fall any more.

        Collective over the ranks of the loop, but free of communication while all is well: `loss`
        is the reduced one, equal on all ranks. To be called before the update of `step`, while the
        parameters are still those that `step` began with; they are saved under that number, unless
        they hold a NaN or infinity themselves.

        Raises
        ------
        MpidistError
            On all ranks, after the checkpoint was saved.
        """
        if not math.isfinite(loss):
            cure = "clip the gradients, or look for a bad record in this step's batch"
            self._end_run(step, loss, f"the loss is {loss}", cure)
        if self._patience is None:
            return
        self._losses.append(loss)
        if len(self._losses) == self._patience:
            mean = math.fsum(self._losses) / self._patience
            self._losses.clear()
            if not mean < self._best:
                steps = f"{self._patience} steps"
                text = f"the mean loss of {steps} is {mean:.6g} and was {self._best:.6g} before"
                self._end_run(step, loss, text, "decay it with a schedule, or be more patient")
            self._best = mean

    def _end_run(self, step: int, loss: float, what: str, cure: str) -> None:
        saved = self._save_if_finite(step)
        error = MpidistError(f"step {step}: {what}; {saved}. Lower the learning rate, {cure}")
        error.everywhere = True
        events.emit("bad_loss", step=step, loss=str(loss), reason=what)
        raise error

    # ------------------------------------------------------------------------------ underneath

    def _hear(self, number: int) -> None:
        self._asked = max(self._asked, _SIGNAL + number)

    def _wish(self) -> int:
        now = time.monotonic()
        over = now >= self._deadline
        if self._allotment is not None:
            self._allotment.step(now)
            over = self._allotment.is_over(now)
        return self._asked or (_TIME if over else 0)

    def _code(self) -> int:
        """Give this rank's wish and number as one integer; the maximum of all is one rank's."""
        wish = self._wish()
        return wish << 32 | self._given.rank if wish else 0

    def _note(self, code: int) -> None:
        self._agreed = code
        kind, rank = code >> 32, code & 0xFFFFFFFF
        if kind >= _SIGNAL:
            self.reason = f"{signal.Signals(kind - _SIGNAL).name} on rank {rank}"
        elif kind == _TIME:
            limit = self._time_limit
            auto = limit == "auto"
            self.reason = "the end of the allocation" if auto else f"time limit of {limit:g} s"
        else:
            self.reason = f"requested on rank {rank}"
        self.exit_code = REQUEUE

    def _agree(self, *values: int) -> list[int]:
        """Return the largest of each value among the ranks of the loop. Collective."""
        if self._deciders is not None:
            return self._reduce(self._deciders, values)
        return self._of_all(*values)

    def _of_all(self, *values: int) -> list[int]:
        """Return the largest of each value; ranks in another operation raise, and so do these."""
        most = np.array(values, np.int64)
        return allreduce(self._given, most, "max", algorithm="native").tolist()

    def _reduce(self, comm, values, wait=wait_until) -> list[int]:
        send, result = np.array(values, np.int64), np.empty(len(values), np.int64)
        # Polled and not blocking, so that a signal which arrives while we wait is handled now.
        wait(comm.Iallreduce(send, result, MPI.MAX).Test)
        return result.tolist()

    def _gather(self, value: int) -> list[int]:
        """Return the values of all ranks of the loop, where all are known to be here."""
        result = np.empty(self._loop.size, np.int64)
        wait_until(self._loop.Iallgather(np.array([value], np.int64), result).Test)
        return result.tolist()

    def _current_state(self):
        return self.state() if callable(self.state) else self.state

    def _save(self, step: int, state: Mapping | None = None) -> bool:
        state = self._current_state() if state is None else state
        if self.store is None or state is None:
            return False
        self.store.save(step, state)
        if hasattr(self.store, "wait"):
            self.store.wait()  # a store of two tiers returns with the first
        return True

    def _settle(self) -> None:
        """Wait for a save in the background. Collective over the ranks that save.

        The last one that this program hears of, or the one before the last, whose failure must not
        keep that from beginning.
        """
        if not hasattr(self.store, "wait"):
            return
        try:
            self.store.wait()
        except StorageError as error:
            events.emit("checkpoint_failed", reason=str(error))
            if self._loop.rank == 0:
                print(f"mpidist: not saved: {error}", file=sys.stderr, flush=True)

    def _save_if_finite(self, step: int) -> str:
        state = self._current_state()
        if self.store is None or state is None:
            return "nothing was saved, for the guard was given no store and state"
        self._settle()
        # Ranks may hold different parts of the state, so they decide together.
        if self._agree(int(not is_finite(state)))[0]:
            return "nothing was saved, for the state holds NaN or infinity already"
        if not self.fits():
            return "nothing was saved, for the allocation ends too soon for that"
        try:
            self._save(step, state)
        except StorageError as error:
            return f"the state before this step could not be saved: {error}"
        return f"the state before this step was saved as step {step}"
