"""The simulator against the textbook formulas, and the picture (R124)."""

import pytest

from mpidist.cli.main import main
from mpidist.collectives import butterfly, direct, ring, tree
from mpidist.collectives.simulate import Network, picture, simulate

NET = Network(alpha=1e-5, beta=1e-9, gamma=3e-10)


def plain(build):
    return lambda p, r, n, itemsize: build(p, r, n)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_formulas(p):
    n = 4096 * p
    a, b, g = NET
    size = 4 * n
    k = p.bit_length() - 1
    share = (p - 1) / p * size
    cost = simulate(plain(ring.allreduce), p, n, network=NET)
    assert cost.seconds == pytest.approx(2 * (p - 1) * a + 2 * share * b + share * g)
    assert (cost.messages, cost.bytes, cost.reduced) == (2 * (p - 1), 2 * share, share)
    cost = simulate(plain(butterfly.recursive_doubling), p, n, network=NET)
    assert cost.seconds == pytest.approx(k * (a + size * b + size * g))
    cost = simulate(plain(butterfly.halving_doubling), p, n, network=NET)
    assert cost.seconds == pytest.approx(2 * k * a + 2 * share * b + share * g)
    assert cost.rounds == 2 * k
    cost = simulate(plain(tree.allreduce), p, n, network=NET)
    assert cost.seconds == pytest.approx(2 * k * (a + size * b) + k * size * g)
    cost = simulate(plain(direct.allreduce), p, n, network=NET)
    assert cost.seconds >= a + (p - 1) * size * b


def test_segments_hide_the_reduction():
    p, n = 4, 1 << 20
    whole = simulate(plain(ring.allreduce), p, n, network=NET).seconds
    cut = simulate(lambda p, r, n, i: ring.allreduce(p, r, n, segments=8), p, n, network=NET)
    assert cut.seconds < whole


def test_picture_of_the_ring():
    text = picture(plain(ring.allreduce), 4, 4)
    lines = text.splitlines()
    assert len(lines) == 6
    assert lines[0] == "round 0   0 -[3:4]-> 1   1 -[0:1]-> 2   2 -[1:2]-> 3   3 -[2:3]-> 0"


def test_command_prints_map_and_cost(capsys):
    assert main(["simulate", "allreduce", "--algorithm", "ring", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    assert "round 13" in out
    assert "14 messages" in out
    assert "ms" in out or "us" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["simulate", "allreduce", "--algorithm", "rnig"], "did you mean 'ring'"),
        (["simulate", "allreduce", "--ranks", "0"], "ranks"),
        (["simulate", "allreduce", "--algorithm", "native"], "native has no schedule"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.splitlines()) == 1
