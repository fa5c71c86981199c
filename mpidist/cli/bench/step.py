"""``mpidist bench step``: time training steps, and compare them with PyTorch's DDP."""

from __future__ import annotations

from .common import head, library, say

HELP = "training steps of LeNet and an MLP, against torch DDP"
#: The columns that need PyTorch, and the digits after their decimal point.
COLUMNS = (("torch_us", 1), ("ratio", 3), ("attached_us", 1), ("over_attached", 3), ("alone_us", 1))


def add_options(parser) -> None:
    """Add the options of ``mpidist bench step`` to its argument parser."""
    parser.add_argument("--rounds", type=int, default=21, help="blocks of 10 steps (21)")
    parser.add_argument("--torch", action="store_true", help="also torch DDP over gloo")


def run(comm, args) -> list[dict]:
    """Measure how long training steps of a model take, print a table, and return its rows.

    Collective over `comm`.
    """
    from ...bench import torch_yardstick
    from ...bench.step_times import MODELS, measure

    version = f", torch {torch_yardstick.reducer(comm)[0]}" if args.torch else ""
    columns = ("step(us)", "DDP(us)", "ratio", "attach(us)", "ratio", "alone(us)")
    title = f"training steps, {comm.size} ranks, {library()}{version}; ratio: DDP over it"
    head(comm, title, columns, width=11, last="model, global batch")
    rows = []
    for name in MODELS:
        rows.append(row := measure(comm, name, rounds=args.rounds, torch=args.torch))
        beside = "".join(
            f"{row[key]:>11.{digits}f}" if key in row else f"{'-':>11}" for key, digits in COLUMNS
        )
        say(comm, f"{row['step_us']:>11.1f}{beside}  {name}, {row['global_batch']}")
    if args.torch:
        torch_yardstick.leave()
    return rows
