"""What a run folder keeps of each start: the job file as it was given, and by whom it was run.

    runs/digits/starts/0001.toml   0001.json      the first start
    runs/digits/starts/0002.toml   0002.json      it was gone on with, perhaps on another day

Nothing is overwritten: a start takes the next number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any


def keep(folder: Path, job_file: Path, facts: Mapping[str, Any]) -> None:
    """Keep `facts` and a copy of `job_file` as one more start of the run in `folder`.

    Raises OSError where that cannot be written.
    """
    starts = folder / "starts"
    starts.mkdir(exist_ok=True)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    text = json.dumps({"time": now, **facts}, indent=2) + "\n"
    for number in count(1 + max(map(_number, starts.glob("*.json")), default=0)):
        try:
            with (starts / f"{number:04}.json").open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue  # of another job that starts here now
        (starts / f"{number:04}.toml").write_bytes(job_file.read_bytes())
        return


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0
