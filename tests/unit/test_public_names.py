"""The public names, and the ``repr`` of public objects, as far as they need no MPI."""

import ast
import re
import subprocess
import sys

from test_architecture import FILES, tree, users

import mpidist as md
from mpidist import data, models, optim


def test_dir_has_public_names_only():
    """Also after modules were imported, which Python hangs into the package."""
    code = (
        "import mpidist as md, mpidist.errors, mpidist.optim, mpidist.data.sampler\n"
        "for module in (md, md.optim, md.data):\n"
        "    assert dir(module) == sorted(set(module.__all__)), dir(module)\n"
        "names = {*dir(md), *dir(md.data), *dir(md.optim)} - {'__version__'}\n"
        "assert not [name for name in names if name.startswith('_')]\n"
        "assert 'errors' not in names and 'sampler' not in names\n"
        "assert not {'Callable', 'Mapping', 'annotations', 'importlib', 'build'} & names\n"
        "print('fine')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("fine\n", "")


def test_no_name_is_listed_twice():
    for module in (md, data, models, optim):
        assert len(module.__all__) == len(set(module.__all__))


def test_classes_have_class_names():
    """A lower-case name is a function's: what it returns has a class of its own."""

    def lower(node):
        return isinstance(node, ast.ClassDef) and node.name.lstrip("_")[0].islower()

    assert sum(isinstance(n, ast.ClassDef) for f in FILES for n in ast.walk(tree(f))) > 100
    assert users(lower) == {}


def test_repr_of_a_sampler():
    """As it is made again."""
    sampler = data.Sampler(10, 4, seed=3)
    assert repr(sampler) == "Sampler(count=10, global_batch=4, seed=3, shuffle='permutation')"
    again = eval(repr(sampler), {"Sampler": data.Sampler})
    assert again.order(2).tolist() == sampler.order(2).tolist()
    assert repr(data.Sampler(10, 4, shuffle=False)).endswith("shuffle='none')")


def test_repr_of_an_optimizer():
    """Its name and settings, the learning rate first; no functions."""
    said = "<Optimizer momentum: lr=0.1, beta=0.8, "
    assert repr(optim.momentum(0.1, beta=0.8)).startswith(said)
    schedule = optim.cosine(0.1, 20)
    text = repr(optim.clipped(optim.sgd(schedule), 1.0))
    assert text.startswith("<Optimizer sgd: lr={'schedule': 'cosine', 'lr': 0.1, 'steps': 20")
    assert text.endswith("clip_norm=1.0; not elementwise>")
    own = optim.Optimizer(
        "own", dict, print, True, {"table": type("T", (), {"__repr__": broken})()}
    )
    assert re.fullmatch(r"<Optimizer own: table=T object \(its repr raises KeyError\)>", repr(own))


def broken(self):
    raise KeyError("no repr")
