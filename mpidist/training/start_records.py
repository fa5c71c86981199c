"""Records of each start of a run: a copy of the job file, and the command of the start.

    runs/digits/starts/0001.toml   0001.json      the first start
    runs/digits/starts/0002.toml   0002.json      the run was resumed, perhaps on another day

No record is overwritten.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any


def keep(folder: Path, job_file: Path, facts: Mapping[str, Any]) -> None:
    """Record a new start of the run in `folder`: write `facts` and a copy of `job_file`.

    Raises OSError if the files cannot be written.
    """
    starts = folder / "starts"
    starts.mkdir(exist_ok=True)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    text = json.dumps({"time": now, **facts}, indent=2) + "\n"
    taken = (int(path.stem) for path in starts.glob("*.json") if path.stem.isdecimal())
    for number in count(1 + max(taken, default=0)):
        try:
            with (starts / f"{number:04}.json").open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue  # another job that starts now has taken this number
        (starts / f"{number:04}.toml").write_bytes(job_file.read_bytes())
        return
