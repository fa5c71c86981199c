"""Elastic runs of `md.train`: the state that a run keeps in memory when a rank has died.

After a death, the living ranks make a smaller communicator, and `_train` is called again with the
kept state. Nothing is read from disk, except after the loss of a parameter server's part of the
model. A rank that had not finished the interrupted step, although another rank had, receives the
state after this step.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ..elasticity import peer_state
from ..elasticity.deadline import parse_deadline
from ..elasticity.elastic_group import Group
from ..elasticity.elastic_loop import check_possible
from ..elasticity.elastic_settings import Elastic
from ..elasticity.evict_on_exception import EvictOnException
from ..elasticity.slow_ranks import SlowRanks
from ..fault_tolerance.guard import Guard
from ..launch.environment import memory_folder
from ..runtime.agreement.run_on_all import run_on_all, same_on_all
from ..runtime.ulfm import is_death, rank_failure
from .run_state import Progress, StepReport
from .summary import Summary

#: Signals by which a launcher or a batch system asks a run to stop.
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)


class Carried:
    """The state that a run of `md.train` keeps in memory when a rank dies, to continue from it.

    `name` is the name of an elastic run, equal on all ranks, and "" for any other run.
    """

    def __init__(self, given: Mapping[str, Any], name: str = ""):
        self.name, self.given = name, given
        self.group: TrainingGroup | None = None
        self._slow: SlowRanks | None = None
        #: A context manager for the user's code in a step.
        self.evict_on_exception = EvictOnException()
        self._run: Progress | None = None
        self._guard: Guard | None = None
        # The state at the last death; None if this rank had not begun its steps then.
        self._facts: dict | None = None
        self._optimizer: Any = None
        self._optimizer_state: Any = None
        self._times = time.perf_counter(), 0.0
        self._missed: list | None = None  # the report of a step that only other ranks have done
        self._sent: dict = {}

    # -- a run continues from the kept state ---------------------------------------------

    def fresh(self, resume: bool | str) -> bool | str:
        """Return the argument `fresh` of the checkpoint store: False unless `resume` is "fresh"."""
        # After a death the run opens its store again, and finds its own checkpoints by its name.
        return resume == "fresh" and (self.name or True)

    @property
    def memory(self) -> Path | None:
        """The folder in /dev/shm for copies of the state; None if the run makes no such copies."""
        return memory_folder() if self.group and self.group.settings.every else None

    def copies(self, store, step: int):
        """Return the `MemoryCopies` that copies the state to the nodes' memory, or None."""
        every, memory = self.group and self.group.settings.every, self.memory
        if not every or memory is None or getattr(store, "folder", None) != memory:
            return None
        from ..checkpoint.memory_copies import MemoryCopies

        copies = MemoryCopies(store, every)
        copies.begin(step)
        return copies

    def open(self, strategy, comm, asked, settings: Mapping):
        """Return the object that exchanges gradients, which `strategy` makes. Collective.

        After the death of a rank, the returned object gets the optimizer state that this rank has
        kept.
        """
        if self._facts is None:
            return strategy.open(comm, asked.model, asked.optimizer, **settings)
        state = self._optimizer_state
        return strategy.open(comm, asked.model, self._optimizer, optimizer_state=state, **settings)

    def continue_run(self, run: Progress) -> bool:
        """Let `run` continue from the state that this rank has kept; return whether it has one.

        Collective.
        """
        if self.group is not None and self.group.deaths:
            run.deaths, run.evicted = self.group.deaths, self.group.evicted
            run.ranks_before = self.group.ranks_at_first
        if self._facts is None:
            return False
        run.continue_from(self._facts)
        run.began = self._times[0]
        return True

    def restore(self, run: Progress, resume: bool | str, retry_bad: bool, handed: str) -> None:
        """Restore `run` from the newest checkpoint, as `Progress.resume` does. Collective."""
        run.resume(resume, retry_bad, handed)

    def interval_from(self, step: int) -> int:
        """Return the step from which the steps to the next checkpoint are counted.

        It is the same on all workers. `step` is the number of steps that this worker has done.
        """
        return step

    def begin(self, exchange) -> None:
        """Prepare the exchange of gradients for the first step. Collective."""
        if self._facts is None:
            exchange.begin()
        else:
            exchange.price = self._facts["price"]

    def hold(self, run: Progress, guard: Guard, callbacks) -> None:
        """From now on, keep the state of `run` if a rank dies. Called before the first step."""
        group = self.group
        if group is None:
            return
        if self._facts is None:
            self._times = run.began, run.loop_began
        else:
            run.loop_began = self._times[1]
            guard.take_over(self._guard, self._facts["losses_of_guard"])
        guard.survives = True
        self._run, self._guard = run, guard
        watch, ranks = group.watch, group.original_ranks
        stragglers, factor = run.exchange.stragglers, group.settings.slow
        self._slow = SlowRanks(stragglers, factor, group.min_ranks, watch.board, ranks)
        if group.settings.on_exception == "evict":
            self.evict_on_exception = EvictOnException(group, lambda: run.step)
        watch.begin_steps()
        if self._missed is not None:
            report, self._missed = StepReport(*self._missed), None
            with self.evict_on_exception:
                for callback in callbacks:
                    callback(report)

    def step_done(self, step: int) -> None:
        """Tell the other ranks that this rank has done `step` steps, and end slow ranks.

        Collective.
        """
        if self.group is not None:
            self.group.watch.step_done(step)
            if self._slow is not None:
                self._slow.end_of_step()

    def end_steps(self) -> None:
        """Tell the other ranks that this rank does no more steps.

        Otherwise, they could take this rank for a rank that hangs, and kill it.
        """
        if self.group is not None:
            self.group.watch.end_steps()

    # -- after a death -------------------------------------------------------------------

    def note_state(self) -> int:
        """Keep the state of the run that a death has interrupted; return its number of steps.

        Returns -1 if this rank had not begun its steps.
        """
        run, self._run = self._run, None
        if run is not None and self._guard is not None:
            self._facts = run.facts_to_carry(self._guard.losses())
            self._optimizer = run.exchange.optimizer
            self._optimizer_state = run.exchange.optimizer_state
        return self.step

    @property
    def step(self) -> int:
        """The number of steps done when the state was kept; -1 if this rank has kept none."""
        return -1 if self._facts is None else self._facts["step"]

    def state(self) -> dict:
        """Return the kept state as nested dicts of arrays; the value of "facts" is a JSON text."""
        model, optimizer = self.given["model"], self.given["optimizer"]
        if self._optimizer_state is None:
            self._optimizer = optimizer
            self._optimizer_state = optimizer.init(model.parameters)
        self._sent = {
            "parameters": dict(model.parameters),
            "optimizer": self._optimizer_state,
            "model": dict(getattr(model, "state", {})),
            "facts": json.dumps(self._facts),
        }
        return self._sent

    def bring_up_to_date(self, comm, step: int) -> int:
        """Give all ranks of `comm` the newest state; return its number of steps. Collective.

        `step` is the number of steps that this rank has done, or `peer_state.NOTHING` (-2) if this
        rank has no state.
        """
        before = self.step
        newest = peer_state.bring_up_to_date(comm, self.state(), step)
        self._facts = json.loads(self._sent["facts"])
        if 0 <= before < self.step:
            self._missed = self._facts["report"]
        return newest

    def check_living(self, ranks: Sequence[int]) -> None:
        """Raise RankFailure on all ranks if the run cannot go on with only the living `ranks`.

        In this class each rank has the whole model, so nothing is raised; subclasses override this
        method.
        """


class TrainingGroup(Group):
    """The living ranks of a run of `md.train` that goes on when ranks die."""

    def __init__(self, comm, settings: Elastic, carried: Carried):
        limit = parse_deadline(settings.deadline, settings.slow)
        super().__init__(comm, {}, settings.min_ranks, True, limit, settings.spares)
        self.settings, self._carried = settings, carried
        self.ranks_at_first = comm.size - settings.spares
        carried.group = self

    def note_step(self) -> None:
        """Keep the state of the run that a death has interrupted, so that the run can continue."""
        self.step = self._carried.note_state()

    def _state_bytes(self) -> int:
        # Most optimizers have at most two arrays for each parameter.
        return 3 * sum(array.nbytes for array in self._carried.given["model"].parameters.values())

    def _bring_up_to_date(self, step: int) -> int:
        return self._carried.bring_up_to_date(self.comm, step)

    def _check_living(self, ranks: list[int]) -> None:
        self._carried.check_living(ranks)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank for messages, such as ``rank 3 of 8 on n2``."""
        return next(name for name, number in self._number.items() if number == rank)


def train_elastic(
    comm,
    settings: Elastic,
    carry: Callable[[str, int], Carried],
    train: Callable[[Any, Carried], Summary],
) -> Summary:
    """Call `train`, and call it again each time a rank has died. Collective over `comm`."""
    check = partial(check_possible, comm, settings.min_ranks, settings.spares)
    same_on_all(comm, "md.train: elastic", check)
    name = run_on_all(comm, "md.train", lambda: uuid.uuid4().hex, lambda names: names[0])
    carried = carry(name, comm.size - settings.spares)
    try:
        group = TrainingGroup(comm, settings, carried)
    except MPI.Exception as error:  # a rank has died while the group was made
        if is_death(error):
            raise rank_failure(error) from error
        raise
    # A spare waits to replace a dead rank. On a spare, a signal that asks for a stop stays pending
    # until the spare trains and has a guard.
    if group.is_spare:
        signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    try:
        return group.repeat(
            lambda: train(group.comm, carried),
            lambda summary: json.dumps(dataclasses.asdict(summary)).encode(),
            lambda text: Summary(**json.loads(text)),
            group.note_step,
        )
    finally:
        # If the death of a rank ends a guard, signals stay blocked until the next guard begins; no
        # guard follows here. A spare that was never needed drops its pending signals, because the
        # other ranks have handled them.
        while group.is_spare and signal.sigtimedwait(_REQUESTS, 0):
            pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)
