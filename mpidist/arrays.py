"""Convert, allocate and copy NumPy and CuPy arrays. No other module uses cupy.

NumPy and CuPy arrays are used as they are. A tensor with DLPack (torch, JAX, ...) becomes a NumPy
or CuPy array over the same memory. cupy is imported only when the program already has a device
array, so a host without a GPU does not need cupy.

Data of a GPU are copied to host buffers in pinned memory before MPI sends them. MPI gets device
memory directly only if the user or the MPI library asks for it and a test on this host has
succeeded (see `mpi_direct`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import platform
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConfigError
from .tensors import is_module, shared_bits, tensors_of

_CUDA, _CUDA_MANAGED, _ROCM = 2, 13, 10  # the device types of DLPack for GPU memory
_FLOAT32 = np.dtype(np.float32)


# ---------------------------------------------------------------------------------- what it is


def is_device(x) -> bool:
    """Return whether `x` is a CuPy array."""
    if isinstance(x, np.ndarray):
        return False
    # A CuPy array can exist only if the program has imported cupy.
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def array_module(x):
    """Return the module ``numpy``, or ``cupy`` if `x` is a device array."""
    return sys.modules["cupy"] if is_device(x) else np


def as_array(x, written: bool = True):
    """Return `x` as a NumPy or CuPy array; what is written into the result also changes `x`.

    Parameters
    ----------
    x : numpy.ndarray, cupy.ndarray or an object with ``__dlpack__``
        An array is returned as it is. An object of a subclass of ndarray is returned as a plain
        array. A tensor of another library is returned as a view, which is writable if that library
        allows writing.
    written : bool
        Whether the caller writes into the result. The text of an error depends on `written`.

    Raises
    ------
    ConfigError
        For lists, scalars and other objects without memory to share, for masked arrays, and for
        tensors whose library does not share their memory.
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
    cure = "wrap it: numpy.asarray(x)"
    if written:
        cure += ", and keep the array, because the result is written into it"
    raise ConfigError(f"expected a NumPy, CuPy or DLPack array, got {type(x).__name__}; {cure}")


def _from_dlpack(x):
    name = f"{type(x).__module__}.{type(x).__name__}"
    device = int(x.__dlpack_device__()[0])
    try:
        if device in (_CUDA, _CUDA_MANAGED, _ROCM):
            import cupy  # the program has a device tensor

            return cupy.from_dlpack(x)
        array = np.from_dlpack(x)
    except ImportError as error:
        raise ConfigError(
            f"{name} lives on a GPU, and sharing it needs cupy, which is not installed here; "
            "install mpidist[cuda12] or mpidist[cuda13]"
        ) from error
    except Exception as error:  # each library raises another class: BufferError, TypeError, ...
        for other_way in (shared_bits, _readable):
            if (found := other_way(x)) is not None:
                return found
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{name} cannot be shared as an array: {reason}") from error
    if array.flags.writeable:
        return array
    # DLPack before version 1 has no flag for writable memory, so NumPy makes a read-only array. If
    # the array protocol returns a writable array over the same memory, that array is used.
    other = np.asarray(x) if hasattr(x, "__array__") else array
    same = other.shape == array.shape and other.dtype == array.dtype
    same = same and other.__array_interface__["data"][0] == array.__array_interface__["data"][0]
    return other if same and other.flags.writeable else array


def _readable(x) -> np.ndarray | None:
    """Return `x` as a read-only array, for a dtype that DLPack does not support (bfloat16 of JAX).

    The result may be a copy of `x`. If `x` cannot be converted, the result is None.
    """
    try:
        array = x.__array__().view()
    except Exception:  # the caller then raises an error with DLPack's reason
        return None
    array.flags.writeable = False
    return array


def load_cupy():
    """Import the package cupy and return it.

    Raises
    ------
    ConfigError
        If cupy is not installed or finds no device.
    """
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() > 0:
            return cupy
        reason = "no device"
    except Exception as error:  # a broken driver raises errors of many classes
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise ConfigError(f"no GPU to work on ({reason}); install mpidist[cuda12] or use NumPy arrays")


def to_device(x, local_rank: int):
    """Return a copy of a host array in the memory of this rank's GPU.

    The number of the GPU is `local_rank` modulo the number of GPUs that this rank sees. Raises
    ConfigError without cupy or without a GPU.
    """
    cupy = load_cupy()
    cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy.asarray(x)


def is_writable(x) -> bool:
    """Return whether the memory of `x` is writable; device memory always is."""
    return x.flags.writeable if isinstance(x, np.ndarray) else True


def all_finite(x) -> bool:
    """Return whether all values of an array are finite."""
    if x.dtype.kind in "iubSUOmM" or x.dtype.names:
        return True
    isfinite = array_module(x).isfinite
    # If the sum is finite, all values are finite, and a sum needs no temporary array. If the sum is
    # not finite, each value is tested, because finite values may have an infinite sum.
    with np.errstate(over="ignore", invalid="ignore"):
        if x.dtype.char in "fd" and x.ndim == 1:
            # The sum of squares (`dot`) takes half of the time of a plain sum, and `math.isfinite`
            # is faster for one number than NumPy's `isfinite`.
            return math.isfinite(x.dot(x)) or bool(isfinite(x).all())
        total = x.sum()
        return bool(isfinite(total) or isfinite(x).all())


@cache
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of memory that it has freed, for its next arrays."""
    # glibc then keeps twice as much (M_MMAP_THRESHOLD in mallopt(3)). Otherwise each step would
    # have the page faults of its new arrays.
    np.empty(31 << 20, np.uint8)  # freed at once, and never touched


def unique_numbers(x) -> np.ndarray:
    """Return the different values of a NumPy array, sorted."""
    # Without counts, `np.unique` would import `np.ma`, which takes 9 ms.
    return np.unique(x, return_counts=True)[0]


def medians(x) -> np.ndarray:
    """Return the medians over the first axis of `x`, which must not be empty."""
    # `np.median` would import `np.ma`, which takes 9 ms.
    ordered = np.sort(x, axis=0)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


@lru_cache(maxsize=256)  # reading the name of a dtype takes 2 us
def work_dtype(dtype) -> np.dtype:
    """Return the dtype in which values of `dtype` are added.

    The result is float32 for float16 and bfloat16, because a sum in half precision would lose bits
    at every addition. For other dtypes it is `dtype` itself in native byte order.
    """
    dtype = np.dtype(dtype)
    if dtype.name in ("float16", "bfloat16"):
        return _FLOAT32
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def element_name(dtype: np.dtype) -> str:
    """Return a name for a dtype; before arrays are sent as bytes, ranks compare these names.

    Raises ConfigError for Python objects, which cannot be sent as bytes.
    """
    if dtype.hasobject:
        raise ConfigError(f"elements of dtype {dtype} are Python objects; convert them to numbers")
    return dtype.name if dtype.isnative and not dtype.names else str(dtype)


def named_arrays(params) -> tuple[list[tuple[str, Any]], str | None]:
    """Return the sorted (name, array) pairs of a model or mapping, and an error text or None."""
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
    """Wait until the current CUDA stream has computed `x`; for a host array, do nothing."""
    if is_device(x):
        with x.device:
            sys.modules["cupy"].cuda.get_current_stream().synchronize()


def device_of(x):
    """Return a context manager that makes the GPU of `x` current, or does nothing on the host."""
    return x.device if is_device(x) else nullcontext()


def host_empty(count: int, dtype, like=None) -> np.ndarray:
    """Return a one-dimensional NumPy buffer, in pinned memory if `like` is a device array."""
    dtype = np.dtype(dtype)
    nbytes = count * dtype.itemsize
    if nbytes == 0 or not is_device(like):
        return np.empty(count, dtype)
    with like.device:  # otherwise CUDA would also begin to use the current GPU
        memory = sys.modules["cupy"].cuda.alloc_pinned_memory(nbytes)
    # The allocator rounds the length up, so the view is given the exact length. The view keeps
    # `memory` alive.
    return np.frombuffer(memory, np.uint8, nbytes).view(dtype)


def mpi_empty(count: int, dtype, like=None):
    """Return an uninitialised one-dimensional buffer that MPI can use.

    The buffer is in device memory if `like` is a device array that MPI may use directly
    (`mpi_direct`), otherwise in host memory.
    """
    if is_device(like) and mpi_direct(like):
        with like.device:
            return array_module(like).empty(count, dtype)
    return host_empty(count, dtype, like)


def copy_into(destination, source) -> None:
    """Copy an array into another; each may be a host or device array, contiguous or not.

    Either the shapes of the arrays are equal, or one array is one-dimensional with its values in C
    order. Values are cast to the dtype of `destination`.
    """
    if destination.shape != source.shape and 1 not in (destination.ndim, source.ndim):
        raise ConfigError(f"cannot copy shape {source.shape} into shape {destination.shape}")
    if not is_device(destination):
        (_download if is_device(source) else _assign)(destination, source)
        return
    with destination.device:
        (_assign if is_device(source) else _upload)(destination, source)
        synchronize(destination)


def _assign(destination, source) -> None:
    """Copy between two host arrays or between two device arrays."""
    if destination.shape == source.shape:
        destination[...] = source
    elif destination.flags.c_contiguous:
        # Reshaping a contiguous array makes no copy, so the assignment writes into `destination`
        # itself.
        destination.reshape(source.shape)[...] = source
    else:
        destination[...] = source.reshape(destination.shape)


def _download(destination: np.ndarray, source) -> None:
    # The values are packed and cast on the device first, so that few bytes cross the bus, in one
    # copy. The method `get` runs after the work of the current stream, and waits for the copy.
    with source.device:
        flat = source.reshape(-1)
        if flat.dtype != destination.dtype:
            flat = flat.astype(destination.dtype)
        if destination.flags.c_contiguous:
            flat.get(out=destination.reshape(-1))
        else:
            _assign(destination, flat.get())


def _upload(destination, source: np.ndarray) -> None:
    packed = np.ascontiguousarray(source, destination.dtype)
    if destination.flags.c_contiguous:
        destination.reshape(-1).set(packed.reshape(-1))
        return
    staged = sys.modules["cupy"].empty(packed.shape, destination.dtype)
    staged.set(packed)
    _assign(destination, staged)


# ------------------------------------------------------------------------- device memory and MPI

_wanted: bool | None = None  # what the user has asked for; None: ask the MPI library
_answer: bool | None = None  # the result of `mpi_direct`, found once per process


def set_direct(wanted: bool | None) -> None:
    """Set whether MPI gets device memory (True or False); None lets the MPI library decide."""
    global _wanted, _answer
    _wanted, _answer = wanted, None


def direct_wanted(environ: Mapping[str, str]) -> bool | None:
    """Return whether the environment asks to pass GPU memory to MPI; None if it does not say."""
    said = environ.get("MPIDIST_GPU_DIRECT", "").strip()
    if said not in ("", "0", "1"):
        raise ConfigError(f"MPIDIST_GPU_DIRECT={said!r}: expected 0 (staged) or 1 (direct)")
    if said:
        return said == "1"
    return True if environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" else None


def mpi_direct(x) -> bool:
    """Return whether MPI may use the memory of `x` directly.

    For a device array the result is true only if the user or the MPI library asks for direct use,
    and if the test ``mpiexec -n 2 python -m mpidist.gpu_direct`` has succeeded on this host with
    the same MPI, cupy and driver.
    """
    global _answer
    if isinstance(x, np.ndarray):
        return True
    if _answer is None:
        wanted = _mpi_says() if _wanted is None else _wanted
        _answer = wanted and _proved(proof_path())
    return _answer


def proof_path() -> Path:
    """Return the path of the file with the result of `mpidist.gpu_direct` on this host.

    Needs MPI.
    """
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
        return False  # there is no valid proof; host buffers always work


def _mpi_says() -> bool:
    """Return whether the loaded MPI library (Open MPI or MPICH) says that it supports GPUs."""
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
