"""``mpidist bench`` prints readable rows with consistent figures, and leaves nothing behind."""

import json
import sys

import pytest
from tiers import exhaustive

from mpidist.launch.launchers import launch

MPIDIST = [sys.executable, "-m", "mpidist"]


@pytest.mark.parametrize("ranks", [1, exhaustive(3)])
def test_checkpoint(tmp_path, ranks):
    """Save, stall and restore, each with its yardstick of the same run; text and JSON agree."""
    store = tmp_path / "store"
    store.mkdir()
    words = ["--size", "0.3", "--rounds", "3", "--folder", str(store), "--json", "rows.json"]
    result = launch(
        ranks, [*MPIDIST, "bench", "checkpoint", *words], cwd=tmp_path, timeout=200
    ).check()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["what"] for row in rows] == ["save", "stall", "async", "restore", "unchecked"]
    for row in rows:
        assert set(row) == {
            "what", "beside", "bytes", "ranks", "median_s", "plain_s", "ratio", "mb_per_s",
        }  # fmt: skip
        assert row["ranks"] == ranks
        # Two equal halves of whole float32 elements.
        assert row["bytes"] == int(0.3 * (1 << 20)) // 8 * 8
        assert min(row["median_s"], row["plain_s"], row["ratio"]) > 0
        assert row["mb_per_s"] == pytest.approx(row["bytes"] / row["median_s"] / 1e6, rel=1e-3)
        (line,) = [t for t in result.stdout.splitlines() if t.split()[:1] == [row["what"]]]
        assert float(line.split()[4]) == pytest.approx(row["ratio"], abs=0.006)
    assert list(store.iterdir()) == []


def test_bad_input_is_one_line(tmp_path, many):
    cases = (("--folder", "nowhere"), ("--size", "0"), ("--rounds", "-1"))
    wanted = {words: [*MPIDIST[1:], "bench", "checkpoint", *words] for words in cases}
    for result in many(2, wanted, cwd=tmp_path).values():
        assert result.returncode == 2
        assert result.stderr.count("mpidist: error: --") == 1


def test_overlap_on_one_node_says_that_nothing_travels(tmp_path):
    words = ["--size", "1", "--layers", "8", "--rounds", "2", "--json", "rows.json"]
    result = launch(2, [*MPIDIST, "bench", "overlap", *words], cwd=tmp_path, timeout=200).check()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["progress"] for row in rows] == ["hooks", "thread"]
    assert all(row["hidden"] is None and not row["overlap"] for row in rows)
    assert "no messages are sent" in result.stdout


def test_training_steps(tmp_path):
    """A row per model; torch DDP beside it only where it is asked for."""
    words = ["--rounds", "1", "--json", "rows.json"]
    result = launch(2, [*MPIDIST, "bench", "step", *words], cwd=tmp_path, timeout=200).check()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["model"] for row in rows] == ["lenet 8x8", "lenet 28x28", "mlp 784-512-256-10"]
    assert all(row["step_us"] > 0 and "torch_us" not in row for row in rows)
    assert "lenet 8x8, 64" in result.stdout


def test_servers(tmp_path, many):
    """R11, R16, R65, R120: each case beside plain messages and allreduce; text and JSON agree."""
    command = [*MPIDIST[1:], "bench", "servers", "--rounds", "3", "--bytes", "1000", "--json"]
    jobs = {
        "sweep": [*command, "sweep.json", "--sweep", "--compute", "0.01", "--histogram"],
        "one": [*command, "one.json", "--workers", "2", "--bound", "1"],
        "none": [*command, "none.json", "--workers", "9"],
        "bound": [*command, "none.json", "--bound", "2"],
    }
    results = many(3, jobs, cwd=tmp_path)
    said = results["sweep"].check().stdout
    rows = json.loads((tmp_path / "sweep.json").read_text())
    cases = [(row["workers"], row["servers"], row["placement"]) for row in rows]
    assert cases == [
        (1, 1, "dedicated"), (1, 2, "dedicated"), (2, 1, "dedicated"),
        (1, 1, "colocated"), (2, 2, "colocated"),
    ]  # fmt: skip
    for row in rows:
        assert min(row["push_pull_us"], row["raw_us"], row["allreduce_us"], row["over_raw"]) > 0
        assert row["step_us"] >= row["compute_us"] == 0.01e6 / row["workers"]
        assert row["ideal"] == row["workers"] >= row["speed_up"] > 0
        assert 0 <= row["share"] < 1
        assert [sum(counts) for counts in row["histogram"]["counts"]] == [3] * row["workers"]
    assert said.count("\n#   worker ") == sum(row["workers"] for row in rows)
    assert "# 1000 bytes: " in said
    (row,) = json.loads((tmp_path / "one.json").read_text())
    assert (row["bytes"], row["workers"], row["servers"]) == (1000, 2, 1)
    assert "warning" not in results["one"].check().stdout
    for name, told in (("none", "no case with dedicated"), ("bound", "--bound 2: expected")):
        assert results[name].returncode == 2
        assert told in results[name].stderr
