"""The rooms (folders) of the package: their floors, their sizes, and a picture of their imports.

    python tests/rooms.py                         a table: files and lines of code of each room
    python tests/rooms.py --picture docs/rooms.svg

Lines of code are counted without comments, docstrings and blank lines.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mpidist"

#: The floor of each top-level module and room. Within the two lowest the order is finer.
FLOORS = {
    "": 0.0,  # mpidist/__init__.py: names as text and the version; it imports nothing of ours
    "errors": 0.0, "partition": 0.0, "registry": 0.0,
    "events": 1.0, "tensors": 1.1, "arrays": 1.2, "untrusted_hdf5": 1.2,
    "launch": 1.3, "runtime": 1.4, "gpu_direct": 1.5,
    "collectives": 2.0, "simulator": 2.1,
    "gradients": 3.0, "servers": 3.0, "optim": 3.0, "data": 3.0, "checkpoint": 3.0,
    "fault_tolerance": 3.0, "models": 3.0, "elasticity": 3.1, "pipeline": 3.1, "peers": 3.1,
    "training": 4.0, "supervisor": 4.0, "bench": 4.0, "advice": 4.1,
    "cli": 5.0, "__main__": 6.0,
}  # fmt: skip
CORE = ("runtime", "collectives", "gradients", "servers", "checkpoint")
#: Rooms and modules that load without MPI: settings and policies, which are checked before a
#: launcher has started anything, and all that plans, simulates, supervises, reads or computes.
WITHOUT_MPI = (
    "checkpoint.format", "checkpoint.storage", "cli", "collectives.schedules", "data",
    "elasticity.elastic_settings", "launch", "models", "optim", "pipeline",
    "servers.balance.rebalance", "servers.consistency", "servers.layout.roles",
    "servers.modes.backup_workers", "servers.modes.dynamic_bound", "servers.modes.mode_policy",
    "servers.modes.stale_gradients", "servers.model_facts", "servers.rows.cache_policy",
    "simulator", "supervisor", "training.checks", "training.exchanges.peer_strategies",
    "training.exchanges.pipelines.pipeline_strategy", "training.exchanges.server_strategy",
    "training.job", "training.strategies",
)  # fmt: skip
#: Within these, what needs MPI all the same.
WITH_MPI = ("pipeline.stages",)

_FILL = ("#eef2f7", "#e3edf7", "#d9f0e3", "#fdf3d8", "#fbe3d6", "#efe3f5", "#e8e8e8")


def part_of(module: str) -> str:
    """The top-level module or room that a module belongs to: ``collectives``, ``events``."""
    return module.split(".")[1] if "." in module else ""


def module_of(file: Path) -> str:
    """The dotted name of a file of the package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


#: Dotted name -> file, of the package.
MODULES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(file: Path) -> ast.Module:
    """What a file says, parsed once."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """All nodes of a file's tree, found once."""
    return [*ast.walk(tree_of(file))]


def targets(file: Path, node) -> list[str]:
    """The modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in MODULES]
    base = node.module or ""
    if node.level:
        here = module_of(file).split(".")
        up = node.level - (file.name == "__init__.py")
        base = ".".join([*here[: len(here) - up], *([base] if base else [])])
    if base.split(".")[0] != "mpidist":
        return []
    # ``from .. import events`` names a module, ``from ..events import emit`` something in one.
    return [f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names]


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """(line, module) of what `file` imports of ours, also inside functions."""
    found = [node for node in nodes_of(file) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [(node.lineno, target) for node in found for target in targets(file, node)]


@cache
def loads(module: str) -> set[str]:
    """What is loaded with a module itself: modules of ours, and ``mpi4py.MPI``.

    Not what functions import, nor what is there for the types only.
    """
    found, todo = set(), [tree_of(MODULES[module])]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            whole = isinstance(node, ast.Import) or node.module != "mpi4py"
            names = {f"{'' if whole else 'mpi4py.'}{alias.name}" for alias in node.names}
            if "mpi4py.MPI" in names:
                found.add("mpi4py.MPI")
            found |= set(targets(MODULES[module], node))
        types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not types_only and not isinstance(node, ast.FunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    packages = {part for name in (module, *found) for part in parents(name)} & {*MODULES}
    return (found | packages) - {module}


def parents(name: str) -> list[str]:
    """The packages of a module, which are loaded before it."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


def way_to_mpi(module: str) -> list[str]:
    """The modules through which `module` loads MPI, or an empty list."""
    ways = {module: [module]}
    for name in (todo := [module]):
        for target in sorted(loads(name)):
            if target == "mpi4py.MPI":
                return [*ways[name], target]
            if target not in ways:
                ways[target] = [*ways[name], target]
                todo.append(target)
    return []


def lines_of_code(file: Path) -> int:
    """How many lines hold code: no comments, no docstrings, no blanks."""
    docstrings = set()
    for node in nodes_of(file):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = body[0] if body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    skipped = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER, tokenize.ENCODING,
    )  # fmt: skip
    used = set()
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type not in skipped:
            used |= set(range(token.start[0], token.end[0] + 1))
    return len(used - docstrings)


@cache
def sizes() -> dict[str, tuple[int, int]]:
    """Room -> (files, lines of code); modules that are no room are one, named ``(modules)``."""
    files, lines = Counter(), Counter()
    for module, file in MODULES.items():
        name = part_of(module)
        room = name if (PACKAGE / name).is_dir() and name else "(modules)"
        files[room] += 1
        lines[room] += lines_of_code(file)
    order = sorted(files, key=lambda room: (FLOORS.get(room, 0), room))
    return {room: (files[room], lines[room]) for room in order}


def table() -> str:
    """The sizes as text, with the sums of the core and of all."""
    found = sizes()
    rows = [*found.items()]
    for name, among in (("core", CORE), ("all", tuple(found))):
        rows.append((name, tuple(sum(found[room][k] for room in among) for k in (0, 1))))
    return "\n".join(
        [f"{'room':16} {'files':>5} {'lines':>6}", *(f"{n:16} {f:5} {c:6}" for n, (f, c) in rows)]
    )


def arrows() -> dict[str, set[str]]:
    """Room -> the rooms whose modules it imports, anywhere in its files."""
    found = defaultdict(set)
    for module, file in MODULES.items():
        found[part_of(module)] |= {part_of(target) for _, target in imports(file)}
    return {room: used - {room} for room, used in found.items()}


def picture() -> str:
    """An SVG: floors from below, a box for each room, a line to each room below that it uses.

    But for floor 1, which everybody uses.
    """
    uses = arrows()
    floors = defaultdict(list)
    for room in FLOORS:
        if room and (PACKAGE / room).is_dir():
            floors[int(FLOORS[room])].append(room)
    width, high, gap = 1060, 40, 50
    levels = sorted(floors, reverse=True)
    place, parts = {}, []
    for row, level in enumerate(levels):
        rooms = sorted(floors[level])
        each = min(138, (width - 20) / len(rooms) - 10)
        start = (width - len(rooms) * (each + 10) + 10) / 2
        for k, room in enumerate(rooms):
            place[room] = (start + k * (each + 10), 14 + row * (high + gap), each)
    for room, (x, y, each) in sorted(place.items()):
        for other in sorted(uses.get(room, set()) & set(place)):
            ox, oy, oeach = place[other]
            if oy > y and FLOORS[other] >= 2:
                parts.append(
                    f'<path d="M{x + each / 2:.0f},{y + high} C{x + each / 2:.0f},{y + high + 24} '
                    f'{ox + oeach / 2:.0f},{oy - 24} {ox + oeach / 2:.0f},{oy}" '
                    'fill="none" stroke="#8aa0b8" stroke-width="0.9"/>'
                )
    for room, (x, y, each) in sorted(place.items()):
        middle = x + each / 2
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{each:.0f}" height="{high}" rx="6" '
            f'fill="{_FILL[int(FLOORS[room])]}" stroke="#44566c"/>'
            f'<text x="{middle:.0f}" y="{y + 25}" font-size="14">{room}</text>'
        )
    height = 14 + len(levels) * (high + gap)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" text-anchor="middle">\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", metavar="FILE.svg", help="draw it instead of the table")
    args = parser.parse_args()
    if args.picture:
        Path(args.picture).write_text(picture(), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
