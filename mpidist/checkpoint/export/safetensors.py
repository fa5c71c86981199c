"""Write arrays in the safetensors format, which model hubs and other frameworks read.

    8 bytes   length of the header, little endian
    header    JSON: {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data      the arrays one after the other, little endian, in C order, without gaps

The arrays are sorted by the size of their elements, largest first, so that the elements are aligned
if the file is mapped into memory. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...errors import ConfigError

#: A dict from the name of a dtype in NumPy or ml_dtypes to its name in the safetensors format.
DTYPES = {
    "bool": "BOOL",
    **{f"{sign}int{n}": f"{sign.upper() or 'I'}{n}" for sign in ("", "u") for n in (8, 16, 32, 64)},
    **{f"float{n}": f"F{n}" for n in (16, 32, 64)},
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}

METADATA = "__metadata__"
#: The longest header in bytes; readers of the format refuse a longer one.
_MAX_HEADER = 100_000_000


def write(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], path: Path) -> None:
    """Write `arrays` under their names, and the strings of `metadata`, to a new file.

    Raises ConfigError if the format has no name for a dtype, or if the header gets too long.
    """
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {METADATA: dict(metadata)}
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        facts = {"dtype": _dtype(name, array.dtype), "shape": list(array.shape)}
        header[name] = {**facts, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ConfigError(
            f"the header would have {len(text)} bytes, at most {_MAX_HEADER} are allowed; export "
            "to .h5 or .npz"
        )
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            file.write(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)


def _dtype(name: str, dtype: np.dtype) -> str:
    """Return the safetensors name of `dtype`, the dtype of the array `name`."""
    if name == METADATA:
        raise ConfigError(f"an array is named {METADATA}, which is the name of the extras")
    if dtype.name not in DTYPES:
        raise ConfigError(
            f"{name} is of dtype {dtype}, for which safetensors has no name; export to .h5 or .npz"
        )
    return DTYPES[dtype.name]
