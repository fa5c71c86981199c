"""Profiles of layers: what is read, what is left out, and what is refused (R61, R84)."""

import math

import numpy as np
import pytest

from mpidist.errors import ConfigError
from mpidist.pipeline import Layer, chain, measure, read_profile, write_profile
from mpidist.pipeline.layer_profile import parse_profile

COSTS = "forward_compute_time=1.5, backward_compute_time=2.0, activation_size={}, parameter_size=8"


def node(name, text="Linear", size="4", more=""):
    return f"{name} -- {text} -- {COSTS.format(size)}{more}\n"


def test_units_lists_and_stages():
    text = (
        node("a", "LSTM(1, 2)  (x): y", "[4.0; 2; 1.5]", " -- stage_id=3") + node("b") + "\ta -- b"
    )
    profile = parse_profile(text)
    a, b = profile.layers
    assert (a.name, a.text, a.output_bytes, a.parameter_bytes) == (
        "a",
        "LSTM(1, 2)  (x): y",
        7.5,
        8,
    )
    assert (a.forward, a.backward, a.stage, b.stage) == (0.0015, 0.002, 3, None)
    assert profile.edges == ((0, 1),)
    assert profile.seconds == pytest.approx(0.007)


def test_inputs_and_unused_outputs_are_left_out():
    names = [
        node("i", "Input0"),
        node("a"),
        node("u", "__getitem__(1)"),
        node("v", "__getitem__(0)"),
    ]
    names += [node("g", "__getitem__(0)"), node("b")]
    edges = "\ti -- a\n\ta -- u\n\tu -- v\n\ta -- g\n\tg -- b\n"
    profile = parse_profile("".join(names) + edges)
    assert [layer.name for layer in profile.layers] == ["a", "g", "b"]
    assert profile.edges == ((0, 1), (1, 2))
    assert profile.inputs == ("i",)


def test_the_order_is_one_in_which_data_flow():
    text = node("c") + node("a") + node("b") + "\ta -- b\n\tb -- c\n\ta -- c\n"
    assert [layer.name for layer in parse_profile(text).layers] == ["a", "b", "c"]


def test_what_is_written_is_read_again(tmp_path):
    first = parse_profile(node("a", more=" -- stage_id=0") + node("b", size="0.1") + "\ta -- b\n")
    write_profile(first, tmp_path / "p.txt")
    assert read_profile(tmp_path / "p.txt") == first
    assert chain(first.layers) == first


def test_measured_times_are_written_as_numbers(tmp_path):
    layer = Layer("a", "x", np.float64(1e-3), np.float32(0.5), 1, np.int64(8))
    write_profile(chain([layer]), tmp_path / "p.txt")
    assert read_profile(tmp_path / "p.txt").layers == (layer,)


@pytest.mark.parametrize("layer", [("a b", "x", 1.0), ("a", "x\ny", 1.0), ("a", "x", math.nan)])
def test_what_could_not_be_read_is_not_written(tmp_path, layer):
    with pytest.raises(ConfigError, match=r"p\.txt, line 1"):
        write_profile(chain([Layer(*layer, 1.0, 1.0, 1.0)]), tmp_path / "p.txt")
    assert not (tmp_path / "p.txt").exists()


WRONG = {
    "": "no nodes",
    node("i", "Input0"): "no nodes but inputs",
    node("a") + node("a"): r"line 2: a second node a",
    node("a") + "\ta -- b\n": r"line 2: unknown node 'b'",
    node("a") + node("b") + "\ta -- b\n\tb -- a\n": "the edges form a cycle, .* node a",
    node("a") + "\ta -- a\n": "cycle",
    node("a") + "what is this\n": r"line 2: 'what is this'; expected `NAME -- TEXT",
    node("a", size="-1"): r"line 1: activation_size=-1; expected a finite number >= 0",
    node("a", size="nan"): "finite",
    node("a", size="inf"): "finite",
    node("a", size="[1e308; 1e308]"): "finite",
    node("a", size="[1; x]"): r"activation_size='\[1; x\]'; expected a number",
    node("a", more=" -- stage_id=-1"): "stage_id='-1'; expected a whole number",
    node("a").replace("parameter_size=8", "parameter_size=[8; 9]"): "expected one number",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_profile_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=WRONG[text]) as error:
        parse_profile(text, "x.txt")
    assert str(error.value).startswith("x.txt")
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.txt"):
        read_profile(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary"):
        read_profile(tmp_path / "binary")


def test_a_layer_that_readers_would_leave_out_is_refused(tmp_path):
    layer = Layer("a", "InputNorm", 0.1, 0.1, 1, 1)
    with pytest.raises(ConfigError, match="node a has the text 'InputNorm'"):
        write_profile(chain([layer, Layer("b", "Dense", 0.1, 0.1, 1, 1)]), tmp_path / "p.txt")
    assert not (tmp_path / "p.txt").exists()


@pytest.mark.parametrize("repeats", [0, -1, 1.5])
def test_a_profile_needs_at_least_one_pass(repeats):
    with pytest.raises(ConfigError, match=f"repeats is {repeats}, expected a whole number of at"):
        measure(None, None, repeats=repeats)
