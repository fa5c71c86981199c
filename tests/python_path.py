"""The module search path of a program that a test starts."""

import os
from pathlib import Path

#: The folder of `onebox` and `benchmarks`.
TESTS = Path(__file__).resolve().parent


def python_path(folder=TESTS) -> str:
    """The value of PYTHONPATH with `folder` before what is on it already."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
