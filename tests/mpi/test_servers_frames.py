"""Count the frames of mpidist between a user's call of a server group and MPI."""

import numpy as np
import pytest
from frames import Recorded, recorded

import mpidist as md
from mpidist.servers import group as groups
from mpidist.servers.link import Link


class Noting(Link):
    """A link whose communicator notes what is on the stack when it sends."""

    def __init__(self, *args):
        super().__init__(*args)
        self.comm = Recorded(self.comm)


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
def test_frames(comm, monkeypatch, placement, way):
    """The rule is 4 for a push and 6 for an answer."""
    monkeypatch.setattr(groups, "Link", Noting)
    with recorded() as notes:
        if way == "parameter_server":
            by_itself(comm, placement)
        else:
            in_group(comm, placement, serves=way == "serve")
    sends = [note.way for note in notes if note.call == "Isend"]
    pushes = [names for names in sends if names[0] == "client.push"]
    answers = [names for names in sends if names[-2] == "server.poll"]
    if comm.rank < 2:
        assert pushes == [
            ("client.push", "client_requests.push", "client_requests.post", "link.send")
        ]
    if comm.rank == 2:
        longest = max(answers, key=len)
        above = {
            "group": ("group.__exit__", "group.close"),
            "serve": (),
            "parameter_server": ("parameter_server.parameter_server",),
        }[way]
        if placement == "dedicated":
            assert longest == (*above, "group.serve", "link.wait", "server.poll", "link.send")
        else:
            assert len(longest) <= 6, longest
