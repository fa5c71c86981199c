"""The check that all ranks have the same parameters, bit for bit: `md.check_replicas`.

Every rank computes a checksum (CRC-32) of each tensor, and one small allreduce compares them. A CRC
detects every change within 32 consecutive bits, and misses one in 2^32 of all other changes.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays import copy_into, host_empty, is_device, named_arrays
from ..errors import ConfigError, MismatchError, ReplicaError, shown
from ..runtime.agreement.mismatch import rank_list
from ..runtime.agreement.run_on_all import difference, run_on_all
from ..tensors import is_module, tensors_of


def check_replicas(comm, params, *, step: int | None = None) -> None:
    """Raise ReplicaError on all ranks unless the arrays in `params` have equal bytes on all ranks.

    Collective over `comm`. Device arrays are first copied to host memory.

    Parameters
    ----------
    params : mapping of name -> array, or a model
        NumPy, CuPy or DLPack arrays. A model is a torch module or an object with ``parameters``.
    step : int, optional
        The number of the training step, for the text of the error. All ranks pass the same `step`.

    Raises
    ------
    ReplicaError
        On all ranks; the text names the ranks and the tensors that differ.
    ConfigError
        On all ranks, if `params` of a rank is anything else than arrays or a model.
    """
    told = run_on_all(comm, "check_replicas", lambda: _facts(params, step), list, if_differs=True)
    if isinstance(told, str):  # a rank gets its own text back if the texts of all ranks are equal
        return
    everyone = [json.loads(text) for text in told]
    apart = difference([{"step": str(each)} for each, _ in everyone])
    if apart is not None:
        raise MismatchError(f"check_replicas: {apart}; pass one value everywhere")
    raise divergence([facts for _, facts in everyone], step)


def _facts(params, step) -> str:
    """Return the step and the shape, dtype and CRC of each tensor as one text."""
    try:
        number = None if step is None else operator.index(step)
    except TypeError:  # the ``__index__`` of an array raises this error, too
        given = shown(step)
        raise ConfigError(f"check_replicas: step={given}; expected a number or None") from None
    tree = params
    if is_module(params):
        tree = tensors_of(params, buffers=False)
    elif not isinstance(params, Mapping):
        tree = getattr(params, "parameters", params)
    named, problem = named_arrays(tree)
    if problem:
        raise ConfigError(f"check_replicas: params: {problem}")
    facts = {name: f"{x.shape} {x.dtype} {checksum(x):08x}" for name, x in named}
    return json.dumps([number, facts])


def checksum(x) -> int:
    """Return the CRC-32 of the bytes of `x` in C order."""
    if is_device(x):
        host = host_empty(x.size, x.dtype, like=x)
        copy_into(host, x)
    else:
        host = np.ascontiguousarray(x).reshape(-1)
    return zlib.crc32(host.view(np.uint8).data) if host.size else 0


def divergence(facts: Sequence[Mapping[str, str]], step: int | None = None) -> ReplicaError:
    """Return the error for unequal replicas, which names the ranks and tensors that differ.

    `facts` has one mapping per rank: tensor name to a text with shape, dtype and CRC.
    """
    size = len(facts)
    names = {name for each in facts for name in each}
    tensors = tuple(sorted(n for n in names if len({each.get(n) for each in facts}) > 1))
    groups: dict[str | None, list[int]] = {}
    for rank, each in enumerate(facts):
        groups.setdefault(each.get(tensors[0]), []).append(rank)
    sides = sorted(groups.values(), key=len, reverse=True)
    verb, more = "differs", ""
    if len(tensors) > 1:
        verb, more = "differ", f" and {len(tensors) - 1} more of {len(names)} tensors"
    most = len(sides[0])
    odd: tuple[int, ...] = ()
    if most > len(sides[1]):
        odd = tuple(rank for side in sides[1:] for rank in side)
        others = f"the other {most} ranks" if most > 1 else "the other rank"
        what = f"{rank_list(odd)}'s {tensors[0]!r}{more} {verb} from {others}"
    elif most > 1:
        halves = " and ".join(rank_list(side) for side in sides)
        what = f"{tensors[0]!r}{more} {verb} between {halves}"
    else:
        all_of_them = "both" if size == 2 else f"all {size}"
        what = f"{tensors[0]!r}{more} {verb} between {all_of_them} ranks"
    when = "" if step is None else f" after step {step}"
    return ReplicaError(
        f"replicas differ{when}: {what}; go on from the newest checkpoint, and look for what "
        "only one rank does: another seed, another branch, an extra update, bad memory",
        odd,
        tensors,
    )
