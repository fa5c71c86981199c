"""What a worker does if a model's consistency mode or optimizer changes: checks and messages."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from ...errors import ConfigError, ProtocolError, shown
from ...runtime import ulfm
from ..consistency import Consistency
from ..layout.placement import ServerLayout
from ..model_facts import Request, check_stale
from ..rows.cache_policy import row_cache
from ..rows.table_updates import TableUpdate
from ..wire.trial_update import has_the_same_bits
from .agreed_changes import encode_mode
from .optimizer_changes import encode_optimizer
from .stale_gradients import check_momentum


class ClientModes:
    """Remembers for one worker which consistency mode (such as BSP) each of its steps has.

    In an elastic run (which goes on after the death of a rank) the mode cannot change; `votes` is
    true if such a run has several servers. The attribute `in_memory` says whether servers of this
    host may read gradients in the memory of this worker.
    """

    def __init__(self, asked: Request, votes: bool):
        self._asked, self._votes = asked, votes
        # Reasons against updates piece by piece: in an elastic run, a push that a death interrupts
        # must not be applied in part; and clipping, or an optimizer without `streams`, needs the
        # whole gradient first.
        whole = asked.clip_norm is not None or not getattr(asked.optimizer, "streams", True)
        self._pieces = not votes and ulfm.current is None and not whole
        # On a device, an update always changes all parameters.
        self._pieces &= asked.server_device == "cpu"
        self._streams = self._pieces and has_the_same_bits(asked.optimizer)
        corrects = asked.stale.compensates or asked.stale.corrects
        self.in_memory = self._streams and not corrects
        kind = getattr(asked.optimizer, "name", "") or type(asked.optimizer).__name__
        reason = f"optimizer {kind} updates whole tensors"
        if asked.clip_norm is not None:
            reason = "clip_norm needs whole gradients"
        #: Two texts: why servers wait for whole pushes in all modes, and why outside BSP. A text is
        #: empty if servers need not wait.
        self.why = ("" if self._streams else reason, str(asked.stale) if corrects else "")
        self._changed = -1  # the clock of the newest change of the optimizer
        self._starts, self._modes = [0], [asked.consistency]

    @property
    def newest(self) -> Consistency:
        """The consistency mode that was set last.

        If it was set in the present step, it is used from the next step on.
        """
        return self._modes[-1]

    def at(self, clock: int) -> Consistency:
        """Return the consistency mode of step number `clock` of this worker."""
        if clock >= self._starts[-1]:
            return self._modes[-1]
        return self._modes[bisect_right(self._starts, clock) - 1]

    def asks_all(self, clock: int) -> bool:
        """Whether this worker begins step number `clock` only after an answer from every server.

        Otherwise it asks only the servers that hold the parameters that it needs.
        """
        return self._votes or self.at(clock).asks_all

    def streams(self, clock: int) -> bool:
        """Whether servers may process large gradients of step number `clock` in pieces.

        A server then updates the parameters and sends them to the workers piece after piece.
        """
        return self._streams and self.at(clock).streams

    def clip_norm(self, clock: int) -> float | None:
        """Return the norm to which this worker clips its gradients in step number `clock`.

        None means that servers clip the gradients, or that gradients are not clipped.
        """
        return None if self.at(clock).merges else self._asked.clip_norm

    def checked(self, mode: Any, clock: int) -> bytes:
        """Check the consistency mode that the user sets in step number `clock`; return a message.

        The message tells servers the new mode. It is empty if the mode does not change.
        """
        name = self._asked.name
        if not isinstance(mode, Consistency):
            raise ConfigError(f"client {name!r}: consistency is {shown(mode)}; give BSP, SSP, ...")
        if self._starts[-1] > clock:
            if mode == self._modes[-1]:
                return b""
            raise ProtocolError(
                f"client {name!r}: consistency is {self._modes[-1]} from clock "
                f"{self._starts[-1]} on, already set in clock {clock}; set it once per clock"
            )
        if mode == self._modes[-1]:
            return b""
        refuse_in_elastic_runs(name, self._votes, "consistency")
        encode_mode(self._modes[-1])
        text = encode_mode(mode)
        check_stale(self._asked._replace(consistency=mode))
        row_cache(name, self._asked.cache_rows, mode, self._asked.stale)
        return text

    def set(self, mode: Consistency, clock: int) -> None:
        """Use the consistency mode `mode` for all steps after step number `clock`."""
        self._starts.append(clock + 1)
        self._modes.append(mode)

    def checked_optimizer(self, optimizer: Any, clock: int, layout: ServerLayout) -> bytes:
        """Check the optimizer that the user sets in step number `clock`; return a message.

        The message tells servers the new optimizer.
        """
        name = self._asked.name
        refuse_in_elastic_runs(name, self._votes, "optimizer")
        if isinstance(table := self._asked.optimizer, TableUpdate):
            raise ConfigError(
                f"model {name!r} has update={table.name!r} and no optimizer; add another model"
            )
        check_momentum(name, self._asked.stale, optimizer)
        if self._changed == clock:
            raise ProtocolError(f"client {name!r}: second set_optimizer in clock {clock}")
        return encode_optimizer(name, layout, optimizer)

    def set_optimizer(self, optimizer: Any, clock: int) -> None:
        """Record that the user sets `optimizer` in step number `clock`."""
        self._changed = clock
        self._streams = self._pieces and has_the_same_bits(optimizer)
        # Outside BSP, servers use the old optimizer until the last worker has changed it.
        self.in_memory &= self._streams


def refuse_in_elastic_runs(name: str, votes: bool, what: str) -> None:
    """Raise ConfigError in a run that goes on after deaths: its `what` cannot change."""
    if votes or ulfm.current is not None:
        raise ConfigError(
            f"client {name!r}: the {what} cannot change in an elastic run, which would go on after "
            f"a death with the first {what}; set it when the model is added"
        )
