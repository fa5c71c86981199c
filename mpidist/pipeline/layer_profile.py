"""Profiles of models: each layer's time and bytes, and which layers' outputs it uses.

Files have the format of PipeDream's profiles (Narayanan et al., SOSP 2019). Each line is a node (a
layer) or an edge. The line of an edge begins with a tab, and says that the output of the first node
is an input of the second node. Times are in milliseconds, sizes in bytes:

    node2 -- Conv2d -- forward_compute_time=22.3, backward_compute_time=6.4, activation_size=1982.0,
                       parameter_size=93184.0        (one line)
    node5 -- LSTM -- forward_compute_time=3.2, ..., activation_size=[6291456.0; 131072.0], ...
        node2 -- node5

If a node has several outputs, ``activation_size`` is the list of their sizes. ``-- stage_id=2`` at
the end of a node's line says that the layer belongs to stage 2. Nodes whose text begins with
``Input`` are inputs of the model, and take no time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, shown

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FACTS = ", ".join(rf"{key}=(?P<{key}>\[[^\]]*\]|[^,\s\[\]]+)" for key in _KEYS)
_NODE = re.compile(rf"(?P<name>\S+) -- (?P<text>.*) -- {_FACTS}(?: -- stage_id=(?P<stage>\S+))?")
_EDGE = re.compile(r"\t(\S+) -- (\S+)")


@dataclass(frozen=True)
class Layer:
    """A layer of a profiled model. Times are in seconds for one microbatch, sizes in bytes.

    `stage` is None if the profile does not say to which stage the layer belongs.
    """

    name: str
    text: str
    forward: float
    backward: float
    output_bytes: float
    parameter_bytes: float
    stage: int | None = None

    @property
    def seconds(self) -> float:
        """The time of a forward and a backward pass of this layer."""
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerProfile:
    """A model as a list of layers, in which each layer comes after the layers that feed it.

    Attributes
    ----------
    layers : tuple of Layer
        The nodes of the profile. Inputs of the model are left out, and so are nodes called
        ``__getitem__`` that feed no other node.
    edges : tuple of (int, int)
        Pairs (a, b) of indices into `layers`: the output of layer a is an input of layer b.
    inputs : tuple of str
        The names of the nodes that are inputs of the model. These nodes belong to the first stage.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    inputs: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of a forward and a backward pass of all layers on one worker."""
        return math.fsum(layer.seconds for layer in self.layers)


def read_profile(path: str | Path) -> LayerProfile:
    """Read a profile in PipeDream's text form.

    Raises
    ------
    ConfigError
        The file cannot be read, layers feed each other in a cycle, or a line is wrong. The error
        text contains the number of a wrong line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file; expected a profile of layers") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return parse_profile(text, str(path))


def parse_profile(text: str, source: str = "profile") -> LayerProfile:
    """Return the profile that `text` describes; error texts begin with the name `source`."""
    found: dict[str, Layer] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        if not line.strip():
            continue
        if edge := _EDGE.fullmatch(line.rstrip()):
            edges.append((number, edge[1], edge[2]))
        elif node := _NODE.fullmatch(line.strip()):
            layer = _layer(node, where)
            if layer.name in found:
                raise ConfigError(f"{where}: a second node {layer.name}; names must differ")
            found[layer.name] = layer
        else:
            wanted = f"`NAME -- TEXT -- {', '.join(f'{key}=…' for key in _KEYS)}`"
            wanted += " or `<tab>NAME -- NAME`"
            raise ConfigError(f"{where}: {shown(line.strip(), 60)}; expected {wanted}")
    if not found:
        raise ConfigError(f"{source}: no nodes")
    for number, *ends in edges:
        for name in ends:
            if name not in found:
                raise ConfigError(f"{source}, line {number}: unknown node {shown(name)}")
    return profile_of(found.values(), [(a, b) for _, a, b in edges], source)


def profile_of(
    layers: Iterable[Layer], edges: Iterable[tuple[str, str]], source: str = "profile"
) -> LayerProfile:
    """Return the profile of `layers`; for each pair (a, b) of `edges`, layer a feeds layer b."""
    kept = {layer.name: layer for layer in layers}
    pairs = [*dict.fromkeys(edges)]
    order = _in_order(list(kept), pairs, source)
    inputs = [name for name in kept if kept[name].text.startswith("Input")]
    feeds = {a for a, _ in pairs}
    for name in reversed(order):  # a __getitem__ node that feeds only unused nodes is unused, too
        if kept[name].text.startswith("__getitem__") and name not in feeds:
            del kept[name]
            pairs = [pair for pair in pairs if pair[1] != name]
            feeds = {a for a, _ in pairs}
    for name in inputs:
        del kept[name]
    if not kept:
        raise ConfigError(f"{source}: no nodes but inputs and unused __getitem__ nodes")
    index = {name: k for k, name in enumerate(name for name in order if name in kept)}
    within = [(index[a], index[b]) for a, b in pairs if a in index and b in index]
    return LayerProfile(tuple(kept[name] for name in index), tuple(sorted(within)), tuple(inputs))


def chain(layers: Sequence[Layer]) -> LayerProfile:
    """Return the profile of a model in which each layer feeds the next layer."""
    return LayerProfile(tuple(layers), tuple((k, k + 1) for k in range(len(layers) - 1)))


def write_profile(profile: LayerProfile, path: str | Path) -> None:
    """Write a profile to a file that `read_profile` can read.

    Raises
    ------
    ConfigError
        `read_profile` could not read the profile, for example because a name contains a blank; or
        the file cannot be written.
    """
    lines = []
    for layer in profile.layers:
        values = [layer.forward * 1e3, layer.backward * 1e3]
        values += [layer.output_bytes, layer.parameter_bytes]
        # `float`, because NumPy writes its numbers as np.float64(1.0).
        facts = ", ".join(f"{key}={float(v)!r}" for key, v in zip(_KEYS, values, strict=True))
        stage = "" if layer.stage is None else f" -- stage_id={layer.stage}"
        lines.append(f"{layer.name} -- {layer.text} -- {facts}{stage}")
    names = [layer.name for layer in profile.layers]
    lines += [f"\t{names[a]} -- {names[b]}" for a, b in profile.edges]
    text = "\n".join(lines) + "\n"
    kept = parse_profile(text, str(path)).layers
    for layer in profile.layers:
        if layer.name not in {one.name for one in kept}:
            raise ConfigError(
                f"{path}: node {layer.name} has the text {shown(layer.text)}, and a reader would "
                "leave the node out; the text of a layer must not begin with Input or __getitem__"
            )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _layer(node: re.Match, where: str) -> Layer:
    values = []
    for key in _KEYS:
        parts = node[key].strip("[]").split(";")
        if len(parts) > 1 and key != "activation_size":
            raise ConfigError(f"{where}: {key}={node[key]}; expected one number")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            raise ConfigError(f"{where}: {key}={shown(node[key])}; expected a number") from None
        values.append(sum(numbers))
        if not all(0 <= number < math.inf for number in (*numbers, values[-1])):
            raise ConfigError(f"{where}: {key}={node[key]}; expected a finite number >= 0")
    stage = node["stage"]
    if stage is not None and not stage.isdecimal():
        raise ConfigError(f"{where}: stage_id={shown(stage)}; expected a whole number >= 0")
    forward, backward, output, parameters = values
    number = None if stage is None else int(stage)
    return Layer(
        node["name"], node["text"], forward / 1e3, backward / 1e3, output, parameters, number
    )


def _in_order(names: list[str], pairs: list[tuple[str, str]], source: str) -> list[str]:
    """Return the names of the nodes, each after the nodes whose outputs it uses."""
    feeders = dict.fromkeys(names, 0)
    fed: dict[str, list[str]] = {name: [] for name in names}
    for a, b in pairs:
        feeders[b] += 1
        fed[a].append(b)
    ready, order = [name for name in reversed(names) if not feeders[name]], []
    while ready:
        name = ready.pop()
        order.append(name)
        for other in reversed(fed[name]):
            feeders[other] -= 1
            if not feeders[other]:
                ready.append(other)
    if len(order) < len(names):
        stuck = next(name for name in names if feeders[name])
        raise ConfigError(f"{source}: the edges form a cycle, which contains or feeds node {stuck}")
    return order
