"""A chunk whose parameters change while microbatches are under way, as with "pipedream".

A microbatch has its backward pass with the parameters of its forward pass. Before an update, the
parameters are copied if a microbatch that is under way has begun with them:

    F0 F1 F2   B0 U0   F3   B1 U1
    begun with version 0    1
                  ^ version 0 is copied for microbatches 1 and 2; microbatch 3 begins with version 1
"""

from __future__ import annotations

from .stage_chunk import Chunk


class VersionedChunk(Chunk):
    """A `Chunk` that keeps old versions of its parameters.

    Attributes
    ----------
    versions : int
        The most versions of the parameters that were kept at a time.
    updates : int
    gradients_used : int
        How many microbatches have had their update.
    stalest, staleness : int
        How many updates a gradient has missed at most, and the sum over all gradients.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self._old: dict[int, dict] = {}  # parameters of microbatches that are older than an update
        self._begun: dict[int, int] = {}  # updates before the forward pass of a microbatch
        self.versions = 1
        self.updates = self.gradients_used = self.stalest = self.staleness = 0

    @property
    def stash_bytes(self) -> int:
        """The bytes that are kept for microbatches under way: activations, and old parameters."""
        old = {id(one): one for one in self._old.values()}
        return super().stash_bytes + sum(a.nbytes for one in old.values() for a in one.values())

    def use_gradients(self, views: dict) -> None:
        """Write gradients into these arrays from now on."""
        self.gradients = views
        self._write_into(views)

    def forward(self, microbatch: int, x, keep: bool):
        """Return the output, see `Chunk.forward`."""
        if keep:
            self._begun[microbatch] = self.updates
        return super().forward(microbatch, x, keep)

    def used_by(self, microbatch: int) -> dict:
        """Return the parameters with which a microbatch had its forward pass, and forget them."""
        return self._old.pop(microbatch, self.parameters)

    def before_update(self, microbatch: int) -> None:
        """Keep the parameters for the microbatches under way: an update by `microbatch` follows.

        Those that began before an earlier update keep the version that they have. The microbatch is
        one of this rank, and may have no samples.
        """
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
