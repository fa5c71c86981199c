"""Run `who.py` in a process whose memory is full of text, as after importing a big package."""

import os
import random
import runpy
from pathlib import Path

from mpidist.launch import start_checks

texts = [b"text " * length for length in range(110, 1200) for _ in range(10)]
random.Random(0).shuffle(texts)
del texts[::2]
start_checks.initialize(os.environ)
runpy.run_path(str(Path(__file__).with_name("who.py")))
