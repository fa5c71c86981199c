"""``md.train``: the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from types import SimpleNamespace

from ..data import Loading
from ..elasticity.elastic_settings import Elastic
from ..fault_tolerance import hand_over
from ..fault_tolerance.guard import Stopped, guard
from ..launch.fault_points import fault_point
from . import resume_report
from .checks import last_step
from .elastic_run import Carried, train_elastic
from .feed import Feed
from .quarantine import Quarantine
from .run_resources import abandon_on_error, open_store, watched
from .run_state import Progress, StepReport
from .settings import TrainSettings, agree_on_settings
from .summary import Summary, gather_facts, share

__all__ = ["StepReport", "Summary", "train"]


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
    callbacks: Sequence[Callable[[StepReport], None]] = (),
    on_resize: Callable[[int, int, Progress], None] | None = None,
    watch_seconds: float = 600.0,
    elastic: Elastic | bool | None = False,
) -> Summary:
    """Train `model` on `data` over all ranks of `comm`. Collective over `comm`.

    All ranks must give the same arguments. Only `loading`, `quarantine`, `callbacks`, the records
    of `test_data` and the function `on_resize` may differ between ranks.

    Parameters
    ----------
    model : object
        An object with ``parameters`` (name to array), ``predict(inputs)`` and
        ``loss_and_gradients(batch, gradients, ready=None)``; see docs/models.md. Training changes
        the parameters of the model in place.
    data : tuple of arrays, or a source
        The training data, the same on every rank. Each rank takes its part of every global batch.
    optimizer : Optimizer
        From `md.optim`, or any object with ``init`` and ``update``.
    global_batch : int
        Samples per step over all ranks together.
    epochs, steps : int
        Length of the run: give one of the two.
    seed : int
        Seed of the order of the data.
    shuffle : str or bool
        Order of the records in an epoch, see `data.Sampler`. A resumed run keeps the order with
        which it began.
    strategy : AllReduce, ParameterServer, Pipeline, PeerAverage or Hogwild
        How the gradients or the models are combined; by default ``AllReduce()``. The names
        "allreduce", "parameter_server", "pipeline", "peer_average" and "hogwild" stand for the
        strategies with their defaults.
    test_data : tuple (inputs, labels), or a source
        Data on which the model is evaluated at the end, as a classifier: ``predict`` must return
        class scores of shape (n, classes), with 2 or more classes. The labels have shape (n,), or
        (n, classes) with 0 or 1. Leave `test_data` out for other models, such as a regression.
    checkpoint : path, CheckpointStore, TieredStore, or a function
        Where the state is saved. If `checkpoint` is a function, it gets a communicator and returns
        a store, which the run closes at its end. The state is saved every `checkpoint_every` steps
        (by default once per epoch), at the end, and when a signal stops the run. If a checkpoint
        cannot be written, for example because the disk is full, the run reports this and continues.
        The run raises an error only if the last checkpoint cannot be written.
    resume : "auto", True, False or "fresh"
        "auto" resumes from the newest good checkpoint if there is one. True requires a checkpoint,
        and False requires that there is none. "fresh" begins a new run, which does not use the
        older checkpoints in the folder. If `checkpoint` is a store, do not give "fresh", but open
        the store with ``fresh=True``.
    stop_after : int
        Save a checkpoint and stop after this many steps, counted from the beginning of the run.
    microbatches : int
        Cut every global batch into this many pieces, and sum the gradients of the pieces in a fixed
        order. The results then have the same bits on any number of ranks. For AllReduce and
        Pipeline only; see docs/models.md for the cost.
    check_replicas : int
        Compare the parameters of all ranks each time this many steps are done. The parameters are
        compared before each checkpoint in any case. AllReduce only.
    time_limit : float or "auto"
        Save a checkpoint and stop after this many seconds, or, with "auto", before the Slurm
        allocation ends.
    patience : int
        Compute the mean loss of each group of this many steps. Save a checkpoint and stop when such
        a mean is not below all earlier means. AllReduce only.
    max_bad : float
        Fraction of the records that may be bad. Bad records are skipped, counted and listed. If a
        larger fraction is bad, the run saves a checkpoint and stops. See docs/data.md.
    retry_bad : bool
        Whether to read those records again that the checkpoint lists as bad, for example after they
        were repaired.
    quarantine : path
        File for the list of bad records, as JSON lines.
    loading : data.Loading
        Settings for reading ahead, for a limit of the bandwidth, and for sources that do not
        answer.
    callbacks : functions of a `StepReport`
        Functions that are called after every step on every worker.
    on_resize : function of (old ranks, new ranks, run)
        Function that is called on every rank after a resume on another number of ranks. In an
        elastic run it is also called after each change of the ranks. The function may set another
        learning rate: ``run.exchange.optimizer = md.optim.sgd(lr=...)``. This is usually not
        needed, because the global batch does not depend on the number of ranks.
    watch_seconds : float
        After this many seconds without progress, the job ends and reports the missing ranks, as
        with `md.watch`. 0 switches this off. A run on one rank is not watched, nor is a run whose
        program already uses `md.watch`.
    elastic : Elastic or bool
        Whether the run goes on with the living ranks after ranks have died, see docs/elastic.md.
        True stands for ``md.Elastic()``. The job must be started by ``mpirun --with-ft ulfm`` of
        Open MPI. `checkpoint` must be a path or a function. With parameter servers, give
        `checkpoint`, from which the parameters of a dead server are restored, or let servers keep
        copies: ``ParameterServer(replicas=1)``.

    Returns
    -------
    Summary
        The result of the run, the same on every rank.

    Raises
    ------
    ConfigError
        An argument is invalid; raised on all ranks.
    MismatchError
        The ranks were given different arguments or data; raised on all ranks.
    NoCheckpoint, CheckpointError
        There is no checkpoint although ``resume=True``, or the checkpoint is from another model.
    ReplicaError
        The parameters are not the same on all ranks, and nothing was saved.
    SourceError
        `data` cannot be read any more. Raised on the ranks that failed to read; a checkpoint was
        saved.
    TooManyBadRecords
        More records are bad than `max_bad` allows; a checkpoint was saved.
    MpidistError
        The loss has become infinite or not a number; a checkpoint was saved without the update of
        the step with this loss.
    StorageError
        The last checkpoint could not be written; raised on all ranks.
    Stopped
        A SystemExit with code 75, because a signal or the time limit asked for a stop; the state
        was saved. If the allocation left no time to save, the newest good checkpoint remains.
    """
    given = {name: value for name, value in locals().items() if name != "comm"}
    agreed, asked = agree_on_settings(comm, given), SimpleNamespace(**given)
    if agreed.elastic is not None:

        def carry(name: str, ranks: int) -> Carried:
            if getattr(agreed.strategy, "has_replicas", False):
                return Carried(given, name)
            # Imported here: most runs have no servers, whose modules are a sixth of all imports.
            from .exchanges.carried.carried_servers import CarriedServers
            from .exchanges.carried.replicated_servers import ReplicatedServers

            if getattr(agreed.strategy, "keeps_copies", False):
                return ReplicatedServers(given, name, agreed.strategy, ranks)
            return CarriedServers(given, name, agreed.strategy, ranks)

        return train_elastic(comm, agreed.elastic, carry, partial(_train, asked, agreed))
    return _train(asked, agreed, comm, Carried(given))


def pass_over(run: Progress, exchange, sampler) -> int:
    """Skip steps that the other workers have done without this worker; return how many."""
    steps = exchange.passed_over() if hasattr(exchange, "passed_over") else 0
    for _ in range(steps):
        indices, after = sampler.batch(run.position)
        run.advance(after, len(indices), len(run.quarantine.wanted(indices)))
    if steps:
        run.stopping = exchange.stops()
    return steps


def _train(asked, agreed: TrainSettings, comm, carried: Carried) -> Summary:
    """Train with the arguments `asked` of `train`. Collective over `comm`.

    An elastic run calls this function again after each death, with the communicator of the living
    ranks.
    """
    # If the next attempt has taken over the run, the store must not be opened, because the next
    # attempt may be writing to it.
    if carried.step >= 0 and hand_over.is_handed(comm):
        raise Stopped(carried.step, "the next attempt goes on with the run")
    source, sampler, pace = agreed.source, agreed.sampler, agreed.pace
    settings: dict = {"global_batch": sampler.global_batch, "seed": sampler.seed}
    if asked.microbatches is not None:
        settings["microbatches"] = asked.microbatches
    watch_it = agreed.watch and comm.size > 1  # an elastic run may have only one rank left
    watch = watched(comm, asked.watch_seconds) if watch_it else nullcontext()
    fresh = carried.fresh(asked.resume)
    leaving = hand_over.leaving(comm)
    with leaving, watch, open_store(comm, asked.checkpoint, fresh, carried.memory) as store:
        if getattr(agreed.strategy, "reads_last_run", False):
            settings |= {"store": store, "resume": asked.resume}
        exchange, early = carried.open(agreed.strategy, comm, asked, settings), False
        with abandon_on_error(exchange):
            bad = Quarantine(exchange.workers, source, asked.max_bad, asked.quarantine)
            run = Progress(comm, asked.model, exchange, store, sampler, bad, agreed.words)
            continued = carried.continue_run(run)
            if not continued:
                early = exchange.synchronous and hand_over.is_waiting()
                if early:  # before the hand-over, because the measurements in `begin` take long
                    exchange.begin()
                handed = hand_over.wait_for_turn(comm)
                carried.restore(run, asked.resume, asked.retry_bad, handed)
            changed = run.deaths > 0 or run.ranks_before != comm.size
            if asked.on_resize is not None and changed:
                asked.on_resize(run.ranks_before, comm.size, run)
            last = last_step(asked.epochs, asked.steps, sampler, run.step, run.position)
            end = last if asked.stop_after is None else min(last, asked.stop_after)
            resume_report.tell_resume(run, end, last)
            facts = None
            watching = guard(
                comm, run.state, store, time_limit=asked.time_limit, patience=asked.patience
            )
            with watching as watcher, ExitStack() as stack:
                if exchange.dedicated:
                    carried.hold(run, watcher, ())
                    exchange.serve(run.save)
                else:
                    if not early:
                        carried.begin(exchange)
                    feed = stack.enter_context(closing(Feed(source, run, asked.loading)))
                    run.start_loop(last)
                    exchange.first_step = run.step
                    pace.begin(carried.interval_from(run.step))
                    copies = carried.copies(store, run.step)
                    carried.hold(run, watcher, agreed.callbacks)
                    hands_over = store is not None and asked.resume in ("auto", True)
                    if exchange.workers.rank == 0 and hands_over:
                        hand_over.announce(True)
                    # The other workers may have come to a save before this worker's first pull.
                    if pass_over(run, exchange, sampler) and pace.due(run.step) and run.step < last:
                        run.checkpoint(pace)
                    while run.step < end and not run.stopping:
                        indices, after = sampler.batch(run.position)
                        wanted = bad.wanted(indices)
                        began, waited = time.perf_counter(), feed.waited
                        fault_point("step", run.step + 1)
                        with carried.evict_on_exception:
                            loss, samples = exchange.compute(feed, wanted)
                        computed = time.perf_counter()
                        fault_point("exchange", run.step + 1)
                        stop = bool(watcher.flag or run.bad or bad.full)
                        loss, used = run.reduce(loss, samples, len(wanted), stop, feed)
                        if used is None:
                            continue  # a rank has no data yet; the state is saved, so try again
                        if used and exchange.synchronous:
                            watcher.check_loss(loss, run.step)
                        if used or not exchange.synchronous:
                            exchange.update()
                        run.note_loss(loss, used)
                        run.advance(after, len(indices), len(wanted))
                        pass_over(run, exchange, sampler)
                        times = (computed - began, time.perf_counter() - computed)
                        on_data = min(feed.waited - waited, times[0])
                        run.times.note(on_data, times[0] - on_data, times[1])
                        report = StepReport(
                            run.step, last, run.position.epoch, loss, len(indices), *times
                        )
                        run.report = report
                        # The callbacks come before the calls below. If all ranks learn of a death
                        # in those calls, no rank repeats this step, and its report would be lost.
                        with carried.evict_on_exception:
                            for callback in agreed.callbacks:
                                callback(report)
                        exchange.stragglers.note(on_data, max(0.0, times[0] - on_data))
                        carried.step_done(run.step)
                        if asked.check_replicas and run.step % asked.check_replicas == 0:
                            exchange.check(run.step)
                        if (pace.due(run.step) or run.owes_save) and run.step < last:
                            run.checkpoint(pace)
                        elif copies is not None:
                            run.keep_copy(copies)
                    feed.close()
                    run.end_loop()
                    carried.end_steps()
                    if exchange.workers.rank == 0:
                        hand_over.announce(False)
                    run.in_time = not run.stopping or watcher.fits(exchange.workers, exchange.wait)
                    if run.stopping and exchange.synchronous and run.hand_over():
                        pass  # the next attempt has the state, and continues the run
                    elif run.in_time:
                        run.checkpoint()
                    else:
                        run.settle()  # a save that began in time may still end in time
                    exchange.finish()
                    run.agree_on_bad_records()
                    if not run.stopping:
                        facts = gather_facts(run, asked.test_data)
                exchange.close()
                run.agree_on_the_end(watcher)
    return share(run, facts)
