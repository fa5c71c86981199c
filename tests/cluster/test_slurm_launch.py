"""Both MPI libraries reach all nodes of the cluster by every launcher that docs/slurm.md names."""

import re

import pytest
from interpreters import job_environment
from until import wait_until

pytestmark = pytest.mark.slurm

LINE = re.compile(r"rank (\d+) of (\d+) sum (\d+) on (n\d)")


def ranks_and_hosts(text):
    """Check that 8 ranks on 4 nodes saw each other; return rank -> host."""
    lines = LINE.findall(text)
    assert {(size, total) for _, size, total, _ in lines} == {("8", "28")}, text
    hosts = {int(rank): host for rank, _, _, host in lines}
    assert sorted(hosts) == list(range(8)), text
    return hosts


EVEN = {rank: f"n{rank // 2 + 1}" for rank in range(8)}
SHAPE = ["--nodes=4", "--ntasks-per-node=2"]


def test_srun_pmix_open_mpi(cluster, openmpi, programs):
    """R95: ranks find each other with no address or port from the user."""
    srun = ["srun", *SHAPE, "--mpi=pmix", openmpi, programs / "who.py"]
    done = cluster.run(srun, env={"SLURM_PMIX_FENCE": "ring"})  # docs/slurm.md: or it may crash
    assert ranks_and_hosts(done.check().stdout) == EVEN


def test_srun_pmi2_mpich(cluster, mpich, programs):
    """R95: ranks find each other with no address or port from the user."""
    done = cluster.run(["srun", *SHAPE, "--mpi=pmi2", mpich, programs / "who.py"])
    assert ranks_and_hosts(done.check().stdout) == EVEN


def test_srun_pmi2_mpich_with_a_full_memory(cluster, mpich, programs):
    """What lies in memory beside MPICH's address is published too, more than Slurm takes."""
    done = cluster.run(["srun", *SHAPE, "--mpi=pmi2", mpich, programs / "crowded.py"], timeout=60)
    assert ranks_and_hosts(done.check().stdout) == EVEN


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpirun_in_a_batch_script(cluster, kind, programs, tmp_path, request):
    """R95: mpirun takes hosts and ranks from the allocation."""
    python = request.getfixturevalue(kind)
    script = tmp_path / "mpirun.sbatch"
    script.write_text(f"#!/bin/bash\nmpiexec -n 8 python {programs / 'who.py'}\n")
    job = cluster.sbatch(script, options=SHAPE, env=job_environment(python), cwd=tmp_path)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert ranks_and_hosts(job.output) == EVEN


def test_srun_without_pmi_gives_singletons(cluster, openmpi, programs):
    """The trap that the launch check exists for: eight jobs of one rank, and no error."""
    done = cluster.run(["srun", *SHAPE, "--mpi=none", openmpi, programs / "who.py"]).check()
    assert done.stdout.count("rank 0 of 1 sum 0") == 8


def test_a_job_of_one_failing_rank_fails(cluster, openmpi, tmp_path):
    script = tmp_path / "fail.sbatch"
    script.write_text("#!/bin/bash\nsrun --mpi=pmix sh -c 'exit $SLURM_PROCID'\n")
    job = cluster.sbatch(script, options=["--nodes=2", "--ntasks=4"], cwd=tmp_path)
    assert (job.state, job.exit_code) == ("FAILED", 3)


def test_a_job_beyond_its_deadline_is_cancelled(cluster, tmp_path):
    script = tmp_path / "sleep.sbatch"
    script.write_text("#!/bin/bash\necho begun\nsleep 600\n")
    with pytest.raises(TimeoutError, match=r"was \w+ after 2 s"):
        cluster.sbatch(script, timeout=2, cwd=tmp_path)
    job = cluster.submit(script, cwd=tmp_path)
    wait_until(lambda: cluster.job(job).output, otherwise="nothing came of the job")
    with pytest.raises(TimeoutError, match=r"RUNNING after 0 s[\s\S]*begun"):
        cluster.wait(job, timeout=0)
    assert cluster.wait(job).state == "CANCELLED"


def test_a_command_beyond_its_deadline_is_ended(cluster):
    done = cluster.run(["srun", "-N2", "sleep", "500"], timeout=2)
    assert (done.timed_out, done.returncode) == (True, 124)
    running = ["squeue", "--noheader", "--states=RUNNING", "--name=sleep"]
    wait_until(lambda: not cluster.run(running).stdout.strip(), otherwise="the step is still there")


def test_jobs_outlive_their_sbatch(cluster, tmp_path):
    """A job inherits the environment of sbatch, but not its end."""
    script = tmp_path / "short.sbatch"
    script.write_text("#!/bin/bash\nsleep 1\necho through\n")
    jobs = [cluster.submit(script, cwd=tmp_path) for _ in range(5)]
    assert [cluster.wait(job).output for job in jobs] == ["through\n"] * 5
