"""Requests to a job under `mpidist launch`: a notice ends it in time, and it grows."""

import subprocess

from supervised_jobs import MPIDIST, SLOWLY, finish, run, steps, summary, supervised, wait_for_step


def test_a_notice_and_more_ranks(tmp_path):
    """Saved before the machine goes away; then again, and with one more rank: the same bits."""
    (tmp_path / "alone").mkdir()
    run(tmp_path / "alone", "-n", "2")
    notice = tmp_path / "notice"
    job = supervised(tmp_path, "-n", "2", "--notice", str(notice), fault=SLOWLY)
    wait_for_step(job, tmp_path, 3)
    notice.touch()
    done = finish(job, 75)
    assert f"notice by {notice}: the ranks are asked to save and exit" in done.stderr
    assert "stopped as asked" in done.stderr
    last = max(steps(tmp_path))
    job = supervised(tmp_path, "-n", "2", "--control", "control", "--max-restarts", "0",
                     fault="sleep@step,ms=200,attempt=0")  # fmt: skip
    wait_for_step(job, tmp_path, last + 3)
    asked = subprocess.run([*MPIDIST, "grow", "control", "-n", "1"], cwd=tmp_path, timeout=60)
    assert asked.returncode == 0
    done = finish(job)
    assert "asked for 1 more rank: 3 ranks get ready, and 2 go on meanwhile" in done.stderr
    assert "again with 3 ranks, which were ready" in done.stderr
    facts = summary(tmp_path)
    assert (facts["workers"], facts["steps"], facts["restarts"]) == (3, 120, 1)
    assert facts["resumed_at"] > last
    assert facts["parameters_sha256"] == summary(tmp_path / "alone")["parameters_sha256"]
