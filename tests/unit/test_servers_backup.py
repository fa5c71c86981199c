"""Backup workers: every order of events on one server and on two, and the decisions (R92)."""

import pickle
from collections import deque

import pytest

import mpidist as md
from mpidist.errors import ConfigError, ProtocolError
from mpidist.servers.consistency import BSP, Answer, Apply, Drop, simulate
from mpidist.servers.modes.backup_workers import CLOSE, END, ENTER, Decision


class World:
    """Workers that push, tick and pull until they have come to their last clock, then leave.

    With two servers, a message comes to each of them at any time, and so do the decisions of the
    first server. A worker that has asked waits for all answers.
    """

    def __init__(self, spare, clocks, servers):
        mode = md.BackupWorkers(spare)
        self.clocks, self.needed = clocks, len(clocks) - spare
        self.gates = [mode.gate(len(clocks), server) for server in range(servers)]
        self.told = deque()  # decisions on their way
        self.at = [0] * len(clocks)  # the clock that each worker knows
        self.sent = [0] * len(clocks)
        self.gone = [False] * len(clocks)
        self.here = [[0] * len(clocks) for _ in self.gates]  # messages that have come
        self.mail = [[] for _ in clocks]  # the clock of each message
        self.answers = [dict() for _ in clocks]  # server -> (clock, version)
        self.seen = [(0,) * servers for _ in clocks]  # versions at the newest pull
        self.updates = [[] for _ in self.gates]  # (clock, workers)
        self.dropped = [[] for _ in self.gates]  # (worker, clock)
        for worker in range(len(clocks)):
            self._send(worker)

    def key(self):
        gates = tuple(
            (tuple(g.clocks), tuple(g.live), g.round, tuple(g.waiting), tuple(sorted(g._finished)),
             tuple((c, tuple(sorted(h))) for c, h in sorted(g.held.items())),
             tuple(getattr(g, "_script", ()))) for g in self.gates
        )  # fmt: skip
        here = tuple(map(tuple, self.here))
        return (
            gates,
            tuple(self.told),
            here,
            tuple(map(tuple, self.mail)),
            str((self.updates, self.seen)),
        )

    def _send(self, worker):
        self.mail[worker].append(self.at[worker])
        self.gone[worker] = self.at[worker] >= self.clocks[worker]

    def able(self):
        for server, here in enumerate(self.here):
            for worker, mail in enumerate(self.mail):
                if here[worker] < len(mail):
                    yield server, worker
        if self.told:
            yield 1, None

    def step(self, server, worker):
        gate = self.gates[server]
        if worker is None:
            self._carry_out(server, gate.follow(self.told.popleft()))
            return
        clock = self.mail[worker][self.here[server][worker]]
        self.here[server][worker] += 1
        assert gate.clocks[worker] == clock  # as the server checks
        if clock >= self.clocks[worker]:
            self._carry_out(server, gate.leave(worker))
            return
        item = worker, clock, self.seen[worker][server]
        self._carry_out(server, gate.push(worker, item))
        self._carry_out(server, gate.tick(worker))
        self._carry_out(server, gate.pull(worker, clock))

    def _carry_out(self, server, actions):
        gate = self.gates[server]
        if server == 0:
            self.told.extend(gate.decisions if len(self.gates) > 1 else ())
            gate.decisions.clear()
        for action in actions:
            if isinstance(action, Apply):
                done = self.updates[server]
                assert action.clock == len(done)  # each round once, in order
                workers = tuple(worker for worker, _ in action.pushes)
                assert workers == tuple(sorted(workers))
                # Each gradient that counts is of the newest parameters.
                assert all(item == (w, action.clock, action.clock) for w, item in action.pushes)
                done.append((action.clock, workers))
                if server == 0 and len(workers) < self.needed:
                    live = [w for w in range(len(self.clocks)) if gate.live[w]]
                    assert all(gate.clocks[w] > action.clock for w in live)
            elif isinstance(action, Drop):
                assert action.clock < gate.round
                self.dropped[server] += [(w, action.clock) for w, _ in action.pushes]
            else:
                assert isinstance(action, Answer)
                worker = action.worker
                self.answers[worker][server] = gate.clocks[worker], len(self.updates[server])
                if len(self.answers[worker]) == len(self.gates):
                    found = [self.answers[worker][s] for s in range(len(self.gates))]
                    self.answers[worker] = {}
                    (clock,) = {clock for clock, _ in found}  # all servers say the same
                    assert clock > self.at[worker]
                    self.at[worker], self.seen[worker] = clock, tuple(v for _, v in found)
                    self._send(worker)


@pytest.mark.parametrize(
    ("spare", "clocks", "servers"),
    [(1, (3, 3, 3), 1), (2, (3, 3, 3), 1), (0, (3, 3, 3), 1), (1, (1, 4, 2), 1), (1, (0, 3, 3), 1),
     (1, (4, 4), 1), (1, (3, 3), 2), (0, (2, 2), 2), (1, (1, 3), 2), (1, (1, 1, 2), 2),
     (2, (2, 1, 1), 2)],
)  # fmt: skip
def test_every_interleaving(spare, clocks, servers):
    """No deadlock; all servers make the same updates; each push is applied or dropped, once."""
    start = World(spare, clocks, servers)
    stack, seen, finals = [start], {start.key()}, []
    while stack:
        world = stack.pop()
        able = list(world.able())
        if not able:
            assert all(world.gone), world.key()
            assert all(gate.settled for gate in world.gates)
            finals.append(world)
        state = pickle.dumps(world)
        for event in able:
            after = pickle.loads(state)
            after.step(*event)
            if after.key() not in seen:
                seen.add(after.key())
                stack.append(after)
    late = set()
    for world in finals:
        assert all(updates == world.updates[0] for updates in world.updates)
        pushes = {(w, c) for w, mail in enumerate(world.mail) for c in mail if c < clocks[w]}
        for updates, dropped, gate in zip(world.updates, world.dropped, world.gates, strict=True):
            applied = [(w, c) for c, workers in updates for w in workers]
            assert sorted(applied + dropped) == sorted(pushes)
            assert not gate.held
            assert not gate.waiting
            late.add(len(dropped))
    # Somebody can be late where more workers push than a round needs.
    assert (max(late) > 0) == (sum(n > 0 for n in clocks) > len(clocks) - spare)
    assert len(seen) > 20


def test_no_spare_worker_is_bsp():
    delays = [[1.0, 5.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 3.0]]
    assert simulate(delays, md.BackupWorkers(0)) == simulate(delays, BSP())


def test_a_late_worker_goes_on_with_the_others():
    gate = md.BackupWorkers(1).gate(3)
    for clock in range(3):
        for worker in (0, 1):
            gate.push(worker, (worker, clock))
            gate.tick(worker)
            gate.pull(worker)
    assert (gate.round, gate.clocks) == (3, [3, 3, 0])
    assert gate.push(2, "late") == [Drop(0, ((2, "late"),))]
    gate.tick(2)
    assert gate.pull(2, "want") == [Answer(2, 0, "want")]
    assert gate.clocks == [3, 3, 3]
    gate.tick(0)
    gate.pull(0)
    assert gate.blockers(0) == ([1, 2], 1)
    # A second pull in the same clock takes nobody further.
    gate.tick(1)
    assert gate.round == 4
    assert gate.pull(2) == [Answer(2, 0, None)]
    assert gate.clocks[2] == 3


def test_the_decisions():
    first, other = (md.BackupWorkers(1).gate(2, server) for server in (0, 1))
    first.push(1, "b")
    first.tick(1)
    assert first.pull(1) == [Answer(1, 1, None)]
    assert first.decisions == [Decision(CLOSE, 0, (1,)), Decision(ENTER, 1, (1,))]
    # The other server waits for the push, drops what comes late, and answers at last.
    other.push(0, "a")
    assert [other.follow(decision) for decision in first.decisions] == [[], []]
    assert other.push(1, "b") == [Apply(0, ((1, "b"),)), Drop(0, ((0, "a"),))]
    other.tick(1)
    assert other.pull(1) == [Answer(1, 1, None)]
    for gate in (first, other):
        gate.leave(0)
        gate.leave(1)
    assert first.decisions[-1] == Decision(END, 1)
    assert not other.settled
    other.follow(first.decisions[-1])
    assert other.settled


def test_wrong_orders_are_named():
    gate = md.BackupWorkers(1).gate(2)
    gate.push(0)
    with pytest.raises(ProtocolError, match="worker 0: second push in clock 0"):
        gate.push(0)
    gate.tick(0)
    with pytest.raises(ProtocolError, match="before it was let in"):
        gate.push(0)
    gate.leave(1)
    with pytest.raises(ProtocolError, match="after it has left"):
        gate.pull(1)
    with pytest.raises(ProtocolError, match="no server decides"):
        BSP().gate(2).follow(Decision(END, 0))


@pytest.mark.parametrize("bad", [-1, 1.5, "1", True, None])
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match="BackupWorkers: count is"):
        md.BackupWorkers(bad)


def test_too_many_spare_workers():
    md.BackupWorkers(2).check(3)
    with pytest.raises(ConfigError, match=r"count=3 of 3 workers leaves none.*give at most 2"):
        md.BackupWorkers(3).check(3)
