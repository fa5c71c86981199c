"""The reference in docs/ is complete: public names, command line, keys of a job file (issue 11)."""

import ast
import importlib.util
import itertools
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import mpidist as md
from mpidist import data, models, optim
from mpidist.cli.main import COMMANDS
from mpidist.training.job import Job

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
PLACES = {"": md, "optim.": optim, "data.": data, "models.": models}


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public(place):
    """The names of one of `PLACES` that are not modules themselves."""
    modules = set(getattr(PLACES[place], "_SUBMODULES", ()))
    return {f"{place}{name}" for name in PLACES[place].__all__} - modules - {"__version__"}


def documented():
    """What has an entry of its own under a name that begins with ``mpidist.``, with its kind."""
    entry = r"^\.\. (?:auto|py:)(function|class|exception|data):: mpidist\.([\w.]+)"
    return [(name, kind) for kind, name in re.findall(entry, PAGES["api.md"], re.MULTILINE)]


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_stands_in_the_reference(place):
    """Under that name: `mpidist.allreduce`, `mpidist.optim.sgd`."""
    assert public(place) - {name for name, _ in documented()} == set()


def test_the_reference_has_no_other_short_names():
    """A name that was taken away goes from the page as well, and none stands there twice."""
    names = [name for name, _ in documented()]
    assert sorted(names) == sorted(set(names))
    known = set().union(*map(public, PLACES))
    short = {n for n in names if "." not in n or n.split(".")[0] in ("optim", "data", "models")}
    assert short - known == set()


def test_kinds_are_those_of_the_names():
    """Classes begin with a capital letter, tables are in capitals, errors are exceptions."""
    for name, kind in documented():
        last = name.rpartition(".")[2]
        assert (kind in ("class", "exception")) == (last[0].isupper() and not last.isupper()) or (
            last in ("BSP", "ASP", "SSP", "DSSP", "HDF5") and kind == "class"
        ), name


# -------------------------------------------------------------------------------- command line


def options_in_the_code():
    """Every ``add_argument("--x")`` of mpidist/cli, read without running it."""
    found = set()
    for path in (ROOT / "mpidist" / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = ast.unparse(node.func).rpartition(".")[2]
                value = node.args[0].value
                if name in ("add", "add_argument") and str(value).startswith("-"):
                    found.add(value)
    return found


def test_every_option_stands_on_the_page(reference):
    page = reference.filled(PAGES["command_line.md"])
    assert "<!--" not in page
    assert "command_line\n" in PAGES["index.md"]
    for name in COMMANDS:
        assert re.search(rf"^## mpidist {name}$", page, re.MULTILINE), name
    options = options_in_the_code()
    assert {"--set", "--max-restarts", "--ranks", "--json", "-n"} <= options
    unknown = {o for o in options if not re.search(rf"`{re.escape(o)}[ `]", page)}
    assert unknown - {"--version"} == set()


def test_every_argument_is_explained(reference):
    """`--help` and the page have a line for each, and for each command."""
    silent = [
        f"{parser.prog}: {action.dest}"
        for parser in reference.parsers()
        for action in reference.arguments(parser)
        if not action.help
    ]
    assert silent == []
    assert [prog for prog, text in reference.summaries().items() if not text] == []


def test_options_in_the_docs_exist(reference):
    """Each ``mpidist COMMAND ... --option`` of a page or of the README."""
    taken = {
        parser.prog: {o for action in parser._actions for o in action.option_strings}
        for parser in reference.parsers()
    }
    wrong, seen = [], 0
    for name, text in {**PAGES, "README.md": (ROOT / "README.md").read_text("utf-8")}.items():
        if name == "changelog.md":
            continue  # of what was
        for line in re.findall(r"mpidist (?:\w+)[^`\n]*", text.replace("\\\n", " ")):
            words = re.split(r" -- | mpirun | mpiexec | srun |[;&|#]", line)[0].split()
            prog = next((p for p in (" ".join(words[:3]), " ".join(words[:2])) if p in taken), None)
            given = [w.partition("=")[0] for w in words if re.fullmatch(r"--[a-z][a-z-]*(=.*)?", w)]
            seen += len(given) if prog else 0
            wrong += [f"{name}: {prog} {o}" for o in given if prog and o not in taken[prog]]
    assert wrong == []
    assert seen > 20


# ------------------------------------------------------------------------------------ job file


def test_every_key_of_a_job_file_stands_on_the_page(reference):
    page = reference.filled(PAGES["job_file.md"])
    assert "<!--" not in page
    assert "job_file\n" in PAGES["index.md"]
    keys = [each.name for each in fields(Job)]
    said = reference.descriptions(Job)
    assert list(said) != []
    assert sorted(said) == sorted(keys)
    for key in keys:
        assert re.search(rf"^\| `{key}` \|.*[^ |]\. \|$", page, re.MULTILINE), key
    for table, choices in reference.CHOICES.items():
        section = page.partition(f"## [{table}]\n")[2].partition("\n## ")[0]
        for name, make in choices.items():
            row = re.search(rf"^\| `{name}` \| (.*) \|$", section, re.MULTILINE)[1]
            given = [key for key, _ in re.findall(r"`(\w+)( = [^`]*)?`", row)]
            assert given == list(reference.settings(make)), (table, name)


def known_keys(reference):
    """Dotted keys: those of a job file, and those of its tables."""
    keys = {each.name for each in fields(Job)} | {f"{table}.name" for table in reference.CHOICES}
    for table, choices in reference.CHOICES.items():
        for make in choices.values():
            keys |= {f"{table}.{key}" for key in reference.settings(make)}
        keys |= {f"{table}.{key}" for key in reference.COMMON.get(table, {})}
    return keys | {f"loading.{key}" for key in reference.settings(data.Loading)}


def test_keys_of_examples_are_known(reference):
    """Those of jobs/*.toml, and of each ``--set`` in the docs."""
    known = known_keys(reference)
    given = set()
    for path in (ROOT / "jobs").glob("*.toml"):
        for key, value in tomllib.loads(path.read_text(encoding="utf-8")).items():
            given.add(key)
            given |= {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else set()
    assert {"optimizer.lr", "global_batch"} <= given
    for text in (*PAGES.values(), (ROOT / "README.md").read_text(encoding="utf-8")):
        given |= set(re.findall(r"--set ([a-z_.]+)=", text))
    assert given - known == set()
    assert set(reference.CHOICES) <= {key.partition(".")[0] for key in given}


def stray_lines(text):
    """Lines of a docstring that should be indented, because they name no parameter or error."""
    section = ""
    for line, following in itertools.pairwise([*text.split("\n"), ""]):
        if re.fullmatch(r"-{4,}", following):
            section = line
        elif line[:1] in ("", " ", "-"):
            continue
        elif section in ("Parameters", "Attributes"):
            if not re.fullmatch(r"\*{0,2}\w+(, \*{0,2}\w+)*( : .+)?", line):
                yield line
        elif section == "Raises" and not re.fullmatch(r"[A-Z]\w+(, [A-Z]\w+)*", line):
            yield line


def test_each_parameter_begins_a_line():
    """A tool that wraps lines must not join ``name : type`` with the line before."""
    assert [*stray_lines("A\n\nParameters\n----------\nx : int\n    One.\nmore. y : int")]
    wrong = [
        (str(path.relative_to(ROOT)), line)
        for path in sorted((ROOT / "mpidist").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for line in stray_lines(ast.get_docstring(node) or "")
    ]
    assert wrong == []
