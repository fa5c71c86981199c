"""The code obeys docs/architecture.md: imports point down, no cycles, short files."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import rooms
from rooms import FLOORS, PACKAGE, ROOT, part_of

import mpidist as md

FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

#: Pure facts are one family: `registry` uses `errors`, and both are on the ground.
PURE = {"", "errors", "partition", "registry"}
#: Files in one folder, `__init__` counted.
FILES_IN_A_FOLDER = 14
#: Lines of code, see `rooms.lines_of_code`.
CORE_LINES, WHEEL_LINES = 20_180, 40_780


MODULES = {module: file.relative_to(ROOT).as_posix() for module, file in rooms.MODULES.items()}


def module_of(file: str) -> str:
    """The dotted name of a file."""
    return rooms.module_of(ROOT / file)


def imports(file: str):
    """(line, module) of what `file` imports of ours, also inside functions."""
    return rooms.imports(ROOT / file)


def external(file: str) -> set[str]:
    """The top-level packages of others that `file` imports anywhere."""
    found = set()
    for node in rooms.nodes_of(FILES[file]):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def tree(file: str) -> ast.Module:
    """What a file says. Parsed only when asked for: a worker that runs no test of it needs none."""
    return rooms.tree_of(FILES[file])


def users(predicate) -> dict[str, list[int]]:
    """Files with the lines of the nodes for which `predicate` holds."""
    found = {
        file: sorted({n.lineno for n in rooms.nodes_of(path) if predicate(n)})
        for file, path in FILES.items()
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


def test_imports_point_down():
    """Every import, also inside a function: a lower floor, or the own folder."""
    wrong, seen = [], 0
    for file in FILES:
        mine = part_of(module_of(file))
        for line, target in imports(file):
            part, seen = part_of(target), seen + 1
            if (part == mine and "." in module_of(file)) or {mine, part} <= PURE:
                continue
            if not FLOORS[part] < FLOORS[mine]:
                floors = FLOORS[mine], FLOORS[part]
                wrong.append(f"{file}:{line} imports {target}, floors {floors}")
    assert seen > 1000
    assert wrong == []


def test_no_cycles():
    """Also none that is hidden in functions."""
    graph = {m: {t for _, t in imports(f)} - {m} for m, f in MODULES.items()}
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
    """cupy in arrays.py; h5py in checkpoint/ and data/, untrusted files by untrusted_hdf5.py."""
    assert [file for file in FILES if "cupy" in external(file)] == ["mpidist/arrays.py"]
    h5py = {file: [] for file in FILES if "h5py" in external(file)}
    assert h5py
    assert outside(h5py, "mpidist/checkpoint/", "mpidist/data/", "mpidist/untrusted_hdf5.py") == {}


def test_environment_is_read_in_few_places():
    """Everything else takes the environment as an argument."""

    def reads(node):
        return (
            isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
        ) or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(
            a.name in ("environ", "getenv") for a in node.names))  # fmt: skip

    allowed = ("cli/", "launch/", "supervisor/", "bench/", "advice/", "events.py",
               "runtime/context.py", "runtime/failure.py", "fault_tolerance/guard.py")  # fmt: skip
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
    allowed = (
        "cli/",
        "runtime/failure.py",
        "launch/start_checks.py",
        "fault_tolerance/watch.py",
        "gpu_direct/__main__.py",
    )
    assert outside(found, *(f"mpidist/{a}" for a in allowed)) == {}


def test_own_algorithms_are_point_to_point():
    """R29: what runs a schedule knows Isend and Irecv and none of MPI's collectives."""
    executor = tree("mpidist/collectives/engines/executor.py")
    called = {node.attr for node in ast.walk(executor) if isinstance(node, ast.Attribute)}
    assert called >= {"Isend", "Irecv"}
    assert not {name for name in called if re.match(r"I?(all|bcast|reduce|gather|scatter|barr)",
                                                    name, re.IGNORECASE)}  # fmt: skip


def test_folders_are_small():
    """HOUSE rule 1: a folder has at most 14 files; beside the rooms lie at most 7 modules."""
    counts = Counter(Path(file).parent.as_posix() for file in FILES)
    alone = counts.pop("mpidist") - 2  # __init__ and __main__
    assert {folder: n for folder, n in counts.items() if n > FILES_IN_A_FOLDER} == {}
    assert alone <= 7


def test_file_names_stand_once():
    """Rule 1: but `__init__` and `__main__`, and `cli/`, where a file has its command's name."""
    names = Counter(
        Path(file).name for file in FILES if "__" not in file and not file.startswith("mpidist/cli")
    )
    assert {name for name, n in names.items() if n > 1} == set()


#: Public names that several modules have on purpose, for one thing.
ONE_MEANING = {
    "add_parser", "add_options", "run",  # a command of `mpidist`
    "measure",  # a bench
    "allgather", "allreduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter",
    "from_settings",  # what a table of a job file means
    "on_slots", "simulate",
    "load", "restore", "write", "main",  # what they load or write stands in the module's name
    "run_on_all", "same_on_all",  # checkpoint/control.py adds the memory to them
}  # fmt: skip


def test_a_public_name_means_one_thing():
    """Rule 2: a class or function of a module has a name that no other module uses."""
    homes = Counter(
        node.name
        for file in FILES
        for node in tree(file).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    )
    twice = {name for name, count in homes.items() if count > 1}
    assert twice - ONE_MEANING == set(), "a second thing of this name"


#: A participle in a file's name says what was done to something, not what stands in the file.
PARTICIPLE = re.compile(r"(?:^|_)\w+(?:ed|ing)$")
NOUNS = {
    "binding", "clipping", "drawing", "feed", "polling", "ring", "routing", "sharding", "staging",
    "tiered",  # as in TieredStore
}  # fmt: skip


def test_file_names_are_nouns_or_verbs():
    """Rule 2: names of the field; no participles."""
    stems = {Path(file).stem for file in FILES}
    assert {s for s in stems if PARTICIPLE.search(s)} - NOUNS == set()


@pytest.mark.parametrize("room", sorted({Path(file).parent.as_posix() for file in FILES}))
def test_a_room_says_what_it_is_for(room):
    """Rule 1: in its `__init__`, in a sentence at least."""
    told = ast.get_docstring(tree(f"{room}/__init__.py"))
    assert told
    assert told.count(" ") > 5, told


def test_the_code_keeps_to_its_budget():
    """Rule 4: lines of code of the core and of the whole wheel; raised only with a reason."""
    found = {room: lines for room, (_, lines) in rooms.sizes().items()}
    assert sum(found[room] for room in rooms.CORE) <= CORE_LINES
    assert sum(found.values()) <= WHEEL_LINES


def test_the_picture_is_todays():
    """docs/rooms.svg is what the code is: `make size` draws it anew."""
    assert (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8") == rooms.picture()


def test_files_are_short():
    """450 lines at most; aim at 150. A file that holds one idea is not cut in two for it."""
    lengths = {file: len(path.read_text().splitlines()) for file, path in FILES.items()}
    assert {file: n for file, n in lengths.items() if n > 450} == {}


def test_tests_are_short():
    """400 lines at most: a longer one holds two subjects."""
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    assert len(lengths) > 150
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_imports_of_ours_are_relative():
    """Rule 6: and none of them leads to the tests."""
    ours, named = (
        {"mpidist", "tests", "onebox", "benchmarks"},
        {file: external(file) for file in FILES},
    )
    assert sum(map(len, named.values())) > 1000
    assert {file: found & ours for file, found in named.items() if found & ours} == {}


def docstrings(file: str):
    """(line, text) of each docstring of a file."""
    for node in rooms.nodes_of(FILES[file]):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text


def test_nothing_says_that_it_is_local():
    """Rule 7: it is the rule. What is collective says so."""
    marker = re.compile(r"(^|[.\s])Local([.;,:]| (but|unless|except)\b)")
    said = [f"{f}:{n}" for f in FILES for n, text in docstrings(f) if marker.search(text)]
    assert said == []


def test_what_takes_a_communicator_says_that_it_is_collective():
    """Rule 7: every public function and class whose first argument is `comm`.

    But `Guard` and `Watch`, which `md.guard` and `md.watch` make.
    """
    silent, seen = [], set()
    for name, home in md._HOME.items():
        for node in tree(f"mpidist/{home.replace('.', '/')}.py").body:
            if getattr(node, "name", None) == name and first_argument(node) == "comm":
                told = re.search(r"Collective over\s+`comm`", ast.get_docstring(node) or "")
                silent += [] if told else [name]
                seen.add(name)
    assert silent == ["Guard", "Watch"]
    assert {"allreduce", "train", "Arena", "parameter_server", "CheckpointStore"} <= seen


def first_argument(node) -> str:
    """The first argument of a function, or of what makes a class, but for `self`."""
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if getattr(n, "name", None) == "__init__"]
        return first_argument(made[0]) if made else ""
    names = [a.arg for a in node.args.args if a.arg != "self"]
    return names[0] if names else ""


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


def test_settings_and_policies_load_without_mpi():
    """R97: what a job file says is checked before MPI is there; a login node simulates."""

    def among(module, names):
        return any(f"{module}.".startswith(f"mpidist.{name}.") for name in names)

    for name in (*rooms.WITHOUT_MPI, *rooms.WITH_MPI):
        assert f"mpidist.{name}" in MODULES
    wrong = [
        " -> ".join(way)
        for module in MODULES
        if among(module, rooms.WITHOUT_MPI) and not among(module, rooms.WITH_MPI)
        and (way := rooms.way_to_mpi(module))
    ]  # fmt: skip
    assert wrong == []
    assert rooms.way_to_mpi("mpidist.training.settings")[-1] == "mpi4py.MPI"


def test_collectives_are_a_library_of_their_own():
    """R35: they serve any parallel program; no training code is loaded with them."""
    code = (
        "import sys, mpi4py\nmpi4py.rc.initialize = False\n"
        "import mpidist.collectives.allreduce, mpidist.collectives.allgather\n"
        "import mpidist.collectives.scatter\nprint(*sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = {part_of(name) for name in run.stdout.split() if name.split(".")[0] == "mpidist"}
    assert "collectives" in loaded
    assert {part for part in loaded if FLOORS[part] > 2} == set()


def test_no_test_calls_a_collective_of_the_world():
    """In tests/mpi the ranks that a test does not need are not in it, and would never come."""
    calls = re.compile(r"\b(COMM_)?WORLD\.(?!rank\b|size\b)\w+")
    tests = sorted((ROOT / "tests" / "mpi").glob("test_*.py"))
    assert tests
    assert [(p.name, m[0]) for p in tests for m in calls.finditer(p.read_text())] == []
