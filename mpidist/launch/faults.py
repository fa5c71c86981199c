"""Fault injection, for example by ``MPIDIST_FAULT="kill@step:20,rank=1"``.

    MPIDIST_FAULT = FAULT[;FAULT...]        FAULT = ACTION@POINT[:NUMBER][,KEY=VALUE...]

    kill      SIGKILL to this process        sleep      `ms` milliseconds (default 1000)
    stop      SIGSTOP to this process        enospc     OSError: no space left on device
    exit      os._exit(`code`) (default 1)   flip       one bit of the point's file
    raise     RuntimeError                   truncate   the second half of the point's file

NUMBER says when the fault happens: at the training step of this number, or when the program has
reached POINT this many times. Without NUMBER the fault happens every time the program reaches
POINT. KEY is ``rank``, ``attempt``, ``ms``, ``code`` or ``seed``. ``rank`` is a number, or
``random`` with the seed ``seed``; without ``rank`` the fault happens on every rank. ``attempt`` is
the number of a start of the program by `mpidist launch`, or ``any``; the default is 0, the first
start.

Faults are allowed only if MPIDIST_TESTING=1 is set.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError, nearest
from .claims import claimed_size, rank_hint

ACTIONS = ("kill", "stop", "exit", "raise", "sleep", "enospc", "flip", "truncate")
_KEYS = ("rank", "seed", "attempt", "ms", "code")


@dataclass(frozen=True)
class Fault:
    """One fault: what happens (`action`), and where and when it happens.

    `rank` and `attempt` (the number of a start of the program by `mpidist launch`) say in which
    process it happens. `point` is a place of the program, and `number` a training step, or how
    often the place was reached.
    """

    action: str
    point: str
    number: int | None = None
    rank: int | None = None
    attempt: int | None = 0
    seed: int = 0
    ms: int = 1000
    code: int = 1


def parse(text: str, size: int = 1) -> list[Fault]:
    """Read the value of MPIDIST_FAULT for a job of `size` ranks.

    Raises
    ------
    ConfigError
        If the text does not describe faults. The error text shows the expected form.
    """
    return [_parse_one(one.strip(), size) for one in text.split(";") if one.strip()]


def _parse_one(text: str, size: int) -> Fault:
    what, *settings = (word.strip() for word in text.split(","))
    action, found, where = what.partition("@")
    point, _, number = where.partition(":")
    if action not in ACTIONS or not found or not point:
        raise ConfigError(
            f"MPIDIST_FAULT={text!r}: expected ACTION@POINT[:NUMBER][,KEY=VALUE...] with one of "
            f"{', '.join(ACTIONS)}{nearest(action, ACTIONS)}"
        )
    values = dict(setting.partition("=")[::2] for setting in settings)
    for key in values:
        if key not in _KEYS:
            raise ConfigError(
                f"MPIDIST_FAULT={text!r}: unknown key {key!r}; expected one of {', '.join(_KEYS)}"
            )
    if values.get("attempt") == "any":
        values["attempt"] = ""
    seed = _whole(text, "seed", values.get("seed", "0")) or 0
    if values.get("rank") == "random":
        values["rank"] = str(random.Random(seed).randrange(size))
    known = {key: _whole(text, key, value) for key, value in values.items()}
    return Fault(action, point, number=_whole(text, "number", number), **known)  # type: ignore[arg-type]


def _whole(text: str, name: str, value: str) -> int | None:
    if value == "":
        return None
    if not value.isdigit():
        raise ConfigError(f"MPIDIST_FAULT={text!r}: {name}={value!r}; expected a whole number >= 0")
    return int(value)


def read_faults(environ: Mapping[str, str]) -> Injector:
    """Return an `Injector` of the faults that the environment variables of this process describe.

    Raises
    ------
    ConfigError
        If MPIDIST_TESTING is not 1, or if MPIDIST_FAULT does not describe faults.
    """
    if environ.get("MPIDIST_TESTING") != "1":
        raise ConfigError(
            "MPIDIST_FAULT is set, which breaks this run on purpose; unset it, or set "
            "MPIDIST_TESTING=1 as well if that is meant"
        )
    claim = claimed_size(environ)
    faults = parse(environ.get("MPIDIST_FAULT", ""), claim.size if claim else 1)
    attempt = int(environ.get("MPIDIST_ATTEMPT", "0"))
    return Injector(faults, rank_hint(environ), attempt)


class Injector:
    """Causes the faults that a test has set for this process."""

    def __init__(self, faults: list[Fault], rank: int, attempt: int = 0):
        faults = [fault for fault in faults if fault.rank in (None, rank)]
        self.faults = [fault for fault in faults if fault.attempt in (None, attempt)]
        self.rank = rank
        self._reached: Counter[str] = Counter()
        self._wrapped: list[ModuleType] = []
        self._wrap()

    def __call__(self, name: str, number: int | None = None, about: Mapping | None = None) -> None:
        """Inject the faults that are set for the point `name` and for `number`."""
        self._wrap()
        self._reached[name] += 1
        number = self._reached[name] if number is None else number
        for fault in self.faults:
            if fault.point == name and fault.number in (None, number):
                act(fault, f"{name}:{number} on rank {self.rank}", about or {})

    # The points below are functions that run often, or that belong to other folders of the package,
    # and that contain no call of `fault_point`. If a fault names such a function, the function is
    # replaced by a wrapper.

    def _wrap(self) -> None:
        # If the module is not loaded yet, the function is wrapped at a later point. Loading the
        # module here could start MPI before the program starts it.
        asked = {fault.point for fault in self.faults}
        on_files = {name for name in asked if name.startswith("file.")}
        files = sys.modules.get("mpidist.checkpoint.storage.files")
        if on_files and files is not None and files not in self._wrapped:
            self._wrapped.append(files)
            for change in files.CHANGES:
                setattr(files, change, self._around(getattr(files, change), change))
        context = sys.modules.get("mpidist.runtime.context")
        if asked - on_files and context is not None and context not in self._wrapped:
            self._wrapped.append(context)
            begin = context.Context.begin

            @wraps(begin)
            def counted(instance, signature, runs=None):
                self("collective")
                self(signature.kind)
                return begin(instance, signature, runs)

            context.Context.begin = counted

    def _around(self, function: Callable, name: str) -> Callable:
        @wraps(function)
        def reached(*args):
            file = args[0] if name in ("write_at", "sync") else None
            self(f"file.{name}", None, {"file": file})
            return function(*args)

        return reached


def act(fault: Fault, where: str, about: Mapping) -> None:
    """Inject one fault."""
    os.write(2, f"mpidist: fault: {fault.action} at {where}\n".encode())
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(fault.code)
        case "raise":
            raise RuntimeError(f"fault at {where}")
        case "sleep":
            time.sleep(fault.ms / 1000)
        case "enospc":
            raise OSError(errno.ENOSPC, f"fault: {os.strerror(errno.ENOSPC)}")
        case _:
            _damage(fault, about.get("file"))


def _damage(fault: Fault, file) -> None:
    if file is None:
        raise ConfigError(
            f"MPIDIST_FAULT: {fault.action}@{fault.point}: there is no file at this point"
        )
    opened = isinstance(file, int)
    descriptor = file if opened else os.open(Path(file), os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            return  # `sync` is also called for folders
        if fault.action == "truncate":
            os.ftruncate(descriptor, size // 2)
        elif size:
            bit = random.Random(fault.seed).randrange(8 * size)
            byte = os.pread(descriptor, 1, bit // 8)[0] ^ (1 << bit % 8)
            os.pwrite(descriptor, bytes([byte]), bit // 8)
    finally:
        if not opened:
            os.close(descriptor)
