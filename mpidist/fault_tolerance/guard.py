"""Stop a training loop on all ranks at the same step, and save a checkpoint to resume from.

A signal reaches the ranks at different moments, so the signal handler only sets a flag. Once per
step the ranks combine their flags in an allreduce. If a flag is set, all ranks stop at this step,
save the state, and end with exit code 75, which tells a batch script to requeue the job.

    rank 0   step 7 - - - - - - - - - step 8 |  all: save(8), exit 75
    rank 1   step 7 - SIGTERM, flag - step 8 |

The first Ctrl-C sets the flag like any other signal; the second Ctrl-C ends the process at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from .. import events
from ..collectives.allreduce import allreduce
from ..errors import ConfigError, MismatchError, MpidistError, ProtocolError, StorageError, shown
from ..launch import heartbeat
from ..launch.claims import claimed_size
from ..runtime.agreement.run_on_all import difference, run_on_all, same_on_all
from ..runtime.agreement.tell_others import tell
from ..runtime.context import of
from ..runtime.failure import expect_failure, failing
from ..runtime.polling import wait_until
from ..runtime.ulfm import is_death
from .finite import is_finite
from .guard_settings import settings_of
from .signals import Handlers
from .stragglers import OwnTime, Stragglers, crowded_ranks
from .time_limit import Allotment, seconds_left

#: The exit code of a run that has stopped and can be requeued (EX_TEMPFAIL of sysexits.h).
REQUEUE = 75

failing.append(heartbeat.fail)  # tells `mpidist launch` which host failed first

# The reasons to stop. If ranks have different reasons, the one with the largest number is reported.
# The reason for a signal is _SIGNAL plus the number of the signal.
_TIME, _CODE, _SIGNAL = 1, 2, 100


class Stopped(SystemExit):
    """The exception that ends a run with exit code 75, after all ranks have agreed to stop.

    ``step`` is the number of the last step, and ``reason`` is a text.
    """

    def __init__(self, step: int, reason: str):
        super().__init__(REQUEUE)
        expect_failure(REQUEUE)
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
    """Return a `Guard`, which stops a loop on signals, at a time limit, or for a bad loss.

    Collective over `comm`: all ranks pass the same settings. Entering the ``with`` block of the
    guard is collective, too, and must happen in the main thread, where Python delivers signals.

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
        The state that `leave` saves, or a function that returns the state at that time.
    store : object with ``save(step, state)``, optional
        The store in which `leave` saves the state, usually a CheckpointStore.
    signals : iterable of signal numbers
        The signals that stop the loop while the ``with`` block runs.
    time_limit : float or "auto", optional
        The loop stops this number of seconds after the guard was entered. With "auto", the loop
        stops before the end of the Slurm allocation, early enough for one more step and a save.
    patience : int, optional
        A number of steps. `check_loss` computes the mean loss of each block of so many steps, and
        stops the run if the mean of a block is not smaller than the means of all blocks before.
    every : int
        Only at steps whose number is a multiple of `every`, the ranks tell each other whether they
        want to stop.
    deciders : MPI.Intracomm, optional
        The ranks that run the loop and call `should_stop`, if they are not all ranks of `comm`. All
        other ranks, such as parameter servers, pass ``MPI.COMM_NULL``. When the loop has stopped,
        these other ranks raise Stopped at the end of the guard's ``with`` block.
    """
    check = partial(
        settings_of, state=state, store=store, signals=signals, time_limit=time_limit,
        patience=patience, every=every, deciders=deciders,
    )  # fmt: skip
    return Guard(comm, same_on_all(comm, "guard", check), state, store, deciders)


class Guard:
    """The object that `guard` returns. Its methods work only inside its ``with`` block."""

    def __init__(self, comm: MPI.Intracomm, agreed: Mapping, state, store, deciders):
        self.state, self.store = state, store
        self.every = agreed["every"]
        self.reason, self.exit_code = "", 0
        #: Whether the run goes on after the death of a rank. Then signals stay blocked from the end
        #: of this guard to the beginning of the next one.
        self.survives = False
        self._given, self._deciders = comm, deciders
        self._time_limit = agreed["time_limit"]
        self._deadline = math.inf
        self._allotment: Allotment | None = None
        self._patience, self._best = agreed["patience"], math.inf
        self._losses = list[float]()
        alone = claimed_size(os.environ) is None
        self._handlers = Handlers(agreed["signals"], self._hear, comm.rank == 0, alone)
        self._asked = self._agreed = 0
        # The communicator of the ranks that run the training loop. It is used only where all these
        # ranks are known to make the same call.
        self._loop = of(comm).control if deciders is None else deciders
        self._own = OwnTime()

    # --------------------------------------------------------------------- the ``with`` block

    def __enter__(self) -> Guard:
        left = run_on_all(self._given, "guard: entering", self._entering, lambda all: all[0])
        heartbeat.join()
        # Servers do not run the training loop, but may share cores with ranks that do. The ranks
        # that run it do not exchange data with servers later, so all ranks exchange the numbers of
        # their cores now.
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
        """Raise an error outside the main thread; with "auto", rank 0 returns the seconds left."""
        if threading.current_thread() is not threading.main_thread():
            raise ProtocolError("guard: enter it in the main thread; Python delivers signals there")
        asked = self._time_limit == "auto" and self._given.rank == 0
        return seconds_left(os.environ) if asked else None

    def __exit__(self, kind, error, trace) -> None:
        self._handlers.put_back(block=self.survives and is_death(error))
        if error is not None and not isinstance(error, Stopped):
            return  # other ranks may have no error, so no collective call here
        if self._deciders is not None and error is None:
            self._end_with_the_loop()

    def _end_with_the_loop(self) -> None:
        """Raise Stopped on servers, which do not run the loop, if the loop was stopped.

        Collective over all ranks of the guard's communicator.
        """
        step, code = self._of_all(-1, 0)
        if code and not self.exit_code:
            self._note(code)
            raise Stopped(step, self.reason)

    # ------------------------------------------------------------------------------ in the loop

    @property
    def flag(self) -> int:
        """1 if this rank wants to stop the run, otherwise 0.

        A loop can add this number to a reduction of its own and pass the result to `heard`. Read
        `flag` once per step.
        """
        return int(self._wish() != 0)

    def fits(self, comm: MPI.Intracomm | None = None, wait=wait_until) -> bool:
        """Return whether a save that begins now would end before the job's Slurm allocation ends.

        Collective over `comm`, the ranks that save; by default, all ranks that run the training
        loop. The longest save so far is the estimate, and without ``time_limit="auto"`` the result
        is true. `wait` is a function that calls an MPI request's ``Test`` until it returns true.
        """
        if self._allotment is None:
            return True
        late = int(not self._allotment.fits(time.monotonic()))
        return not (self._agree(late) if comm is None else self._reduce(comm, (late,), wait))[0]

    def stop(self, reason: str | None = None) -> None:
        """Ask all ranks to stop at their next call of `should_stop`. One rank's call is enough."""
        self._asked = max(self._asked, _CODE)
        events.emit("stop_requested", reason=reason or "stop() was called")

    def should_stop(self, step: int) -> bool:
        """Return whether all ranks stop at this step.

        Collective over the ranks that run the training loop (`deciders`, or all ranks of `comm`). A
        call costs one allreduce of three integers. Every ten steps the ranks also compare how long
        they have worked, and report a slow rank.

        Raises
        ------
        MismatchError
            On all ranks, if the ranks are at different steps.
        """
        if not isinstance(step, Integral) or abs(step := int(step)) >> 62:
            given = shown(step)
            self._refuse(ConfigError(f"guard: should_stop: step={given}; expected a whole number"))
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
        """Record that this rank has done its own work of a step and now exchanges data with others.

        Call this before a blocking MPI call of your own, in which waiting would otherwise count as
        work.
        """
        self._own.stop()

    def heard(self, flags: float) -> bool:
        """Return whether all ranks stop, because at least one of them wants to (its `flag` is 1).

        `flags` is the sum or the maximum of all ranks' `flag`. A loop that reduces `flag` together
        with its own data calls `heard` instead of `should_stop`.
        """
        if flags:
            self._note(self._code() or _CODE << 32)
        return bool(flags)

    def leave(self, step: int, state: Mapping | None = None) -> None:
        """Save the state under the number `step`, if a store exists, and raise Stopped. Collective.

        The state is not saved if the job's Slurm allocation would end during the save.
        """
        if not self.exit_code:
            self._refuse(ProtocolError("guard: leave() without a stop that all ranks agreed on"))
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
        """Stop the run with a checkpoint if the loss is not finite or does not fall any more.

        Collective over the ranks that run the training loop. `loss` must be the reduced loss, which
        is equal on all ranks. Call this method in each step before the parameters are updated. If
        the run stops, the parameters are saved under the number `step`, unless they contain NaN or
        infinity.

        Raises
        ------
        MpidistError
            On all ranks, after the checkpoint was saved.
        """
        try:
            finite = math.isfinite(loss)
        except TypeError:
            self._refuse(ConfigError(f"guard: check_loss: loss={shown(loss)}; expected a number"))
        if not finite:
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

    def losses(self) -> list[float]:
        """Return the losses that a later guard needs to continue `check_loss` (see `take_over`)."""
        return [self._best, *self._losses]

    def take_over(self, earlier: Guard | None, losses: Sequence[float]) -> None:
        """Continue the work of `earlier`, this rank's guard that ended because another rank died.

        `losses` are the training losses that the method `losses` of an earlier guard returned. They
        are the same on all ranks, so they may come from any rank.
        """
        if earlier is not None:
            self._asked = max(self._asked, earlier._asked)
            self._deadline = earlier._deadline
        self._best, *self._losses = losses

    # ------------------------------------------------------------------------------- internals

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
        """Return this rank's reason to stop and its rank in one integer; 0 if it has no reason."""
        wish = self._wish()
        return wish << 32 | self._given.rank if wish else 0

    def _note(self, code: int) -> None:
        self._agreed = code
        kind, rank = code >> 32, code & 0xFFFFFFFF
        if kind >= _SIGNAL:
            self.reason = f"{signal.Signals(kind - _SIGNAL).name} on rank {rank}"
        elif kind == _TIME:
            auto, limit = "the end of the allocation", self._time_limit
            self.reason = auto if limit == "auto" else f"time limit of {limit:g} s"
        else:
            self.reason = f"requested on rank {rank}"
        self.exit_code = REQUEUE

    def _agree(self, *values: int) -> list[int]:
        """Return each value's maximum over the ranks that run the training loop. Collective."""
        if self._deciders is not None:
            return self._reduce(self._deciders, values)
        return self._of_all(*values)

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise `error`, which ends the call on the other ranks, too, unless some are servers."""
        if self._deciders is None:
            tell(self._given, error)
        raise error

    def _of_all(self, *values: int) -> list[int]:
        """Return each value's maximum over all ranks; raise MismatchError if their calls differ."""
        most = np.array(values, np.int64)
        return allreduce(self._given, most, "max", algorithm="native").tolist()

    def _reduce(self, comm, values, wait=wait_until) -> list[int]:
        send, result = np.array(values, np.int64), np.empty(len(values), np.int64)
        # The wait polls and does not block, so a signal that arrives during the wait is handled at
        # once.
        wait(comm.Iallreduce(send, result, MPI.MAX).Test)
        return result.tolist()

    def _gather(self, value: int) -> list[int]:
        """Return the `value` of every rank that runs the training loop."""
        result = np.empty(self._loop.size, np.int64)
        wait_until(self._loop.Iallgather(np.array([value], np.int64), result).Test)
        return result.tolist()

    def _current_state(self):
        try:
            return self.state() if callable(self.state) else self.state
        except Exception as error:
            self._refuse(error)

    def _save(self, step: int, state: Mapping | None = None) -> bool:
        state = self._current_state() if state is None else state
        if self.store is None or state is None:
            return False
        self.store.save(step, state)
        if hasattr(self.store, "wait"):
            self.store.wait()  # `TieredStore.save` returns before the shared folder has the state
        return True

    def _settle(self) -> None:
        """Wait for a save in the background, and print its error if it fails. Collective."""
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
            return "nothing was saved, because the guard was given no store and state"
        self._settle()
        # Ranks may have different parts of the state, so they decide together whether all of it is
        # finite.
        if self._agree(int(not is_finite(state)))[0]:
            return "nothing was saved, because the state holds NaN or infinity already"
        if not self.fits():
            return "nothing was saved, because the allocation ends too soon for that"
        try:
            self._save(step, state)
        except StorageError as error:
            return f"the state before this step could not be saved: {error}"
        return f"the state before this step was saved as step {step}"
