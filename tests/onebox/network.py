"""Simulate several hosts on this machine, with a network of known speed between them.

::

    with shaped_network(hosts=4, rate="1gbit") as net:
        net.mpirun(1, [sys.executable, "prog.py"]).check()
        print(net.bytes_sent(1), net.stream(25_000_000))

A host is a network namespace whose only device, eth0, is one end of a veth pair. The other ends of
all pairs are connected to a bridge. A token bucket on each eth0 limits the speed at which the host
sends. Open MPI starts its daemon on a host by a script in place of ssh. The script gives the daemon
its own host name and its own /dev/shm. Otherwise Open MPI would see one host and use shared memory.
The real speed of such a network is not its nominal rate, but the speed of a plain TCP stream, which
`ShapedNetwork.stream` measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpidist.errors import ConfigError
from mpidist.launch.launchers import find_launcher, launch_environment, launcher_kind
from mpidist.launch.processes import Finished
from onebox import ring_stream
from onebox.box import Box, missing

#: What apt-get has to install on Debian and Ubuntu.
PACKAGES = "iproute2"
_SUBNET = "10.77.0"

#: Other work on the machine must not pass for a slow wire. Niceness counts within a session only
#: where the kernel groups processes by session, hence both; without the right to, neither fails.
_FIRST_CLASS = (
    *("sh", "-c", '{ echo -10 >/proc/self/autogroup; } 2>/dev/null; exec nice -n -10 "$@"'),
    "sh",
)

#: Called by Open MPI as ``agent ADDRESS COMMAND...``; the last number of the address is the host.
_AGENT = """\
#!/bin/sh
n=${1##*.}; shift
exec ip netns exec h$n unshare --uts --ipc --mount sh -c \
  "mount -t tmpfs tmpfs /dev/shm; hostname h$n; $*"
"""


class ShapedNetwork:
    """Hosts 1, 2, ... behind links of one speed; made by `shaped_network`. All methods local."""

    def __init__(self, box: Box, hosts: int):
        self.box = box
        self.hosts = hosts
        self.agent = box.folder / "agent"
        self.agent.write_text(_AGENT)
        self.agent.chmod(0o755)

    def address(self, host: int) -> str:
        """Give the IP address of a host. Local."""
        return f"{_SUBNET}.{host}"

    def mpirun(
        self,
        ranks_per_host: int,
        args: Sequence[str | os.PathLike],
        *,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        options: Sequence[str] = (),
        mpi: str | os.PathLike | None = None,
    ) -> Finished:
        """Run a program with Open MPI on every host. Local.

        Parameters
        ----------
        ranks_per_host : int
            Ranks on each host; ranks of one host are neighbours.
        args : sequence of str
            The program and its arguments.
        timeout : float
            Seconds.
        env : mapping, optional
            Added to this process's environment, for mpirun; ``-x NAME`` hands it on.
        options : sequence of str
            Further options of mpirun, such as ``["--mca", "btl_tcp_links", "2"]``.
        mpi : path, optional
            The mpiexec to use; None is that of this interpreter.
        """
        launcher = Path(mpi) if mpi else find_launcher()
        if launcher_kind(launcher)[0] != "openmpi":
            raise ConfigError(f"{launcher} is not Open MPI's; the shaped network needs Open MPI")
        slots = ",".join(f"{self.address(h)}:{ranks_per_host}" for h in self._all())
        exported = [word for name in env or {} for word in ("-x", name)]
        command = [
            *(launcher, "--host", slots, "--map-by", f"ppr:{ranks_per_host}:node"),
            *("--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"),
            *("--prtemca", "plm_ssh_agent", self.agent, "--prtemca", "prte_if_include", "eth0"),
            *("--mca", "btl_tcp_if_include", "eth0", "--mca", "pml", "ob1"),
            *("--mca", "btl", "tcp,sm,self" if ranks_per_host > 1 else "tcp,self"),
            *(*options, *exported, *_FIRST_CLASS, *args),
        ]
        # Open MPI names files after the host and its process, and another box may have both alike.
        environment = {
            **launch_environment(mpi=launcher),
            "TMPDIR": str(self.box.folder),
            **(env or {}),
        }
        return self.box.run(command, env=environment, cwd=cwd, timeout=timeout)

    def bytes_sent(self, host: int) -> int:
        """Read how many bytes a host has put on its wire, all headers included. Local."""
        shown = self.box.run(["ip", "-n", f"h{host}", "-s", "-j", "link", "show", "eth0"]).check()
        return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]

    def stream(self, size: int, *, repeats: int = 3, timeout: float = 120) -> float:
        """Median seconds in which every host sends `size` bytes to the next one by plain TCP.

        Local. All hosts send at the same time: this is the traffic of a ring collective without
        its order, so nothing built on TCP can be faster here.
        """
        running = [
            self.box.start(
                [
                    *(*_FIRST_CLASS, "ip", "netns", "exec", f"h{h}"),
                    *(sys.executable, ring_stream.__file__),
                    *(self.address(h), self.address(h % self.hosts + 1)),
                    *(str(self.hosts), str(size), str(repeats)),
                ]
            )
            for h in self._all()
        ]
        ended = [job.finish(timeout) for job in running]
        times = [json.loads(e.check().stdout) for e in ended]
        return statistics.median(max(round_) for round_ in zip(*times, strict=True))

    def _all(self) -> range:
        return range(1, self.hosts + 1)


def unavailable() -> str | None:
    """Say in one line why there can be no shaped network here, or None. Local."""
    return missing(("ip", "tc"), PACKAGES)


@contextlib.contextmanager
def shaped_network(
    hosts: int = 4, rate: str = "1gbit", *, burst: str = "1mb"
) -> Iterator[ShapedNetwork]:
    """Make hosts and a network on this machine, and take all of it away afterwards. Local.

    Parameters
    ----------
    hosts : int
        Number of hosts.
    rate : str
        What each host can send, in the words of tc(8): "1gbit", "200mbit".
    burst : str
        Size of the token bucket. With 128 kb the flow stalls for 30 ms at a time; 1 mb does not.

    Raises
    ------
    ConfigError
        No root, no iproute2, no namespaces, or a kernel without veth, bridge or tbf.
    """
    if reason := unavailable():
        raise ConfigError(f"no shaped network on this machine: {reason}")
    with Box(network=True) as box:
        made = box.run(["sh", "-ec", _wiring(hosts, rate, burst)])
        if made.returncode:
            raise ConfigError(
                f"no shaped network on this machine: {made.stderr.strip()} "
                "(needs veth, bridge and sch_tbf in the kernel)"
            )
        yield ShapedNetwork(box, hosts)


#: What a host of a cluster does and this machine might not. Where its choice is bbr, that sends
#: what comes in bursts, as all messages do, at a pace of its own guess: single messages wait for
#: tens of milliseconds. A namespace may choose only what its machine allows, as reno always is.
#: And a network card's queue is short, so that an answer does not wait behind megabytes of another
#: message; in front of a token bucket each connection may have 4 MiB, but for this bound.
_TUNING = (
    "cd /proc/sys/net/ipv4; for name in cubic reno; do "
    "{ echo $name >tcp_congestion_control; } 2>/dev/null && break; done; "
    "{ echo 262144 >tcp_limit_output_bytes; } 2>/dev/null || true"
)


def _wiring(hosts: int, rate: str, burst: str) -> str:
    """Give the shell commands that build the network in a fresh box."""
    # `ip netns` keeps its names in /run, which must not be the machine's. mpirun itself runs
    # beside the bridge, which therefore bears the device name that all daemons look for.
    lines = [
        "mount -t tmpfs tmpfs /run",
        "ip link add eth0 type bridge",
        f"ip addr add {_SUBNET}.254/24 dev eth0",
        "ip link set eth0 up",
    ]
    for h in range(1, hosts + 1):
        lines += [
            f"ip netns add h{h}",
            f"ip link add port{h} type veth peer name eth0 netns h{h}",
            f"ip link set port{h} master eth0 up",
            f"ip -n h{h} addr add {_SUBNET}.{h}/24 dev eth0",
            f"ip -n h{h} link set lo up",
            f"ip -n h{h} link set eth0 up",
            f"ip netns exec h{h} sh -c '{_TUNING}'",
            f"tc -n h{h} qdisc add dev eth0 root tbf rate {rate} burst {burst} latency 100ms",
        ]
    return "\n".join(lines)
