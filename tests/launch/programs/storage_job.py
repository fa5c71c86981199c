"""Run `mpidist train` on 3 ranks while its folder becomes read-only, disappears, and gets full.

The call is ``storage_job.py FOLDER``, and FOLDER is a tmpfs of this mount namespace. The program
prints the result, and ends with the exit code of the job.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from storage_faults import Full, ReadOnly, Renamed
from until import wait_until

from mpidist.launch.launchers import launch_environment, launcher_command

JOB = Path(__file__).parents[3] / "jobs" / "digits.toml"
SETTINGS = ("steps=100000", "checkpoint_every=5", "model.channels=[4, 8]", "global_batch=12")


def newest(store):
    return max((int(path.name[5:17]) for path in store.glob("step-*")), default=0)


def failures(errors):
    return errors.read_text().count("mpidist: not saved, the run goes on: ")


def main(base):
    disk, errors = base / "small", base / "errors"
    full = Full(disk, size="4m")
    full.mount()
    command = [*launcher_command(3), sys.executable, "-m", "mpidist", "train", str(JOB)]
    command += [w for s in (*SETTINGS, f"out={disk / 'run'}") for w in ("--set", s)]
    store = disk / "run" / "checkpoints"
    slowly = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": "sleep@step,rank=0,ms=5"}
    with errors.open("w") as log:
        job = subprocess.Popen(command, stderr=log, env=launch_environment(slowly))
    try:
        wait_until(lambda: newest(store) > 0, job=job)
        for fault in (ReadOnly(store), Renamed(store), full):
            said = failures(errors)
            fault.make()

            def fails(fault=fault, said=said):
                if fault is full:
                    full.make()  # a save that was nearly done removes an old step
                return failures(errors) >= said + 2

            wait_until(fails, job=job, every=0.02)
            fault.mend()
            step = newest(store)
            wait_until(lambda step=step: newest(store) > step + 10, job=job)
        # The end of the run, as the batch system would ask for it.
        job.send_signal(signal.SIGUSR1)
        code = job.wait(60)
    finally:
        job.kill()
        job.wait()
        print(errors.read_text())
    lines = (disk / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.startswith("{")]
    assert steps == sorted(steps)
    print("newest", newest(store), "metrics up to", steps[-1])
    verify = [sys.executable, "-m", "mpidist", "checkpoint", "verify", str(store)]
    subprocess.run(verify, check=True)
    return code


if __name__ == "__main__":
    os.environ.pop("MPIDIST_FAULT", None)
    sys.exit(main(Path(sys.argv[1])))
