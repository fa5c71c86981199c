"""The settings of an elastic run of `md.train`."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, shown
from ..registry import checked_whole


@dataclass(frozen=True)
class Elastic:
    """How a run of `md.train` goes on after ranks have died; see docs/elastic.md.

    Parameters
    ----------
    min_ranks : int
        With fewer living ranks the run ends by RankFailure.
    """

    min_ranks: int = 1

    def __post_init__(self):
        checked_whole("min_ranks", self.min_ranks, 1)


def as_elastic(given) -> Elastic:
    """Return the settings for the argument `elastic` of `md.train`; raise ConfigError if wrong."""
    if given is True:
        return Elastic()
    if isinstance(given, Elastic):
        return given
    raise ConfigError(f"elastic={shown(given, 60)}; expected True, False or md.Elastic(...)")
