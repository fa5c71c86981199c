"""Check the arguments of `md.train` and compare them over all ranks, before anything else.

Every rank checks its arguments, and describes them as text. If a rank has an error, all ranks raise
it; otherwise the ranks compare a digest (hash) of all texts. The texts themselves are sent only if
digests differ, for the error text. The arguments in `MAY_DIFFER` (`comm`, `loading`, `quarantine`
and `callbacks`) may differ between ranks. For `test_data` and `on_resize`, the ranks only compare
whether they were given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from ..arrays import named_arrays
from ..checkpoint.interval import SaveInterval
from ..data import Sampler, as_source, records
from ..elasticity.elastic_settings import Elastic
from ..errors import ConfigError, MismatchError, ProtocolError
from ..fault_tolerance import watch
from ..optim import Optimizer
from ..runtime.agreement.mismatch import rank_list
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.communicator import check_comm
from . import checks
from .exchanges.evaluation import check_test_data
from .strategies import as_strategy

#: Arguments that may differ between ranks; and arguments for which the ranks only compare whether
#: they were given.
MAY_DIFFER = ("comm", "loading", "quarantine", "callbacks")
PRESENCE = ("test_data", "on_resize")
#: Arguments that separate functions describe in words.
_SPECIAL = ("model", "data", "optimizer", "strategy", "checkpoint")
#: The largest number of ranks whose settings are compared word by word, and the largest number of
#: characters of a value in an error text.
_WITNESSES, _LONGEST = 8, 80


class TrainSettings(NamedTuple):
    """The checked arguments of `md.train`, and the objects that were made from them.

    `elastic` has the settings of a run that goes on after the death of a rank; None for other runs.
    """

    strategy: Any
    source: Any
    sampler: Sampler
    pace: SaveInterval
    callbacks: tuple
    elastic: Elastic | None = None
    watch: bool = False
    words: Mapping[str, str] = {}


def agree_on_settings(comm, given: Mapping[str, Any]) -> TrainSettings:
    """Check the arguments of `md.train` and compare them over all ranks. Collective over `comm`.

    Raises
    ------
    ConfigError
        An argument is invalid on some rank. The error is raised on all ranks, and names this rank
        and this argument.
    MismatchError
        A setting differs between ranks. The error is raised on all ranks, and names the setting,
        its values, and the ranks that have each value.
    """
    check_comm(comm)
    found: Any = None
    words: dict[str, str] = {}
    content = records.Content()

    def local():
        nonlocal found, content
        found = checked(comm.size, **given)
        words.update(settings_in_words(found, given))
        if comm.size > 1:
            content = records.content(found.source)
        return _digest(words), content, bool(watch.active)

    def decide(everyone: list) -> tuple[list[int], bool, bool]:
        digests = [digest for digest, _, _ in everyone]
        witnesses = [digests.index(one) for one in dict.fromkeys(digests)]
        others = records.differing([content for _, content, _ in everyone])
        return witnesses, others is not None, any(watched for _, _, watched in everyone)

    witnesses, others, watched = run_on_all(comm, "md.train", local, decide)
    if len(witnesses) > 1:
        mine = _digest(words), words if comm.rank in witnesses[:_WITNESSES] else None
        run_on_all(comm, "md.train: settings", lambda: mine, _refuse_settings)
    if others:

        def again() -> tuple:
            return content, records.content(found.source) == content

        run_on_all(comm, "md.train: data", again, _refuse_data)
    if given["test_data"] is not None and not getattr(found.strategy, "in_parts", False):

        def predict() -> None:
            if comm.rank in getattr(found.strategy, "worker_ranks", range)(comm.size):
                check_test_data(given["model"], given["test_data"])

        run_on_all(comm, "md.train: test_data", predict)
    watch_it = given["watch_seconds"] and comm.size > 1 and not watched
    return found._replace(watch=bool(watch_it), words=words)


def _refuse_settings(everyone: list) -> None:
    raise MismatchError(settings_difference(everyone))


def _refuse_data(everyone: list) -> None:
    """Raise MismatchError if a record differs between ranks."""
    text = records.differing([one for one, _ in everyone])
    if text is not None and all(again for _, again in everyone):
        raise MismatchError(f"md.train: {text}")


def checked(
    size: int, *, model, data, optimizer, global_batch, epochs, steps, seed, shuffle, strategy,
    test_data, checkpoint, checkpoint_every, resume, stop_after, microbatches, check_replicas,
    time_limit, patience, max_bad, retry_bad, quarantine, loading, callbacks, on_resize,
    watch_seconds, elastic,
) -> TrainSettings:  # fmt: skip
    """Check the arguments of `md.train` for `size` ranks; return the objects made from them."""
    if threading.current_thread() is not threading.main_thread():
        raise ProtocolError("md.train: call it in the main thread; Python delivers signals there")
    strategy = as_strategy(strategy)
    if not getattr(strategy, "in_parts", False):  # `check_run` looks at the layers
        checks.check_model(model, test_data is not None)
    source = as_source(data)
    checks.check_optimizer(optimizer)
    sampler = Sampler(len(source), global_batch, seed, shuffle)
    checks.last_step(epochs, steps, sampler)
    if test_data is not None:
        try:
            as_source(test_data)
        except ConfigError as error:
            raise ConfigError(f"test_data: {error}") from None
    checks.check_checkpoint(checkpoint, resume)
    checks.check_whole(stop_after=stop_after)
    pace = SaveInterval(sampler.steps_per_epoch if checkpoint_every is None else checkpoint_every)
    checks.check_microbatches(microbatches, sampler.global_batch, strategy)
    if hasattr(strategy, "check_run"):
        strategy.check_run(size, model, optimizer, microbatches)
    elif microbatches is None:
        checks.check_batch(sampler.global_batch, strategy.workers(size))
    checks.check_replicated(strategy, check_replicas=check_replicas, patience=patience)
    checks.check_time_limit(time_limit)
    checks.check_share(max_bad)
    checks.check_reading(loading, quarantine, retry_bad)
    checks.check_watch(watch_seconds)
    functions = checks.check_functions(callbacks, on_resize)
    goes_on = checks.check_elastic(elastic, strategy, checkpoint)
    import_modules(strategy, checkpoint, goes_on)
    return TrainSettings(strategy, source, sampler, pace, functions, goes_on)


def import_modules(strategy, checkpoint, elastic: Elastic | None) -> None:
    """Import the modules that the run uses, so that all ranks learn if an import fails on one."""
    names = [f".exchanges.{name}" for name in getattr(strategy, "modules", ())]
    if isinstance(checkpoint, str | os.PathLike):
        names += ["..checkpoint.store", "..checkpoint.memory_copies"]
    if elastic is not None:
        names.append("..checkpoint.memory_copies")
        if not getattr(strategy, "has_replicas", False):
            names.append(".exchanges.carried.replicated_servers")
    for name in names:
        import_module(name, __package__)


# ------------------------------------------------------------------------------------- in words


def settings_in_words(found: TrainSettings, given: Mapping[str, Any]) -> dict[str, str]:
    """Return {setting: text} for every setting of `md.train` that must be equal on all ranks."""
    words: dict[str, str] = {}
    for name, value in given.items():
        if name in PRESENCE:
            words[name] = "none" if value is None else "one"
        elif name not in (*MAY_DIFFER, *_SPECIAL):
            words.update(_words(name, value))
    words["len(data)"] = str(len(found.source))
    words.update(_model(given["model"], getattr(found.strategy, "in_parts", False)))
    words.update(_words("strategy", found.strategy))
    words.update(_words("optimizer", given["optimizer"]))
    words.update(_rates(given["optimizer"]))
    words.update(_checkpoint(given["checkpoint"]))
    return words


def _words(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield pairs (setting, value) that describe an object and its attributes."""
    inside: Iterable[tuple[Any, Any]] = ()
    joint = "."
    if value is None or isinstance(value, str | bytes | bool):
        yield name, repr(value)
    elif isinstance(value, Real | np.bool_):
        yield name, _number(value)
    elif isinstance(value, os.PathLike):
        yield name, repr(os.fspath(value))
    elif isinstance(getattr(value, "dtype", None), np.dtype):
        yield name, f"{value.shape} {value.dtype} {records.digest_of(value)}"
    elif isinstance(value, Mapping):
        yield name, f"{len(value)} entries"
        inside = value.items()
    elif isinstance(value, Sequence):
        yield name, f"{len(value)} entries"
        inside, joint = ((f"[{k}]", one) for k, one in enumerate(value)), ""
    elif callable(value) and hasattr(value, "__qualname__"):
        yield name, value.__qualname__
    else:
        yield name, _kind(value)
        inside = _parts(value)
    if depth < 6:
        for part, one in inside:
            yield from _words(f"{name}{joint}{part}", one, depth + 1)


def _number(value) -> str:
    if isinstance(value, np.bool_):
        return repr(bool(value))
    if not isinstance(value, Integral):
        return repr(float(value)).removesuffix(".0")
    # Python refuses to write an integer of more than 4,300 digits in decimal.
    return repr(int(value)) if int(value).bit_length() < 10_000 else hex(value)


def _kind(value) -> str:
    name = getattr(value, "name", None)
    kind = type(value).__qualname__
    return f"{kind} {name}" if isinstance(name, str) else kind


def _parts(value) -> Iterable[tuple[str, Any]]:
    """Return an object's attribute `settings`, its dataclass fields, or its plain attributes."""
    settings = getattr(value, "settings", None)
    if isinstance(settings, Mapping):
        return settings.items()
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    plain = (int, float, str, bool, tuple, list, dict, np.number, type(None))
    # Attributes such as a rank or a device, and private attributes, may differ between ranks.
    return [
        (name, one)
        for name, one in sorted(getattr(value, "__dict__", {}).items())
        if isinstance(one, plain) and not name.startswith("_") and name not in ("rank", "device")
    ]


def _model(model, in_parts: bool) -> Iterator[tuple[str, str]]:
    yield "model", type(model).__qualname__
    for layer in getattr(model, "layers", ()):
        # If ranks had different parts of a layer, they would be treated as copies of one array.
        for name in layer.shapes() if hasattr(layer, "window") else ():
            yield f"model.part of {name}", str(layer.window(name))
    if in_parts:  # here no rank makes the parameters of the whole model
        if "parameters" not in vars(model):
            yield "model.seed", repr(getattr(model, "seed", None))
        for k, layer in enumerate(model.layers):
            yield f"model.layer {k}", f"{type(layer).__qualname__} {layer.shapes()}"
        return
    for name, array in named_arrays(model)[0]:
        yield f"model.{name}", f"{tuple(array.shape)} {array.dtype}"
    yield "order of model.parameters", ", ".join(map(str, model.parameters))


def _rates(optimizer) -> Iterator[tuple[str, str]]:
    """Yield a setting that differs if ranks have different functions as learning rates.

    The ranks compare some updates that the optimizer computes with this learning rate.
    """
    rate = optimizer.settings.get("lr") if isinstance(optimizer, Optimizer) else None
    if not isinstance(rate, Mapping) or len(rate) != 1:
        return
    steps = (0, 1, 10, 100, 1000)
    said = []
    for step in steps:
        parameters, gradients = {"x": np.zeros(1)}, {"x": np.ones(1)}
        try:
            state = optimizer.init(parameters)
            state["progress"][...] = step
            optimizer.update(gradients, state, parameters)
            said.append(f"{float(parameters['x'][0]):.9g}")
        except Exception as error:  # the function may not be defined for so many steps
            said.append(type(error).__name__)
    yield f"optimizer.lr, an update of 0 at steps {', '.join(map(str, steps))}", " ".join(said)


def _checkpoint(checkpoint) -> Iterator[tuple[str, str]]:
    if checkpoint is None or isinstance(checkpoint, str | os.PathLike):
        yield from _words("checkpoint", checkpoint)
        return
    yield "checkpoint", type(checkpoint).__qualname__
    if isinstance(getattr(checkpoint, "path", None), str | os.PathLike):
        yield "checkpoint.path", str(checkpoint.path)


# ----------------------------------------------------------------------------------- differences


def _digest(words: Mapping[str, str]) -> str:
    text = "\n".join(f"{name}\t{value}" for name, value in sorted(words.items()))
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()


def settings_difference(everyone: Sequence[tuple[str, Mapping[str, str] | None]]) -> str:
    """Return a text that names a setting that differs between ranks, with its values."""
    kinds = {digest: words for digest, words in everyone if words is not None}
    names = dict.fromkeys(name for words in kinds.values() for name in words)
    common = {name: {words.get(name) for words in kinds.values()} for name in names}
    odd = [name for name, values in common.items() if len(values) > 1]
    if not odd:
        return "md.train: the settings of the ranks differ, in more ways than could be compared"
    # The error names a setting that all ranks have, if there is one. A setting that only some ranks
    # have is only a consequence of another difference, such as another optimizer.
    first = next((name for name in odd if None not in common[name]), odd[0])
    groups: dict[str, list[int]] = {}
    for rank, (digest, _) in enumerate(everyone):
        if digest in kinds:
            groups.setdefault(kinds[digest].get(first, "none"), []).append(rank)
    # The value of the fewest ranks comes first, since it is most often the wrong one.
    said = ", ".join(
        f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} {shortened(value)}"
        for value, ranks in sorted(groups.items(), key=lambda item: len(item[1]))
    )
    return f"md.train: {first} differs: {said}{_more(odd, first)}; give all ranks the same"


def shortened(text: str) -> str:
    """Return a text as it is if it is short; otherwise its beginning and a digest of all of it."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


def _more(odd: Sequence[str], first: str) -> str:
    others = [name for name in odd if name != first and not name.startswith(f"{first}.")]
    if not others:
        return ""
    return f" (and so do {', '.join(others[:3])}{', ...' if len(others) > 3 else ''})"
