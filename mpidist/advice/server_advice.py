"""`mpidist advise servers`: advise allreduce, parameter servers, or neither; needs no MPI.

The time of a step is the time of the computation, which the workers share, plus the time of the
messages:

    allreduce        the fastest algorithm, as `mpidist simulate` predicts it
    k servers        2 latencies, and max(M, n M / k) bytes over the busiest link in each direction
    p colocated      2 (p - 1) / p M bytes, as each rank sends parts both as worker and as server

M is the number of bytes of the parameters, n the number of workers, and p the number of ranks. If
steps take uneven times, all workers wait for the slowest one in each step with allreduce. With
parameter servers, the advice assumes that no worker waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..simulator.network_model import NetworkModel, Problem
from ..simulator.predict import predict

#: If the speed-up over one rank is less than this, neither allreduce nor servers are advised.
GAIN = 1.1
#: Servers are advised only if a step takes at most this share of the time of a step with allreduce.
CLEAR = 0.95
#: The bytes that a server keeps for those pieces of one worker's push that are being sent.
PIECES = 1 << 20
_ALGORITHMS = ("ring", "butterfly", "double_tree")


@dataclass(frozen=True)
class StepFacts:
    """The facts on which the advice depends; sizes are in bytes, times in seconds.

    Attributes
    ----------
    parameters, state
        Bytes of the parameters, and of the state of the optimizer.
    compute
        Seconds that one rank needs for the computation of a global batch.
    ranks
        The number of ranks, each on a node of its own.
    network
        The times of messages.
    memory
        Bytes that a rank may use; None if they are not known.
    slowest
        The factor by which the slowest rank of a step takes longer than the other ranks: 1 if all
        ranks take the same time. In each step, another rank may be the slowest one.
    """

    parameters: int
    state: int
    compute: float
    ranks: int
    network: NetworkModel
    memory: int | None = None
    slowest: float = 1.0


@dataclass(frozen=True)
class Choice:
    """One way to train (allreduce, or a number of servers), with the predicted time and memory."""

    name: str
    workers: int
    servers: int
    compute: float
    messages: float
    memory: int
    algorithm: str = ""

    @property
    def seconds(self) -> float:
        """The predicted seconds of a training step."""
        return self.compute + self.messages

    @property
    def share(self) -> float:
        """The fraction of a step's time that the messages take."""
        return self.messages / self.seconds if self.seconds else 0.0


def choices(facts: StepFacts) -> list[Choice]:
    """Return all ways to train on p ranks, with their predicted times and memory.

    They are one rank alone, allreduce, 1 to p - 1 servers, and p colocated servers (each rank is
    both a worker and a server).
    """
    model, state, p, net = facts.parameters, facts.state, facts.ranks, facts.network
    if not net.overhead:  # not measured: without it, thousands of small messages would cost nothing
        net = net._replace(overhead=net.latency / 2)
    mean = 1 + (facts.slowest - 1) / p  # how many times as long as usual a step takes on average
    found = [Choice("one rank", 1, 0, facts.compute * mean, 0.0, 2 * model + state)]
    if p == 1:
        return found
    problem = Problem(p, max(1, model // 4), 4, net)
    costs = {name: predict(name, problem).seconds + net.call for name in _ALGORITHMS}
    name = min(costs, key=lambda each: costs[each])
    waiting = facts.compute / p * facts.slowest
    found.append(Choice("allreduce", p, 0, waiting, costs[name], 2 * model + state, name))
    for k in range(1, p):
        n = p - k
        share = facts.compute / n * mean
        busiest = max(model, n * model / k)
        trips = 2 * net.latency + 2 * (max(n, k) + 1) * net.overhead
        # The memory of a server: its part of the parameters, a sum of gradients, the state of the
        # optimizer, and pieces of the messages of each worker.
        server = (2 * model + state) // k + n * min(model // k, PIECES)
        messages = trips + busiest * net.gap
        found.append(Choice("servers", n, k, share, messages, max(2 * model, server)))
    share = facts.compute / p * mean
    messages = 2 * net.latency + 2 * (p + 1) * net.overhead + 2 * (p - 1) / p * model * net.gap
    memory = 2 * model + (2 * model + state) // p + p * min(model // p, PIECES)
    found.append(Choice("colocated servers", p, p, share, messages, memory))
    return found


def advised_choice(facts: StepFacts, found: Sequence[Choice]) -> tuple[Choice | None, str]:
    """Return (advised way to train, a sentence with the reason)."""
    room = facts.memory
    fits = [each for each in found if room is None or each.memory <= room]
    if not fits:
        least = min(each.memory for each in found)
        return None, (
            f"neither: each way needs {_mb(least)} or more on a rank, which may use {_mb(room)}; "
            "cut the model into stages (md.Pipeline), or pull single rows"
        )
    alone, several = found[0], [each for each in fits if each is not found[0]]
    best = min(several, key=lambda each: (each.seconds, each.servers), default=alone)
    if best is alone:
        return None, f"neither: there is {'one rank' if facts.ranks == 1 else 'no room for more'}"
    if alone in fits and alone.seconds < GAIN * best.seconds:
        return None, (
            f"neither: one rank needs {_ms(alone.seconds)} for a step, and {facts.ranks} ranks at "
            f"best {_ms(best.seconds)} ({_name(best)}); compute more in a step, for example with a "
            "larger batch"
        )
    together = next((each for each in fits if each.name == "allreduce"), None)
    if together is None:
        return best, (
            f"{_name(best)}: allreduce needs {_mb(found[1].memory)} on each rank, which may use "
            f"{_mb(room)}"
        )
    if best.servers and best.seconds <= CLEAR * together.seconds:
        return best, (
            f"{_name(best)}: a step takes {_ms(best.seconds)}, and {_ms(together.seconds)} with "
            "allreduce" + (", whose workers wait for the slowest" if facts.slowest > 1 else "")
        )
    others = [each for each in fits if each.servers]
    rival = min(others, key=lambda each: each.seconds, default=None)
    beside = "" if rival is None else f", and {_ms(rival.seconds)} with {_name(rival)}"
    return together, f"allreduce: a step takes {_ms(together.seconds)}{beside}"


def server_advice_lines(
    facts: StepFacts, found: Sequence[Choice], bound: float, shown: int = 8
) -> Iterator[str]:
    """Yield the lines that the command prints: a table of the ways to train, and the advice."""
    advised, why = advised_choice(facts, found)
    served = sorted((each for each in found if each.servers), key=lambda each: each.seconds)
    kept = [each for each in found if not each.servers or each in served[:shown]]
    heads = ("workers", "servers", "compute(ms)", "messages(ms)", "step(ms)", "speed-up", "ideal",
             "share", "MB/rank")  # fmt: skip
    yield "#" + "".join(f"{name:>13}" for name in heads)[1:] + "  how"
    for each in kept:
        numbers = (
            f"{each.workers}", f"{each.servers}", f"{each.compute * 1e3:.3f}",
            f"{each.messages * 1e3:.3f}", f"{each.seconds * 1e3:.3f}",
            f"{found[0].seconds / each.seconds:.2f}", f"{each.workers}", f"{each.share:.3f}",
            f"{each.memory / 1e6:.1f}",
        )  # fmt: skip
        how = f"{each.name}{f' ({each.algorithm})' if each.algorithm else ''}"
        mark = "  <" if each is advised else ""
        yield "".join(f"{number:>13}" for number in numbers) + f"  {how}{mark}"
    yield f"advice: {why}"
    if advised is not None and advised.share > bound:
        yield (
            f"warning: messages take {advised.share:.2f} of a step, above the bound of {bound:g}; "
            "fewer ranks or a larger batch would use the ranks better"
        )


def _name(choice: Choice) -> str:
    if choice.name == "colocated servers":
        return f"{choice.servers} colocated servers"
    if choice.servers:
        servers = f"{choice.servers} server{'s' if choice.servers > 1 else ''}"
        return f"{servers} for {choice.workers} worker{'s' if choice.workers > 1 else ''}"
    return choice.name


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _mb(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / 1e6:.3g} MB"
