"""Changes of a model's consistency mode or optimizer, which all workers request in the same step.

    worker 0   ... clock 6 | change to BSP | push, tick of clock 6 | ...
    worker 1   ... clock 6 | change to BSP | push, tick of clock 6 | ...
    server     gets the change of each worker before the tick of this worker

A clock is a step of a worker, and a tick is the message that ends it. If a worker finishes the step
without the change, or requests another change, the server raises an error on all ranks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import ConfigError, ProtocolError, shown
from ..consistency import ASP, BSP, SSP, Action, Consistency, Do
from .dynamic_bound import DSSP
from .optimizer_changes import agreed_part, change_optimizer

#: The modes that may follow each other during training, by the names in messages.
MODES: dict[str, type[Consistency]] = {each.__name__: each for each in (ASP, BSP, SSP, DSSP)}

#: The two kinds of changes, by their names in messages.
MODE, OPTIMIZER = "consistency", "optimizer"

_SAME = "all workers must make the same changes in the same clock"


def encode_mode(mode: Consistency) -> bytes:
    """Return the message that sets a mode; raise ConfigError if training cannot change to it."""
    if type(mode) not in MODES.values():
        raise ConfigError(
            f"consistency is {shown(mode)}; a model in training may change between BSP, SSP, DSSP "
            "and ASP"
        )
    settings = dataclasses.asdict(mode)  # type: ignore[call-overload]
    return json.dumps({"of": MODE, "name": type(mode).__name__, **settings}).encode()


def decode_mode(text: bytes) -> Consistency:
    """Return the mode in a message that `encode_mode` has made."""
    settings = json.loads(text)
    del settings["of"]
    return MODES[settings.pop("name")](**settings)


class Asked:
    """A change of mode or optimizer, and the workers that have requested it in the same step."""

    def __init__(self, text: bytes):
        self.text, self.workers = text, set[int]()
        # Whether the server makes the change when all workers have requested it.
        self.is_due = json.loads(text)["of"] == OPTIMIZER


class AgreedChanges:
    """Checks on a server that all workers of a model request the same changes in the same step.

    A change is another consistency mode (such as BSP) or another optimizer.
    """

    def __init__(self, hosted: Any):
        self._hosted = hosted
        self._asked: dict[tuple[int, str], Asked] = {}  # (clock, what changes) -> the change
        self._optimizer = b""  # the message of the newest change of the optimizer

    def __bool__(self) -> bool:
        return bool(self._asked)

    def hear(self, worker: int, text: bytes, ranks: Sequence[int]) -> None:
        """Record that `worker` requests a change of mode or optimizer in its present step.

        Raises ProtocolError if another worker requests a different change in this step, or has
        finished the step without this change. `text` describes the change, and `ranks` has the rank
        of each worker.
        """
        gate, what = self._hosted.gate, json.loads(text)["of"]
        clock = gate.clocks[worker]
        asked = self._asked.get((clock, what))
        if asked is None:
            asked = Asked(text)
            asked.workers.add(worker)
            passed = [other for other, at in enumerate(gate.clocks) if at > clock]
            if passed:
                raise self._missing(passed[0], asked, clock, ranks)
            self._asked[clock, what] = asked
            if what == MODE:
                self._hosted.change_mode(decode_mode(text), clock + 1)
        if agreed_part(asked.text) != agreed_part(text):
            raise ProtocolError(
                f"{self._where(clock)}: rank {ranks[worker]} asks for {_told(text)}, rank "
                f"{ranks[min(asked.workers)]} for {_told(asked.text)}; {_SAME}"
            )
        if worker < min(asked.workers):  # all servers use the message of the same worker
            asked.text = text
        asked.workers.add(worker)

    def due(self) -> list[Action]:
        """Return an action for each new optimizer that all workers have requested.

        An action (`Do`) is a function that the server calls: here it makes the server use the new
        optimizer. Each action is returned only once.
        """
        live = {worker for worker, lives in enumerate(self._hosted.gate.live) if lives}
        in_order = (self._asked[key] for key in sorted(self._asked))
        due = [one for one in in_order if one.is_due and one.workers >= live]
        for asked in due:
            asked.is_due = False
        return [Do(partial(self._use_optimizer, asked.text)) for asked in due]

    def _use_optimizer(self, text: bytes) -> None:
        change_optimizer(self._hosted.shard, text)
        self._optimizer = text

    def facts(self) -> dict[str, Any]:
        """Return all changes of mode and optimizer so far, as plain values.

        A new server passes them to `go_on`.
        """
        asked = [
            (*key, one.text, sorted(one.workers), one.is_due) for key, one in self._asked.items()
        ]
        modes = [(clock, encode_mode(mode)) for clock, mode in self._hosted.gate.changes()]
        return {"asked": asked, "modes": modes, "optimizer": self._optimizer}

    def go_on(self, facts: Mapping[str, Any]) -> None:
        """Make the changes that another server has recorded.

        A new server calls this method. `facts` is the result of the method `facts` on a server that
        has been there before.
        """
        for clock, text in facts["modes"]:
            self._hosted.change_mode(decode_mode(text), clock)
        if facts["optimizer"]:
            self._use_optimizer(facts["optimizer"])
        for clock, what, text, workers, is_due in facts["asked"]:
            asked = self._asked[clock, what] = Asked(text)
            asked.workers, asked.is_due = set(workers), is_due

    def check_tick(self, worker: int, clock: int, ranks: Sequence[int]) -> None:
        """Raise ProtocolError if `worker` ends a step without a change that other workers request.

        All workers must request the same changes of the mode and the optimizer in the same step.
        `clock` is the number of the step, and `ranks` has the rank of each worker.
        """
        for (at, _), asked in self._asked.items():
            if at == clock and worker not in asked.workers:
                raise self._missing(worker, asked, clock, ranks)
        slowest = self._hosted.gate.slowest()
        self._asked = {key: one for key, one in self._asked.items() if key[0] >= slowest}

    def _missing(
        self, worker: int, asked: Asked, clock: int, ranks: Sequence[int]
    ) -> ProtocolError:
        return ProtocolError(
            f"{self._where(clock)}: rank {ranks[worker]} has finished this clock without the "
            f"change to {_told(asked.text)} of rank {ranks[min(asked.workers)]}; {_SAME}"
        )

    def _where(self, clock: int) -> str:
        return f"model {self._hosted.name!r}, clock {clock}"


def _told(text: bytes) -> str:
    facts = json.loads(text)
    if facts["of"] == MODE:
        return f"consistency {decode_mode(text)}"
    return f"optimizer {facts['told']}"
