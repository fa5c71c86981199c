"""Which gradients travel together. Pure.

    order of backward   d3.b d3.w | d2.b d2.w d1.b | c2.w c1.w loss     a bucket leaves when its
    bucket                  0     |       1        |      2             last gradient is ready

A bucket costs a fixed time c per exchange, and the last one cannot hide; for N bytes at b seconds
per byte the exposed time (N / s) c + s b is least at s = sqrt(N c / b). For gradients of 1 to 100
MB on 1 to 10 Gbit/s Ethernet that is N/8 to N/40, so "auto" takes a sixteenth.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError

#: What "auto" keeps to, in bytes.
LEAST, MOST = 256 << 10, 25 << 20


def bucket_bytes(wanted: int | str, total: int) -> int:
    """Return the size of a bucket for `total` bytes of gradients; "auto" is a sixteenth."""
    if isinstance(wanted, str) and wanted == "auto":
        return min(max(total // 16, LEAST), MOST)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(f"bucket_bytes={wanted!r}: expected 'auto' or a number of bytes")
    return wanted


def cut_buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut a sequence of tensors of `sizes` bytes into buckets: (first, last + 1) of each.

    A bucket is closed when it has reached `limit`; a tensor is never cut. The first and the last
    are a quarter of that: until the first leaves the wire is idle, and nothing hides the last.
    """
    buckets: list[tuple[int, int]] = []
    first = filled = 0
    left = sum(sizes)
    for k, size in enumerate(sizes):
        filled += size
        left -= size
        if filled >= (limit if buckets and left > limit // 4 else limit // 4):
            buckets.append((first, k + 1))
            first, filled = k + 1, 0
    if first < len(sizes):
        buckets.append((first, len(sizes)))
    return buckets
