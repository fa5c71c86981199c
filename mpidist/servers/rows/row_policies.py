"""Check the arguments `rows` and `spread` of a model: how its tables are updated and divided."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...errors import ConfigError, nearest, shown
from ..layout.placement import RowPolicy

#: "dense": an update moves all rows, as by a gradient of zeros in those that no push names. "lazy":
#: it moves only the rows that a push names.
ROWS = ("dense", "lazy")

#: "ranges": a server holds consecutive rows. "rows": rows are dealt to the servers in turn.
SPREADS = ("ranges", "rows")


def row_policies(model: str, names: Collection[str], rows, spread) -> dict[str, RowPolicy]:
    """Return the policy of each tensor of a model.

    `rows` and `spread` are a policy for all tensors, or a mapping of names to policies.
    """
    found = {}
    for argument, given, known in (("rows", rows, ROWS), ("spread", spread, SPREADS)):
        each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
        for name, policy in each.items():
            if name not in names:
                close = nearest(name, names)
                raise ConfigError(
                    f"model {model!r}: {argument} names {shown(name)}, which is no tensor{close}"
                )
            if not isinstance(policy, str) or policy not in known:
                close = nearest(policy, known) if isinstance(policy, str) else ""
                raise ConfigError(
                    f"model {model!r}: {argument} of {name!r} is {shown(policy)}, expected "
                    f"{' or '.join(map(repr, known))}{close}"
                )
        found[argument] = {name: each.get(name, known[0]) for name in names}
    return {name: RowPolicy(found["rows"][name], found["spread"][name]) for name in names}


def check_row_optimizer(model: str, policies: Mapping[str, RowPolicy], optimizer) -> None:
    """Raise ConfigError if a tensor is updated by rows, and the optimizer cannot do that."""
    lazy = [name for name, policy in policies.items() if policy.rows != "dense"]
    if lazy and not getattr(optimizer, "rows", ""):
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model {model!r}: rows of {lazy[0]!r} is {policies[lazy[0]].rows!r}, and optimizer "
            f"{kind} updates whole arrays only; give rows='dense', or an optimizer of mpidist.optim"
        )
