"""``mpidist bench overlap``: measure how much of the gradient exchange runs during backward."""

from __future__ import annotations

from .common import head, library, say

HELP = "share of the gradient exchange that overlaps with the backward pass"


def add_options(parser) -> None:
    """Add the options of ``mpidist bench overlap`` to its argument parser."""
    parser.add_argument("--size", type=int, default=16, help="MiB of gradients (16)")
    parser.add_argument("--layers", type=int, default=64, help="layers, of equal size (64)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--bucket-bytes", type=int, default=None, help="as in md.AllReduce (auto)")


def run(comm, args) -> list[dict]:
    """Measure how much of the gradient exchange overlaps the backward pass; print and return rows.

    Collective over `comm`.
    """
    from ...bench.overlap_times import measure

    columns = ("exchange(ms)", "backward(ms)", "step(ms)", "hidden", "buckets")
    title = f"{args.size} MiB of gradients in {args.layers} layers, {comm.size} ranks, {library()}"
    head(comm, title, columns, width=13, last="progress")
    given = {"nbytes": args.size << 20, "layers": args.layers, "rounds": args.rounds}
    buckets = args.bucket_bytes or "auto"
    rows = []
    for progress in ("hooks", "thread"):
        row = measure(comm, bucket_bytes=buckets, progress=progress, **given)
        rows.append({**row, "progress": progress})
        hidden = "-" if row["hidden"] is None else f"{row['hidden']:.3f}"
        times = "".join(f"{row[name]:>13.2f}" for name in ("exchange_ms", "backward_ms", "step_ms"))
        say(comm, f"{times}{hidden:>13}{row['buckets']:>13}  {progress}")
    if not rows[0]["overlap"]:
        say(comm, "# all ranks are on one node: no messages are sent, so nothing can overlap")
    return rows
