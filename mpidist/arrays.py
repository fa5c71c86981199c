"""The only door to cupy: which arrays we take, where they live, and how they reach MPI.

NumPy arrays are taken as they are. CuPy arrays too, and whatever speaks DLPack (torch, JAX, ...)
becomes a NumPy or CuPy array over the same memory. cupy is imported by nobody here unless a
device array is already at hand, so a host without a GPU never pays for it and never needs it.

Device memory reaches MPI through pinned host buffers. It is handed to MPI directly only where the
user or the MPI library says that this works *and* a proof agrees (see `mpi_direct`): a library
that is wrong about it does not raise, it segfaults.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConfigError
from .tensors import is_module, shared_bits, tensors_of

_CUDA, _CUDA_MANAGED, _ROCM = 2, 13, 10  # DLPack's device types whose memory only a device reads
_FLOAT32 = np.dtype(np.float32)


# ---------------------------------------------------------------------------------- what it is


def is_device(x) -> bool:
    """Whether `x` is a CuPy array."""
    if isinstance(x, np.ndarray):
        return False
    # An array of cupy can exist only where cupy has been imported: by its owner, not by us.
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def array_module(x):
    """Return the namespace of `x`: ``numpy``, or ``cupy`` for a device array."""
    return sys.modules["cupy"] if is_device(x) else np


def as_array(x):
    """Return `x` as a NumPy or CuPy array; what is writable shares its memory.

    Parameters
    ----------
    x : numpy.ndarray, cupy.ndarray or an object with ``__dlpack__``
        Arrays come back as they are (subclasses as their plain base); tensors of other libraries
        as a view, writable where the exporter allows it.

    Raises
    ------
    ConfigError
        For lists, scalars and everything else that has no memory to share, for masked arrays,
        and for tensors whose library refuses to share them.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise ConfigError("a masked array was given: its mask cannot travel; pass x.filled(value)")
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if is_device(x):
        return x
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x)
    raise ConfigError(
        f"expected a NumPy, CuPy or DLPack array, got {type(x).__name__}; "
        "wrap it: numpy.asarray(x), and keep the array, for the result is written into it"
    )


def _from_dlpack(x):
    name = f"{type(x).__module__}.{type(x).__name__}"
    device = int(x.__dlpack_device__()[0])
    try:
        if device in (_CUDA, _CUDA_MANAGED, _ROCM):
            import cupy  # a device tensor is at hand

            return cupy.from_dlpack(x)
        array = np.from_dlpack(x)
    except ImportError as error:
        raise ConfigError(
            f"{name} lives on a GPU, and sharing it needs cupy, which is not installed here; "
            "install mpidist[cuda12] or mpidist[cuda13]"
        ) from error
    except Exception as error:  # each library refuses in its own way: BufferError, TypeError, ...
        for other_way in (shared_bits, _readable):
            if (found := other_way(x)) is not None:
                return found
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{name} cannot be shared as an array: {reason}") from error
    if array.flags.writeable:
        return array
    # DLPack before version 1 cannot say "writable", and NumPy then assumes read-only. Where the
    # array protocol gives the very same memory as writable, that answer is the better one.
    other = np.asarray(x) if hasattr(x, "__array__") else array
    same = other.shape == array.shape and other.dtype == array.dtype
    same = same and other.__array_interface__["data"][0] == array.__array_interface__["data"][0]
    return other if same and other.flags.writeable else array


def _readable(x) -> np.ndarray | None:
    """Return what the array protocol gives where DLPack does not know the dtype (bfloat16 of JAX).

    It may be a copy, so it is not writable: nothing may be lost by writing into it.
    """
    try:
        array = x.__array__().view()
    except Exception:  # it refuses here too, or has no such protocol; DLPack's reason is told
        return None
    array.flags.writeable = False
    return array


def load_cupy():
    """Import and return cupy, for those who make device arrays.

    Raises
    ------
    ConfigError
        cupy is not installed, or finds no device.
    """
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() > 0:
            return cupy
        reason = "no device"
    except Exception as error:  # a broken driver has many names
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise ConfigError(f"no GPU to work on ({reason}); install mpidist[cuda12] or use NumPy arrays")


def to_device(x, local_rank: int):
    """Return a copy of a host array on this rank's GPU: local rank modulo the GPUs it sees.

    Right both where the batch system shows each rank its own GPU and where all see all of them.
    Raises ConfigError without cupy or without a GPU.
    """
    cupy = load_cupy()
    cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy.asarray(x)


def is_writable(x) -> bool:
    """Whether the memory of `x` may be written; device memory always may."""
    return x.flags.writeable if isinstance(x, np.ndarray) else True


@lru_cache(maxsize=256)  # a dtype builds its name anew each time it is asked: 2 us
def work_dtype(dtype) -> np.dtype:
    """Return the dtype in which values of `dtype` are added up.

    float32 for float16 and bfloat16, whose sums would lose bits at every step; otherwise the
    dtype itself in native byte order. bfloat16 is known by its name: no import of ml_dtypes.
    """
    dtype = np.dtype(dtype)
    if dtype.name in ("float16", "bfloat16"):
        return _FLOAT32
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def element_name(dtype: np.dtype) -> str:
    """Name elements whose bytes travel as they are, for a signature.

    Swapped bytes are part of the name: the receiver would read other numbers. References to
    Python objects mean nothing in another process: ConfigError.
    """
    if dtype.hasobject:
        raise ConfigError(f"elements of dtype {dtype} are Python objects; convert them to numbers")
    return dtype.name if dtype.isnative and not dtype.names else str(dtype)


def named_arrays(params) -> tuple[list[tuple[str, Any]], str | None]:
    """Return (name, array) in the order of the names, and what is wrong with them.

    Sorted, since dicts may have been filled in another order on another rank.
    """
    tree = params
    if is_module(params):
        try:
            tree = tensors_of(params)
        except ConfigError as error:
            return [], str(error)
    elif not isinstance(params, Mapping) and hasattr(params, "parameters"):
        state = getattr(params, "state", None)
        tree = params.parameters
        if callable(tree):
            return [], f"{type(params).__name__}.parameters is a method; pass its state_dict()"
        if isinstance(tree, Mapping) and isinstance(state, Mapping):
            tree = {**tree, **{f"state.{name}": x for name, x in state.items()}}
    if not isinstance(tree, Mapping):
        return [], f"expected a mapping of name -> array, got {type(tree).__name__}"
    named = []
    for name in sorted(tree, key=str):
        try:
            x = as_array(tree[name])
            element_name(x.dtype)
        except ConfigError as error:
            return [], f"{name!r}: {error}"
        named.append((str(name), x))
    return named, None


# ----------------------------------------------------------------------------------- its memory


def synchronize(x) -> None:
    """Wait until the current stream has produced `x`; nothing to do for host arrays."""
    if is_device(x):
        with x.device:
            sys.modules["cupy"].cuda.get_current_stream().synchronize()


def host_empty(count: int, dtype, like=None) -> np.ndarray:
    """Return a flat NumPy buffer, in pinned memory where `like` is a device array.

    Pinned memory is what a GPU copies to and from at full speed; it is freed with the buffer.
    """
    dtype = np.dtype(dtype)
    nbytes = count * dtype.itemsize
    if nbytes == 0 or not is_device(like):
        return np.empty(count, dtype)
    memory = sys.modules["cupy"].cuda.alloc_pinned_memory(nbytes)
    # The allocator rounds up, so the length is ours to give; the buffer keeps `memory` alive.
    return np.frombuffer(memory, np.uint8, nbytes).view(dtype)


def mpi_empty(count: int, dtype, like=None):
    """Return a flat buffer that MPI can be given for the values of `like`.

    On the device where `mpi_direct` holds for `like`, otherwise as `host_empty`.
    """
    if is_device(like) and mpi_direct(like):
        with like.device:
            return array_module(like).empty(count, dtype)
    return host_empty(count, dtype, like)


def copy_into(destination, source) -> None:
    """Copy `source` into `destination`, host or device, contiguous or not.

    Both have the same size, and either the same shape or one of them is flat, in C order.
    Values are cast to the destination's dtype. The data is there when the call returns, and
    everything queued before on the current stream has been waited for.
    """
    if destination.shape != source.shape and 1 not in (destination.ndim, source.ndim):
        raise ConfigError(f"cannot copy shape {source.shape} into shape {destination.shape}")
    to_device, from_device = is_device(destination), is_device(source)
    if to_device and not from_device:
        _upload(destination, source)
    elif from_device and not to_device:
        _download(destination, source)
    else:
        _assign(destination, source)
    if to_device:
        synchronize(destination)


def _assign(destination, source) -> None:
    """Copy inside one memory space."""
    if destination.shape == source.shape:
        destination[...] = source
    elif destination.flags.c_contiguous:
        # Only the side that is certain to reshape without a copy may be the written one.
        destination.reshape(source.shape)[...] = source
    else:
        destination[...] = source.reshape(destination.shape)


def _download(destination: np.ndarray, source) -> None:
    # Pack and cast on the device: fewer bytes cross the bus, in one piece. `get` is ordered after
    # the current stream's work and waits for the copy.
    flat = source.reshape(-1)
    if flat.dtype != destination.dtype:
        flat = flat.astype(destination.dtype)
    if destination.flags.c_contiguous:
        flat.get(out=destination.reshape(-1))
    else:
        _assign(destination, flat.get())


def _upload(destination, source: np.ndarray) -> None:
    cupy = sys.modules["cupy"]
    packed = np.ascontiguousarray(source, destination.dtype)
    if destination.flags.c_contiguous:
        destination.reshape(-1).set(packed.reshape(-1))
        return
    with destination.device:
        staged = cupy.empty(packed.shape, destination.dtype)
    staged.set(packed)
    _assign(destination, staged)


# ------------------------------------------------------------------------- device memory and MPI

_wanted: bool | None = None  # what the user said; None: ask the MPI library
_answer: bool | None = None  # what was found out, once per process


def set_direct(wanted: bool | None) -> None:
    """Say whether MPI may be given device memory: True, False, or None to ask MPI.

    True alone is not enough: a proof must agree, see `mpi_direct`.
    """
    global _wanted, _answer
    _wanted, _answer = wanted, None


def direct_wanted(environ: Mapping[str, str]) -> bool | None:
    """Return what ``MPIDIST_GPU_DIRECT`` or Cray's MPI says in `environ`, or None."""
    said = environ.get("MPIDIST_GPU_DIRECT", "").strip()
    if said not in ("", "0", "1"):
        raise ConfigError(f"MPIDIST_GPU_DIRECT={said!r}: expected 0 (staged) or 1 (direct)")
    if said:
        return said == "1"
    return True if environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" else None


def mpi_direct(x) -> bool:
    """Whether the memory of `x` may be handed to MPI as it is.

    Always true for host arrays. For device arrays only if the user (`set_direct`) or the MPI
    library says so, and ``mpiexec -n 2 python -m mpidist.gpu_direct`` has proved it on this
    host with this MPI, this cupy and this driver. Otherwise they are staged.
    """
    global _answer
    if isinstance(x, np.ndarray):
        return True
    if _answer is None:
        wanted = _mpi_says() if _wanted is None else _wanted
        _answer = wanted and _proved(proof_path())
    return _answer


def proof_path() -> Path:
    """Return where the proof for this host, MPI, cupy and driver lies. Needs MPI."""
    from mpi4py import MPI

    cupy = sys.modules["cupy"]
    facts = (
        MPI.Get_library_version().strip("\0 \n"),
        cupy.__version__,
        str(cupy.cuda.runtime.driverGetVersion()),
        platform.node(),
    )
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    return Path.home() / ".cache" / "mpidist" / f"gpu-direct-{key}.json"


def _proved(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("direct") is True
    except (OSError, ValueError, AttributeError):
        return False  # no proof, or not one of ours: staging always works


def _mpi_says() -> bool:
    """Ask the MPI library that is loaded: Open MPI and MPICH export the same two names."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    libraries = {line.split()[-1] for line in maps.splitlines() if "/libmpi" in line}
    for path in sorted(libraries):
        try:
            library = ctypes.CDLL(path)
            for name in ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support"):
                if hasattr(library, name) and getattr(library, name)():
                    return True
        except OSError:
            continue
    return False
