"""The Python blocks of docs/*.md run unchanged on two ranks, with the names that they assume.

README.md and docs/adoption.md are run by tests/launch/test_readme.py and test_adoption.py,
docs/parameter_servers.md by test_servers_docs.py, and docs/elastic.md by
tests/launch/test_elastic.py. The blocks of docs/one_box_clusters.md need root. For these blocks and
the one of docs/api.md, tests/unit/test_docs.py only compiles the code and looks up the imports.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.checkpoint.export.index import index

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def network():
    return md.models.mlp([5, 3], seed=1)


def samples(n=128):
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, 5)).astype("f4"), rng.integers(0, 3, n)


class Enough(Exception):
    """The block would go on for ever."""


def enough(*_):
    raise Enough


def of_collectives(comm):
    return {"x": np.ones(6)}


def of_checkpoints(comm):
    with md.CheckpointStore(comm, "indexed") as store:
        store.save(1200, {"parameters": {"conv1": {"weight": np.ones(3)}}})
    if comm.rank == 0:
        index("indexed")
    comm.Barrier()
    import h5py

    local = Path("local").absolute()
    copies = {
        "memory_folder())": '__import__("pathlib").Path("copies").absolute())',
        "range(done + 1, 1001)": "range(done + 1, 12)",
        "train_one_step": lambda: None,
        "current_state": lambda: {"x": np.arange(3.0)},
    }
    return {
        **copies,
        "h5py": h5py, "w": np.zeros(2), "b": np.zeros(1), "m": np.zeros(2), "evaluate": enough,
        "run/checkpoints/step-000000001200": "indexed/step-000000001200",
        "/dev/shm/me/checkpoints": str(local),
    }  # fmt: skip


def of_models(comm):
    inputs, labels = samples()
    x = np.random.default_rng(comm.rank).standard_normal((4, 3, 2, 2))
    return {"x": x, "dy": x, "model": network(), "data": (inputs, labels)}


def of_gradients(comm):
    model = network()
    optimizer = md.optim.sgd(0.1)
    return {
        "model": model, "steps": 3, "stop_wanted": 0.0, "optimizer": optimizer,
        "state": optimizer.init(model.parameters),
        "my_part_of_the_batch": lambda step: (samples(8), 1 / comm.size),
    }  # fmt: skip


def of_tutorial(comm):
    inputs, labels = samples(512)
    return {
        "MyModel": network, "inputs": inputs, "labels": labels, "test_inputs": inputs,
        "test_labels": labels,
    }  # fmt: skip


def of_recovery(comm):
    state = {"w": np.zeros(3)}
    return {
        "model": network(), "data": samples(), "state": state, "store": None, "first": 0,
        "last": 3, "batch": lambda step: step, "compute": lambda batch: np.ones(3),
    }  # fmt: skip


def of_data(comm):
    return {"records_per_file": [100, 90], "ranks_of_nodes": [comm.size], "rank": comm.rank}


def of_peers(comm):
    return {"model": network(), "data": samples()}


def of_faults(comm):
    return {}


#: Page -> what its blocks take as given, besides `np`, `md`, `MPI` and `comm`.
GIVEN = {
    "collectives.md": of_collectives, "checkpoints.md": of_checkpoints, "models.md": of_models,
    "gradients.md": of_gradients, "tutorial.md": of_tutorial, "recovery.md": of_recovery,
    "data.md": of_data, "faults.md": of_faults, "pipelines.md": lambda comm: {},
    "comparison.md": lambda comm: {}, "peers.md": of_peers,
}  # fmt: skip
#: Pages with blocks that are not run here: see above.
ELSEWHERE = {"adoption.md", "parameter_servers.md", "one_box_clusters.md", "api.md", "elastic.md"}


def test_every_page_with_python_is_run_somewhere():
    pages = {path.name for path in DOCS.glob("*.md") if blocks(path.name)}
    assert pages == set(GIVEN) | ELSEWHERE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", GIVEN)
def test_the_blocks_of_a_page_run(comm, folder, monkeypatch, page):
    monkeypatch.chdir(folder)
    own = comm.Dup()
    # A block that says COMM_WORLD means the whole job, which is two ranks of nine here.
    world = SimpleNamespace(COMM_WORLD=own, IN_PLACE=MPI.IN_PLACE)
    names = {"np": np, "md": md, "MPI": world, "comm": own}
    given = GIVEN[page](own)
    names.update({name: value for name, value in given.items() if name.isidentifier()})
    for number, block in enumerate(blocks(page)):
        text = block.replace("from mpi4py import MPI\n", "")
        for word, value in given.items():
            text = text if word.isidentifier() else text.replace(word, value)
        try:
            exec(compile(text, f"docs/{page}, block {number}", "exec"), names)
        except Enough:
            assert "while True" in text
    if isinstance(names.get("store"), md.TieredStore):
        names["store"].close()
    md.free(own)
    own.Free()
