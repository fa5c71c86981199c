"""Compare collectives with the speed of the wire, on shaped networks of this machine; needs root.

    PYTHONPATH=tests python -m benchmarks.network [--cases ring,auto]

The program calls mpirun itself. Calls that the wire limits are compared with a plain TCP stream of
as many bytes around the same ring, which is measured before and after the calls in the same network
(`ShapedNetwork.stream`). The bytes are those that the network device of a host counts during the
calls. The device counts the headers of each packet that it gets from the kernel. So the payload is
the number of bytes sent, minus 66 bytes per packet: 14 for Ethernet, 20 for IP, and 32 for TCP with
time stamps.

All hosts, links and processes of a case are removed when the case ends, even if it fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from onebox.network import ShapedNetwork, shaped_network

from benchmarks import advise_network
from mpidist.errors import ConfigError
from mpidist.launch.launchers import launch

HOSTS, BYTES = 4, 16 << 20
_MIB = 1 << 20
#: BLAS threads of each rank: there are more ranks than cores already.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Say = Callable[[str], None]


def sent_per_host(nbytes: int, hosts: int = HOSTS) -> int:
    """Bytes that each host has to send in an allreduce of `nbytes`: 2(P-1)/P N. Pure."""
    return 2 * (hosts - 1) * nbytes // hosts


def ring(say: Say) -> list[dict]:
    """4 hosts x 1 rank, 1 Gbit/s, 16 MiB: ring and auto over the stream. Local."""
    return _over_stream(1, "1gbit", ("ring", "auto"), say, must=0.93, aim=0.97, rounds=9)


def hierarchical(say: Say) -> list[dict]:
    """4 hosts x 2 ranks, 200 Mbit/s, 16 MiB: likewise, and the bytes on the wire. Local."""
    return _over_stream(2, "200mbit", ("hierarchical", "auto"), say, must=0.90, aim=0.97, rounds=5)


def auto(say: Say) -> list[dict]:
    """Hold auto against the best hand-chosen algorithm: one node, 4 x 1 and 4 x 2. Local."""
    # Where a call takes a second: few rounds, and without what is far from the best.
    sizes = (
        ("--max", str(256 << 10)),
        ("--min", str(2 * _MIB), "--max", str(16 * _MIB)),
        ("--min", str(64 * _MIB)),
    )
    rows = []

    def compare(layout: str, bench: Callable[..., list[dict]], good: str, others: str) -> None:
        counts = (101, 21, 15) if layout == "1 x 2" else (101, 13, 9)
        chosen = (good + others, good + others, good)
        for span, count, names in zip(sizes, counts, chosen, strict=True):
            words = ("--forms", "plan", "--step", "8", "--rounds", str(count), *span)
            for row in bench(*words, "--algorithms", f"auto,{names}"):
                if "against_best" in row:
                    rows.append(_compared(layout, row))
                    say(_text(rows[-1]))

    compare("1 x 2", _on_this_node, "node,native", ",ring,butterfly")
    with shaped_network(HOSTS, "1gbit") as net:
        compare("4 x 1", partial(_bench, net, 1), "ring,butterfly", ",native,double_tree,direct")
        compare(
            "4 x 2", partial(_bench, net, 2), "hierarchical,ring", ",native,butterfly,double_tree"
        )
    return rows


def nonblocking(say: Say) -> list[dict]:
    """4 hosts x 1 rank, 1 Gbit/s, 16 MiB: iallreduce in place against MPI's own. Local."""
    rows = []
    with shaped_network(HOSTS, "1gbit") as net:
        words = ("--forms", "nonblocking", "--algorithms", "auto,ring", "--rounds", "7")
        for found in _bench(net, 1, *_only(BYTES), *words):
            if found["algorithm"] in ("auto nonblocking", "ring nonblocking"):
                rows.append(
                    {
                        "case": "nonblocking", "layout": "4 x 1", "bytes": BYTES,
                        "what": found["algorithm"], "ms": round(found["median_us"] / 1e3, 2),
                        "yardstick": "MPI's Iallreduce",
                        "yardstick_ms": round(found["native_us"] / 1e3, 2),
                        "ratio": found["ratio"], "must": 1.3, "aim": 1.8,
                    }
                )  # fmt: skip
                say(_text(rows[-1]))
    return rows


def overlap(say: Say) -> list[dict]:
    """4 hosts x 1 rank, 1 Gbit/s, 16 MiB of gradients: what hides behind backward. Local."""
    rows = []
    with shaped_network(HOSTS, "1gbit") as net:
        file = net.box.folder / "rows.json"
        words = [sys.executable, "-m", "mpidist", "bench", "overlap", "--json", str(file)]
        net.mpirun(1, words, env=_ONE_THREAD, timeout=300).check()
        for found in json.loads(file.read_text()):
            rows.append(
                {
                    "case": "overlap", "layout": "4 x 1", "bytes": found["bytes"],
                    "what": found["progress"], "ms": found["step_ms"],
                    "yardstick": "exchange alone", "yardstick_ms": found["exchange_ms"],
                    "ratio": found["hidden"], "must": 0.8, "aim": 0.95,
                }
            )  # fmt: skip
            say(_text(rows[-1]))
    return rows


def advised(say: Say) -> list[dict]:
    """4 hosts x 1 rank, 1 Gbit/s: Open MPI as it is advised to be, over its default. Local."""
    rows = advise_network.advice(say)
    for row in rows:
        say(_text(row))
    return rows


#: name -> what is measured. A new case is a function that says its rows and returns them.
CASES: dict[str, Callable[[Say], list[dict]]] = {
    "ring": ring,
    "hierarchical": hierarchical,
    "auto": auto,
    "nonblocking": nonblocking,
    "overlap": overlap,
    "advise": advised,
}


def measure(names: Sequence[str], say: Say = print) -> list[dict]:
    """Run cases by name and return their rows. Local; needs root.

    Raises
    ------
    ConfigError
        An unknown name, or no shaped network on this machine.
    """
    for name in names:
        if name not in CASES:
            raise ConfigError(f"--cases {name}: expected some of {', '.join(CASES)}")
    return [row for name in names for row in CASES[name](say)]


def _over_stream(
    ranks: int, rate: str, names: Sequence[str], say: Say, *, must: float, aim: float, rounds: int
) -> list[dict]:
    sent = sent_per_host(BYTES)
    rows: list[dict] = []
    with shaped_network(HOSTS, rate) as net:
        streams = [net.stream(sent)]
        words = ("--forms", "plan", "--algorithms", ",".join(names), "--rounds", str(rounds))
        found = _bench(net, ranks, *_only(BYTES), *words, "--wire", "eth0")
        streams.append(net.stream(sent))
    stream = statistics.mean(streams)
    for row in found:
        name = row["algorithm"]
        rows.append(
            {
                "case": f"{rate} wire", "layout": f"{HOSTS} x {ranks}", "bytes": BYTES,
                "what": name, "ms": round(row["median_us"] / 1e3, 1),
                "yardstick": "TCP stream", "yardstick_ms": round(stream * 1e3, 1),
                "ratio": round(stream * 1e6 / row["median_us"], 4),
                "must": must if name != "native" else None,
                "aim": aim if name != "native" else None,
                "wire_over_formula": round(row["wire_bytes"] / sent, 4),
                "payload_over_formula": round(row["wire_payload"] / sent, 4),
            }
        )  # fmt: skip
        say(_text(rows[-1]))
    return rows


def _compared(layout: str, row: dict) -> dict:
    return {
        "case": "auto", "layout": layout, "bytes": row["bytes"], "what": row["algorithm"],
        "ms": round(row["median_us"] / 1e3, 4), "yardstick": row["best"],
        "ratio": row["against_best"], "must": 0.95, "aim": 0.99,
    }  # fmt: skip


def _only(nbytes: int) -> tuple[str, ...]:
    return ("--min", str(nbytes), "--max", str(nbytes))


def _bench(net: ShapedNetwork, ranks: int, *words: str) -> list[dict]:
    """Run `mpidist bench allreduce` on every host and return its rows. Local."""
    file = net.box.folder / "rows.json"
    net.mpirun(ranks, [*_command(words), "--json", str(file)], env=_ONE_THREAD, timeout=600).check()
    return json.loads(file.read_text())


def _on_this_node(*words: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        launch(2, [*_command(words), "--json", file], env=_ONE_THREAD, timeout=600).check()
        return json.loads(file.read_text())


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "mpidist", "bench", "allreduce", *words]


def _text(row: dict) -> str:
    verdict = ""
    if row["must"]:
        kept = row["ratio"] >= row["must"]
        verdict = f"  must {row['must']} ({'kept' if kept else 'MISSED'}), aim {row['aim']}"
    beside = f" {row['yardstick_ms']} ms" if "yardstick_ms" in row else ""
    wire = ""
    if "wire_over_formula" in row:
        wire = (
            f"  sent / formula {row['wire_over_formula']}, "
            f"without headers {row['payload_over_formula']}"
        )
    return (
        f"{row['case']:<14}{row['layout']:<7}{row['bytes']:>9}  {row['what']:<18}"
        f"{row['ms']:>10} ms  {row['yardstick']}{beside}: {row['ratio']:.3f}{verdict}{wire}"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print. Local: this process makes the hosts and starts the ranks."""
    parser = argparse.ArgumentParser("benchmarks.network", description=__doc__)
    parser.add_argument(
        "--cases",
        default="ring,hierarchical,auto,nonblocking,overlap",
        help="comma-separated, also advise (ring,hierarchical,auto,nonblocking,overlap)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    args = parser.parse_args(words)
    names = [word.strip() for word in args.cases.split(",") if word.strip()]
    rows = measure(names, lambda line: print(line, flush=True))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
