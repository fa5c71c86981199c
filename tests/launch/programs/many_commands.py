"""Run command lines of mpidist that need no MPI; `commands.py` starts ``many_commands.py CASES``.

Each runs in a fork of this process, which has imported NumPy and what the commands use, so that a
case takes 20 ms and not 300. What it writes goes to files, and its exit code to another one.
"""

import importlib
import json
import os
import sys
from pathlib import Path

USED = (
    "numpy", "mpidist.cli.main", "mpidist.cli.train", "mpidist.cli.checkpoint",
    "mpidist.cli.simulate", "mpidist.cli.pipeline", "mpidist.cli.launch", "mpidist.training.job",
    "mpidist.training.exchanges.server_strategy", "mpidist.training.exchanges.peer_strategies",
    "mpidist.training.exchanges.pipelines.pipeline_strategy", "mpidist.pipeline.stage_plan",
    "mpidist.data.source_table", "mpidist.data.readers.remote", "mpidist.models", "mpidist.optim",
)  # fmt: skip


class Blocked:
    """Whoever imports the module ends, and says so."""

    def __init__(self, module):
        self.module = module

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            print("blocked import of", name, file=sys.stderr, flush=True)
            os._exit(99)


def begin(case, report):
    """Be as if started for this case alone, in a fork."""
    for number, suffix in ((1, ".out"), (2, ".err")):
        with report.with_suffix(suffix).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(case["folder"])
    os.environ.clear()
    os.environ.update(case["environ"])
    sys.meta_path.insert(0, Blocked(case["without"]))
    sys.argv[1:] = case["words"]


def play(cases, folder):
    """Return whether this is a fork, whose command is to be run."""
    for number, case in enumerate(cases):
        report = folder / str(number)
        pid = os.fork()
        if not pid:
            begin(case, report)
            return True
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report.with_suffix(".code").write_text(str(code))
    return False


if __name__ == "__main__":
    for module in USED:
        importlib.import_module(module)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]
    assert loaded == [], "what a command uses before MPI has imported it"
    path = Path(sys.argv[1])
    if play(json.loads(path.read_text()), path.parent):
        from mpidist.cli.main import main

        sys.exit(main())
