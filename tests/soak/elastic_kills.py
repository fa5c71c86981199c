"""SIGKILL of random ranks at random moments of an elastic job: the result keeps its bits.

    elastic_kills.py [--single 300] [--double 100] [--follow 100] [--seed 0] [--ranks 2-6]
                     [--kinds "with ring 250000,store 1000"] [--file RUNS.jsonl] [--keep FOLDER]

Each run starts `mpirun --with-ft ulfm` of `elastic_job.py` and kills ranks: one at a time, up to
three in a run (``single``); two at once (``double``); or a second one up to 100 ms after the first,
which falls into the repair (``follow``). Moments are drawn between the making of the group and the
end of the program. A run is right if all living ranks have the bits of a run that nobody disturbs
(those of each other in a training without microbatches), no rank has done a step twice, the exit
code is 0, and 5 s later no process and no file in /dev/shm is left. A run that does not end is a
failure, and its ranks leave their stacks. A run with parameter servers is right if no sample was
used more often than there were epochs, and under BSP and SSP(0) none less often. It may also end by
the error that the parameters of a dead server are lost, or that no worker lives; if servers keep
copies, only after two deaths, and a run that goes back to its checkpoint needs two deaths, too.

One line of JSON tells each run; the seed in it, given by ``--seed`` with ``--single 1``, draws the
same kills again. As root all happens in a mount namespace of its own, with an empty /dev/shm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpidist.collectives.schedules.algorithms import ALLREDUCE
from mpidist.launch.launchers import launch_environment, launcher_command
from mpidist.launch.processes import Started, marked

PROGRAM = Path(__file__).with_name("elastic_job.py")
STEPS = 40
#: Values and columns of the board, as in `elastic_job`, which imports MPI.
INSIDE, LEFT = 1, 1_000_000
PID, DONE, SAVING = range(3)
#: Seconds after the end of mpirun in which all must be gone.
GONE_WITHIN = 5.0
#: The exit code of `RankFailure`.
LOST = 70
_PRIVATE = "MPIDIST_SOAK_PRIVATE"
_FAST = ["native", "auto", "node", "hierarchical", "single_copy", *ALLREDUCE]
KINDS = [f"with {name} {n}" for name in _FAST for n in (1000, 250_000)]
KINDS += ["function auto 1000", "function ring 250000", "arena 1000", "arena 250000"]
KINDS += ["store 1000", "store 250000"] * 3
KINDS += ["train 12 auto 0", "train 12 auto 1"] * 10
KINDS += [
    f"served {mode} {rest}"  # placement, servers, saves, copies
    for mode in ("bsp", "asp", "ssp", "ssp0")
    for rest in (
        "dedicated 1 0 0", "dedicated 2 0 0", "dedicated 2 1 0", "colocated 2 1 0",
        "dedicated 2 0 1", "dedicated 3 1 1", "colocated 3 0 1", "shares 3 0 1", "shares 2 1 0",
    )
]  # fmt: skip
KINDS += [
    f"train 0 {name} {saves}" for name in ("auto", "node", "ring", "native") for saves in (0, 1)
]


@dataclass
class Blow:
    """Who is killed, when: `after` ms after the board has shown `target` ("save" or steps)."""

    target: str | int
    after: float
    ranks: list[int]
    gap: float = 0.0  # ms between the kills
    #: What has happened: (rank, milliseconds since the first kill of the run, board of the rank).
    hits: list[tuple[int, float, int]] = field(default_factory=list)


def drawn(draw: random.Random, mode: str, kind: str, ranks: int) -> list[Blow]:
    """Draw the kills of a run."""
    victims = draw.sample(range(ranks), ranks)
    words = kind.split()
    place = {"train": 3, "served": 4}.get(words[0])  # of the word that says whether it saves
    saves = words[0] == "store" or (place is not None and words[place] == "1")

    def moment() -> tuple[str | int, float]:
        what = draw.choices(["begin", "save", "end", "step"], [1, 2 * saves, 1, 8])[0]
        if what == "save":
            return "save", draw.uniform(0, 10)
        if what == "begin":
            return INSIDE, draw.choice([0.0, draw.uniform(0, 20)])
        if what == "end":
            return INSIDE + STEPS - draw.randint(0, 1), draw.choice([0.0, draw.uniform(0, 15)])
        return INSIDE + draw.randint(0, STEPS - 2), draw.uniform(0, 30)

    if mode == "single":
        count = min(draw.choice([1, 1, 1, 2, 3]), ranks - 1)
        return [Blow(*moment(), [victims.pop()]) for _ in range(count)]
    two = [victims.pop(), victims.pop()]
    return [Blow(*moment(), two, draw.uniform(0, 100) if mode == "follow" else 0.0)]


class Run:
    """One job, from its start to the verdict."""

    def __init__(self, kind: str, ranks: int, timeout: float, ladder: bool = False):
        self.folder = Path(tempfile.mkdtemp(prefix="mpidist-elastic-"))
        self.kind, self.ranks, self.deadline = kind, ranks, time.monotonic() + timeout
        (self.folder / "board").write_bytes(bytes(24 * ranks))
        self.board = np.memmap(self.folder / "board", np.int64, "r", shape=(ranks, 3))
        launcher, *options = launcher_command(ranks)
        words = [sys.executable, PROGRAM, kind, self.folder, ranks, STEPS]
        env = launch_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        command = [launcher, "--with-ft", "ulfm", *options]
        if ladder:
            launch = ["-m", "mpidist", "launch", "--elastic", "-n", str(ranks), "--"]
            command = [sys.executable, *launch]
        self.ladder, command = ladder, [*command, *map(str, words)]
        self.job = Started(command, env=env, cwd=self.folder)
        self.first_kill = 0.0
        self.faults: list[str] = []
        self.lost = False
        self.killed: set[int] = set()

    def over(self) -> bool:
        return self.job.process.poll() is not None or time.monotonic() > self.deadline

    def deal(self, blows: list[Blow]) -> None:
        """Deal all blows, each at its moment."""
        while not self.over() and not (self.board[:, DONE] >= INSIDE).all():
            time.sleep(0.001)  # the group is made on all ranks
        for blow in sorted(blows, key=lambda one: 0 if one.target == "save" else one.target):
            wanted = blow.target
            while not self.over():
                living = [rank for rank in range(self.ranks) if rank not in self.killed]
                if wanted == "save" and self.board[living, SAVING].any():
                    break
                if wanted != "save" and self.board[:, DONE].max() >= wanted:
                    break
                if wanted == "save" and self.board[:, DONE].max() == LEFT:
                    break
                time.sleep(0.0003)
            time.sleep(blow.after / 1e3)
            for k, rank in enumerate(blow.ranks):
                time.sleep(blow.gap / 1e3 if k else 0)
                self.kill(rank, blow)

    def kill(self, rank: int, blow: Blow) -> None:
        pid, done = int(self.board[rank, PID]), int(self.board[rank, DONE])
        with suppress(OSError):
            # Nobody else's process may have got the number of a rank that has ended.
            if self.job.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
                self.first_kill = self.first_kill or time.monotonic()
                since = (time.monotonic() - self.first_kill) * 1e3
                blow.hits.append((rank, round(since, 1), done))
                self.killed.add(rank)

    def end(self) -> None:
        """Wait for the end, and note what is wrong with it."""
        while not self.over():
            time.sleep(0.005)
        if self.job.process.poll() is None:
            self.faults.append("hung")
            self.stacks()
        elif code := self.job.process.returncode:
            # Lost parameters end a job with servers, as they must.
            self.lost = self.kind.startswith("served") and code == LOST
            if not self.lost:
                self.faults.append(f"exit code {code}")
        began = time.monotonic()
        while (left := self.left()) and time.monotonic() < began + GONE_WITHIN:
            time.sleep(0.02)
        if left and "hung" not in self.faults:
            self.faults.append(f"left: {', '.join(left)}")
            self.stacks()
        self.done = self.job.finish(0.1)

    def left(self) -> list[str]:
        """Return the processes of the job that live, and the files in a /dev/shm of our own."""
        found = [f"process {pid}" for pid in marked(self.job.mark)]
        shared = Path("/dev/shm").iterdir() if _PRIVATE in os.environ else ()
        return found + [str(path) for path in shared]

    def stacks(self) -> None:
        """Let all ranks that live write their stacks, and add what py-spy and gdb see."""
        alive = marked(self.job.mark)
        ours = {int(pid) for pid in self.board[:, PID]}
        for pid in alive:
            with suppress(OSError):
                if pid in ours:
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
        native = ["gdb", "-p", "{}", "-batch", "-ex", "bt"]
        for tool, words in {"py-spy": ["py-spy", "dump", "--pid", "{}"], "gdb": native}.items():
            for pid in alive if shutil.which(tool) else ():
                command = [word.format(pid) for word in words]
                said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
                (self.folder / f"{tool}-{pid}").write_text(said)

    def judge(self, bits: str) -> None:
        """Compare what the living ranks have with `bits`, or with each other if that is ""."""
        if "hung" in self.faults:
            return
        if self.kind.startswith("served"):
            self.judge_served()
            return
        paths = [self.folder / f"{rank}.log" for rank in range(self.ranks)]
        logs = [[*map(int, p.read_text().split())] if p.exists() else [] for p in paths]
        for rank, log in enumerate([] if self.ladder else logs):  # else steps may be done again
            if log != sorted(set(log)):
                self.faults.append(f"rank {rank} did a step twice")
            if self.kind.startswith("train") and rank not in self.killed and len(log) != STEPS:
                self.faults.append(f"rank {rank} has told {len(log)} of {STEPS} steps")
        if set().union(*logs) != set(range(STEPS)):
            self.faults.append(f"{STEPS - len(set().union(*logs))} steps are in no log")
        for rank in sorted(self.living()):
            path = self.folder / f"{rank}.end"
            if not path.exists():
                self.faults.append(f"rank {rank} did not come to the end")
                continue
            end = json.loads(path.read_text())
            bits = bits or end["sha256"]
            if end["count"] != STEPS or end["sha256"] != bits:
                self.faults.append(f"rank {rank} is wrong: {end}")

    def judge_served(self) -> None:
        """Check how often the samples were used; see `elastic_job.Counts`."""
        # With 2 ranks there is one server, and no other one for a copy.
        copies, stderr = self.kind.endswith("1") and self.ranks > 2, self.done.stderr
        back = "go back to step" in stderr
        if copies and len(self.killed) < 2 and (back or ("partitions" in stderr and self.lost)):
            self.faults.append("one death has cost steps, although servers keep copies")
        if self.lost:
            told = ("partitions it served", "no checkpoint yet", "all workers died")
            told += ("are lost; give checkpoint",)
            if not self.killed or not any(text in self.done.stderr for text in told):
                self.faults.append("ended by an error")
            return
        mode, epochs, before = self.kind.split()[1], STEPS // 5, None
        for rank in sorted(self.living()):
            path, log = self.folder / f"{rank}.end", self.folder / f"{rank}.log"
            steps = [*map(int, log.read_text().split())] if log.exists() else []
            if not path.exists():
                self.faults.append(f"rank {rank} did not come to the end")
                continue
            if not steps or (steps[-1] < STEPS - 1 and back):
                continue  # a server, maybe only since all others have died
            end, counts = json.loads(path.read_text()), np.load(self.folder / f"{rank}.npy")
            jumps = [(a, b) for a, b in itertools.pairwise(steps) if b != a + 1]
            if end["count"] != STEPS or steps[-1] != STEPS - 1:
                self.faults.append(f"rank {rank} has done {end['count']} steps")
            if jumps and not back:
                self.faults.append(f"rank {rank} jumps: {jumps}")
            if counts.max() > epochs or (mode in ("bsp", "ssp0") and counts.min() < epochs):
                self.faults.append(f"rank {rank}: counts {counts.min()} to {counts.max()}")
            if before is not None and not np.array_equal(before, counts):
                self.faults.append(f"rank {rank} has other parameters")
            if mode == "ssp" and end["gap"] > 2:
                self.faults.append(f"rank {rank} was {end['gap']} steps ahead")
            before = counts

    def living(self) -> set[int]:
        """Return the ranks that must have come to the end."""
        if self.ladder and ": again" in self.done.stderr:
            return {0}  # of another attempt
        return set(range(self.ranks)) - self.killed

    def close(self, keep: Path | None, name: str) -> None:
        if self.faults and keep is not None:
            (self.folder / "stdout").write_text(self.done.stdout)
            (self.folder / "stderr").write_text(self.done.stderr)
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copytree(self.folder, keep / name, dirs_exist_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        if _PRIVATE in os.environ:
            for path in Path("/dev/shm").iterdir():
                path.unlink()


def undisturbed(kind: str, timeout: float) -> str:
    """Return the hash of a run on 2 ranks in which nobody dies."""
    run = Run(kind, 2, timeout)
    run.end()
    ends = [json.loads(path.read_text())["sha256"] for path in run.folder.glob("*.end")]
    run.close(None, "")
    if run.faults or len(set(ends)) != 1:
        raise SystemExit(f"{kind}: undisturbed: {run.faults} {run.done}")
    return ends[0]


def one(mode: str, seed: int, args, bits: dict[str, str]) -> dict:
    """Make one run; return what is told of it."""
    draw = random.Random(f"{mode} {seed}")
    kind = draw.choice(args.kinds)
    ranks = draw.randint(max(args.ranks[0], 2 if mode == "single" else 3), args.ranks[1])
    blows = drawn(draw, mode, kind, ranks)
    if kind.startswith(("train 0 ", "served")):
        bits[kind] = ""  # sums of floating-point numbers depend on the number of ranks
    elif kind not in bits:
        bits[kind] = undisturbed(kind, args.timeout)
    began, load = time.monotonic(), Path("/proc/loadavg").read_text().split()[0]
    run = Run(kind, ranks, args.timeout, args.ladder)
    try:
        run.deal(blows)
        run.end()
        run.judge(bits[kind])
    finally:
        if not hasattr(run, "done"):
            run.done = run.job.finish(0.1)
        name = f"{mode}-{seed}"
        run.close(args.keep, name)
    told = {"mode": mode, "seed": seed, "verdict": "; ".join(run.faults) or "right", "kind": kind,
            "ranks": ranks, "hits": [hit for blow in blows for hit in blow.hits],
            "wanted": [(blow.target, round(blow.after, 1), blow.ranks) for blow in blows],
            "lost": run.lost,
            "deaths_seen": run.done.stderr.count("go on after") + run.done.stderr.count("goes on"),
            "seconds": round(time.monotonic() - began, 2), "load": float(load)}  # fmt: skip
    if run.faults:
        told["kept"] = str(args.keep / name)
    return told


def in_private() -> None:
    """Begin again in a mount namespace of our own, whose /dev/shm is empty, if we may."""
    if os.geteuid() == 0 and shutil.which("unshare") and _PRIVATE not in os.environ:
        mount = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, *sys.argv]
        os.execvpe(words[0], words, {**os.environ, _PRIVATE: "1"})


def parsed(words: list[str] | None):
    parser = argparse.ArgumentParser("elastic_kills", description=__doc__)
    for mode, count, what in (("single", 300, "one at a time"), ("double", 100, "two at once"),
                              ("follow", 100, "a second one 0 to 100 ms later")):  # fmt: skip
        parser.add_argument(f"--{mode}", type=int, default=count, help=f"runs with kills, {what}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--ranks", default="2-6", help="the number of ranks is drawn from these")
    parser.add_argument("--kinds", default=",".join(KINDS), help="jobs, or their first words")
    parser.add_argument("--ladder", action="store_true", help="start by mpidist launch --elastic")
    parser.add_argument("--timeout", type=float, default=90, help="seconds; then a run hangs")
    parser.add_argument("--file", type=Path, help="add the lines of the runs to this file")
    parser.add_argument("--keep", type=Path, default=Path("runs/soak-elastic"),
                        help="where the output of a run that fails is kept")  # fmt: skip
    args = parser.parse_args(words)
    low, _, high = args.ranks.partition("-")
    args.ranks = (int(low), int(high or low))
    named = ([k for k in KINDS if k.startswith(f"{w} ")] or [w] for w in args.kinds.split(","))
    args.kinds = [*itertools.chain(*named)]
    args.keep = args.keep.absolute()
    return args


def main(words: list[str] | None = None) -> int:
    """Make all runs, tell each, and return the exit code."""
    args, bits = parsed(words), {}
    rows = []
    modes = [mode for mode in ("single", "double", "follow") for _ in range(getattr(args, mode))]
    numbers = {mode: itertools.count(args.seed) for mode in set(modes)}
    for mode in modes:
        row = one(mode, next(numbers[mode]), args, bits)
        rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if args.file:
            with args.file.open("a") as file:
                file.write(f"{line}\n")
    return report(rows)


def report(rows: list[dict]) -> int:
    """Say how many runs were right; return the exit code."""
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        wrong = [row for row in of_mode if row["verdict"] != "right"]
        hits = [hit for row in of_mode for hit in row["hits"]]
        late = sum(done == LEFT for _, _, done in hits)
        each = statistics.median(row["seconds"] for row in of_mode)
        load = statistics.median(row["load"] for row in of_mode)
        right = f"{len(of_mode) - len(wrong)} of {len(of_mode)} runs right"
        print(f"{mode}: {right}, {len(hits)} kills ({late} while the program ended); "
              f"{each:.1f} s each, load {load:.1f}")  # fmt: skip
        for row in wrong:
            print(f"  seed {row['seed']}, {row['kind']} on {row['ranks']}: {row['verdict']}")
    seen = Counter(row["kind"].split()[0] for row in rows)
    print("kinds: " + ", ".join(f"{count} {name}" for name, count in seen.most_common()))
    return int(any(row["verdict"] != "right" for row in rows))


if __name__ == "__main__":
    in_private()
    sys.exit(main())
