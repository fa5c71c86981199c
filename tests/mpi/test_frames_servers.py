"""How many functions of ours lie between a call of the user's and MPI, for data of servers."""

import traceback

import numpy as np
import pytest

import mpidist as md
from mpidist.events import is_ours
from mpidist.servers import group as groups
from mpidist.servers import protocol
from mpidist.servers.link import Link


def ours():
    """Names of mpidist's own functions on the stack of the caller, outermost first."""
    frames = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    return [code.co_name for code in reversed(frames) if is_ours(code.co_filename)]


class Recorder:
    """A communicator that notes the functions above each call of some of its operations."""

    def __init__(self, comm, *operations):
        self._comm, self._operations = comm, operations
        self.stacks = []  # (operation, its arguments, names of functions)

    def __getattr__(self, name):
        entered = getattr(self._comm, name)
        if name not in self._operations:
            return entered

        def noted(*args, **named):
            self.stacks.append((name, args, ours()))
            return entered(*args, **named)

        return noted


@pytest.fixture
def links(monkeypatch):
    """The links that are made; each notes what is on the stack when it sends."""
    made = []

    class Noting(Link):
        def __init__(self, *args):
            super().__init__(*args)
            self.comm = Recorder(self.comm, "Isend")
            made.append(self)

    monkeypatch.setattr(groups, "Link", Noting)
    return made


def stacks(link, tag):
    """Names of the functions above each message with data that was sent on `tag`."""
    return [
        names
        for _, ((data, _), _, told), names in link.comm.stacks
        if told == link.tag + tag and data.size > protocol.HEADER_BYTES
    ]


def params():
    return {"w": np.zeros((30, 10), "f4"), "b": np.zeros(10, "f4")}


def work(client):
    """One of each call that brings data; a server's answers follow."""
    out, gradients = params(), params()
    client.pull(out=out)
    client.push(gradients)
    client.clock()
    client.push_pull(gradients, out=out)
    client.pull({"w": [3, 5]})


def in_group(comm, placement, serves):
    with md.ServerGroup(comm, servers=1, placement=placement) as group:
        client = group.add("m", params(), optimizer=md.optim.sgd(0.1))
        if client is not None:
            work(client)
        elif serves:
            group.serve()


def by_itself(comm, placement):
    with md.parameter_server(
        comm, params(), optimizer=md.optim.sgd(0.1), placement=placement
    ) as client:
        if client is not None:
            work(client)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.parametrize("way", ["group", "serve", "parameter_server"])
def test_frames(comm, links, placement, way):
    """The rule is 4 for a push and 6 for an answer."""
    if way == "parameter_server":
        by_itself(comm, placement)
    else:
        in_group(comm, placement, serves=way == "serve")
    (link,) = links
    pushes = [names for names in stacks(link, protocol.TO_SERVER) if names[0] == "push"]
    if comm.rank < 2:
        assert pushes == [["push", "_post", "send"]]
    if comm.rank == 2:
        answers = stacks(link, protocol.TO_WORKER)
        longest = max(answers, key=len)
        above = {"group": ["__exit__", "close"], "serve": [], "parameter_server": [way]}[way]
        if placement == "dedicated":
            assert longest == [*above, "serve", "wait", "poll", "send"]
        else:
            assert len(longest) <= 6, longest
