"""``mpidist`` and ``python -m mpidist``: run a command, and turn errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
import time
from contextlib import suppress

from .. import __version__, events
from ..errors import ConfigError, MpidistError, nearest

#: Commands and their help. For each command, the module of the same name has `add_parser` and
#: `run`.
COMMANDS = {
    "train": "train the model of a TOML job file (under mpirun or srun)",
    "bench": "measure allreduce, parameter servers or checkpoints against references",
    "launch": "run an MPI program, and restart it after failures; needs no MPI",
    "grow": "continue the job of a running mpidist launch with more ranks; needs no MPI",
    "advise": "whether allreduce or parameter servers suit a model; needs no MPI",
    "simulate": "messages and costs of an algorithm, for any number of ranks; needs no MPI",
    "pipeline": "cut a model into pipeline stages, and draw schedules; needs no MPI",
    "checkpoint": "list, show, verify, export or index checkpoints; needs no MPI",
}


#: A rank that does not print the error waits for this many seconds before it exits, so that another
#: rank can print the error. The longer time is for launchers that end all ranks as soon as one rank
#: has failed.
HOLD_BACK, HOLD_BACK_LONG = 3.0, 10.0


class _Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for invalid arguments, instead of exiting."""

    def error(self, message: str):
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    All ranks of the launch must call it together if the command uses MPI.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        try:
            return _run(argv)
        except MpidistError as error:
            return _report(error)
        finally:
            try:
                print(end="", flush=True)
            except OSError as error:
                if isinstance(error, BrokenPipeError):
                    raise  # other errors, such as a full disk, are reported at the end by Python
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout):  # a pipe of the model or of the data
            raise
        # The reader has closed the pipe, as in `mpidist checkpoint list | head`. The command may
        # not have done all its work.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if _is_one_of_several():  # the others may wait for this rank: the exception hook ends them
            raise ConfigError("the reader of the output has ended before the job") from None
        return 141  # as for a program that SIGPIPE has ended


def _has_lost_its_reader(stream) -> bool:
    """Return whether `stream` writes to a pipe whose reader has ended."""
    with suppress(OSError, ValueError):  # the stream is closed, or has no descriptor
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


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
        known = f"{', '.join(COMMANDS)}{nearest(wanted, COMMANDS)}"
        raise ConfigError(f"unknown command {wanted!r}; expected one of {known}")
    module = None
    for name, text in COMMANDS.items():
        if name == wanted:
            module = importlib.import_module(f"{__package__}.{name}")
            module.add_parser(commands)
        else:
            commands.add_parser(name, help=text)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown(parser, argv, unknown))
    if module is None:
        parser.print_help()
        return 2
    return module.run(args)


def _unknown(parser: argparse.ArgumentParser, argv: list[str], unknown: list[str]) -> str:
    """Return the error text for `unknown`, the arguments in `argv` that no parser knows."""
    for word in argv:  # to the parser of the command, as `mpidist bench allreduce`
        for action in parser._actions:
            if isinstance(action.choices, dict) and word in action.choices:
                parser = action.choices[word]
    options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    known = [word.strip("-") for each in parser._actions for word in each.option_strings]
    hint = nearest(options[0].strip("-"), known).replace("'", "'--", 1) if options else ""
    return (
        f"unrecognized arguments: {' '.join(options or unknown)}{hint}"
        f"{'' if hint else ';'} see {parser.prog} --help"
    )


def _report(error: MpidistError) -> int:
    """Print the error in one line, on one rank of the job, and return the exit code."""
    from ..launch import claims

    text = " ".join(str(error).split())
    speaks = claims.rank_hint(os.environ) == 0 and not error.quiet
    if speaks:
        print(f"mpidist: error: {text}", file=sys.stderr, flush=True)
    claim = claims.claimed_size(os.environ)
    if _met(error, text, claim):
        with suppress(Exception):  # a failing import may be the error that was printed
            from ..runtime import failure

            if claims.rank_hint(os.environ):
                failure.let_first_leave()
    elif not speaks:
        # Open MPI's launcher ends the whole job when the first process exits with an error. A rank
        # that prints nothing must not be that first process, because rank 0 may not have printed
        # the error yet.
        ends_all = claim is not None and claim.launcher.startswith("Open MPI")
        time.sleep(HOLD_BACK_LONG if ends_all else HOLD_BACK)
    return error.exit_code


def _is_one_of_several() -> bool:
    """Return whether this process is one of several ranks, and MPI is initialised."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    running = MPI.Is_initialized() and not MPI.Is_finalized()
    return running and MPI.COMM_WORLD.size > 1


def _met(error: MpidistError, text: str, claim) -> bool:
    """Report `error` to ranks that wait in MPI_Init; return whether all ranks end together.

    Collective if `error` was raised before MPI_Init: without this call, the other ranks would wait
    in MPI_Init for ever.
    """
    from ..launch import start_checks

    if "mpi4py.MPI" in sys.modules:
        return _is_one_of_several()
    if not error.awaited or claim is None or claim.size == 1:
        return False
    try:
        comm = start_checks.initialize(os.environ).COMM_WORLD
    except (ImportError, RuntimeError, MpidistError):  # no MPI, or not the launcher's MPI
        return False
    with suppress(MpidistError):
        start_checks.check_launch(comm, os.environ, problem=text)
    return True


if __name__ == "__main__":
    sys.exit(main())
