"""Bytes out of shard files: only those that are asked for, and none that was not checked.

Nothing here parses HDF5. The manifest says at which offset each piece of a tensor lies, so a reader
says what it *wants*: ranges of bytes, and where they go. All wants are then served together, in the
order of the files, so that a block that several of them touch is read and checked once:

    wants      w[0:900]      w[900:1000]  b[0:50]  m[0:2000]
    blocks     |   0   |   1   |   2   |   3   |   4   |   5   |    a few are read at once
    threads      one     one     two     two     one     one        read, check, copy
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import numpy as np

from ..format.manifest import Damaged, Layout, Manifest
from ..storage import files
from ..storage.steps import Entry, open_shard
from ..storage.worker_thread import Worker
from .read_plan import ReadItem

#: Some wait for the disk while others check and copy: four restored 1 GiB in 0.48 s, two in 0.56.
_THREADS = 4
#: Groups that the system is asked for before they are needed, where it reads through its cache.
_AHEAD = 4


class _Summed(ReadItem):
    """A whole file, of which a digest is made; its bytes must come in order."""

    def __init__(self, file: int, count: int, digest):
        super().__init__(file, 0, count)
        self._digest = digest

    def take(self, at: int, data: np.ndarray) -> None:
        self._digest.update(data)


class _Group(NamedTuple):
    """Neighbouring blocks of a file, with those who want something of each."""

    file: int
    first: int
    wants: list[list[ReadItem]]


class Reader:
    """The shard files of one checkpoint, in an open folder that the caller keeps open.

    Parameters
    ----------
    verify : bool
        Whether blocks are compared with their checksums.
    direct : bool
        Whether bytes pass the system's cache by, where that is possible: worth while where nobody
        else will read the same.
    """

    def __init__(
        self,
        folder: int,
        manifest: Manifest | Layout,
        verify: bool = True,
        direct: bool = False,
    ):
        self._folder, self._manifest, self._verify = folder, manifest, verify
        self._direct = direct and manifest.block % files.PAGE == 0

    def read(
        self,
        wants: Sequence[ReadItem],
        threads: int = _THREADS,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read and check every block that `wants` need, once, and copy their bytes to them.

        It ends early when that is not `wanted` any more. Raises Damaged when a block fails its
        checksum or cannot be read; what came before has been given then.
        """
        groups = self._groups(wants)
        taken, lock = iter(range(len(groups))), threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                room = files.paged(self._at_once * self._manifest.block)
                with _Held(self._folder, self._manifest, self._direct) as held:
                    while not errors and wanted():
                        with lock:
                            number = next(taken, None)
                        if number is None:
                            return
                        group = groups[number]
                        descriptor = held.open(group.file)
                        if not held.direct:
                            self._begin(descriptor, groups[number : number + _AHEAD])
                        begin, count, where = self._span(group)
                        asked = -(-count // files.PAGE) * files.PAGE if held.direct else count
                        try:
                            there = files.read_at(descriptor, room[:asked].data, begin, count)
                        except OSError as error:
                            raise Damaged(f"{where} cannot be read: {error.strerror}") from error
                        if there < count:
                            raise Damaged(f"{where} are cut short: {there} are there")
                        self._serve(group, room[:count])
            except BaseException as error:
                errors.append(error)

        helpers = [Worker(work, "mpidist-read") for _ in range(min(threads, len(groups)) - 1)]
        with ExitStack() as stack:
            for helper in helpers:
                with suppress(RuntimeError):  # no more threads: fewer do it
                    helper.start()
                    # Nobody writes to the caller's arrays once this has returned.
                    stack.callback(helper.end)
            if groups:
                work()
        if errors:
            # Damage is an answer, on which others go on: Ctrl-C is not.
            raise next((e for e in errors if not isinstance(e, Exception)), errors[0])

    def check_file(self, number: int) -> None:
        """Check every byte of a file against all that the manifest says of it. Raises Damaged."""
        listed = self._manifest.files[number]
        if listed.sha256 is None:
            self.read([ReadItem(number, 0, listed.size)])
            return
        digest = hashlib.sha256()
        self.read([_Summed(number, listed.size, digest)], threads=1)
        if digest.hexdigest() != listed.sha256:
            raise Damaged(f"{listed.name} fails its SHA-256")

    @property
    def _at_once(self) -> int:
        """Blocks that are read by one call."""
        return max(1, files.GROUP * files.BLOCK // self._manifest.block)

    def _groups(self, wants: Sequence[ReadItem]) -> list[_Group]:
        block = self._manifest.block
        touched: dict[tuple[int, int], list[ReadItem]] = {}
        for want in wants:
            if want.count:
                last = (want.offset + want.count - 1) // block
                for number in range(want.offset // block, last + 1):
                    touched.setdefault((want.file, number), []).append(want)
        found: list[_Group] = []
        for (file, number), takers in sorted(touched.items(), key=lambda item: item[0]):
            group = found[-1] if found else None
            if (
                group is not None
                and (group.file, group.first + len(group.wants)) == (file, number)
                and len(group.wants) < self._at_once
            ):
                group.wants.append(takers)
            else:
                found.append(_Group(file, number, [takers]))
        return found

    def _begin(self, descriptor: int, groups: Sequence[_Group]) -> None:
        block = self._manifest.block
        for group in groups:
            if group.file == groups[0].file:
                files.begin_read(descriptor, group.first * block, len(group.wants) * block)

    def _span(self, group: _Group) -> tuple[int, int, str]:
        """Return where the bytes of a group begin, how many they are, and what to call them."""
        listed, block = self._manifest.files[group.file], self._manifest.block
        begin = group.first * block
        count = min(len(group.wants) * block, listed.size - begin)
        return begin, count, f"{listed.name}, bytes {begin}:{begin + count}"

    def _serve(self, group: _Group, data: np.ndarray) -> None:
        listed, block = self._manifest.files[group.file], self._manifest.block
        for number, takers in enumerate(group.wants, group.first):
            begin = number * block
            piece = data[begin - group.first * block :][:block]
            end = begin + len(piece)
            if self._verify and zlib.crc32(piece.data) != listed.crc32[number]:
                raise Damaged(f"{listed.name}, bytes {begin}:{end} fail their checksum")
            for want in takers:
                low, high = max(want.offset, begin), min(want.offset + want.count, end)
                want.take(low - want.offset, piece[low - begin : high - begin])


class _Held:
    """The file that a thread reads from: one at a time, for groups come in their order."""

    def __init__(self, folder: int, manifest: Manifest | Layout, direct: bool):
        self._folder, self._manifest, self._wanted = folder, manifest, direct
        self._file, self._descriptor, self.direct = -1, -1, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._close()

    def open(self, file: int) -> int:
        if file != self._file:
            self._close()
            self._descriptor, _ = open_shard(self._folder, self._manifest.files[file].name)
            self._file = file
            self.direct = self._wanted and files.set_direct(self._descriptor, True)
        return self._descriptor

    def _close(self) -> None:
        if self._file >= 0:
            self._file = -1
            files.close(self._descriptor)


@contextmanager
def opened(
    path: str, entry: Entry, manifest: Manifest | Layout, verify: bool = True, direct: bool = False
) -> Iterator[Reader]:
    """Read from an entry of the store at `path`. Raises Damaged."""
    with ExitStack() as stack:
        try:
            root = stack.enter_context(files.folder(path))
            folder = stack.enter_context(files.folder(entry.name, root))
        except OSError as error:
            raise Damaged(f"{entry.name} cannot be opened: {error.strerror}") from error
        yield Reader(folder, manifest, verify, direct)
