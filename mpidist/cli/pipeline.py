"""``mpidist pipeline {profile,partition,show,trace}``: measure, cut a model into stages, draw.

None of these sub-commands needs MPI.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from ..errors import ConfigError

#: The largest number of workers for which a step is simulated if no number of microbatches is
#: given.
_MOST_ADVISED = 64


def add_parser(commands) -> None:
    """Add the command ``mpidist pipeline`` to the sub-parsers `commands` of ``mpidist``."""
    parser = commands.add_parser("pipeline", help="measure layers, cut a model into stages")
    what = parser.add_subparsers(
        dest="what", required=True, metavar="{profile,partition,show,trace}"
    )
    about = "measure the layers of a job's model for a microbatch, and write a profile of them"
    add = what.add_parser("profile", help=about, description=about).add_argument
    add("job", metavar="JOB.toml", help="the job file, which needs no pipeline")
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="change a key of the job file, e.g. --set microbatches=16",
    )  # fmt: skip
    add("--out", metavar="FILE",
        help="the profile (the name of the job file, with .profile.txt)")  # fmt: skip
    add("--repeats", type=int, default=5, metavar="N",
        help="how often each pass is measured; the shortest time counts (5)")  # fmt: skip
    about = "the best cut of a profiled model into stages, and the replicas of each stage"
    add = what.add_parser("partition", help=about, description=about).add_argument
    add("profile", metavar="PROFILE", help="times and sizes of layers, as PipeDream writes them")
    add("--workers", type=int, required=True, metavar="N", help="largest number of workers to use")
    add("--stages", type=int, metavar="S", help="exact number of stages (any)")
    add("--no-replication", action="store_true", help="one worker for each stage")
    add("--bandwidth", type=float, metavar="BYTES_PER_S",
        help="bytes per second between two workers (1e9, or the value in --network)")  # fmt: skip
    add("--network", metavar="FILE",
        help="bandwidths that `mpidist simulate fit` has measured; with it, also print on how many "
        "hosts the workers should be")  # fmt: skip
    add("--memory", type=float, metavar="BYTES", help="bytes of memory of a worker (any)")
    add("--cost", default="overlap", metavar="{overlap,serial,pipedream}",
        help="whether messages run during the computation (overlap) or not (serial); pipedream "
        "counts as the PipeDream program does")  # fmt: skip
    add("--evaluate", action="store_true",
        help="keep the stages that the profile names, and choose their replicas")  # fmt: skip
    add("--microbatches", type=int, metavar="M",
        help="compare steps of M microbatches with allreduce (4 times the workers)")  # fmt: skip
    add("--json", metavar="FILE", help="write the plan as JSON; - is the standard output")
    about = "draw a schedule over time, with its idle time and what it keeps"
    add = what.add_parser("show", help=about, description=about).add_argument
    add("schedule", metavar="SCHEDULE",
        help="gpipe, 1f1b, interleaved, zero_bubble or pipedream")  # fmt: skip
    add("--stages", type=int, default=4, metavar="P", help="number of ranks (4)")
    add("--microbatches", type=int, default=8, metavar="M", help="number of microbatches (8)")
    add("--chunks", type=int, default=1, metavar="V", help="chunks of each rank (1)")
    add("--forward", type=float, default=1.0, metavar="MS", help="ms of a rank's forward pass (1)")
    add("--backward", type=float, default=2.0, metavar="MS", help="ms of the backward pass (2)")
    add("--bytes", type=float, default=0.0, metavar="N", help="bytes of a message (0)")
    add("--bandwidth", type=float, default=1e9, metavar="BYTES_PER_S",
        help="bytes per second of a link (1e9)")  # fmt: skip
    add("--latency", type=float, default=0.0, metavar="US", help="latency of a message in us (0)")
    add("--picture", metavar="FILE.png", help="draw the schedule into a file")
    add("--trace", metavar="FILE.json", help="write the schedule in Chrome's trace format")
    about = "write the newest step of a finished run in Chrome's trace format"
    add = what.add_parser("trace", help=about, description=about).add_argument
    add("folder", metavar="RUN", help="the folder of the run")
    add("--out", default="trace.json", metavar="FILE.json", help="the trace (trace.json)")
    parser.set_defaults(command="pipeline")


def run(args: argparse.Namespace) -> int:
    """Run the wanted sub-command, and return the exit code."""
    commands = {"profile": _profile, "partition": _partition, "show": _show, "trace": _trace}
    return commands[args.what](args)


def _profile(args) -> int:
    from ..pipeline import measure, write_profile
    from ..pipeline.measure_layers import random_batch
    from ..registry import checked_whole
    from ..training.job import model_of, read_job

    checked_whole("--repeats", args.repeats, 1)
    job = read_job(args.job, args.settings)
    model = model_of(job)
    samples = -(-job.global_batch // (job.microbatches or 1))
    profile = measure(model, random_batch(model, samples), args.repeats)
    file = args.out or f"{Path(args.job).stem}.profile.txt"
    write_profile(profile, file)
    print("layer                   forward ms  backward ms  output MB  parameters MB")
    for layer in profile.layers:
        print(
            f"{f'{layer.name} {layer.text}':22.22s}  {layer.forward * 1e3:10.3f}"
            f"  {layer.backward * 1e3:11.3f}  {layer.output_bytes / 1e6:9.3f}"
            f"  {layer.parameter_bytes / 1e6:13.3f}"
        )
    print(f"{profile.seconds * 1e3:.3f} ms for a microbatch of {samples} samples on this machine")
    print(f"written: {file}; next: mpidist pipeline partition {shlex.quote(file)} --workers N")
    return 0


def _partition(args) -> int:
    from ..pipeline import cut, read_profile
    from ..pipeline.grid.host_advice import advise_hosts
    from ..pipeline.plan_advice import advise_step
    from ..simulator.network_model import load

    profile = read_profile(args.profile)
    network = None if args.network is None else load(args.network)
    if network is not None and not (network.gap and network.node_gap):
        raise ConfigError(
            f"{args.network}: gap and node_gap must be above 0; `mpidist simulate fit` on two "
            "hosts, and then on one, measures both"
        )
    bandwidth = args.bandwidth
    if bandwidth is None:
        bandwidth = 1e9 if network is None else 1 / network.gap
    settings = {
        "bandwidth": bandwidth, "stages": args.stages, "memory": args.memory,
        "replication": not args.no_replication, "cost": args.cost, "evaluate": args.evaluate,
    }  # fmt: skip
    plan = cut(profile, workers=args.workers, **settings)
    advice = None
    if args.microbatches is not None or args.workers <= _MOST_ADVISED:
        microbatches = 4 * args.workers if args.microbatches is None else args.microbatches
        advice = advise_step(
            profile, plan, workers=args.workers, microbatches=microbatches, settings=settings
        )
    facts = plan.as_dict()
    if args.microbatches is not None:
        facts["step"] = advice and advice.as_dict()
    layouts = []
    if network is not None:
        others = {name: value for name, value in settings.items() if name != "bandwidth"}
        layouts = advise_hosts(profile, workers=args.workers, network=network, settings=others)
        facts["hosts"] = [layout._asdict() for layout in layouts]
    text = json.dumps(facts, indent=2)
    if args.json == "-":
        print(text)
        return 0
    if args.json:
        try:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json}: {error.strerror}") from None
    print("stage  layers  replicas  compute ms  stage ms  parameters MB  in MB  out MB  kept")
    for k, stage in enumerate(plan.stages):
        print(
            f"{k:5d}  {len(stage.nodes):6d}  {stage.replicas:8d}"
            f"  {stage.compute_seconds * 1e3:10.3f}"
            f"  {stage.seconds * 1e3:8.3f}  {stage.parameter_bytes / 1e6:13.2f}"
            f"  {stage.input_bytes / 1e6:5.2f}  {stage.output_bytes / 1e6:6.2f}"
            f"  {stage.in_flight:4d}   {stage.nodes[0]} .. {stage.nodes[-1]}"
        )
    print(
        f"a microbatch every {plan.bottleneck_seconds * 1e3:.3f} ms on {plan.workers} workers: "
        f"{plan.speedup:.2f} times as fast as one worker ({plan.single_seconds * 1e3:.3f} ms); "
        f"data parallelism on {args.workers}: {plan.data_parallel_seconds * 1e3:.3f} ms"
    )
    if not plan.exact:
        print("the model has too many cuts; only those in one order of its layers were tried")
    if advice is not None:
        _say_advice(advice, args.workers)
    if network is not None:
        _say_hosts(layouts, network)
    return 0


def _say_hosts(layouts, network) -> None:
    """Print the time of a microbatch for each number of hosts, and the best number of hosts."""
    from ..pipeline.grid.host_advice import best_layout

    print("hosts  workers each  ms for a microbatch  MB between hosts  limited by  replicas")
    for one in layouts:
        replicas = " + ".join(map(str, one.replicas))
        print(
            f"{one.hosts:5d}  {one.workers_each:12d}  {one.seconds * 1e3:19.3f}"
            f"  {one.bytes_between / 1e6:16.2f}  {one.limit:10s}  {replicas}"
        )
    best = best_layout(layouts)
    many = "one host" if best.hosts == 1 else f"{best.hosts} hosts"
    print(
        f"prefer {many} with {best.workers_each} workers each; measured: "
        f"{1e-9 / network.node_gap:.2f} GB/s within a host, {1e-9 / network.gap:.2f} GB/s between"
    )


def _say_advice(advice, workers: int) -> None:
    """Print whether a pipeline or allreduce has the shorter step, and why."""
    stages = " + ".join(map(str, advice.replicas))
    fits = advice.allreduce_seconds < float("inf")
    allreduce = f"{advice.allreduce_seconds * 1e3:.3f} ms" if fits else "does not fit"
    print(
        f"a step of {advice.microbatches} microbatches: pipeline on {stages} workers "
        f"{advice.pipeline_seconds * 1e3:.3f} ms, allreduce on {workers} {allreduce}"
    )
    names = {"equal": "they are equal", "pipeline": "the pipeline wins"}
    print(f"{names.get(advice.winner, 'allreduce wins')}: {advice.reason}")


def _show(args) -> int:
    from ..pipeline import (
        ChunkCost,
        action_lists,
        check_actions,
        draw_actions,
        save_drawing,
        simulate_actions,
    )
    from ..pipeline.draw_actions import check_drawing
    from ..simulator.network_model import NetworkModel

    for name in ("forward", "backward", "bytes", "latency"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ConfigError(f"--{name} {getattr(args, name)}: expected a number >= 0")
    if not 0 < args.bandwidth < float("inf"):
        raise ConfigError(f"--bandwidth {args.bandwidth}: expected a number > 0")
    lists = action_lists(args.schedule, args.stages, args.microbatches, args.chunks)
    if args.picture:
        check_drawing(args.picture, args.stages)
    ms = 1e-3 / args.chunks
    cost = ChunkCost(args.forward * ms, args.backward * ms, args.bytes)
    network = NetworkModel(latency=args.latency * 1e-6, gap=1 / args.bandwidth)
    run = simulate_actions(lists, [cost] * (args.stages * args.chunks), network)
    title = f"{args.schedule}, {args.stages} ranks, {args.microbatches} microbatches"
    try:
        print(draw_actions(run))
    except ConfigError as error:
        print(f"no drawing: {error}", file=sys.stderr)
    print(f"{title}: {run.seconds * 1e3:.3f} ms, idle {run.bubble:.1%}")
    print(f"microbatches kept by each rank, times chunks: {' '.join(map(str, run.stash))}")
    if args.schedule == "pipedream":
        kept = check_actions(lists).versions_kept
        print(f"versions of the weights on each rank: {' '.join(map(str, kept))}")
    if args.picture:
        save_drawing(run, args.picture, f"{title}: idle {run.bubble:.1%}")
        print(f"drawn: {args.picture}")
    if args.trace:
        spans = [(span.rank, *span.action, span.begin, span.end) for span in run.spans]
        _write_trace(spans, args.trace)
    return 0


def _trace(args) -> int:
    from ..pipeline.action_trace import logged_spans

    _write_trace(logged_spans(Path(args.folder)), args.out)
    return 0


def _write_trace(spans, file: str) -> None:
    from ..pipeline.action_trace import chrome_trace, write_trace

    write_trace(chrome_trace(spans), file)
    print(f"written: {file}; open it in chrome://tracing or https://ui.perfetto.dev")
