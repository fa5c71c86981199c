"""The nodes of a one-box Slurm cluster: their processes, ranks, and the steps that ranks note."""

import os
from contextlib import suppress
from pathlib import Path


def rows(folder, rank):
    """What a rank has noted: (time, step, number of ranks) of each step."""
    path = folder / str(rank)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(float(a), int(b), int(c)) for a, b, c in map(str.split, lines)]


def host_namespace(pid):
    """What names the host on which a process believes to be, or "" if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/uts").readlink())
    except OSError:
        return ""


def processes_of(cluster, node):
    """All processes on a node of a one-box cluster, its slurmd among them."""
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    words, box = f"slurmd\0-D\0-N\0{node}\0".encode(), str(cluster.box.folder).encode()
    hosts = set()
    for pid in pids:
        with suppress(OSError):
            folder = Path(f"/proc/{pid}")
            if (folder / "cmdline").read_bytes() == words and box in (
                folder / "environ"
            ).read_bytes():
                hosts.add(host_namespace(pid))
    (host,) = hosts - {host_namespace(os.getpid()), ""}
    return [pid for pid in pids if host_namespace(pid) == host]


def ranks_on(cluster, node):
    """The ranks that live on a node."""
    found = []
    for pid in processes_of(cluster, node):
        with suppress(OSError):
            found += [pid] * (b"elastic_steps.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found
