"""The folder of a store becomes read-only, disappears or gets full, in a mount namespace.

A mount in the namespace exists until the last process of the namespace ends, for any reason.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import python_path
from tiers import exhaustive

from mpidist.launch.launchers import launch_environment, launcher_command
from mpidist.launch.processes import run

PROGRAMS = Path(__file__).parent / "programs"
#: Root needs no user namespace, which some systems do not give.
NAMESPACE = ["unshare", "--mount", "--map-root-user"]
_FIRST = 'mount -t tmpfs -o size=200m tmpfs "$0" && exec "$@"'


def in_namespace(folder, command, **options):
    """Run a command that sees a small disk of its own at `folder`."""
    inside = [*NAMESPACE, "sh", "-c", _FIRST, str(folder), *command]
    return run(inside, env=launch_environment(options.pop("env", None)), **options)


@pytest.fixture
def disk(tmp_path):
    """A folder where a disk can be mounted."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("ranks", [exhaustive(2), 3])
def test_a_store_survives_its_folder(disk, ranks):
    """One error on all ranks, earlier steps whole, a later save works; each page of a full disk."""
    program = [sys.executable, str(PROGRAMS / "storage_faults.py"), str(disk)]
    env = {"PYTHONPATH": python_path()}
    done = in_namespace(disk, [*launcher_command(ranks), *program], timeout=240, env=env).check()
    for kind in ("ReadOnly", "Renamed", "Unmounted", "Full"):
        assert f"save {kind}: " in done.stdout
        assert f"save_async {kind}: " in done.stdout
    assert done.stdout.count("full after 0 to ") == 2
    assert not list(disk.iterdir()), "it was gone with its namespace"


def test_a_job_survives_its_folder(disk):
    """`mpidist train` goes on while its folder is read-only, gone and full, and saves after it."""
    program = [sys.executable, str(PROGRAMS / "storage_job.py"), str(disk)]
    # The program waits with what the tests wait with.
    done = in_namespace(disk, program, timeout=300, env={"PYTHONPATH": python_path()})
    assert done.returncode == 75, done.stdout + done.stderr
    for text in ("Read-only file system", "is gone; put it back", "No space left on device"):
        assert text in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
