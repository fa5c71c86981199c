"""arrays.py without a GPU: which arrays it accepts, and the order of copies to a device."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from python_path import python_path

from mpidist import arrays, tensors
from mpidist.errors import ConfigError


@pytest.fixture
def cupy():
    with fake_cupy.installed() as module:
        yield module


class Tensor:
    """Another library's tensor: memory, and the DLPack protocol over it."""

    def __init__(self, memory, device=1, array_protocol=False, refusal=None):
        self.memory, self.device, self.refusal = memory, device, refusal
        if array_protocol:
            self.__class__ = TensorWithArray

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **kwargs):
        if self.refusal:
            raise BufferError(self.refusal)
        return self.memory.__dlpack__(**kwargs)


class TensorWithArray(Tensor):
    def __dlpack__(self, **kwargs):
        # An exporter from before DLPack 1: its capsule cannot say that writing is allowed.
        kwargs.pop("max_version", None)
        return self.memory.__dlpack__()

    def __array__(self, dtype=None, copy=None):
        return self.memory


# ---------------------------------------------------------------------------------- what it takes


def test_numpy_arrays_come_back_as_they_are():
    x = np.arange(6.0).reshape(2, 3)
    assert arrays.as_array(x) is x
    assert arrays.array_module(x) is np
    assert not arrays.is_device(x)
    assert arrays.mpi_direct(x)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", ml_dtypes.bfloat16])
def test_all_finite_looks_at_each_value(dtype):
    x = np.full(1000, 6e4, dtype)
    assert arrays.all_finite(x)  # though the sum of float16 is infinite
    for bad in (np.nan, np.inf, -np.inf):
        x[-1] = bad
        assert not arrays.all_finite(x)
        x[0] = -x[-1]
        assert not arrays.all_finite(x)
        x[0] = x[-1] = 1
    assert arrays.all_finite(np.empty(0, dtype))


def test_integers_and_texts_are_finite():
    for x in (np.arange(3), np.array(["nan"]), np.array([object()]), np.zeros(2, "f4,i4")):
        assert arrays.all_finite(x)


def test_subclasses_share_memory_as_plain_arrays(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4,))
    plain = arrays.as_array(x)
    plain[:] = 3
    assert type(plain) is np.ndarray
    assert x.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("bad", [[1, 2], (1.0,), 3.5, np.float32(1), None, "x", memoryview(b"a")])
def test_what_has_no_shared_memory_is_refused_in_one_line(bad):
    with pytest.raises(ConfigError) as error:
        arrays.as_array(bad)
    assert type(bad).__name__ in str(error.value)
    assert "\n" not in str(error.value)


def test_masked_array_is_refused():
    with pytest.raises(ConfigError, match=r"x\.filled"):
        arrays.as_array(np.ma.masked_equal([1, 2, 3], 2))


DLPACK_1 = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0",
    reason="NumPy before 2.1 cannot say in DLPack what is writable",
)


@pytest.mark.parametrize("array_protocol", [pytest.param(False, marks=DLPACK_1), True])
def test_host_tensor_is_a_writable_view(array_protocol):
    memory = np.arange(4.0)
    view = arrays.as_array(Tensor(memory, array_protocol=array_protocol))
    assert arrays.is_writable(view)
    view += 1
    assert memory.tolist() == [1, 2, 3, 4]


@DLPACK_1
def test_read_only_tensor_stays_read_only():
    memory = np.arange(4.0)
    memory.flags.writeable = False
    assert not arrays.is_writable(arrays.as_array(Tensor(memory)))


def test_refusing_tensor_gives_its_reason_in_one_line():
    tensor = Tensor(np.ones(2), refusal="requires grad; use tensor.detach()\nsecond line")
    with pytest.raises(ConfigError, match=r"test_arrays\.Tensor cannot be shared.*detach\(\)$"):
        arrays.as_array(tensor)


def test_bfloat16_that_dlpack_does_not_know_can_be_read():
    tensor = Tensor(np.ones(2, ml_dtypes.bfloat16), refusal="unsupported dtype")
    tensor.__class__ = type("Bfloat16", (Tensor,), {"__array__": lambda self: self.memory})
    array = arrays.as_array(tensor)
    assert array.dtype.name == "bfloat16"
    assert not arrays.is_writable(array)
    assert tensor.memory.flags.writeable


class LowPrecision(Tensor):
    """As torch's bfloat16: no DLPack, but a view as integers of the same bits."""

    is_cpu, requires_grad, dtype = True, False, "torch.bfloat16"

    def view(self, bits):
        assert bits == "int16"
        return SimpleNamespace(numpy=lambda: self.memory.view(bits))

    def element_size(self):
        return 2


@pytest.fixture
def torch(monkeypatch):
    module = SimpleNamespace(Tensor=LowPrecision, int16="int16", uint8="uint8")
    monkeypatch.setitem(sys.modules, "torch", module)


@pytest.mark.usefixtures("torch")
def test_bfloat16_of_torch_shares_its_memory():
    """Issue 10 point 10: written in place."""
    tensor = LowPrecision(np.ones(2, ml_dtypes.bfloat16), refusal="unsupported dtype")
    array = arrays.as_array(tensor)
    assert array.dtype.name == "bfloat16"
    array[...] = 1.5
    assert tensor.memory.tolist() == [1.5, 1.5]
    tensor.requires_grad = True
    with pytest.raises(ConfigError, match="cannot be shared as an array: unsupported dtype"):
        arrays.as_array(tensor)


def test_work_of_torch_is_finished_in_torch_s_stream(monkeypatch):
    """CuPy's stream does not wait for a stream that the program has chosen in torch."""
    waits = []
    cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(
        synchronize=lambda: waits.append(device)
    ))  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    tensors.finish_work(SimpleNamespace(is_cuda=False))
    tensors.finish_work(SimpleNamespace())  # of the stand-in
    assert waits == []
    tensors.finish_work(SimpleNamespace(is_cuda=True, device="cuda:1"))
    assert waits == ["cuda:1"]


def test_dtypes_have_names_of_torch():
    assert tensors.dtype_of("f4") == tensors.dtype_of("torch.float32") == np.float32
    assert tensors.dtype_of("bfloat16") == tensors.dtype_of("torch.bfloat16") == ml_dtypes.bfloat16
    with pytest.raises(TypeError):
        tensors.dtype_of("torch.nothing")


def test_unique_numbers_and_medians_are_those_of_numpy():
    rng = np.random.default_rng(5)
    for n in range(1, 8):
        x = rng.integers(0, 4, (n, 3))
        np.testing.assert_array_equal(arrays.unique_numbers(x[:, 0]), np.unique(x[:, 0]))
        np.testing.assert_array_equal(arrays.medians(x), np.median(x, axis=0))
        assert arrays.medians([*x[:, 0]]) == np.median(x[:, 0])


def test_a_start_does_not_import_masked_arrays(tmp_path):
    """9 ms of each rank, where NumPy imports `np.ma` only when it is used."""
    code = (
        "import sys, numpy\nbefore = 'numpy.ma' in sys.modules\n"
        "from checkpoint_solo import resumed, state_of\n"
        "from mpidist.data.digits import digits\n"
        "from mpidist.fault_tolerance.stragglers import find_stragglers\n"
        "digits()\nfind_stragglers(numpy.ones((3, 2)))\n"
        "store = resumed(sys.argv[1])\nstore.save(1, state_of(1))\nstore.restore()\n"
        "assert before or 'numpy.ma' not in sys.modules\n"
    )
    env = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=env, check=True, timeout=60)


def test_bfloat16_without_ml_dtypes_says_what_is_missing():
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from mpidist.tensors import dtype_of; dtype_of('torch.bfloat16')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ConfigError: bfloat16 needs the package ml_dtypes" in run.stderr


def test_device_tensor_without_cupy_names_the_extra():
    with pytest.raises(ConfigError, match=r"needs cupy.*mpidist\[cuda12\]"):
        arrays.as_array(Tensor(np.ones(2), device=2))


def test_device_tensor_becomes_a_device_array(cupy):
    memory = np.ones(2)
    x = arrays.as_array(Tensor(memory, device=2))
    assert arrays.is_device(x)
    assert arrays.array_module(x) is cupy
    assert x.memory is memory
    assert arrays.as_array(x) is x


def test_cupy_is_not_imported_by_looking():
    code = (
        "import sys, numpy as np; from mpidist import arrays; x = np.ones(3);"
        "arrays.as_array(x); arrays.synchronize(x); arrays.is_device(object());"
        "assert 'cupy' not in sys.modules and 'ml_dtypes' not in sys.modules;"
        "assert 'mpi4py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "work"),
    [
        ("f2", "f4"), (ml_dtypes.bfloat16, "f4"), ("f4", "f4"), ("f8", "f8"), ("c8", "c8"),
        ("i4", "i4"), ("?", "?"), (">f8", "=f8"), (">i2", "=i2"),
    ],
)  # fmt: skip
def test_work_dtype(given, work):
    result = arrays.work_dtype(np.dtype(given))
    assert result == np.dtype(work)
    assert result.isnative


# -------------------------------------------------------------------------------------- its memory


def test_host_empty_is_pinned_only_for_device_arrays(cupy):
    assert arrays.host_empty(5, "f4", np.ones(3)).shape == (5,)
    assert fake_cupy.calls == []
    buffer = arrays.host_empty(5, "f4", cupy.empty(3))
    assert fake_cupy.calls == ["device", "alloc_pinned"]
    assert (buffer.shape, buffer.dtype) == ((5,), np.dtype("f4"))
    buffer[:] = 1
    assert arrays.host_empty(0, "f4", cupy.empty(3)).shape == (0,)
    assert arrays.host_empty(2, ml_dtypes.bfloat16, cupy.empty(3)).dtype.name == "bfloat16"


def _layouts(shape):
    """One array of each layout, with distinct values."""
    size = int(np.prod(shape))
    values = np.arange(1.0, size + 1).reshape(shape)
    yield "C", values.copy()
    yield "F", np.asfortranarray(values)
    gaps = np.zeros((*shape[:-1], 2 * shape[-1]))[..., ::2]
    gaps[...] = values
    yield "strided", gaps
    yield "flat", values.reshape(-1).copy()


@pytest.mark.parametrize(("to", "source"), list(itertools.product(["host", "device"], repeat=2)))
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_copy_into_any_two(cupy, to, source, dtype):
    shape = (3, 4)
    expected = np.arange(1.0, 13)
    for (_, given), (name, blank) in itertools.product(_layouts(shape), _layouts(shape)):
        blank[...] = 0
        target = np.zeros_like(blank, dtype=dtype) if dtype != "f8" else blank
        given_x = fake_cupy.ndarray(given) if source == "device" else given
        target_x = fake_cupy.ndarray(target) if to == "device" else target
        arrays.copy_into(target_x, given_x)
        # Whatever the layout, element i in C order is element i: also between flat and shaped.
        assert target.reshape(-1).tolist() == expected.tolist(), name


def test_copy_into_refuses_other_shapes():
    with pytest.raises(ConfigError, match=r"\(2, 3\).*\(3, 2\)"):
        arrays.copy_into(np.zeros((3, 2)), np.zeros((2, 3)))


def test_download_sees_what_was_queued(cupy):
    x = cupy.asarray(np.zeros(3))
    x += 5  # not done yet
    assert x.memory.tolist() == [0, 0, 0]
    buffer = arrays.host_empty(3, "f8", x)
    arrays.copy_into(buffer, x)
    assert buffer.tolist() == [5, 5, 5]


def test_upload_has_arrived_before_the_buffer_may_be_reused(cupy):
    x = cupy.empty(3)
    buffer = arrays.host_empty(3, "f8", x)
    buffer[:] = 7
    arrays.copy_into(x, buffer)
    buffer[:] = 0  # the next message lands in the same staging buffer
    assert x.memory.tolist() == [7, 7, 7]
    expected = ["device", "alloc_pinned", "device", "set", "device", "synchronize"]
    assert fake_cupy.calls == expected


def test_a_copy_is_made_on_the_array_s_device(cupy):
    """Another GPU may be the current one: kernels and new memory would be on that one."""
    half = cupy.asarray(np.ones(3, "f2"))
    arrays.copy_into(np.zeros(3, "f4"), half)
    assert fake_cupy.calls == ["device", "kernel", "get"]
    fake_cupy.calls.clear()
    with arrays.device_of(half), arrays.device_of(np.ones(3)):
        assert fake_cupy.calls == ["device"]


def test_synchronize_waits_on_the_array_s_device(cupy):
    arrays.synchronize(np.ones(2))
    assert fake_cupy.calls == []
    x = cupy.asarray(np.zeros(2))
    x += 1
    arrays.synchronize(x)
    assert fake_cupy.calls == ["kernel", "device", "synchronize"]
    assert x.memory.tolist() == [1, 1]


# ------------------------------------------------------------------------- device memory and MPI


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None), ({"MPIDIST_GPU_DIRECT": "1"}, True), ({"MPIDIST_GPU_DIRECT": "0"}, False),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, True), ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, None),
        ({"MPIDIST_GPU_DIRECT": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"}, False),
    ],
)  # fmt: skip
def test_direct_wanted(environ, wanted):
    assert arrays.direct_wanted(environ) is wanted


def test_direct_wanted_refuses_other_words():
    with pytest.raises(ConfigError, match="MPIDIST_GPU_DIRECT='yes'"):
        arrays.direct_wanted({"MPIDIST_GPU_DIRECT": "yes"})


@pytest.mark.parametrize("proof", [None, '{"direct": false}', "not json", "[]", '{"direct": true}'])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_direct_needs_both_a_word_and_a_proof(cupy, tmp_path, monkeypatch, proof, wanted):
    path = tmp_path / "proof.json"
    if proof is not None:
        path.write_text(proof)
    monkeypatch.setattr(arrays, "proof_path", lambda: path)
    arrays.set_direct(wanted)
    try:
        good = wanted is True and proof == '{"direct": true}'
        assert arrays.mpi_direct(cupy.empty(2)) is good
        assert arrays.mpi_direct(np.ones(2)) is True
    finally:
        arrays.set_direct(None)


def test_load_cupy(cupy):
    assert arrays.load_cupy() is cupy
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(ConfigError, match="no device"):
        arrays.load_cupy()
