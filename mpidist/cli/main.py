"""``mpidist`` and ``python -m mpidist``: find the command, run it, turn errors into exit codes.

Commands are imported only when called, so ``mpidist --help`` and ``mpidist checkpoint show`` work
on a login node without MPI.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from contextlib import suppress

from .. import __version__, events
from ..errors import ConfigError, MpidistError, nearest

#: command -> one line of help. The module of the same name has add_parser and run.
COMMANDS = {
    "train": "train a model as a TOML job file says (under mpirun or srun)",
    "bench": "measure allreduce, parameter servers or checkpoints against what is there",
    "launch": "run an MPI program until it is done, whatever dies meanwhile; needs no MPI",
    "simulate": "who sends what, and what it costs, for any number of ranks; needs no MPI",
    "checkpoint": "list, show, verify, export or index checkpoints; needs no MPI",
}


#: Seconds that a rank which says nothing waits for the one that speaks; the longer ones where the
#: launcher ends all ranks as soon as that one has left.
HOLD_BACK, HOLD_BACK_LONG = 3.0, 10.0


class _Parser(argparse.ArgumentParser):
    """Bad arguments are a ConfigError like any other bad input: one line, exit code 2."""

    def error(self, message: str):
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Collective where the command is."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except MpidistError as error:
        return _report(error)
    except BrokenPipeError:
        # `mpidist checkpoint list | head`: the reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    events.verbosity()
    parser = _Parser(
        prog="mpidist",
        description="Distributed training of plain NumPy and CuPy models on an MPI job.",
    )
    parser.add_argument("--version", action="version", version=f"mpidist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    if wanted is not None and wanted not in COMMANDS:
        raise ConfigError(
            f"unknown command {wanted!r}; expected one of {', '.join(COMMANDS)}"
            + nearest(wanted, COMMANDS)
        )
    module = None
    for name, text in COMMANDS.items():
        if name == wanted:
            module = importlib.import_module(f"{__package__}.{name}")
            module.add_parser(commands)
        else:
            commands.add_parser(name, help=text)
    args = parser.parse_args(argv)
    if module is None:
        parser.print_help()
        return 2
    return module.run(args)


def _report(error: MpidistError) -> int:
    """Say what is wrong in one line, once per job, and return the exit code."""
    from ..launch import claims

    text = " ".join(str(error).split())
    speaks = claims.rank_hint(os.environ) == 0 and not error.quiet
    if speaks:
        print(f"mpidist: error: {text}", file=sys.stderr, flush=True)
    claim = claims.claimed_size(os.environ)
    if not _met(error, text, claim) and not speaks:
        # Open MPI's launcher ends the whole job when the first process of it has failed, and that
        # must not be one that says nothing: rank 0 may still be on its way to this line.
        ends_all = claim is not None and claim.launcher.startswith("Open MPI")
        time.sleep(HOLD_BACK_LONG if ends_all else HOLD_BACK)
    return error.exit_code


def _met(error: MpidistError, text: str, claim) -> bool:
    """Whether all ranks know that they end. Collective where `error` came on the way to MPI.

    Ranks that have no such error, whose host has the file that this one lacks, would wait in
    MPI_Init for ever: they are met in `check_launch`, which is the first that they do there.
    """
    from ..launch import start_checks

    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        return MPI.Is_initialized() and MPI.COMM_WORLD.size > 1
    if not error.awaited or claim is None or claim.size == 1:
        return False
    try:
        comm = start_checks.initialize(os.environ).COMM_WORLD
    except (ImportError, RuntimeError, MpidistError):  # no MPI, or not that of the launcher
        return False
    with suppress(MpidistError):
        start_checks.check_launch(comm, os.environ, problem=text)
    return True


if __name__ == "__main__":
    sys.exit(main())
