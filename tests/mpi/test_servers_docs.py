"""The code in docs/parameter_servers.md runs unchanged."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "parameter_servers.md"


@pytest.mark.ranks(2, further=(4,))
def test_the_page_runs(comm):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 9
    names = {"given": comm}
    for block in blocks:
        exec(block.replace("MPI.COMM_WORLD", "given"), names)
    report = names["group"].report()
    for rank in report["servers"]:
        assert report["ranks"][rank]["server"]["models"]["m"]["updates"] == 6
