"""Elastic jobs on several hosts: a rank dies, or a link is away for some seconds."""

import re
import shutil

import pytest
from elastic_jobs import mpirun_ulfm, told_rightly
from nodes import rows
from onebox.link_away import link_away

RANKS, STEPS = 8, 60


@pytest.mark.slurm
def test_a_rank_is_killed(cluster, openmpi, programs, tmp_path):
    """R46, R48: `mpirun --with-ft ulfm` in a batch script; seven ranks go on within a second."""
    job = cluster.wait(mpirun_ulfm(cluster, openmpi, programs, tmp_path, STEPS, 0.01, "5:20"))
    assert "mpirun ended with 0" in job.output, job.output
    found = re.findall(r"rank (\d) of 7 has (\w{64})", job.output)
    assert sorted(int(rank) for rank, _ in found) == [0, 1, 2, 3, 4, 6, 7], job.output
    assert len({bits for _, bits in found}) == 1
    assert "rank 5 of 8 on n3 died at step 20; 7 ranks go on after" in job.output
    killed = float((tmp_path / "killed").read_text())
    others = [rows(tmp_path, rank) for rank in range(RANKS) if rank != 5]
    assert all([step for _, step, _ in each] == list(range(STEPS)) for each in others)
    next_step = max(min(when for when, _, size in each if size == 7) for each in others) - killed
    print(f"\nall ranks have done the next step after {next_step:.2f} s")
    assert next_step < 5  # a second on a machine that has nothing else to do


@pytest.mark.network
def test_a_link_is_away_for_some_seconds(net, openmpi, programs, tmp_path):
    """R45, R157: TCP brings what was lost; sums, saves and pushes go on with the right bits."""
    jobs, ulfm = {}, ["--with-ft", "ulfm"]
    for kind, options in (("allreduce", ulfm), ("save", ulfm), ("push", ())):
        folder = tmp_path / kind
        folder.mkdir()
        jobs[folder] = ([programs / "network_away.py", kind, folder, "40"], options)
    for folder, found in link_away(net, openmpi, jobs, 8.0).items():
        print(f"\n{folder.name}: no step for {found.longest:.1f} s, all ranks go on "
              f"{found.after:.1f} s after the link was back", *found.told(), sep="\n")  # fmt: skip
        hashes = re.findall(r"rank (\d) has (\w{64})", found.done.check().stdout)
        assert len(hashes) == 4
        assert len({bits for _, bits in hashes}) == 1
        assert 7.5 < found.longest < 16
        assert (
            found.after < 6
        )  # at most 2 s on a quiet machine with Linux 6.15; 12 s on an older one
        assert told_rightly(found)
    shutil.rmtree(tmp_path / "save")
