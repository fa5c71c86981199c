"""Run many cases in one launched job, because a launch takes a second and a case takes little.

    ends = play_many(3, {"help": ["-m", "mpidist", "--help"], "mine": [program, "word"]}, folder)
    assert ends["help"].check().stdout.startswith("usage: ")

Each case has its own result, which has the name of the case. A case needs its own launch if its
processes must die, or if it tests the launcher, MPI_Init or the start of Python.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from mpidist.launch.launchers import launch
from mpidist.launch.processes import TIMED_OUT, Finished

DRIVER = Path(__file__).with_name("programs") / "many_cases.py"


@dataclass(frozen=True)
class Ended(Finished):
    """What came of one case: its outputs are those of its ranks, in their order.

    ``returncode`` is that of all ranks, or a tuple of theirs where they differ. ``ranks`` has what
    each wrote to stdout and stderr.
    """

    ranks: tuple[tuple[str, str], ...] = ()


def play_many(n, cases, folder, **options):
    """Run cases ``{name: words}`` in one job of n ranks; return ``{name: Ended}``.

    `words` are those after the interpreter; `folder`, which must be new, gets what the ranks write;
    `options` are those of `launch`.
    """
    paths = folder / "cases.json"
    paths.write_text(json.dumps([[str(word) for word in words] for words in cases.values()]))
    job = launch(n, [sys.executable, DRIVER, paths], **{"timeout": 240, **options})
    ends, held_up = {}, ""
    for number, (name, words) in enumerate(cases.items()):
        reports = [folder / f"{number}-{rank}" for rank in range(n)]
        ends[name] = ended = _ended(name, words, reports, job, held_up)
        held_up = held_up or (name if ended.timed_out else "")
    assert held_up or job.returncode == 0, f"all cases ended, and the job did not: {job}"
    return ends


def _ended(name, words, reports, job, held_up):
    def text(report, suffix):
        path = report.with_suffix(suffix)
        return path.read_text(errors="replace") if path.exists() else ""

    ranks = tuple((text(report, ".out"), text(report, ".err")) for report in reports)
    out, err = ("".join(each) for each in zip(*ranks, strict=True))
    told = [text(report, ".code").split() for report in reports]
    args = (f"case {name!r} of {len(reports)} ranks:", *map(str, words))
    if not all(told):
        begun = any(report.with_suffix(".begun").exists() for report in reports)
        out_of = [rank for rank, code in enumerate(told) if not code]
        why = f"ranks {out_of} did not end" if begun and not held_up else f"held up by {held_up!r}"
        said = f"{err}\n{why}; the job: {job.returncode}, {job.stdout}{job.stderr}"
        return Ended(args, TIMED_OUT, out, said, job.seconds, True, ranks)
    codes = tuple(int(code) for code, _ in told)
    code = codes[0] if len(set(codes)) == 1 else codes
    return Ended(args, code, out, err, max(float(each) for _, each in told), False, ranks)
