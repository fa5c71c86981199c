"""``mpidist bench allreduce`` prints OSU's columns, its losing cases, and the same as JSON."""

import importlib.util
import json
import sys

import pytest

from mpidist.launch.launchers import launch

MPIDIST = [sys.executable, "-m", "mpidist", "bench", "allreduce"]


def test_text_and_json_agree(tmp_path):
    """Issue 3, point 9: size and latency as OSU prints them, then ours; what loses is told."""
    words = "--min 64 --max 65536 --step 32 --rounds 3 --algorithms auto,naive --json rows.json"
    result = launch(2, [*MPIDIST, *words.split()], cwd=tmp_path).check()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["bytes"] for row in rows} == {64, 2048, 65536}
    for row in rows:
        assert (row["thread_level"], row["vectors"], row["dtype"]) == ("multiple", "hot", "f4")
        assert row["mpi"]
    table = [line for line in result.stdout.splitlines() if line[:1].isdigit()]
    for line, row in zip(table, rows, strict=True):
        words = line.split(maxsplit=9)
        assert (int(words[0]), words[9]) == (row["bytes"], row["algorithm"])
        figures = [row[name] for name in ("median_us", "native_us", "ratio", "low", "high")]
        assert [float(w) for w in words[1:6]] == pytest.approx(figures, abs=0.006)
    notes = [line for line in result.stdout.splitlines() if line.startswith("#")]
    ours = [row for row in rows if row["algorithm"].split()[0] in ("auto", "naive")]
    for row in ours:
        if row["ratio"] >= 1:
            continue
        assert any(row["algorithm"] in line and f"{row['ratio']:.3f}" in line for line in notes)
    assert any("auto against the best that was chosen by hand" in line for line in notes)


def test_torch_is_a_yardstick_where_it_is_installed(tmp_path):
    """Issue 3, point 9: gloo over arena; without PyTorch one line that says what to do."""
    words = "--torch --min 65536 --max 65536 --rounds 3 --algorithms auto --json rows.json"
    result = launch(2, [*MPIDIST, *words.split()], cwd=tmp_path)
    if importlib.util.find_spec("torch") is None:
        assert result.returncode == 2
        assert "--torch: no PyTorch here; pip install torch" in result.stderr
        return
    rows = json.loads((tmp_path / "rows.json").read_text())
    (gloo,) = [row for row in rows if row["algorithm"] == "torch gloo"]
    assert gloo["over_arena"] > 0
    assert "torch gloo over arena: geometric mean over 1 size" in result.check().stdout


def test_bad_input_is_one_line(tmp_path, many):
    cases = (
        (["--forms", "calls"], "--forms calls: expected some of call, plan, arena, nonblocking"),
        (["--cold", "--min", "64"], "--min 64: --cold would need"),
        (["--step", "1"], "--step 1: expected 2 or more"),
        (["--min", "0"], "--min 0: expected more than 0"),
        (["--algorithms", "rnig"], "did you mean 'ring'?"),
    )
    ends = many(2, {said: [*MPIDIST[1:], *words] for words, said in cases}, cwd=tmp_path)
    for said, result in ends.items():
        assert result.returncode == 2
        lines = [line for line in result.stderr.splitlines() if "mpidist: error: " in line]
        assert len(lines) == 1
        assert said in lines[0]
