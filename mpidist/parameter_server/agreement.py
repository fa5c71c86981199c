"""Setting up together: what fails on one rank fails on all, and what must be equal is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError, MismatchError, MpidistError
from .link import Link


def together(link: Link, work: Callable[[], Any]) -> list:
    """Run `work` on every rank and return everyone's JSON result. Collective over the link.

    Raises
    ------
    Exception
        Where `work` fails, what it raises; on the other ranks a ConfigError that says so.
    """
    try:
        result, failure = work(), None
    except Exception as error:
        result, failure = None, error
    said = None if failure is None else str(failure) or type(failure).__name__
    everyone = link.exchange([result, said])
    texts = [text for _, text in everyone]
    with everywhere():
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise ConfigError(f"rank {rank}: {text}")
    return [result for result, _ in everyone]


@contextmanager
def everywhere() -> Iterator[None]:
    """Mark an error that all ranks raise together, so that one of them speaks for all. Local."""
    try:
        yield
    except MpidistError as error:
        error.everywhere = True
        raise


def check_equal(what: str, facts: Sequence) -> None:
    """Raise MismatchError if the ranks' facts differ; all ranks must have the same list. Local."""
    if any(fact != facts[0] for fact in facts):
        with everywhere():
            raise MismatchError(f"{what}: ranks disagree on {differing(facts)}")


def differing(everyone: Sequence[dict], path: tuple[str, ...] = ()) -> str:
    """Name the first fact in which the ranks differ, with the ranks of each value. Local."""
    for key in dict.fromkeys(k for facts in everyone for k in facts):
        values = [facts.get(key) for facts in everyone]
        if all(value == values[0] for value in values):
            continue
        if all(isinstance(value, dict) for value in values):
            return differing([v or {} for v in values], (*path, key))
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            groups.setdefault(str(value), []).append(rank)
        said = "; ".join(f"ranks {ranks}: {value}" for value, ranks in groups.items())
        return f"{' '.join((*path, str(key)))}: {said}"
    return "nothing"
