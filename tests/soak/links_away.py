"""One host's link of the shaped network is away: links_away.py [SECONDS ...] (as root).

Sums, saves and pushes on 4 hosts, all three at once, while the link is down for 5, 30 and 120 s.
Each must go on with the right bits, all ranks within 10 s after the return of the link, and each
must have told the user.
"""

import re
import sys
import tempfile
from pathlib import Path

from onebox.link_away import link_away
from onebox.network import shaped_network

PROGRAM = Path(__file__).parents[1] / "cluster" / "programs" / "network_away.py"
JOBS = {"allreduce": ["--with-ft", "ulfm"], "save": ["--with-ft", "ulfm"], "push": []}


def main(*seconds: float) -> int:
    """Make all cuts; return the exit code."""
    wrong = 0
    for away in seconds:
        with shaped_network(hosts=4) as net, tempfile.TemporaryDirectory() as name:
            jobs = {}
            for kind, options in JOBS.items():
                folder = Path(name, kind)
                folder.mkdir()
                jobs[folder] = [PROGRAM, kind, folder, "60"], options
            found = link_away(net, sys.executable, jobs, away, timeout=4 * away + 60)
        for folder, one in found.items():
            bits = re.findall(r"rank \d has (\w{64})", one.done.stdout)
            right = one.done.returncode == 0 and len(bits) == 4 and len(set(bits)) == 1
            told = one.told()
            wrong += not (right and told and one.after <= 10)
            print(f"{away:g} s, {folder.name}: {'right' if right else 'WRONG'}, all ranks go on "
                  f"{one.after:.1f} s after the link is back, told in {len(told)} lines",
                  *told[:1], sep="\n    ", flush=True)  # fmt: skip
            if not right:
                print(one.done.returncode, one.done.stderr[-12000:])
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:] or (5, 30, 120))))
