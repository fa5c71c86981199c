"""``mpidist simulate``: its map, costs and picture, and errors for bad input (R124; issue 3)."""

import sys

import pytest

from mpidist.cli.main import main
from mpidist.collectives.schedules import ring
from mpidist.simulator import drawing
from mpidist.simulator.network_model import DEFAULT, save


def test_picture_of_the_ring():
    text = drawing.text(lambda p, r, n, itemsize: ring.allreduce(p, r, n), 4, 4)
    lines = text.splitlines()
    assert len(lines) == 6
    assert lines[0] == "round 0   0 -[3:4]-> 1   1 -[0:1]-> 2   2 -[1:2]-> 3   3 -[2:3]-> 0"


def test_command_prints_map_and_cost(capsys):
    assert main(["simulate", "allreduce", "--algorithm", "ring", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    assert "round 13" in out
    assert "14 messages" in out
    assert "ms" in out or "us" in out


def test_parameters_come_from_a_file_and_options_overrule_it(tmp_path, capsys):
    file = tmp_path / "p.json"
    save(file, DEFAULT._replace(gap=8e-9, latency=0.0, reduction=0.0))
    words = ["simulate", "allreduce", "--ranks", "4", "--bytes", "16000000"]
    assert main([*words, "--parameters", str(file)]) == 0
    # 2 (p-1)/p N gap
    assert "192.000 ms" in capsys.readouterr().out
    assert main([*words, "--parameters", str(file), "--bandwidth", "0.25"]) == 0
    assert "96.000 ms" in capsys.readouterr().out


def test_nodes_share_links(capsys):
    words = ["simulate", "allreduce", "--algorithm", "butterfly", "--ranks", "4096"]
    assert main([*words, "--nodes", "512"]) == 0
    assert "simulated" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ring", "double_tree"])
def test_picture_over_time(name, tmp_path, capsys):
    file = tmp_path / "schedule.png"
    words = ["simulate", "allreduce", "--algorithm", name, "--ranks", "8", "--nodes", "4"]
    assert main([*words, "--picture", str(file)]) == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert str(file) in capsys.readouterr().out
    assert "matplotlib.pyplot" not in sys.modules


def test_picture_without_matplotlib(tmp_path, capsys, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "allreduce", "--picture", str(tmp_path / "x.png")]) == 2
    assert "pip install 'mpidist[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["allreduce", "--algorithm", "rnig"], "did you mean 'ring'"),
        (["allreduce", "--ranks", "0"], "ranks"),
        (["allreduce", "--ranks", "6", "--nodes", "4"], "expected a multiple"),
        (["allreduce", "--algorithm", "native"], "native has no schedule"),
        (["allreduce", "--algorithm", "direct", "--ranks", "16384"], "direct on 16384 ranks"),
        (["allreduce", "--picture", "x.gif"], "expected a name that ends in .png"),
        (["allreduce", "--ranks", "100", "--picture", "x.png"], "2 to 64 ranks"),
        (["allreduce", "--parameters", "nowhere.json"], "no parameters of a network"),
        (["measure", "--sizes", "1,x"], "--sizes 1,x"),
        (["measure", "--algorithms", "ring,tre"], "did you mean 'tree'"),
        (["measure", "--blocks", "0"], "--blocks 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, capsys):
    assert main(["simulate", *argv]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.splitlines()) == 1
