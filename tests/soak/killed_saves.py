"""Kill a whole job by SIGKILL at random moments around its saves.

    killed_saves.py KILLS [SECONDS [1]]

Each launch on 3 ranks first restores the store that the previous launch has left, on 1, 2 and 3 of
its ranks. The restored step must be the newest committed one, undamaged, and no older than the
newest step whose save has returned. Then 1, 2 or 3 of the ranks save, both with and without a
background thread. At a random moment, for which the number of the launch is the seed, all processes
and the launcher are killed.

The program stops after KILLS kills or SECONDS seconds. Its exit code is 1 if a step was lost or
damaged. With 1 as third argument, saves first make copies on two nodes, and a step counts as saved
when it has its copies.
"""

import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from mpidist.launch.launchers import start
from mpidist.launch.processes import marked, mpi_segments

RANKS = 3
#: A save of the state takes some 20 ms; a launch is killed within so many seconds of saving.
LONGEST = 0.25


# ---------------------------------------------------------------------------------- in the job


def state(comm, step):
    """Replicated arrays, and a part of each rank, whose sizes depend on how many there are."""
    import mpidist as md

    w = np.arange(30_000.0) * step
    low, high = (6000 * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    return {"w": w, "half": w.astype("f4")[::2], "v": md.Shard(w[low:high] + 1, (6000,), low),
            "step": step}  # fmt: skip


def check(comm, found, step):
    want = state(comm, step)
    low = want["v"].start
    assert found["step"] == step
    assert found["w"].tobytes() == want["w"].tobytes()
    assert found["half"].tobytes() == want["half"].tobytes()
    mine = getattr(found["v"], "array", None)
    mine = found["v"][low : low + len(want["v"].array)] if mine is None else mine
    assert mine.tobytes() == want["v"].array.tobytes()


def part(comm, size):
    """The first `size` ranks, or None on the others."""
    from mpi4py import MPI

    made = comm.Split(0 if comm.rank < size else MPI.UNDEFINED)
    return None if made == MPI.COMM_NULL else made


def job(folder, size, background):
    """Restore on 1, 2 and 3 ranks, say what was found, then save on `size` ranks for ever.

    With `size` 0 they are all ranks, with copies on two nodes, and restore from those at last.
    """
    from mpi4py import MPI

    import mpidist as md

    comm, newest = MPI.COMM_WORLD, 0
    for ranks in range(1, RANKS + 1):
        some = part(comm, ranks)
        if some is None:
            continue
        with md.CheckpointStore(some, folder) as store:
            steps = store.all_steps()
            if steps:
                newest, found = store.restore()
                check(some, found, newest)
                assert newest == steps[-1], f"{newest} of {steps} on {ranks} ranks"
    newest = comm.bcast(newest)
    some = part(comm, size or RANKS)
    if some is None:
        comm.Barrier()
        time.sleep(60)
        return
    if size:
        store = md.CheckpointStore(some, folder, keep=2)
        with suppress(md.NoCheckpoint):
            store.restore()
    else:
        node = Path(folder).with_name(f"node{comm.rank // 2}")
        store = md.TieredStore(some, folder, keep=2, local=node)
        with suppress(md.NoCheckpoint):
            shared, (newest, found) = newest, store.restore(state(comm, 0))
            check(comm, found, newest)
            assert newest >= shared
    say(comm, f"restored {newest}")
    comm.Barrier()
    with store:
        for step in range(newest + 1, newest + 1000):
            later = background[step % len(background)] == "b"
            (store.save_async if later else store.save)(step, state(some, step))
            say(comm, f"saved {step - later}")  # one in the background has waited for the last


def say(comm, text):
    if comm.rank == 0:
        os.write(1, f"{text}\n".encode())  # one call: never half a line


# ------------------------------------------------------------------------------- around the job


def newest_of(lines, word):
    return max((int(line.split()[1]) for line in lines if line.startswith(word)), default=0)


def one_kill(folder, number, least, tiered):
    """Launch, wait until it saves, kill all of it: (what it restored, the newest it had saved)."""
    draw = random.Random(number)
    size, background = draw.randint(1, RANKS), "".join(draw.choices("ab", k=7))
    size = 0 if tiered else size
    words = [sys.executable, __file__, "job", str(folder), str(size), background]
    one = start(RANKS, words, env={"OMP_NUM_THREADS": "1"})
    segments: set[Path] = set()
    try:
        end = time.monotonic() + 60
        while "restored" not in one.output() and one.process.poll() is None:
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        pids = marked(one.mark)
        segments = mpi_segments(pids)  # killed ranks leave them behind
        time.sleep(draw.uniform(0, LONGEST))
        draw.shuffle(pids)
        # The launcher dies of us, and does not end by itself while its ranks die.
        one.process.send_signal(signal.SIGSTOP)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        done = one.finish(5)
        for segment in segments:
            segment.unlink(missing_ok=True)
    lines = done.stdout.splitlines()
    if "restored" not in done.stdout or done.returncode != -signal.SIGKILL:
        raise SystemExit(f"kill {number}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    restored = newest_of(lines, "restored")
    if restored < least:
        raise SystemExit(f"kill {number}: step {least} had been saved, {restored} was restored")
    return restored, max(least, newest_of(lines, "saved"))


def main(kills, seconds=float("inf"), tiered=0):
    began, least, done, inside = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="mpidist-killed-") as name:
        folder = Path(name, "store")
        while done < kills and time.monotonic() - began < seconds:
            restored, least = one_kill(folder, done, least, tiered)
            inside += any(folder.glob(".tmp-step-*"))
            done += 1
        restored, _ = one_kill(folder, done, least, tiered)  # the last kill is looked at as well
    if done == 0 or (done >= 50 and not inside):
        raise SystemExit(f"{done} kills, none of them inside a save: this run has shown nothing")
    each = (time.monotonic() - began) / (done + 1)
    print(
        f"{done} times all was killed, {inside} times inside a save; each time the newest step was "
        f"whole on 1, 2 and 3 ranks, the last one {restored}; {each:.1f} s each"
    )


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(*map(float, sys.argv[1:]))
