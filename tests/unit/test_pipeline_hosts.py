"""R126: on how many hosts the workers of a pipeline should be."""

import json

import pytest

from mpidist.cli.main import main
from mpidist.errors import ConfigError
from mpidist.pipeline import Layer, chain, cut, write_profile
from mpidist.pipeline.grid.host_advice import advise_hosts, best_layout
from mpidist.simulator.network_model import NetworkModel, save

#: Eight layers of 3 ms, each with 4 MB of parameters and an output of 0.5 MB.
LAYERS = chain([Layer(f"layer{k}", "Dense", 0.001, 0.002, 5e5, 4e6) for k in range(8)])
SLOW = NetworkModel(gap=1e-8, node_gap=1e-10)  # 0.1 GB/s between hosts, 10 GB/s within
FAST = NetworkModel(gap=1e-12, node_gap=1e-12)


def test_one_worker_on_each_host_takes_as_long_as_the_partition_says():
    """The same formula, where every worker has a link of its own."""
    for network in (SLOW, FAST):
        layouts = advise_hosts(LAYERS, workers=4, network=network)
        assert [(one.hosts, one.workers_each) for one in layouts] == [(1, 4), (2, 2), (4, 1)]
        alone = cut(LAYERS, workers=4, bandwidth=1 / network.gap)
        assert layouts[-1].seconds <= alone.bottleneck_seconds * (1 + 1e-9)
        if network is SLOW:
            assert layouts[-1].seconds == pytest.approx(alone.bottleneck_seconds, rel=1e-9)
            assert layouts[-1].limit == "network"


def test_a_slow_network_is_avoided_and_a_fast_one_does_not_matter():
    """8 linked workers on one host, not 8 hosts; of equal layouts the one with fewest hosts."""
    slow = advise_hosts(LAYERS, workers=8, network=SLOW)
    assert best_layout(slow).hosts == 1
    assert slow[0].bytes_between == 0
    assert slow[0].limit != "network"
    assert slow[0].seconds < 0.5 * slow[-1].seconds
    fast = advise_hosts(LAYERS, workers=8, network=FAST)
    assert {one.limit for one in fast} == {"workers"}
    assert best_layout(fast).hosts == 1
    # Memory that all ranks of a host share may be slower than the links of many hosts.
    memory = NetworkModel(gap=1e-11, node_gap=1e-7)
    assert best_layout(advise_hosts(LAYERS, workers=4, network=memory)).hosts == 4


def test_bytes_between_two_hosts_by_hand():
    """Two stages without replicas on two hosts: one output there and one gradient back."""
    settings = {"replication": False, "stages": 2}
    one, two = advise_hosts(LAYERS, workers=2, network=SLOW, settings=settings)
    assert (one.bytes_between, two.bytes_between) == (0, 2 * 5e5)
    assert two.replicas == (1, 1)
    assert two.seconds == pytest.approx(max(0.012, 5e5 * 1e-8), rel=1e-9)


def test_the_command(tmp_path, capsys):
    """Text and JSON; without --bandwidth, the plan uses the measured bandwidth between hosts."""
    profile, network, plan = tmp_path / "p.txt", tmp_path / "n.json", tmp_path / "plan.json"
    write_profile(LAYERS, profile)
    save(network, SLOW)
    command = ["pipeline", "partition", str(profile), "--workers", "4", "--network", str(network)]
    assert main([*command, "--json", str(plan)]) == 0
    said = capsys.readouterr().out
    assert "prefer one host with 4 workers each; measured: 10.00 GB/s within a host, 0.10" in said
    facts = json.loads(plan.read_text())
    assert [one["hosts"] for one in facts["hosts"]] == [1, 2, 4]
    seconds = cut(LAYERS, workers=4, bandwidth=1e8).bottleneck_seconds
    assert facts["bottleneck_seconds"] == pytest.approx(seconds)


def test_wrong_networks(tmp_path, capsys):
    """One line: a file that is not there, and one in which a bandwidth is missing."""
    profile, network = tmp_path / "p.txt", tmp_path / "n.json"
    write_profile(LAYERS, profile)
    command = ["pipeline", "partition", str(profile), "--workers", "4", "--network", str(network)]
    assert main(command) == 2
    assert "n.json: no parameters of a network" in capsys.readouterr().err
    save(network, SLOW._replace(node_gap=0.0))
    assert main(command) == 2
    assert "gap and node_gap must be above 0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="workers"):
        advise_hosts(LAYERS, workers=0, network=SLOW)
