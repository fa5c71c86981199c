"""The error texts in docs/errors.md are those of the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ours(text):
    """Yield the quoted messages of the tables that begin with "mpidist says"."""
    inside = False
    for line in text.splitlines():
        if line.startswith("| mpidist says"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("| ---"):
            yield re.search(r"`([^`]+)`", line)[1]


def test_every_quoted_message_is_in_the_source():
    """R97: the page is searched for words a user has seen, so they must be the words we say."""
    source = " ".join(path.read_text() for path in sorted((ROOT / "mpidist").rglob("*.py")))
    # String literals that Python joins, and values that are filled in, are joined here as well.
    source = re.sub(r'"\s+f?"', "", source)
    source = re.sub(r'\{[^{}"]*\}', "…", source)
    quoted = list(ours((ROOT / "docs" / "errors.md").read_text()))
    assert len(quoted) >= 20
    for message in quoted:
        parts = [part.strip(" :,") for part in re.split(r"…|\(|\)", message)]
        # Short pieces between two values prove nothing.
        missing = [part for part in parts if len(part) >= 6 and part not in source]
        assert not missing, message
