"""Write arrays in the safetensors format, which model hubs and other frameworks read.

    8 bytes   length of the header, little endian
    header    JSON: {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data      the arrays one after the other, little endian, in C order, without a hole

Arrays of wide elements come first and the header is filled up with blanks to a multiple of 8, so
that each array begins at a multiple of its element's size for those who map the file.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...errors import ConfigError

#: The format's names by those of NumPy and ml_dtypes.
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
#: Readers refuse a longer header.
_MAX_HEADER = 100_000_000


def write(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], path: Path) -> None:
    """Write `arrays` by name, and texts by name, to a new file.

    Raises ConfigError where the format has no name for a dtype, or no room for the names.
    """
    ordered = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    header: dict[str, object] = {METADATA: dict(metadata)}
    end = 0
    for name in ordered:
        array = arrays[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _dtype(name, array.dtype),
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ConfigError(
            f"the header would have {len(text)} bytes, at most {_MAX_HEADER} are allowed; export "
            "to .h5 or .npz"
        )
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in ordered:
            array = arrays[name]
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            file.write(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)


def _dtype(name: str, dtype: np.dtype) -> str:
    if name == METADATA:
        raise ConfigError(f"an array is named {METADATA}, which is the name of the extras")
    try:
        return DTYPES[dtype.name]
    except KeyError:
        raise ConfigError(
            f"{name} is of dtype {dtype}, for which safetensors has no name; export to .h5 or .npz"
        ) from None
