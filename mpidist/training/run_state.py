"""Where a run stands, and how that gets into a checkpoint and back."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .. import events
from ..checkpoint.interval import SaveInterval
from ..collectives import selection
from ..collectives.allreduce import allreduce
from ..data import Position, Sampler
from ..errors import ConfigError, MpidistError, NoCheckpoint, StorageError
from ..fault_tolerance.signals import say_last
from ..launch import heartbeat
from ..launch.fault_points import fault_point
from ..runtime.agreement.run_on_all import run_on_all
from . import resume_report
from .quarantine import Quarantine


class Step(NamedTuple):
    """What a callback is told after a step. `loss` is global under AllReduce, else the worker's."""

    step: int
    last: int
    epoch: int
    loss: float
    samples: int
    compute_seconds: float
    exchange_seconds: float


class Progress:
    """One run: step, data position, losses, store. Methods that are collective say so."""

    def __init__(
        self, comm, model, exchange, store, sampler: Sampler, quarantine: Quarantine, words: Mapping
    ):
        self.comm, self.model, self.exchange, self.store = comm, model, exchange, store
        self.sampler, self.quarantine = sampler, quarantine
        self.step, self.position = 0, Position(0, 0)
        self.resizes, self.ranks_before = 0, comm.size
        self.first_step = 0
        self.settings, self.changed = resume_report.kept(words), list[str]()
        self.saved_step: int | None = None
        self.failed_saves, self.failure = 0, ""
        self.samples = 0
        self.stopping = self.bad = False
        self.in_time = True  # no stop has come too late for a last checkpoint
        self.began = self.loop_began = time.perf_counter()
        self.loop_seconds = 0.0
        self._losses, self._losses_of = [0.0, 0], -1
        self.last = 0

    # -- the loop ----------------------------------------------------------------------

    def note_loss(self, loss: float, samples: int) -> None:
        """Add a loss to the mean of this epoch; remember one that is no number."""
        if self._losses_of != self.position.epoch:
            self._losses_of, self._losses = self.position.epoch, [0.0, 0]
        if math.isfinite(loss):
            self._losses[0] += loss * samples
            self._losses[1] += samples
        elif samples:
            self.bad = True

    def reduce(self, loss: float, samples: int, total: int, stop: bool, feed):
        """Exchange the gradients of a step; returns (loss, samples that they are of). Collective.

        `samples` of `total` were this worker's. Returns None samples where a rank has no data yet:
        nothing of the step counts, and the state is saved.
        """
        if not self.exchange.synchronous:
            loss, self.stopping = self.exchange.reduce(loss, samples, total, stop)
            return loss, samples
        loss, flag = self.exchange.reduce(loss, samples, total, stop or feed.unusual)
        if not flag:
            return loss, total
        # For a stop, or because the batch is not whole: all ranks see the flag, and talk about it.
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
        """A step is done, and `after` is the new data position.

        It was to use `samples` over all workers, of which `wanted` were not known to be bad.
        """
        self.quarantine.skipped += samples - wanted
        self.step += 1
        heartbeat.note_steps(self.step)
        self.samples += wanted
        self.position = after

    def start_loop(self, last: int) -> None:
        """The clock of samples per second begins here."""
        self.last = last
        heartbeat.note_steps(self.step)
        self.loop_began = time.perf_counter()

    def end_loop(self) -> None:
        """The clock of samples per second ends here."""
        self.loop_seconds = time.perf_counter() - self.loop_began

    def train_loss(self) -> float:
        """Mean loss per sample since the last epoch began. Collective over the workers.

        Where losses are global all ranks have noted the same ones, and nothing is added to them.
        """
        totals = np.array(self._losses, np.float64)
        if not self.exchange.synchronous:
            allreduce(self.exchange.workers, totals, algorithm="native")
        return float(totals[0] / totals[1]) if totals[1] else math.nan

    # -- checkpoints -------------------------------------------------------------------

    def state(self, saving: bool = True) -> dict:
        """The state of the run as live arrays: a save writes them, and a restore fills them."""
        facts: dict = {
            "step": self.step,
            **self.position.as_dict(),
            "seed": self.sampler.seed,
            "global_batch": self.sampler.global_batch,
            "shuffle": self.sampler.shuffle,
            **self.quarantine.facts(),
            "ranks": self.comm.size,
            "resizes": self.resizes,
            "workers": 0 if self.exchange.dedicated else self.exchange.workers.size,
            "selection": {},
            "order": {} if self.exchange.dedicated else self.exchange.order(),
            "settings": [list(each) for each in self.settings.items()],
        }
        state = self.exchange.state(saving)
        if self.exchange.dedicated:
            return state
        facts["selection"] = selection.table(self.exchange.workers)
        more = getattr(self.model, "state", {})
        return {**state, "run": facts, **({"model": dict(more)} if more else {})}

    def checkpoint(self, pace: SaveInterval | None = None) -> None:
        """Save this step, unless it is saved. Collective over the workers; servers follow.

        With the `pace` of a loop that goes on, replicas write in the background; without, the
        state is on stable storage when this returns, or `saved_step` is None.
        """
        if self.store is None:
            return
        if self.saved_step == self.step:
            self.settle()
        if self.saved_step == self.step:
            return
        # Only after the point where all have arrived may workers wait for each other alone: servers
        # on their ranks would not serve those that are still on their way.
        self.exchange.save_point(self.step)
        self.agree_on_bad_records()
        self.average_model_state()
        began = time.monotonic()
        self.save(self.step, background=pace is not None and self.exchange.synchronous)
        if pace is not None:
            pace.saved(self.exchange.workers, self.step, time.monotonic() - began)

    def settle(self) -> None:
        """Wait until what is being saved is on stable storage, or has failed. Collective."""
        if self.exchange.synchronous and hasattr(self.store, "wait"):
            self._saves(self.store.wait)

    def _saves(self, work: Callable[[], None]) -> None:
        """Do `work` of the store; what it cannot do now is no reason to stop training. Collective.

        All ranks know of it, and the next checkpoint tries again.
        """
        try:
            work()
        except StorageError as error:
            self.saved_step = None
            self.failed_saves, self.failure = self.failed_saves + 1, str(error)
            events.emit("checkpoint_failed", reason=self.failure, times=self.failed_saves)
            if self.comm.rank == 0:
                text = f"mpidist: not saved, the run goes on: {error}"
                print(text, file=sys.stderr, flush=True)

    def agree_on_bad_records(self) -> None:
        """Let workers at different clocks tell each other. Collective over the workers."""
        if not self.exchange.synchronous:
            self.quarantine.agree()
            self.stopping = self.stopping or self.quarantine.full

    def _wait_for_data(self, seconds: float) -> None:
        """Save what there is while a source does not answer. Collective over the workers (R44)."""
        if seconds:
            events.emit("starved", step=self.step, seconds=seconds)
            print(
                f"mpidist: rank {self.comm.rank}: no data for step {self.step + 1} after "
                f"{seconds:g} s; the run waits, its state is saved",
                file=sys.stderr,
                flush=True,
            )
        self.checkpoint()

    def save(self, step: int, background: bool = False) -> None:
        """Write what this rank holds as `step`. Collective over all ranks."""
        self.settle()  # or the failure of the last one would keep this one from beginning
        fault_point("save", step)
        self.saved_step = step
        if background and hasattr(self.store, "save_async"):
            self._saves(lambda: self.store.save_async(step, self.state()))
        else:
            self._saves(lambda: self.store.save(step, self.state()))
            if self.saved_step == step and hasattr(self.store, "wait"):
                self._saves(self.store.wait)  # a store of two tiers returns with the first
        fault_point("saved", step)
        if self.saved_step == step:
            events.emit("checkpoint", step=step)

    def average_model_state(self) -> None:
        """Make the model's state the mean of all workers'. Collective over the workers.

        Running statistics differ from rank to rank; what is saved and evaluated is their mean.
        """
        if self.exchange.equal_state:
            return
        for array in getattr(self.model, "state", {}).values():
            if array.dtype.kind == "f":
                allreduce(self.exchange.workers, array, "mean")

    def resume(self, resume: bool | str, retry_bad: bool = False) -> None:
        """Fill the state from the newest good step, as `resume` says. Collective.

        `retry_bad`: records that it lists as bad are looked at again.
        """
        if self.store is None:
            return
        if resume in (False, "fresh"):
            there = self.store.all_steps()
            if there:
                cure = "resume='fresh' (--fresh) sets them aside, or choose another folder"
                raise ConfigError(
                    f"resume={resume!r}, but {self.store.path} has checkpoints up to step "
                    f"{there[-1]}; {'open the store with fresh=True' if resume else cure}"
                )
            return
        like = self.state(saving=False)
        like.setdefault("run", {"step": 0, "epoch": 0, "offset": 0, "seed": 0, "selection": {}})
        like["run"].update(ranks=self.comm.size, resizes=0)
        like["run"]["shuffle"] = "permutation"  # a checkpoint that does not say so has no other
        try:
            _, state = self.store.restore(like)
        except NoCheckpoint:
            # Nothing there is a beginning; steps that are all damaged must not be written over.
            if resume is True or self.store.all_steps():
                raise
            return
        facts = state["run"]
        if facts["seed"] != self.sampler.seed:
            raise ConfigError(
                f"the checkpoint in {self.store.path} was made with seed {facts['seed']}, this run "
                f"has seed {self.sampler.seed}: the data order would change; use the same seed"
            )
        self.step = self.first_step = self.saved_step = int(facts["step"])
        self.position = Position.from_dict(facts)
        self.changed = resume_report.differences(dict(facts.get("settings", [])), self.settings)
        if facts["shuffle"] != self.sampler.shuffle:
            given = self.sampler.shuffle
            self.changed.append(f"shuffle: {facts['shuffle']} when saved, which stays; {given} now")
        # A position means nothing in another order, whatever this version would choose today.
        self.sampler.set_shuffle(facts["shuffle"])
        self.quarantine.restore(facts.get("bad", []), facts.get("skipped", 0), retry_bad)
        self.stopping = self.quarantine.full
        self.ranks_before = facts["ranks"]
        self.resizes = facts["resizes"] + (self.ranks_before != self.comm.size)
        if not self.exchange.dedicated:
            selection.restore(self.exchange.workers, facts["selection"])
            self.exchange.arrange(facts.get("order", {}))
        events.emit("resumed", step=self.step)

    # -- the end -----------------------------------------------------------------------

    def agree_on_the_end(self, watcher) -> None:
        """Raise on all ranks what ends the run early: a bad loss, a stop. Collective."""
        mine = [self.step, self.bad, self.stopping, self.quarantine.full, not self.in_time]
        everyone = run_on_all(self.comm, "md.train: the end", lambda: mine, list)
        self.step, bad, stopping, full, late = (
            max(column) for column in zip(*everyone, strict=True)
        )
        # A save that was tried and failed, at the end: a run that is requeued could do no better.
        # One that came too late is none: the one before is there, whatever failed meanwhile.
        failed = self.failure and self.saved_step is None and not late
        saved = f"the state was saved as step {self.step}" if self.store else "nothing saved"
        if failed:
            saved = f"the state could not be saved: {self.failure}"
        elif self.store and self.saved_step != self.step:
            saved = "the state was not saved, for the allocation ends too soon for that"
        if full:
            raise self.quarantine.error(saved)
        if bad:
            error = MpidistError(
                f"the loss is not a number any more near step {self.step}; {saved}. Lower the "
                "learning rate, clip the gradients, or look for a bad record"
            )
            error.everywhere = True
            raise error
        if failed:
            lost = StorageError(f"the run is over at step {self.step}, and {saved}")
            lost.everywhere = True
            raise lost
        if stopping and watcher.should_stop(self.step):
            if self.comm.rank == 0 and events.VERBOSITY:
                say_last(f"mpidist: stopped at step {self.step}: {watcher.reason}; {saved}")
            watcher.state = None  # `checkpoint` has saved this step, and servers are gone by now
            watcher.leave(self.step)
