"""Training runs that must end with the same bits on any number of ranks, even after failures."""

import json

from interpreters import ROOT
from until import wait_until

DIGITS = str(ROOT / "jobs" / "digits.toml")
STEPS = 150
SETTINGS = [
    word
    for setting in (f"steps={STEPS}", "microbatches=8", "checkpoint_every=20", "log_every=1",
                    "model.channels=[4,8]", "data.distort.copies=2")
    for word in ("--set", setting)
]  # fmt: skip
#: A fault: time to ask the run for a pause at its 30th step, before it is over.
UNTIL_ASKED = "sleep@step:31,ms=10000"


def steps(folder):
    """The steps that runs in a folder have told so far, in the order they were made."""
    files = [*folder.glob("run/metrics.jsonl"), *folder.glob("runs/*/metrics.jsonl")]
    # The last line may be half written.
    lines = files[0].read_text().split("\n")[:-1] if files else []
    return [json.loads(line)["step"] for line in lines]


def wait_for_steps(cluster, job, folder, step=30):
    """Wait until a job has come so far."""
    wait_until(
        lambda: max(steps(folder), default=0) >= step,
        200, otherwise=lambda: cluster.job(job).output, every=0.05,
    )  # fmt: skip
