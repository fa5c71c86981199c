"""A group of layers whose parameters change before all microbatches are done ("pipedream").

The backward pass of a microbatch uses the same parameters as its forward pass. Before an update,
the parameters are therefore copied for the microbatches whose backward pass is still to come:

    F0 F1 F2   B0 U0   F3   B1 U1
    begun with version 0    1
                  ^ version 0 is copied for microbatches 1 and 2; microbatch 3 begins with version 1
"""

from __future__ import annotations

from .stage_chunk import Chunk


class VersionedChunk(Chunk):
    """A `Chunk` (consecutive layers) that keeps old parameters until their microbatches are done.

    Attributes
    ----------
    versions : int
        The largest number of versions of the parameters that were kept at the same time.
    updates : int
        The number of updates.
    gradients_used : int
        The number of microbatches whose gradients an update has used.
    stalest, staleness : int
        For each microbatch, the updates between its forward pass and the update with its gradients
        are counted. `stalest` is the largest of these numbers, and `staleness` is their sum.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self._old: dict[int, dict] = {}  # microbatch -> copy of the parameters that it has used
        self._begun: dict[int, int] = {}  # microbatch -> number of updates before its forward pass
        self.versions = 1
        self.updates = self.gradients_used = self.stalest = self.staleness = 0

    @property
    def stash_bytes(self) -> int:
        """The bytes that are kept for later backward passes: activations and old parameters."""
        old = {id(one): one for one in self._old.values()}
        return super().stash_bytes + sum(a.nbytes for one in old.values() for a in one.values())

    def use_gradients(self, views: dict) -> None:
        """Write gradients into the arrays `views` from now on."""
        self.gradients = views
        self._write_into(views)

    def forward(self, microbatch: int, x, keep: bool):
        """Return the output of the layers; note which version of the parameters computed it."""
        if keep:
            self._begun[microbatch] = self.updates
        return super().forward(microbatch, x, keep)

    def used_by(self, microbatch: int) -> dict:
        """Return the parameters that the forward pass of a microbatch has used.

        If they are an old copy, this object does not keep the copy for this microbatch any longer.
        """
        return self._old.pop(microbatch, self.parameters)

    def before_update(self, microbatch: int) -> None:
        """Copy the parameters that later backward passes need, before an update."""
        begun = self._begun.pop(microbatch, None)
        if begun is not None:
            missed = self.updates - begun
            self.gradients_used += 1
            self.staleness += missed
            self.stalest = max(self.stalest, missed)
        self.updates += 1
        newest = [i for i in self._tapes if i not in self._old]
        if newest and self.parameters:
            copies = {name: array.copy() for name, array in self.parameters.items()}
            self._old.update(dict.fromkeys(newest, copies))
        self.versions = max(self.versions, 1 + len({id(one) for one in self._old.values()}))
