"""docs/architecture.md, checked: floors, cycles, one door to each hard thing, short files."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpidist"
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}

#: The floor of each top-level module and folder. Within floor 1 the order is finer.
FLOORS = {
    "": 0.0,  # mpidist/__init__.py: names as text and the version; it imports nothing of ours
    "errors": 0.0, "partition": 0.0, "tables": 0.0, "points": 0.0,
    "events": 1.0, "environment": 1.0, "waiting": 1.1, "mismatch": 1.1, "memory": 1.1,
    "arrays": 1.1, "communicator": 1.1, "tensors": 1.05,
    "launch": 1.2, "binding": 1.2,
    "abort": 1.2, "elsewhere": 1.15, "statuses": 1.2, "strangers": 1.2, "calls": 1.2,
    "buffer_pool": 1.2, "leaving": 1.25, "making": 1.25, "telling": 1.2, "context": 1.3,
    "rounds": 1.31, "run_on_all": 1.32, "topology": 1.34, "arena": 1.35, "cross_memory": 1.35,
    "collectives": 2.0, "redistribute": 2.0,
    "gradients": 3.0, "parameter_server": 3.0, "optim": 3.0, "data": 3.0, "checkpoint": 3.0,
    "elastic": 3.0, "models": 3.0, "testing": 3.0,
    "training": 4.0, "cluster": 4.0,
    "cli": 5.0, "__main__": 6.0,
}  # fmt: skip

#: Pure facts are one family: `tables` uses `errors`, and both are on the ground.
PURE = {"", "errors", "partition", "tables"}


def module_of(file: str) -> str:
    """The dotted name of a file."""
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def part_of(module: str) -> str:
    """The top-level module or folder that a module belongs to: ``collectives``, ``events``."""
    return module.split(".")[1] if "." in module else ""


def targets(file: str, node) -> list[str]:
    """The modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        named = [alias.name for alias in node.names if alias.name.split(".")[0] == "mpidist"]
        return [name for name in named if name in MODULES]
    base = node.module or ""
    if node.level:
        here = module_of(file).split(".")
        up = node.level - (Path(file).name == "__init__.py")
        base = ".".join([*here[: len(here) - up], *([base] if base else [])])
    if base.split(".")[0] != "mpidist":
        return []
    # ``from .. import events`` names a module, ``from ..events import emit`` something in one.
    return [f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names]


def imports(file: str, deep: bool = True):
    """(line, module) of what `file` imports of ours; not `deep`: only when it is imported."""
    stack = list(TREES[file].body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, target) for target in targets(file, node))
        elif deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if not deep and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            stack.extend(ast.iter_child_nodes(node))


def external(file: str) -> set[str]:
    """The top-level packages of others that `file` imports anywhere."""
    found = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def users(predicate) -> dict[str, list[int]]:
    """Files with the lines of the nodes for which `predicate` holds."""
    found = {
        file: sorted({n.lineno for n in ast.walk(tree) if predicate(n)})
        for file, tree in TREES.items()
    }
    return {file: lines for file, lines in found.items() if lines}


def outside(found: dict, *allowed: str) -> dict:
    """What is found elsewhere than in the allowed files and folders."""
    return {
        file: lines
        for file, lines in found.items()
        if not any(file == a or (a.endswith("/") and file.startswith(a)) for a in allowed)
    }


def test_every_file_has_a_floor():
    assert {part_of(module) for module in MODULES} <= set(FLOORS)


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down(file):
    """Every import, also inside a function: a lower floor, or the own folder."""
    mine = part_of(module_of(file))
    wrong = []
    for line, target in imports(file):
        part = part_of(target)
        if part == mine and "." in module_of(file):
            continue
        if {mine, part} <= PURE:
            continue
        if not FLOORS[part] < FLOORS[mine]:
            wrong.append(f"{file}:{line} (floor {FLOORS[mine]}) imports {target} ({FLOORS[part]})")
    assert wrong == []


def test_no_cycles():
    """Counting what is imported at import time; inside functions anything may look back."""
    graph = {m: {t for _, t in imports(f, deep=False)} - {m} for m, f in MODULES.items()}
    # A package's __init__ gathers its own modules, which name it only as the path to another.
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])


def test_one_door_for_each_hard_thing():
    """cupy in arrays.py; h5py in checkpoint/ and data/, files of others through strangers.py."""
    assert [file for file in FILES if "cupy" in external(file)] == ["mpidist/arrays.py"]
    h5py = {file: [] for file in FILES if "h5py" in external(file)}
    assert h5py
    assert outside(h5py, "mpidist/checkpoint/", "mpidist/data/", "mpidist/strangers.py") == {}


def test_environment_is_read_in_few_places():
    """Everything else takes the environment as an argument."""

    def reads(node):
        return (
            isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
        ) or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(
            a.name in ("environ", "getenv") for a in node.names))  # fmt: skip

    allowed = ("cli/", "cluster/", "testing/", "events.py", "context.py", "environment.py",
               "points.py", "elastic/pulse.py", "elastic/guard.py")  # fmt: skip
    assert outside(users(reads), *(f"mpidist/{a}" for a in allowed)) == {}


def test_nothing_unpickled_ever_comes_from_a_file():
    """No pickle by any name, no eval; NumPy's files are read and written without objects."""
    for file in FILES:
        assert not external(file) & {"pickle", "cPickle", "dill", "shelve", "marshal", "yaml"}, file

    def runs_code(node):
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return named and node.func.id in ("eval", "exec")

    def allows_objects(node):
        return (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        )

    assert users(runs_code) == {}
    assert users(allows_objects) == {}


def test_comm_world_is_the_job_and_nothing_else():
    """The library works on the communicator it is given.

    COMM_WORLD is named where the whole job is meant: the command line, which starts on it; the
    launch that is examined; the end of the job (abort, and the watchdog that found a hang); and
    the probe program, which is a main program.
    """
    found = users(lambda n: isinstance(n, ast.Attribute) and n.attr == "COMM_WORLD")
    allowed = ("cli/", "abort.py", "launch.py", "elastic/watch.py", "testing/gpu_probe.py")
    assert outside(found, *(f"mpidist/{a}" for a in allowed)) == {}


def test_own_algorithms_are_point_to_point():
    """R29: what runs a schedule knows Isend and Irecv and none of MPI's collectives."""
    tree = TREES["mpidist/collectives/executor.py"]
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert called >= {"Isend", "Irecv"}
    assert not {name for name in called if re.match(r"I?(all|bcast|reduce|gather|scatter|barr)",
                                                    name, re.IGNORECASE)}  # fmt: skip


def test_files_are_short():
    """400 lines at most; aim at 150."""
    lengths = {file: len(path.read_text().splitlines()) for file, path in FILES.items()}
    assert {file: n for file, n in lengths.items() if n > 400} == {}


IMPORT = """
import sys, time
import numpy, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
before, modules = time.process_time(), set(sys.modules)
import mpidist
seconds = time.process_time() - before
print(seconds, *sorted(set(sys.modules) - modules))
"""


def test_importing_costs_little():
    """30 ms beyond numpy and mpi4py: CPU time, the least of five runs, whoever else works here."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60)
        for _ in range(5)
    ]
    assert [run.stderr for run in runs] == [""] * 5
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.030


def test_importing_loads_neither_mpi_nor_arrays():
    """The names are looked up when they are first used."""
    code = "import sys, mpidist, mpidist.errors, mpidist.cli.main; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(run.stdout.split())
    assert "mpidist.errors" in loaded
    assert loaded & {"mpi4py.MPI", "mpi4py", "numpy", "h5py", "cupy"} == set()


def test_collectives_are_a_library_of_their_own():
    """R35: they serve any parallel program; no training code is loaded with them."""
    code = (
        "import sys, mpi4py\nmpi4py.rc.initialize = False\n"
        "import mpidist.collectives.allreduce, mpidist.collectives.blocks\n"
        "import mpidist.collectives.rooted\nprint(*sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = {part_of(name) for name in run.stdout.split() if name.split(".")[0] == "mpidist"}
    assert "collectives" in loaded
    assert {part for part in loaded if FLOORS[part] > 2} == set()
