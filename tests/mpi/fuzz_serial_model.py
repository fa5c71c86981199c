"""The values of a model on one rank, for `fuzz_server_changes`."""

import numpy as np


class Serial:
    """The values of the model on one rank."""

    def __init__(self, run):
        self.d, self.run = run.d, run
        self.values = {n: np.zeros(s) for n, s in run.shapes().items()}
        if self.d["open"]:
            self.values["o"] = np.zeros((12, 3))
        self.velocity = {n: np.zeros_like(x) for n, x in self.values.items()}

    def gradient(self, entry):
        found = {n: np.zeros_like(x) for n, x in self.values.items()}
        named = {n: np.zeros(x.shape[:1], bool) for n, x in self.values.items()}
        for n in found:
            if n == "o":
                if entry["keys"] is not None:
                    at = entry["keys"] // 2**40
                    np.add.at(found[n], at, entry["value"])
                    named[n][at] = True
            elif entry["whole"]:
                found[n][...] = entry["value"]
                named[n][...] = True
            elif n == "t" and entry["rows"] is not None:
                np.add.at(found[n], entry["rows"], entry["value"])
                named[n][entry["rows"]] = True
        return found, named

    def step(self, entries, mode, lr, workers):
        """All pushes of a clock."""
        kind, d, (lr, plain) = self.d["kind"], self.d, lr
        if plain:
            self.velocity = {n: np.zeros_like(x) for n, x in self.values.items()}
        if kind == "assign":
            for entry in entries:
                g, named = self.gradient(entry)
                for n, x in self.values.items():
                    if x.ndim == 0:
                        if entry["whole"]:
                            x[...] = entry["value"]
                    else:
                        x[named[n]] = entry["value"]
            return
        total = {n: np.zeros_like(x) for n, x in self.values.items()}
        touched = {n: np.zeros(x.shape[:1], bool) for n, x in self.values.items()}
        for entry in entries:
            g, named = self.gradient(entry)
            for n in total:
                total[n] += g[n]
                touched[n] |= named[n]
        if kind == "add":
            for n in total:
                self.values[n] += total[n]
            return
        count = sum(e["whole"] is not None or e["rows"] is not None for e in entries)
        count = count if mode == 0 else (1 if d["samples"] else workers)
        if not count:
            count = 1
        mean = {n: x / count for n, x in total.items()}
        if kind == "clip":
            norm = np.sqrt(sum((x * x).sum() for x in mean.values()))
            if norm > 50.0:
                mean = {n: x * (50.0 / norm) for n, x in mean.items()}
        for n in mean:
            if kind == "momentum" and not plain:
                lazy = n == "o" or (n == "t" and d["rows"] == "lazy")
                at = touched[n] if lazy else slice(None) if self.values[n].ndim else ()
                self.velocity[n][at] = 0.5 * self.velocity[n][at] + mean[n][at]
                self.values[n][at] -= lr * self.velocity[n][at]
            else:
                self.values[n] -= lr * mean[n]


def close_to(d, x, y):
    """Whether values are equal, up to the rounding of a mean."""
    if d["kind"] in ("add", "assign"):
        return np.array_equal(x, y)
    return np.allclose(x, y, rtol=1e-9, atol=1e-7)


def check(run, everyone, ends, workers):
    d, serial = run.d, Serial(run)
    clocks = max(len(each["pushes"]) for each in everyone)
    modes, rates = everyone[0]["modes"], everyone[0]["rates"]
    states = [{n: x.copy() for n, x in serial.values.items()}]
    for clock in range(clocks):
        entries = [each["pushes"][clock] for each in everyone if len(each["pushes"]) > clock]
        if any(e["whole"] or e["rows"] is not None for e in entries):  # else there is no update
            serial.step(entries, modes[clock], rates[clock], workers)
        states.append({n: x.copy() for n, x in serial.values.items()})
    for n, x in serial.values.items():
        assert close_to(d, ends[n].ravel(), x.ravel()), (
            d,
            "end",
            n,
            ends[n].ravel()[:60],
            x.ravel()[:60],
        )
    sign = 1 if d["kind"] == "add" else -1
    for each in everyone:
        for clock, found, asks in each["pulls"]:
            mode = modes[clock] if clock < len(modes) else modes[-1]
            age = [0, None, 0, 2, 3][mode]
            for n, x in found.items():
                at = slice(None)
                if n in asks:
                    at = asks[n] // 2**40 if n == "o" else asks[n]
                if not states[0][n].ndim:
                    at = ()
                newest = states[-1][n][at]
                if mode == 0:
                    good = close_to(d, x, states[clock][n][at])
                    assert good, (d, "pull", each["me"], clock, n, x, states[clock][n][at])
                elif d["kind"] in ("sum", "add"):
                    old = 0 if age is None else max(0, clock - age)
                    oldest = states[old][n][at]
                    ok = (sign * x >= sign * oldest - 1e-6).all()
                    ok &= bool((sign * x <= sign * newest + 1e-6).all())
                    assert ok, (d, "bound", each["me"], clock, mode, n, x, oldest, newest)
