"""Worlds of workers on a gate, and the search through every order of their events."""

import pickle
from types import SimpleNamespace

from mpidist.servers.consistency import Answer, Apply
from mpidist.servers.modes.agreed_changes import AgreedChanges, encode_mode
from mpidist.servers.modes.hosted_model import Hosted as HostedModel

STEPS = ("pull", "push", "tick")


class World:
    """Workers that pull, push and tick for a number of clocks, then leave, on one gate."""

    def __init__(self, consistency, clocks, choices=None):
        self.gate = consistency.gate(len(clocks), now=float)
        self.choices = choices
        if choices is not None:
            self.gate._rule = choices
        self.clocks = clocks
        self.position = [0] * len(clocks)
        self.blocked = [False] * len(clocks)
        self.applied = []  # (clock, workers) of every update, in order

    def key(self):
        # The order of past updates matters for the future only through the gate.
        gate = self.gate
        held = tuple((c, tuple(sorted(h))) for c, h in sorted(gate.held.items()))
        return (
            tuple(self.position),
            tuple(self.blocked),
            held,
            tuple(gate.waiting),
            tuple(sorted(self.applied)),
        )

    def done(self, worker):
        return self.position[worker] > 3 * self.clocks[worker]

    def able(self):
        return [w for w in range(len(self.clocks)) if not self.blocked[w] and not self.done(w)]

    def step(self, worker):
        position = self.position[worker]
        clock, kind = divmod(position, 3)
        self.position[worker] += 1
        if clock == self.clocks[worker]:
            actions = self.gate.leave(worker)
        elif STEPS[kind] == "pull":
            self.blocked[worker] = True
            actions = self.gate.pull(worker, clock)
        elif STEPS[kind] == "push":
            actions = self.gate.push(worker, (worker, clock))
        else:
            actions = self.gate.tick(worker)
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action):
        consistency = self.gate.mode_at(
            self.gate.clocks[action.worker] if isinstance(action, Answer) else action.clock
        )
        live = [w for w in range(len(self.clocks)) if self.gate.live[w]]
        slowest = min((self.gate.clocks[w] for w in live), default=None)
        if isinstance(action, Apply):
            workers = [w for w, _ in action.pushes]
            assert workers == sorted(workers)
            assert all(item == (w, action.clock) for w, item in action.pushes)
            if consistency.holds:
                # Nobody still working in this clock may see it.
                assert slowest is None or slowest > action.clock
            self.applied.append((action.clock, tuple(workers)))
            return
        assert isinstance(action, Answer)
        clock = self.gate.clocks[action.worker]
        assert action.item == clock
        assert action.gap == clock - slowest
        self.blocked[action.worker] = False
        seen = {(w, c) for c, workers in self.applied for w in workers}
        if consistency.bound is not None:
            assert action.gap <= consistency.bound
            # Everything up to clock c - s - 1 is in what this worker now reads.
            for w, n in enumerate(self.clocks):
                for c in range(min(n, clock - consistency.bound)):
                    assert (w, c) in seen
        if consistency.holds:
            # And nothing from its own clock or later: the exact super-step.
            assert all(c < clock for _, c in seen)
        # Its own pushes are always visible once no clock holds them.
        assert {(action.worker, c) for c in range(clock)} <= seen


class Hosted:
    """What `AgreedChanges` needs of a model: its gate, whose mode it changes."""

    name = "m"
    change_mode = HostedModel.change_mode

    def __init__(self, gate, choices):
        self.gate, self.shard, self.choices = gate, SimpleNamespace(server=0), choices

    def choose(self):
        for gate in getattr(self.gate, "_gates", [self.gate]):
            if hasattr(gate, "_rule") and self.choices is not None:
                gate._rule = self.choices


class ChangingWorld(World):
    """Workers that also set another mode in some clocks, before their push or before their tick.

    `changes` has the new mode of a clock; `late` has the workers that set it after their push.
    `wrong` (worker, clock) does not set it.
    """

    def __init__(self, consistency, clocks, changes, choices=None, late=(), wrong=None):
        super().__init__(consistency, clocks)
        self.choices, self.hosted = choices, Hosted(self.gate, choices)
        self.changed = AgreedChanges(self.hosted)
        self.events = []
        for worker, number in enumerate(clocks):
            events = []
            for clock in range(number):
                steps = list(STEPS)
                if clock in changes and (worker, clock) != wrong:
                    steps.insert(2 if worker in late else 1, encode_mode(changes[clock]))
                events += [(clock, step) for step in steps]
            self.events.append([*events, (number, "leave")])

    def done(self, worker):
        return self.position[worker] == len(self.events[worker])

    def key(self):
        return (*super().key(), repr(self.gate.consistency))

    def step(self, worker):
        clock, event = self.events[worker][self.position[worker]]
        self.position[worker] += 1
        gate, actions = self.gate, []
        if event == "leave":
            actions = gate.leave(worker)
        elif event == "pull":
            self.blocked[worker] = True
            actions = gate.pull(worker, clock)
        elif event == "push":
            actions = gate.push(worker, (worker, clock))
        elif event == "tick":
            self.changed.check_tick(worker, clock, range(9))
            actions = gate.tick(worker)
        else:
            self.changed.hear(worker, event, range(9))
            self.gate = self.hosted.gate
            self.hosted.choose()
        for action in actions:
            if isinstance(action, Answer) and gate.mode_at(gate.clocks[action.worker] - 1).holds:
                assert action.gap == 0 or action.item == 0
            self.carry_out(action)


class Choices:
    """A rule of DSSP whose answers are those of `given`, and then False. It counts the questions.

    So a search can try every answer: whatever a real rule measures, it gives one of them.
    """

    def __init__(self):
        self.given, self.asked = (), 0

    def may_pass(self, gate, worker):
        self.asked += 1
        return self.asked <= len(self.given) and self.given[self.asked - 1]


def outcomes(world, events):
    """The worlds after each event of `world`, one for each series of answers of its rule."""
    state = pickle.dumps(world)  # a fifth of the time of copy.deepcopy
    series = [(event, ()) for event in events]
    while series:
        event, given = series.pop()
        after = pickle.loads(state)
        if after.choices is not None:
            after.choices.given, after.choices.asked = given, 0
        after.step(*event)
        yield after
        if after.choices is not None:
            answered = given + (False,) * (after.choices.asked - len(given))
            further = range(len(given), after.choices.asked)
            series += [(event, (*answered[:n], True)) for n in further]


def explore(consistency, clocks, choices=None):
    """Visit every reachable state; return the final ones, and the worst gap met."""
    return explore_from(World(consistency, clocks, choices))


def explore_from(start):
    """Visit every state that can be reached from a world, as `explore`."""
    clocks = start.clocks
    stack, seen, finals, worst = [start], {start.key()}, [], 0
    while stack:
        world = stack.pop()
        able = world.able()
        if not able:
            # No deadlock: if nobody can move then everybody is done.
            assert all(world.done(w) for w in range(len(clocks))), world.key()
            finals.append(world)
            continue
        working = [world.gate.clocks[w] for w in able]
        live = [world.gate.clocks[w] for w in range(len(clocks)) if world.gate.live[w]]
        entered = [c for w, c in zip(able, working, strict=True) if world.gate.entered[w] == c]
        if entered:
            worst = max(worst, max(entered) - min(live))
        for after in outcomes(world, [(worker,) for worker in able]):
            if after.key() not in seen:
                seen.add(after.key())
                stack.append(after)
    return finals, worst, len(seen)
