"""Run many command lines that need no MPI, each as if alone, in one process that forks for each.

ends = play_commands({"help": ["--help"]}, tmp_path / "reports", cwd=folder)
assert ends["help"].stdout.startswith("usage: ")
"""

import json
import sys
from pathlib import Path

from mpidist.launch.launchers import launch_environment
from mpidist.launch.processes import Finished, run

DRIVER = Path(__file__).with_name("programs") / "many_commands.py"


def play_commands(cases, reports, *, cwd, env=None, without="mpi4py.MPI"):
    """Run ``mpidist WORDS`` for ``{name: words}``; return ``{name: Finished}``.

    `reports`, a new folder, gets what they write. A command that imports the module `without`, if
    one is named, ends with code 99.
    """
    reports.mkdir()
    environ = {**launch_environment(), **(env or {})}
    given = [
        {"words": [*map(str, words)], "folder": str(cwd), "environ": environ, "without": without}
        for words in cases.values()
    ]
    path = reports / "cases.json"
    path.write_text(json.dumps(given))
    run([sys.executable, DRIVER, path], env=launch_environment(), timeout=120).check()
    ends = {}
    for number, (name, words) in enumerate(cases.items()):
        report = reports / str(number)
        code, out, err = (report.with_suffix(s).read_text() for s in (".code", ".out", ".err"))
        ends[name] = Finished(("mpidist", *map(str, words)), int(code), out, err, 0.0)
    return ends
