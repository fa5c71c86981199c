"""Run many cases in one job, one after another; `many.py` starts ``many_cases.py CASES.json``.

A case is a program, or ``-m`` and a module, with its arguments. Each case runs as if it were
started alone: it has its own arguments, working folder, environment and COMM_WORLD. The output of
each rank goes to a file, and so does the output of C code and of forked processes.

A case in which a rank dies or waits for ever must not be run here, because it would end or block
all later cases.
"""

import json
import os
import runpy
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

from mpi4py import MPI

from mpidist.errors import MpidistError
from mpidist.runtime.failure import one_line, speaks_in_one_line

WORLD, PID = MPI.COMM_WORLD, os.getpid()


@contextmanager
def told_to(path):
    """Send what this process and its children write to PATH.out and PATH.err."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        for number, name in ((1, "out"), (2, "err")):
            with open(f"{path}.{name}", "wb") as file:  # noqa: PTH123
                os.dup2(file.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() == PID:
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


@contextmanager
def as_if_alone(words):
    """Give the program what it would have found; afterwards everything is as before."""
    place, environment, path, argv = Path.cwd(), dict(os.environ), list(sys.path), sys.argv
    sys.argv = words[1:] if words[0] == "-m" else words
    sys.path.insert(0, str(place if words[0] == "-m" else Path(words[0]).parent))
    MPI.COMM_WORLD = WORLD.Dup()
    try:
        yield
    finally:
        MPI.COMM_WORLD = WORLD
        sys.argv, sys.path[:] = argv, path
        os.chdir(place)
        os.environ.clear()
        os.environ.update(environment)


def play(words):
    """Run one case; return its exit code on this rank."""
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leaving:
        if os.getpid() != PID:
            raise  # forked by the case, and no rank
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = code if isinstance(code, int) else int(code is not None)
        with suppress(SystemExit):
            sys.exit()  # mpidist remembers the last one
        return code
    except BaseException as error:
        if os.getpid() != PID:
            raise
        if speaks_in_one_line(error):
            print(one_line(error), file=sys.stderr)
        else:
            traceback.print_exc()
        return error.exit_code if isinstance(error, MpidistError) else 1
    return 0


def main(path):
    for number, words in enumerate(json.loads(path.read_text())):
        report = path.parent / f"{number}-{WORLD.rank}"
        report.with_suffix(".begun").touch()
        began = time.monotonic()
        with told_to(report), as_if_alone(words):
            code = play(words)
        report.with_suffix(".code").write_text(f"{code} {time.monotonic() - began}")
        # Nobody begins the next one before all have ended this.
        WORLD.Barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
