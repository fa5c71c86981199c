"""``md.train``: the training loop, on one screen. Everything it uses can be used without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext

from ..checkpoint.store import CheckpointStore
from ..data import Loading
from ..fault_tolerance.guard import guard
from ..launch.fault_points import fault_point
from . import resume_report
from .abandon import AbandonOnError, watched
from .checks import last_step
from .feed import Feed
from .quarantine import Quarantine
from .run_state import Progress, Step
from .settings import agree_on_settings
from .summary import Summary, gather_facts, share

__all__ = ["Step", "Summary", "train"]


def train(
    comm,
    model,
    data,
    *,
    optimizer,
    global_batch: int,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    shuffle: str | bool = True,
    strategy=None,
    test_data=None,
    checkpoint=None,
    checkpoint_every: int | str | None = None,
    resume: bool | str = "auto",
    stop_after: int | None = None,
    microbatches: int | None = None,
    check_replicas: int | None = None,
    time_limit: float | str | None = None,
    patience: int | None = None,
    max_bad: float = 0.001,
    retry_bad: bool = False,
    quarantine=None,
    loading: Loading | None = None,
    callbacks: Sequence[Callable[[Step], None]] = (),
    on_resize: Callable[[int, int, Progress], None] | None = None,
    watch_seconds: float = 600.0,
) -> Summary:
    """Train `model` on `data` over all ranks of `comm`. Collective over `comm`.

    All ranks give the same arguments, which is compared before anything else; only `loading`,
    `quarantine`, `callbacks` and the function `on_resize` may differ.

    Parameters
    ----------
    model : object
        With ``parameters`` (name to array), ``loss_and_gradients(batch, gradients, ready=None)``
        and ``predict(inputs)``; see docs/models.md. Its parameters are trained in place.
    data : tuple of arrays, or a source
        The same on every rank; each rank takes its part of every global batch.
    optimizer : Optimizer
        From `md.optim`, or any object with ``init`` and ``update``.
    global_batch : int
        Samples per step over all ranks together. Never changed silently.
    epochs, steps : int
        How long: one of the two.
    seed : int
        Of the data order.
    shuffle : str or bool
        How an epoch is ordered, see `data.Sampler`. A run that is resumed keeps the one it has.
    strategy : AllReduce or ParameterServer
        AllReduce by default. "allreduce" and "parameter_server" are those with their defaults.
    test_data : tuple (inputs, labels), or a source
        Evaluated at the end.
    checkpoint : path, CheckpointStore or TieredStore
        Where the state goes, every `checkpoint_every` steps (default: once per epoch), at the
        end, and when the run is stopped by a signal. What cannot be written (no space, no
        folder) is said, and the run goes on; only the last one of a run must be there.
    resume : "auto", True, False or "fresh"
        Go on from the newest good step: if there is one; it must be there; there must be none.
        "fresh": begin anew, and set aside what the folder holds; a store of your own is opened with
        ``fresh=True`` for that.
    stop_after : int
        Stop with a checkpoint after this many steps in all, as a planned pause.
    microbatches : int
        Cut every global batch into this many pieces and sum them in one fixed order: the same
        bits on any number of ranks, also after a resume on another. AllReduce only; see
        docs/models.md for its price.
    check_replicas : int
        Compare the parameters of all ranks every so many steps; they are compared before each
        checkpoint in any case. AllReduce only.
    time_limit : float or "auto"
        Stop with a checkpoint after so many seconds, or before a Slurm allocation ends.
    patience : int
        Stop with a checkpoint when the mean loss of so many steps is not below all before.
        AllReduce only.
    max_bad : float
        Share of the records that may turn out to be bad: those are skipped, counted and listed.
        One more stops the run with a checkpoint. See docs/data.md.
    retry_bad : bool
        A resumed run looks again at the records that its checkpoint lists: they were mended.
    quarantine : path
        File for the list of bad records, JSON lines.
    loading : data.Loading
        Reading ahead, a bandwidth cap, and what to do when a source does not answer.
    callbacks : functions of a `Step`
        Called after every step on every worker.
    on_resize : function of (old ranks, new ranks, run)
        Called on every rank after a resume on another number of ranks, for instance to give
        another learning rate: ``run.exchange.optimizer = md.optim.sgd(lr=...)``. The global batch
        stays what it is, so nothing has to change.
    watch_seconds : float
        After so many seconds in which nothing happens the job ends and says who is missing, as
        with `md.watch`. 0 is off; nor is it done where the program watches already (`md.watch`), or
        on one rank.

    Returns
    -------
    Summary
        The same on every rank.

    Raises
    ------
    ConfigError
        Bad input, on all ranks.
    MismatchError
        The ranks were given different arguments or data, on all ranks.
    NoCheckpoint, CheckpointError
        ``resume=True`` without a checkpoint; one of another model.
    ReplicaError
        The parameters are not the same on all ranks; nothing was saved. They are compared before
        each checkpoint, and at the end.
    SourceError
        Nothing of `data` can be read any more, on the ranks that meet it (a checkpoint was saved).
    TooManyBadRecords
        More than `max_bad` allows (a checkpoint was saved).
    MpidistError
        The loss is not a number any more (a checkpoint was saved before that update).
    StorageError
        The last checkpoint could not be written. On all ranks.
    Stopped
        A SystemExit with code 75: a signal or the time limit asked for a stop. The state has
        been saved. If the allocation left no time for that, the newest good step remains.
    """
    given = {name: value for name, value in locals().items() if name != "comm"}
    agreed = agree_on_settings(comm, given)
    source, sampler, pace = agreed.source, agreed.sampler, agreed.pace
    settings: dict = {"global_batch": sampler.global_batch, "seed": sampler.seed}
    if microbatches is not None:
        settings["microbatches"] = microbatches
    own_store = checkpoint is not None and not hasattr(checkpoint, "restore")
    watch = watched(comm, watch_seconds) if agreed.watch else nullcontext()
    with (
        watch,
        CheckpointStore(comm, checkpoint, fresh=resume == "fresh")
        if own_store
        else nullcontext(checkpoint) as store,
    ):
        exchange = agreed.strategy.open(comm, model, optimizer, **settings)
        with AbandonOnError(exchange):
            bad = Quarantine(exchange.workers, source, max_bad, quarantine)
            run = Progress(comm, model, exchange, store, sampler, bad, agreed.words)
            run.resume(resume, retry_bad)
            if on_resize is not None and run.ranks_before != comm.size:
                on_resize(run.ranks_before, comm.size, run)
            last = last_step(epochs, steps, sampler, run.step, run.position)
            end = last if stop_after is None else min(last, stop_after)
            resume_report.tell_resume(run, end)
            facts = None
            watching = guard(comm, run.state, store, time_limit=time_limit, patience=patience)
            with watching as watcher, ExitStack() as stack:
                if exchange.dedicated:
                    exchange.serve(run.save)
                else:
                    exchange.begin()
                    feed = stack.enter_context(closing(Feed(source, run, loading)))
                    run.start_loop(last)
                    pace.begin(run.step)
                    while run.step < end and not run.stopping:
                        indices, after = sampler.batch(run.position)
                        wanted = bad.wanted(indices)
                        began, waited = time.perf_counter(), feed.waited
                        fault_point("step", run.step + 1)
                        loss, samples = exchange.compute(feed, wanted)
                        computed = time.perf_counter()
                        fault_point("exchange", run.step + 1)
                        stop = bool(watcher.flag or run.bad or bad.full)
                        loss, used = run.reduce(loss, samples, len(wanted), stop, feed)
                        if used is None:
                            continue  # a rank has no data yet: the state is saved, try again
                        if used and exchange.synchronous:
                            watcher.check_loss(loss, run.step)
                        if used or not exchange.synchronous:
                            exchange.update()
                        run.note_loss(loss, used)
                        run.advance(after, len(indices), len(wanted))
                        times = (computed - began, time.perf_counter() - computed)
                        on_data = feed.waited - waited
                        exchange.stragglers.note(on_data, max(0.0, times[0] - on_data))
                        for callback in agreed.callbacks:
                            callback(Step(run.step, last, after.epoch, loss, len(indices), *times))
                        if check_replicas and run.step % check_replicas == 0:
                            exchange.check(run.step)
                        if pace.due(run.step) and run.step < last:
                            run.checkpoint(pace)
                    feed.close()
                    run.end_loop()
                    run.in_time = not run.stopping or watcher.fits(exchange.workers, exchange.wait)
                    if run.in_time:
                        run.checkpoint()
                    else:
                        run.settle()  # what was begun in time may end in time
                    exchange.finish()
                    run.agree_on_bad_records()
                    if not run.stopping:
                        facts = gather_facts(run, test_data)
                exchange.close()
                run.agree_on_the_end(watcher)
    return share(run, facts)
