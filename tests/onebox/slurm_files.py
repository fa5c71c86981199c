"""Write the files that the daemons of a one-box Slurm cluster read: slurm.conf, key, hosts."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from mpidist.launch.launchers import MPICH_YIELDS, OPEN_MPI_YIELDS

#: The first and the last port that the system gives to connections.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_CONF = """\
ClusterName=onebox
SlurmctldHost=ctl(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
# Besides the lifetime of credentials this is the pause before a requeued job may start again;
# the default of 120 s is most of a test's time.
AuthInfo=socket={run}/munge.socket,cred_expire={requeue_delay}
StateSaveLocation={run}/state
SlurmctldPidFile={run}/slurmctld.pid
SlurmctldLogFile={logs}/slurmctld.log
# This much detail tells when time limits are looked at; see SlurmCluster.next_limit_check.
SlurmctldDebug=debug2
SlurmdSpoolDir={run}/%n/spool
SlurmdPidFile={run}/%n/slurmd.pid
SlurmdLogFile={logs}/%n.log
# PMIx keeps its sockets here: nodes that share the folder overwrite each other's.
TmpFS={run}/%n/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
MessageTimeout=30
SlurmdTimeout=600
MinJobAge=86400
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus}
NodeName=n[1-{nodes}] NodeAddr=127.0.0.1 Port=[{ports}]
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4 DefaultTime=60 State=UP
"""


def configure(run: Path, logs: Path, nodes: int, **settings: int) -> dict[str, str]:
    """Write key, configuration and hosts file; return the environment of clients. Local."""
    key = run / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    run.chmod(0o755)
    (run / "state").mkdir()
    for i in range(1, nodes + 1):
        (run / f"n{i}" / "spool").mkdir(parents=True)
        (run / f"n{i}" / "tmp").mkdir()
    ports = _free_ports(nodes + 1)
    conf = run / "slurm.conf"
    conf.write_text(
        _CONF.format(
            controller_port=ports[0],
            ports=",".join(map(str, ports[1:])),
            run=run,
            logs=logs,
            nodes=nodes,
            memory=2000,
            **settings,
        )
    )
    devices = [run / f"nvidia{i}" for i in range(settings["gpus"])]
    for device in devices:
        device.touch()
    (run / "gres.conf").write_text("".join(f"Name=gpu File={d}\n" for d in devices))
    names = " ".join(f"n{i}" for i in range(1, nodes + 1))
    (run / "hosts").write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 ctl {names}\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    # The nodes claim more cores than there are: ranks that spin while they wait would keep the
    # cores from those they wait for, and cost a job ten times its time.
    yields = {f"OMPI_MCA_{name}": value for name, value in OPEN_MPI_YIELDS.items()} | MPICH_YIELDS
    return {**yields, **clean, "SLURM_CONF": str(conf)}


def _free_ports(count: int) -> list[int]:
    """Find `count` TCP ports that nobody has.

    Below those that the system gives to connections: one of these might get a number that a daemon
    is still about to listen on.
    """
    low, high = 10_000, max(20_000, int(_EPHEMERAL.read_text().split()[0]))
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            candidate = stack.enter_context(socket.socket())
            with suppress(OSError):
                candidate.bind(("127.0.0.1", low + secrets.randbelow(high - low)))
                found.append(candidate.getsockname()[1])
        return found
