"""Divide the gradients into buckets; the gradients of a bucket are sent together.

    order of backward   d3.b d3.w | d2.b d2.w d1.b | c2.w c1.w loss     a bucket is sent when its
    bucket                  0     |       1        |      2             last gradient is ready

With N bytes of gradients, buckets of s bytes, a fixed time c per bucket, and b seconds per byte,
the exchange makes the step longer by (N / s) c + s b, because the exchange of the last bucket does
not overlap with the backward pass. This extra time is least for s = sqrt(N c / b). For gradients of
1 to 100 MB on Ethernet of 1 to 10 Gbit/s, the best s is between N/8 and N/40, so "auto" takes N/16.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError

#: The smallest and the largest bucket that "auto" chooses, in bytes.
LEAST, MOST = 256 << 10, 25 << 20


def bucket_bytes(wanted: int | str, total: int) -> int:
    """Return the bytes of a bucket; "auto" means a sixteenth of `total`, from 256 KiB to 25 MiB."""
    if isinstance(wanted, str) and wanted == "auto":
        return min(max(total // 16, LEAST), MOST)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(f"bucket_bytes={wanted!r}: expected 'auto' or a number of bytes")
    return wanted


def cut_buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Group tensors of `sizes` bytes into buckets; return each bucket's first and end index.

    A bucket ends with the tensor by which it reaches `limit` bytes. The first bucket needs only a
    quarter of `limit`, and so does a bucket if all tensors after it have at most a quarter of
    `limit` together. A tensor is never cut.
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
