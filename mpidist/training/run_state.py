"""The state of a training run (step, position, losses): how it is saved and restored."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .. import events
from ..checkpoint import handed_copy
from ..checkpoint.interval import SaveInterval
from ..collectives import selection
from ..collectives.allreduce import allreduce
from ..data import Position, Sampler
from ..errors import ConfigError, MpidistError, NoCheckpoint, StorageError
from ..fault_tolerance import hand_over
from ..fault_tolerance.communication_share import StepTimes
from ..fault_tolerance.signals import say_last
from ..launch import heartbeat
from ..launch.environment import memory_folder
from ..launch.fault_points import fault_point
from ..runtime.agreement.run_on_all import run_on_all
from . import resume_report
from .quarantine import Quarantine

#: Attributes of `Progress` with which a run continues after the death of a rank.
_CARRIED = (
    "first_step", "samples", "failed_saves", "failure", "changed", "stopping", "bad", "_losses",
    "_losses_of", "owes_save", "_has_copy", "_newest",
)  # fmt: skip


class StepReport(NamedTuple):
    """The measurements of one step, which callbacks receive.

    Under `AllReduce`, `loss` is the mean over the global batch; under `ParameterServer`, it is the
    mean over this worker's samples.
    """

    step: int
    last: int
    epoch: int
    loss: float
    samples: int
    compute_seconds: float
    exchange_seconds: float


class Progress:
    """The state of one training run: step, position in the data, losses and checkpoint store."""

    def __init__(
        self, comm, model, exchange, store, sampler: Sampler, quarantine: Quarantine, words: Mapping
    ):
        self.comm, self.model, self.exchange, self.store = comm, model, exchange, store
        self.sampler, self.quarantine = sampler, quarantine
        self.step, self.position = 0, Position(0, 0)
        self.resizes, self.grown, self.ranks_before = 0, 0, comm.size
        self.first_step = 0
        self.settings, self.changed = resume_report.kept(words), list[str]()
        self.saved_step: int | None = None
        self._newest: int | None = None  # the newest step that is known to be on stable storage
        #: Whether the run continues from a copy in memory, so it should save to its store soon.
        self.owes_save = self._has_copy = False
        self.failed_saves, self.failure = 0, ""
        self.samples = 0
        self.stopping = self.bad = self._ending = False
        self.in_time = True  # whether there is enough time for a last checkpoint
        self.began = self.loop_began = time.perf_counter()
        self.loop_seconds = 0.0
        self._losses, self._losses_of = [0.0, 0], -1
        self.last = 0
        self.deaths = self.evicted = 0
        self.report: StepReport | None = None
        self.times = StepTimes()

    # -- the loop ----------------------------------------------------------------------

    def note_loss(self, loss: float, samples: int) -> None:
        """Add the loss of a step to the mean of this epoch; set `bad` if the loss is not finite."""
        if self._losses_of != self.position.epoch:
            self._losses_of, self._losses = self.position.epoch, [0.0, 0]
        if math.isfinite(loss):
            self._losses[0] += loss * samples
            self._losses[1] += samples
        elif samples:
            self.bad = True

    def reduce(self, loss: float, samples: int, total: int, stop: bool, feed):
        """Exchange the gradients of a step; return (loss, samples that were used). Collective.

        The step has `total` samples on all workers, of which this worker computed `samples`. If a
        rank still waits for its data, the step is discarded, the state is saved, and the returned
        number of samples is None.
        """
        if not self.exchange.synchronous:
            loss, self.stopping = self.exchange.reduce(loss, samples, total, stop)
            return loss, samples
        loss, flag = self.exchange.reduce(loss, samples, total, stop or feed.unusual)
        if not flag:
            return loss, total
        # The flag is true on all ranks if a rank wants to stop or has an incomplete batch. The
        # ranks now agree on whether the run stops and on what is missing.
        verdict = self.quarantine.agree(stop, feed.starved > 0)
        self.stopping = verdict.stop or self.quarantine.full
        if verdict.starved:
            feed.undo()
            self._wait_for_data(feed.starved)
            return loss, None
        good = total - verdict.lost
        if good:
            self.exchange.rescale(total / good)
        return loss * total / max(good, 1), good

    def advance(self, after: Position, samples: int, wanted: int) -> None:
        """Count a finished step, and set the position in the data to `after`."""
        self.quarantine.skipped += samples - wanted
        self.quarantine.end_of_step()
        self.step += 1
        heartbeat.note_steps(self.step)
        self.samples += wanted
        self.position = after

    def start_loop(self, last: int) -> None:
        """Note the time at which the steps begin."""
        self.last = last
        heartbeat.note_steps(self.step)
        self.loop_began = time.perf_counter()

    def end_loop(self) -> None:
        """Note the time at which the steps end, to compute the samples per second."""
        self._ending = True
        self.loop_seconds = time.perf_counter() - self.loop_began

    def train_loss(self) -> float:
        """Return the mean loss per sample since the last epoch began.

        Collective over the workers.
        """
        totals = np.array(self._losses, np.float64)
        if not self.exchange.synchronous:
            allreduce(self.exchange.workers, totals, algorithm="native")
        return float(totals[0] / totals[1]) if totals[1] else math.nan

    # -- checkpoints -------------------------------------------------------------------

    def state(self, saving: bool = True) -> dict:
        """Return what a checkpoint saves: the run's own arrays, into which a restore writes."""
        state = {**self.exchange.state(saving)}
        if self.exchange.dedicated:
            return state
        state["run"] = {
            **self._facts(),
            "workers": self.exchange.workers.size,
            "selection": selection.table(self.exchange.workers),
            "settings": [list(each) for each in self.settings.items()],
        }
        if more := getattr(self.model, "state", {}):
            state["model"] = dict(more)
        return state

    def _facts(self) -> dict:
        """Return the step, the position, the losses and more as plain values, for a checkpoint."""
        return {
            "step": self.step,
            **self.position.as_dict(),
            "seed": self.sampler.seed,
            "global_batch": self.sampler.global_batch,
            "shuffle": self.sampler.shuffle,
            **self.quarantine.facts(),
            "ranks": self.comm.size,
            "resizes": self.resizes,
            "grown": self.grown,
            "order": self.exchange.order(),
        }

    def facts_to_carry(self, losses_of_guard: list) -> dict:
        """Return the run's plain values (such as its step), to continue after a rank's death."""
        return {
            **self._facts(),
            "more": [getattr(self, name) for name in _CARRIED],
            "report": self.report and list(self.report),
            "price": self.exchange.price,
            "losses_of_guard": losses_of_guard,
        }

    def continue_from(self, facts: Mapping) -> None:
        """Continue after a rank's death, from `facts`, a result of `facts_to_carry`. Collective."""
        self._take(facts)
        for name, value in zip(_CARRIED, facts["more"], strict=True):
            setattr(self, name, value)
        self.report = facts["report"] and StepReport(*facts["report"])
        if self.store is not None and hasattr(self.store, "continue_newest"):
            self.store.continue_newest()

    def checkpoint(self, pace: SaveInterval | None = None) -> None:
        """Save a checkpoint of this step, unless it is already saved. Collective over the workers.

        With `pace` (which chooses when to save), the state may be saved in the background. Without
        it, the state is on stable storage when this method returns. If saving has failed,
        `saved_step` is None.
        """
        if self.store is None:
            return
        if self.saved_step == self.step:
            self.settle()
        if self.saved_step == self.step:
            return
        # Workers may wait for each other only after the save point, at which all workers have
        # arrived: until then a server on a worker's rank must answer the workers that come later.
        self.exchange.save_point(self.step)
        self.agree_on_bad_records()
        self.average_model_state()
        began = time.monotonic()
        self.save(self.step, background=pace is not None and self.exchange.synchronous)
        if pace is None and self._has_copy:
            self.settle()
        if pace is not None:
            pace.saved(self.exchange.workers, self.step, time.monotonic() - began)

    def keep_copy(self, copies) -> None:
        """Copy the state of this step to the memory of the nodes, if a copy is due. Collective."""

        def state() -> dict:
            self.average_model_state()
            return self.state()

        copies.keep(self.comm, self.step, state)

    def hand_over(self) -> bool:
        """Leave the state for newly started ranks, if they ask for it. Collective.

        Returns whether these ranks continue the run.
        """
        memory = memory_folder()
        if memory is None or not hasattr(self.store, "let_go"):
            return False
        if hand_over.asked(self.comm) != heartbeat.IN_MEMORY:
            return False
        self.exchange.save_point(self.step)
        self.average_model_state()
        self.settle()
        state, path = self.state(), self.store.path
        if not handed_copy.save_copy(self.comm, memory, path, self.step, state):
            return False
        self.store.let_go()  # because the next attempt may save immediately
        events.emit("handed_over", step=self.step)
        if not hand_over.offer(self.comm, heartbeat.IN_MEMORY):
            return False
        self.saved_step = self.step
        return True

    def settle(self) -> None:
        """Wait until a save in the background is on stable storage, or has failed. Collective."""
        if self.exchange.synchronous and hasattr(self.store, "wait"):
            self._saves(self.store.wait)
            self._newest = self._newest if self.saved_step is None else self.saved_step
            if self._has_copy and self.saved_step is not None:  # the store is newer than the copy
                self._has_copy, memory = False, memory_folder()
                if memory is not None:
                    handed_copy.remove_copy(memory, self.store.path)

    def _saves(self, work: Callable[[], None], quiet: bool = False) -> None:
        """Call `work`, which uses the store; print a StorageError that it raises. Collective."""
        try:
            work()
        except StorageError as error:
            self.failure = resume_report.save_failure(error, self.saved_step, self.store)
            self.saved_step, self.failed_saves = None, self.failed_saves + 1
            events.emit("checkpoint_failed", reason=self.failure, times=self.failed_saves)
            if self.comm.rank == 0 and not quiet:
                _print(resume_report.not_saved(self.failure, self._newest))

    def agree_on_bad_records(self) -> None:
        """Exchange bad records, if workers may be at different steps. Collective over workers."""
        if not self.exchange.synchronous:
            self.quarantine.agree()
            self.stopping = self.stopping or self.quarantine.full

    def _wait_for_data(self, seconds: float) -> None:
        """Save the state because a data source does not answer. Collective over the workers."""
        if seconds:
            events.emit("starved", step=self.step, seconds=seconds)
            _print(
                f"rank {self.comm.rank}: no data for step {self.step + 1} after {seconds:g} s; the "
                "run waits, its state is saved"
            )
        self.checkpoint()

    def save(self, step: int, background: bool = False) -> None:
        """Save this rank's part of the state under the number `step`. Collective over all ranks."""
        self.settle()  # otherwise the error of an earlier background save would prevent this save
        fault_point("save", step)
        self.saved_step, self.owes_save = step, False
        if background and hasattr(self.store, "save_async"):
            self._saves(lambda: self.store.save_async(step, self.state()))
        else:
            self._saves(lambda: self.store.save(step, self.state()), self._ending)
            if self.saved_step == step and hasattr(self.store, "wait"):
                self._saves(self.store.wait, self._ending)  # `save` of a TieredStore returns early
        fault_point("saved", step)
        if self.saved_step == step:
            self._newest = self._newest if background else step
            events.emit("checkpoint", step=step)

    def average_model_state(self) -> None:
        """Average the model's state over all workers. Collective over the workers."""
        if self.exchange.equal_state:
            return
        arrays = [a for a in getattr(self.model, "state", {}).values() if a.dtype.kind == "f"]
        # The means are copied at the end, so the state is unchanged if a rank dies in these calls.
        means = [allreduce(self.exchange.workers, array.copy(), "mean") for array in arrays]
        for array, mean in zip(arrays, means, strict=True):
            array[...] = mean

    def resume(self, resume: bool | str, retry_bad: bool = False, handed: str = "") -> None:
        """Restore the state from the newest good checkpoint. Collective.

        `handed` says where the ranks that ran this job before have left their state: see
        `hand_over.wait_for_turn`.
        """
        if self.store is None:
            return
        if resume in (False, "fresh"):
            if there := self.store.all_steps():
                raise resume_report.checkpoints_there(resume, self.store.path, there[-1])
            return
        like = self.state(saving=False)
        like.setdefault("run", {"step": 0, "epoch": 0, "offset": 0, "seed": 0, "selection": {}})
        like["run"].update(ranks=self.comm.size, resizes=0, grown=0)
        like["run"]["shuffle"] = "permutation"  # for checkpoints without this entry
        try:
            state, is_copy = handed_copy.restore_newest(
                self.comm, memory_folder(), self.store, like, handed
            )
            self.owes_save = self._has_copy = is_copy
        except NoCheckpoint:
            # Without any checkpoint the run starts from the beginning. If there are checkpoints but
            # all are damaged, the run must not start, because it would overwrite them.
            if resume is True or self.store.all_steps():
                raise
            return
        facts = state["run"]
        if facts["seed"] != self.sampler.seed:
            raise ConfigError(
                f"the checkpoint in {self.store.path} was made with seed {facts['seed']}, this run "
                f"has seed {self.sampler.seed}: the data order would change; use the same seed"
            )
        self.first_step = int(facts["step"])
        self.saved_step = self._newest = None if self.owes_save else self.first_step
        self.changed = resume_report.differences(dict(facts.get("settings", [])), self.settings)
        if facts["shuffle"] != self.sampler.shuffle:
            given = self.sampler.shuffle
            self.changed.append(f"shuffle: {facts['shuffle']} when saved, which stays; {given} now")
        if not self.exchange.dedicated:
            selection.restore(self.exchange.workers, facts["selection"])
        self._take(facts, retry_bad)
        if hasattr(self.exchange, "restored"):
            self.exchange.restored(state)
        events.emit("resumed", step=self.step)

    def _take(self, facts: Mapping, retry_bad: bool = False) -> None:
        """Continue from the values that `_facts` returned when they were saved. Collective."""
        self.step, self.position = int(facts["step"]), Position.from_dict(facts)
        # The saved position is only valid in the order in which the saving run used the samples.
        self.sampler.set_shuffle(facts["shuffle"])
        self.quarantine.restore(facts.get("bad", []), facts.get("skipped", 0), retry_bad)
        self.stopping = self.quarantine.full
        self.ranks_before = facts["ranks"]
        self.resizes = facts["resizes"] + (self.ranks_before != self.comm.size)
        self.grown = facts["grown"] + (self.ranks_before < self.comm.size)
        if not self.exchange.dedicated:
            self.exchange.arrange(facts.get("order", {}))

    # -- the end -----------------------------------------------------------------------

    def agree_on_the_end(self, watcher) -> None:
        """If the run ends early (bad loss, stop), raise the error that says why. Collective."""
        mine = [self.step, self.bad, self.stopping, self.quarantine.full, not self.in_time]
        everyone = run_on_all(self.comm, "md.train: the end", lambda: mine, list)
        self.step, bad, stopping, full, late = (
            max(column) for column in zip(*everyone, strict=True)
        )
        # A failed save at the end is an error, since a requeued run could not save either. If there
        # was no time for a save, the checkpoint before it remains, and that is no error.
        failed = self.failure and self.saved_step is None and not late
        saved = f"the state was saved as step {self.step}" if self.store else "nothing saved"
        if failed:
            saved = resume_report.not_saved(self.failure, self._newest, goes_on=False)
        elif hand_over.handed:
            saved = "the next attempt goes on with the run"
        elif self.store and self.saved_step != self.step:
            saved = "the state was not saved, because the allocation ends too soon for that"
        if full:
            raise self.quarantine.error(saved)
        if bad or failed:
            error: MpidistError = StorageError(f"the run is over at step {self.step}, and {saved}")
            if bad:
                error = MpidistError(
                    f"the loss is not a number any more near step {self.step}; {saved}. Lower the "
                    "learning rate, clip the gradients, or look for a bad record"
                )
            error.everywhere = True
            raise error
        if stopping and self.deaths and not watcher.flag:
            watcher.stop("requested by a rank that may have died")
        if stopping and watcher.should_stop(self.step):
            if self.comm.rank == 0 and events.VERBOSITY:
                say_last(f"mpidist: stopped at step {self.step}: {watcher.reason}; {saved}")
            watcher.state = None  # `checkpoint` has saved this step, and the servers have ended
            watcher.leave(self.step)


def without_losses(facts: Mapping) -> dict:
    """Return a result of `facts_to_carry` without its losses, for a worker without steps so far."""
    new = {"_losses": [0.0, 0], "_losses_of": -1}
    more = [new.get(*each) for each in zip(_CARRIED, facts["more"], strict=True)]
    return {**facts, "more": more}


def _print(text: str) -> None:
    print(f"mpidist: {text}", file=sys.stderr, flush=True)
