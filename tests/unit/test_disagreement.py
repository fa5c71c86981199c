"""Each public collective function has a test in which one rank gives a bad or different value.

This is rule 5 of HOUSE.md. The collective functions are found in the code: they are the names in
`md`, `md.models`, `md.data` and `md.optim`, and the methods of classes among them, whose docstrings
say that they are collective.
"""

import ast
import re

import pytest
from rooms import MODULES, ROOT, tree_of

import mpidist as md
from mpidist import data, models, optim

COLLECTIVES = "test_disagreement_collectives.py::test_all_ranks_raise"
STORES = "test_disagreement_stores.py"
SETTINGS = "test_settings_agree.py"
ARENAS = "test_arena_disagreement.py"
METHODS = "test_disagreement_methods.py"
GRADIENTS = "test_gradients_errors.py"
STORE = {
    "": "test_parameters_of_a_store", "save": "test_steps", "save_async": "test_steps",
    "restore": "test_steps", "verify": "test_steps",
}  # fmt: skip

#: Entry -> the test of tests/mpi in which one rank gives something else.
TESTS = {
    **{
        name: COLLECTIVES
        for name in ("allreduce", "iallreduce", "plan", "reduce_scatter", "allgather",
                     "broadcast", "reduce", "gather", "scatter")
    },
    **{
        f"{store}.{method}".rstrip("."): f"{STORES}::{test}"
        for store in ("CheckpointStore", "TieredStore")
        for method, test in STORE.items()
    },
    **{
        f"{store}.{method}": f"{METHODS}::test_delete_and_all_steps_of_a_store"
        for store in ("CheckpointStore", "TieredStore")
        for method in ("delete", "all_steps")
    },
    "TieredStore.hold": "test_memory_copies.py::test_different_arguments",
    "broadcast_parameters": f"{STORES}::test_broadcast_parameters",
    "Topology": f"{STORES}::test_ranks_per_node",
    "node_once": f"{STORES}::test_ranks_per_node",
    "Arena": f"{ARENAS}::test_a_spec_that_one_rank_alone_has",
    "train": "test_train_disagreement.py::test_what_one_rank_is_given",
    "Gradients": f"{GRADIENTS}::test_another_value_on_one_rank",
    "Gradients.arrange": f"{GRADIENTS}::test_arrange_in_another_order_on_one_rank",
    "Gradients.begin": f"{GRADIENTS}::test_a_wrong_call_on_one_rank_when_a_part_has_left",
    "Gradients.reduce": f"{GRADIENTS}::test_another_number_of_extras_on_one_rank",
    "attach": "test_attach.py::test_one_rank_with_another_module",
    "ServerGroup": f"{SETTINGS}::test_server_group",
    "ServerGroup.add": f"{SETTINGS}::test_add",
    "ServerGroup.remove": "test_servers_models.py::test_one_rank_removes_another",
    "ServerGroup.repartition": "test_servers_repartition.py::test_wrong_calls",
    "ServerGroup.rebalance": "test_servers_rebalance.py::test_another_policy_on_one_rank",
    "ServerGroup.pause": f"{METHODS}::test_a_tag_that_is_none_on_one_worker",
    "parameter_server": f"{SETTINGS}::test_parameter_server",
    "elastic": "test_elastic_arguments.py::test_an_argument_of_one_rank",
    "run_elastic": "test_elastic_arguments.py::test_an_argument_of_one_rank",
    "guard": f"{SETTINGS}::test_guard",
    "Guard.should_stop": f"{METHODS}::test_should_stop_and_leave_at_another_step",
    "Guard.check_loss": f"{METHODS}::test_a_guard_that_one_rank_calls_wrongly",
    "Guard.leave": f"{METHODS}::test_should_stop_and_leave_at_another_step",
    "watch": f"{SETTINGS}::test_watch",
    "check_replicas": f"{SETTINGS}::test_check_replicas",
    "Stage": "test_stage.py::test_wrong_arguments_are_an_error_on_all_ranks",
    "Stage.step": "test_stage.py::test_ranks_that_pass_batches_of_different_sizes_get_an_error",
    "Stage.run": "test_stage.py::test_a_wrong_argument_of_run_on_one_rank_is_an_error_on_all",
    "Stage.predict": "test_stage.py::test_ranks_that_pass_batches_of_different_sizes_get_an_error",
    "Stage.forward": "test_stage.py::test_ranks_that_pass_batches_of_different_sizes_get_an_error",
    "Stage.visit": "test_stage.py::test_what_is_no_array_ends_a_visit_on_all_ranks",
    **{
        f"models.{name}": f"{METHODS}::test_a_batch_of_another_shape_in_batch_normalisation"
        for name in ("sync_moments", "sync_batch_norm", "sync_batch_norm_backward")
    },
    "models.SplitDense": "test_split_dense.py::test_wrong_layers_raise_on_all_ranks",
    **{
        f"models.SplitDense.{name}": "test_split_dense.py::test_batches_of_other_sizes"
        for name in ("forward", "backward", "backward_input")
    },
}  # fmt: skip

#: Collective entries that take nothing which could differ, and why.
WITHOUT_ARGUMENTS = {
    "free", "Plan", "Handle.wait", "Topology.inter_comm", "Topology.close", "Gradients.close",
    "ServerGroup.barrier", "ServerGroup.load", "ServerGroup.close", "Stage.close", "Stage.drain",
    *(f"{store}.{name}" for store in ("CheckpointStore", "TieredStore")
      for name in ("latest_step", "continue_newest", "wait", "let_go", "close")),
    "TieredStore.stop_holding",
    "Guard.fits",  # a communicator and how to wait: for the trainers, which give neither by hand
    # `md.train` calls them, with what it has compared
    "AllReduce.open", "ParameterServer.open", "Pipeline.open", "PeerAverage.open",
    "Hogwild.open",
}  # fmt: skip


def entries():
    """The names under `md` that are collective, and how many arguments each takes."""
    places = [("", name, f"mpidist.{home}") for name, home in md._HOME.items()]
    for prefix, module in (("models.", models), ("data.", data), ("optim.", optim)):
        for name in module.__all__:
            home = getattr(getattr(module, name), "__module__", None)
            places += [(prefix, name, home)] if home in MODULES else []
    for prefix, name, home in places:
        for node in tree_of(MODULES[home]).body:
            if getattr(node, "name", None) != name:
                continue
            if says_so(node):
                yield f"{prefix}{name}"
            for method in [*node.body, *inherited(node)] if isinstance(node, ast.ClassDef) else ():
                public = isinstance(method, ast.FunctionDef) and method.name[0] != "_"
                if public and says_so(method):
                    yield f"{prefix}{name}.{method.name}"


def inherited(node):
    """The methods of the base classes in mpidist that are no public names themselves."""
    names = {base.id for base in node.bases if isinstance(base, ast.Name)} - set(md._HOME)
    for path in MODULES.values() if names else ():
        for other in tree_of(path).body:
            if isinstance(other, ast.ClassDef) and other.name in names:
                yield from other.body


def says_so(node) -> bool:
    return bool(re.search(r"\bcollective\b", ast.get_docstring(node) or "", re.IGNORECASE))


def test_every_collective_entry_is_in_the_table():
    found = set(entries())
    assert len(found) > 50
    assert found == set(TESTS) | WITHOUT_ARGUMENTS
    assert not set(TESTS) & WITHOUT_ARGUMENTS


@pytest.mark.parametrize("test", sorted(set(TESTS.values())))
def test_its_test_exists_and_asks_one_rank(test):
    """The test, or a helper of its file, gives rank 1 something else."""
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / "mpi" / file).read_text(encoding="utf-8")
    (node,) = (n for n in ast.parse(text).body if getattr(n, "name", None) == name)
    assert re.search(r"comm\.rank|\bODD\b|odd\(", ast.unparse(node)), test
