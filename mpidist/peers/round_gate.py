"""When a rank may finish a round of averaging. This module uses no MPI.

A rank begins round k by sending its model to its peers of this round. The bound b is the number of
rounds by which a model may arrive late: the rank waits until all models of the rounds up to k - b
have arrived. Then it averages its own model with all models that have arrived.

    b = 0 (BSP)   a rank waits for the models of this round
    b = 2         a rank waits for the models of two rounds ago, so a short pause of a peer does
                  not stop it
"""

from __future__ import annotations

from typing import NamedTuple

from .peer_plan import PeerPlan


class Expected(NamedTuple):
    """A model that this rank receives: the round of averaging that it is for, and its sender."""

    round: int
    sender: int


class RoundGate:
    """Decides when this rank may end a round of averaging, from the models that have arrived.

    Attributes
    ----------
    round : int
        The number of the newest round that this rank has begun; -1 before the first round.
    missing, arrived : list of Expected
        The models that have not arrived yet, and the models that have arrived but are not yet in an
        average.
    """

    def __init__(self, plan: PeerPlan, rank: int, bound: int):
        self.plan, self.rank, self.bound = plan, rank, bound
        self.round = -1
        self.missing: list[Expected] = []
        self.arrived: list[Expected] = []

    def begin(self) -> tuple[tuple[int, ...], list[Expected]]:
        """Begin the next round; return the ranks to send to, and the models that will arrive."""
        self.round += 1
        senders = self.plan.receives(self.rank, self.round)
        new = [Expected(self.round, sender) for sender in sorted(senders)]
        self.missing += new
        return self.plan.sends(self.rank, self.round), new

    def arrive(self, one: Expected) -> None:
        """Record that a model has arrived; `one` has the number of its round, and its sender."""
        self.missing.remove(one)
        self.arrived.append(one)

    def may_finish(self) -> bool:
        """Whether the models for which this rank must wait have arrived, so that it may average."""
        return all(one.round > self.round - self.bound for one in self.missing)

    def take(self) -> list[Expected]:
        """Return the arrived models to average with, oldest first. Each model is returned once."""
        taken, self.arrived = sorted(self.arrived), []
        return taken

    def reset(self) -> None:
        """Start again with round 0, after an average over all ranks."""
        self.round, self.missing, self.arrived = -1, [], []
