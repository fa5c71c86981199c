"""Check the arguments `rows` and `spread`: how servers update tensors, and how they divide them."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigError, nearest, shown
from ..layout.placement import RowPolicy
from .open_rows import OpenRows

#: "dense": an update changes all rows, with gradient zero in rows that no push names. "lazy": an
#: update changes only the rows that a push names. "open": see `OpenRows`.
ROWS = ("dense", "lazy", "open")

#: "ranges": a server holds consecutive rows. "rows": rows are dealt to the servers in turn.
SPREADS = ("ranges", "rows")


def row_policies(model: str, shapes: Mapping[str, tuple], rows, spread) -> dict[str, RowPolicy]:
    """Return {name of a tensor: `RowPolicy`}: how servers update it and divide its rows."""
    found, names = {}, shapes.keys()
    for argument, given, known in (("rows", rows, ROWS), ("spread", spread, SPREADS)):
        each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
        for name, policy in each.items():
            if name not in names:
                close = nearest(name, names)
                raise ConfigError(
                    f"model {model!r}: {argument} names {shown(name)}, which is no tensor{close}"
                )
            if argument == "rows" and isinstance(policy, OpenRows):
                continue
            if not isinstance(policy, str) or policy not in known:
                close = nearest(policy, known) if isinstance(policy, str) else ""
                raise ConfigError(
                    f"model {model!r}: {argument} of {name!r} is {shown(policy)}, expected "
                    f"{' or '.join(map(repr, known))}{close}"
                )
        found[argument] = {name: each.get(name, known[0]) for name in names}
    for name, shape in shapes.items():
        _check_open(model, name, shape, found["rows"][name])
    return {name: _policy(found["rows"][name], found["spread"][name]) for name in names}


def _policy(rows, spread: str) -> RowPolicy:
    if rows == "open":
        rows = OpenRows()
    if isinstance(rows, OpenRows):
        return RowPolicy("open", spread, [rows.max_rows, rows.min_count])
    return RowPolicy(rows, spread)


def _check_open(model: str, name: str, shape: tuple, rows) -> None:
    """Raise ConfigError if an open table has a number of rows, or an ordinary table has none."""
    is_open = rows == "open" or isinstance(rows, OpenRows)
    if is_open != (shape[:1] == (None,)):
        given = "open" if is_open else repr(rows)
        hint = "an open table is ((None, ...), dtype, init)" if is_open else (
            f"give the number of rows, or rows={{{name!r}: 'open'}} for rows with 64-bit keys"
        )  # fmt: skip
        raise ConfigError(f"model {model!r}: {name!r} has shape {shape} and rows {given}; {hint}")


def check_row_optimizer(model: str, policies: Mapping[str, RowPolicy], optimizer) -> None:
    """Raise ConfigError if updates must change only pushed rows, but `optimizer` cannot do so."""
    lazy = [name for name, policy in policies.items() if policy.rows != "dense"]
    if lazy and not getattr(optimizer, "rows", ""):
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model {model!r}: rows of {lazy[0]!r} is {policies[lazy[0]].rows!r}, and optimizer "
            f"{kind} updates whole arrays only; give rows='dense', or an optimizer of mpidist.optim"
        )


def check_open_tables(asked, policies: Mapping[str, RowPolicy]) -> None:
    """Raise ConfigError if a model has open tables, and its argument `stale` does not allow them.

    The rows of an open table are made by pushes. `stale` says how servers use old gradients.
    """
    tables = [name for name, policy in policies.items() if policy.rows == "open"]
    # Such a policy needs copies of pulled parameters, which servers do not keep of open tables.
    if tables and asked.stale.compensates:
        raise ConfigError(
            f"model {asked.name!r}: {tables[0]!r} has open rows, of which servers keep no copies "
            f"for stale={asked.stale}; give KeepStale, DropStale or ScaleStale"
        )


def check_open_group(model: str, policies: Mapping[str, RowPolicy], elastic: bool) -> None:
    """Raise ConfigError if a model of an elastic run (`elastic`) has open tables.

    The rows of an open table are made by pushes.
    """
    tables = [name for name, policy in policies.items() if policy.rows == "open"]
    if tables and elastic:
        raise ConfigError(
            f"model {model!r}: {tables[0]!r} has open rows, which servers of elastic runs cannot "
            "hold; give the number of rows, or let `mpidist launch` restart the job"
        )
