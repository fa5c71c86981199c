"""All links, files, options, make targets and names in README.md and docs/*.md exist (rule 8).

Each block of code is checked. Python is compiled, and its names of mpidist are looked up
(tests/mpi/test_docs.py also runs most blocks). For each command, the program, sub-command, options,
settings and files must exist. TOML must be a part of a job file. The tests use no network.
"""

import ast
import builtins
import importlib
import importlib.util
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from test_reference import known_keys

import mpidist as md

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {f"docs/{path.name}": path.read_text("utf-8") for path in sorted(DOCS.glob("*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
#: Of what was, which is gone today.
HISTORY = {"docs/changelog.md"}
TODAY = {page: text for page, text in PAGES.items() if page not in HISTORY}
MENU = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(*languages):
    """(page, text) of each fenced block of these languages."""
    fence = re.compile(rf"^```(?:{'|'.join(languages)})\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page, text) for page, whole in PAGES.items() for text in fence.findall(whole)]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------- links and files


def anchors(text):
    """The anchors of a page's headings, as Markdown makes them."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """To a file of the repository, and to a heading that is there."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        there = target.exists()
        if there and anchor:
            there = anchor in anchors(target.read_text(encoding="utf-8"))
        wrong += [] if there else [link]
    assert wrong == []


#: What a program makes, or a page's example takes as given: no file of the repository.
MADE = re.compile(
    r"^(runs?|yt8m|mnist10k)/|(^|/)(step|shard|history|hang|rank)-|\*|[A-Z]{3,}(?!EADME)|…|\.\.\.|^/"
)
#: Files by their name that users write, or a run does.
GIVEN = {
    "job.toml", "loop.py", "prog.py", "train.py", "model.h5", "metrics.jsonl", "summary.json",
    "index.h5", "site.toml", "fit.json", "network.json",
}  # fmt: skip
SUFFIX = r"\.(?:py|md|toml|sbatch|lua|svg|txt)"


@pytest.mark.parametrize("page", TODAY)
def test_files_that_are_named_exist(page):
    """In backticks: a path from the root, or the name of a file that stands somewhere."""
    known = {path.name for folder in ("mpidist", "tests", "docs", "jobs", ".ci")
             for path in (ROOT / folder).rglob("*") if path.is_file()}  # fmt: skip
    known |= {path.name for path in ROOT.iterdir()}
    wrong = []
    for word in re.findall(r"`([^`\s]+)`", TODAY[page]):
        path = word.partition("::")[0].partition("#")[0]
        if MADE.search(path) or path in GIVEN:
            continue
        if re.match(r"(mpidist|tests|docs|jobs|\.ci)/", path):
            wrong += [] if (ROOT / path).exists() else [path]
        elif re.fullmatch(rf"[\w./-]+{SUFFIX}", path):
            inside = ROOT.rglob(path) if "/" in path else (path in known and [path]) or []
            wrong += [] if next(iter(inside), None) else [path]
    assert wrong == []


@pytest.mark.parametrize("page", TODAY)
def test_make_targets_exist(page):
    for target in re.findall(r"(?:`|^\$ |^)make ([a-z][\w-]*)", TODAY[page], re.MULTILINE):
        assert is_target(target), target


def is_target(word):
    pattern = r"^test-%:" if re.fullmatch(r"test-(\d+|N)", word) else rf"^{re.escape(word)}:"
    return re.search(pattern, MENU, re.MULTILINE)


# --------------------------------------------------------------------------------------- Python


def look_up(dotted, given=md):
    """What ``md.x.y`` is; AttributeError where it is not there. Instances are not looked into."""
    thing = given
    for word in dotted.split("."):
        thing = getattr(thing, word)
        if not isinstance(thing, type(ast)) and not isinstance(thing, type):
            break
    return thing


@pytest.mark.parametrize("page", TODAY)
def test_names_of_md_exist(page):
    """Each ``md.x``, also inside of a sentence, and each ``mpidist.x.y`` in backticks."""
    wrong = []
    for dotted in set(re.findall(r"\bmd\.([A-Za-z_][\w.]*\w)", TODAY[page])):
        try:
            look_up(dotted)
        except AttributeError:
            wrong.append(f"md.{dotted}")
    for dotted in set(re.findall(r"`mpidist\.([a-z_][\w.]*\w)", TODAY[page])):
        if not in_package(dotted):
            wrong.append(f"mpidist.{dotted}")
    assert wrong == []


def in_package(dotted):
    """Whether a module, or something in one, has this name; read from the files."""
    words = dotted.split(".")
    for cut in range(len(words), 0, -1):
        path = (ROOT / "mpidist").joinpath(*words[:cut])
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if file.exists():
            text = file.read_text(encoding="utf-8")
            return cut == len(words) or re.search(rf"\b{words[cut]}\b", text)
    return hasattr(md, words[0])


@pytest.mark.parametrize(
    ("page", "text"), [pytest.param(*block, id=f"{block[0]}-{k}")
                       for k, block in enumerate(blocks("python"))]
)  # fmt: skip
def test_python_compiles_and_its_imports_exist(page, text):
    """Whether it also runs is for tests/mpi/test_docs.py and the tests that it names."""
    tree = ast.parse(text, page)
    compile(tree, page, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpidist"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onebox"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("number", range(4))
def test_one_box_clusters_knows_its_names(number):
    """The blocks that need root are not run here: each name in them is made there, or built in."""
    text = [text for page, text in blocks("python") if page == "docs/one_box_clusters.md"][number]
    tree = ast.parse(text)
    made = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    made |= {a.asname or a.name.split(".")[0] for n in ast.walk(tree)
             if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}  # fmt: skip
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert used - made - set(dir(builtins)) == set()


# ------------------------------------------------------------------------------------- commands

#: Programs that are not ours -> the options of theirs that the pages use.
THEIRS = {
    "mpirun": {"-n", "--map-by", ":oversubscribe", "--with-ft", "ulfm"},
    "srun": {"--mpi", "-n", "-N"}, "git": None, "pip": None, "module": None, "cd": None,
    "sbatch": None, "export": None, ".": set(), "exec": set(),
}  # fmt: skip


def commands(text):
    """The commands of a block: without prompts and remarks, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        whole = line.removeprefix("$ ")
        inner = re.fullmatch(r"\w+=\((.*)\)", whole)
        whole = inner[1] if inner else whole
        for part in whole.split(" && "):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def check_command(words, taken, keys):
    """Yield what is wrong with one command."""
    program, rest = words[0], words[1:]
    if program == "make":
        yield from (f"make {w}" for w in rest if "=" not in w and not is_target(w))
    elif program == "mpidist":
        yield from check_ours(words, taken, keys)
    elif program == "python":
        script = rest[1] if rest[0] == "-m" else rest[0]
        if script.endswith(".py") and script not in GIVEN:
            source = ROOT / script
            if not source.exists():
                yield script
            else:
                known = source.read_text(encoding="utf-8")
                options = [w for w in rest if w.startswith("--")]
                yield from (f"{script} {o}" for o in options if f'"{o}"' not in known)
    elif program == "sbatch":
        script = next(w for w in rest if not w.startswith("-"))
        if not (ROOT / script).exists():
            yield script
        after = rest[rest.index(script) + 1 :]
        yield from check_ours(["mpidist", "train", *after], taken, keys)
    elif program in THEIRS:
        if program == "module" and rest[0] == "use" and not (ROOT / rest[1]).exists():
            yield rest[1]
        if "mpidist" in rest:
            at = rest.index("mpidist")
            yield from check_ours(rest[at:], taken, keys)
            if THEIRS[program] is not None:
                mine = [w.partition("=")[0] for w in rest[:at] if w.startswith("-")]
                yield from (f"{program} {o}" for o in mine if o not in THEIRS[program])
    else:
        yield f"unknown program {program}"


def check_ours(words, taken, keys):
    """Yield what is wrong with a command of mpidist; behind ``--`` stands another one."""
    if "--" in words:
        at = words.index("--")
        after = words[at + 1 :]
        if after:
            yield from check_command(after, taken, keys)
        words = words[:at]
    if len(words) < 2 or words[1].startswith("-"):
        return
    prog = next((p for p in (" ".join(words[:3]), " ".join(words[:2])) if p in taken), None)
    if prog is None:
        yield f"no command {' '.join(words[:2])}"
        return
    for word in words:
        option = word.partition("=")[0]
        if re.fullmatch(r"--?[a-z][a-z-]*", option) and option not in taken[prog]:
            yield f"{prog} {option}"
        if word.startswith("jobs/") and not (ROOT / word).exists():
            yield word
    for flag, setting in pairwise(words):
        if flag == "--set" and setting.partition("=")[0] not in keys:
            yield f"--set {setting}"


def test_commands_of_shell_blocks_exist(reference):
    """Also those of indented blocks that begin with ``mpidist`` or ``python``."""
    taken = {
        parser.prog: {o for action in parser._actions for o in action.option_strings}
        for parser in reference.parsers()
    }
    keys, seen, wrong = known_keys(reference), 0, []
    texts = blocks("bash", "console")
    indented = re.compile(r"^    ((?:mpidist|python) .*?)(?:   .*)?$", re.MULTILINE)
    texts += [(page, line) for page, text in TODAY.items() for line in indented.findall(
        re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))]  # fmt: skip
    for page, text in texts:
        for words in commands(text):
            seen += 1
            wrong += [f"{page}: {found}" for found in check_command(words, taken, keys)]
    assert wrong == []
    assert seen > 25


# ----------------------------------------------------------------------------------------- TOML


@pytest.mark.parametrize(
    ("page", "text"), [pytest.param(*block, id=f"{block[0]}-{k}")
                       for k, block in enumerate(blocks("toml"))]
)  # fmt: skip
def test_toml_is_a_part_of_a_job_file(reference, page, text):
    keys = known_keys(reference)
    for key, value in tomllib.loads(text).items():
        given = {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}
        assert given <= keys, given - keys


@pytest.mark.parametrize("page", PAGES)
def test_no_conflict_is_left_in_a_page(page):
    """`git` writes these lines into a file where two changes meet."""
    lines = PAGES[page].splitlines()
    assert [line for line in lines if re.match(r"<{7} |={7}$|>{7} ", line)] == []
