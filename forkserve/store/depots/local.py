"""Chunks as files in a directory: ``aa/<64 hex digits>.kv``.

A file is written under a temporary name in its own directory, synced, renamed, and the directory is
synced.  One durable step serves a whole publish: all files are written before the first is synced,
so the device works on them at once, and each directory is synced once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from forkserve.store import faults
from forkserve.store.chunks import Buffer
from forkserve.store.depots.protocol import Stat
from forkserve.store.pace import breathe, paced, pieces

__all__ = ["LocalDepot"]

_SUFFIX = ".kv"
_TEMP = ".tmp-"
_ABANDONED_S = 86400.0  # after which a living process of that number is another one
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # fewer page faults when everything is read at once


class _Mapped:
    """A mapped file."""

    def __init__(self, stat: Stat, area: mmap.mmap) -> None:
        self.stat = stat
        self._area = area

    @property
    def data(self) -> memoryview:
        return memoryview(self._area)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is still in use: it closes with that
            self._area.close()


class LocalDepot:
    """Files below `folder`, which is made if it is missing.  Raises OSError if it cannot be."""

    def __init__(self, folder: str | Path, *, place: str = "disk", create: bool = True) -> None:
        self.folder = Path(folder).absolute()  # the process may change its directory
        self.place = place
        if create:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
        """Write files; see `Depot.put`."""
        pending: list[tuple[Path, Path, int]] = []
        homes: dict[Path, None] = {}
        faults.reach("chunk.begin")
        try:
            for key, parts in items:
                path = self._path(key)
                size = sum(len(part) for part in parts)
                homes[path.parent] = None
                if self._size(path) == size:
                    continue
                if not path.parent.is_dir():
                    self.folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    homes[self.folder] = None
                temp = path.parent / f"{_TEMP}{os.getpid()}-{time.monotonic_ns()}-{key[:16]}"
                pending.append((temp, path, os.open(temp, os.O_WRONLY | os.O_CREAT, 0o600)))
                _write(pending[-1][2], parts)
            faults.reach("chunk.written")
            for _, _, file in pending:
                os.fdatasync(file)
                breathe()
            faults.reach("chunk.synced")
            for temp, path, _ in pending:
                os.replace(temp, path)
            faults.reach("chunk.renamed")
            for home in homes:
                _sync_folder(home)
                breathe()
            faults.reach("chunk.durable")
        except BaseException:
            for temp, _, _ in pending:
                with contextlib.suppress(OSError):
                    os.unlink(temp)
            raise
        finally:
            for _, _, file in pending:
                os.close(file)
        found = [self.stat(key) for key, _ in items]
        if None in found:
            raise FileNotFoundError(f"a chunk vanished from {self.folder} while it was written")
        return [stat for stat in found if stat is not None]

    def open(self, key: str) -> _Mapped:
        """Map a file.  Raises FileNotFoundError."""
        file = os.open(self._path(key), os.O_RDONLY)
        try:
            stat = _stat(key, os.fstat(file))
            if stat.bytes == 0:
                area = mmap.mmap(-1, 1)  # an empty file cannot be mapped: it is damaged anyway
            else:
                # Read-only: populating a writable private mapping would copy every page.
                flags = mmap.MAP_SHARED | (0 if paced() else _POPULATE)
                area = mmap.mmap(file, stat.bytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        return _Mapped(stat, area)

    def head(self, key: str, count: int) -> tuple[Stat, bytes]:
        """Stat and first bytes of a file.  Raises FileNotFoundError."""
        with self._path(key).open("rb") as file:
            return _stat(key, os.fstat(file.fileno())), file.read(count)

    def stat(self, key: str) -> Stat | None:
        """Length and stamp of a file, or None."""
        try:
            return _stat(key, os.stat(self._path(key)))
        except FileNotFoundError:
            return None

    def delete(self, keys: Sequence[str]) -> None:
        """Unlink files; mappings of them stay readable."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))

    def quarantine(self, key: str, reason: str) -> None:
        """Move a file to ``quarantine/<key>.<reason>``."""
        aside = self.folder.parent / "quarantine"
        aside.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path(key), aside / f"{key}.{reason}.{time.time_ns()}")

    def entries(self) -> Iterator[Stat]:
        """Every chunk file."""
        for home in self._homes():
            with os.scandir(home) as entries:
                for entry in entries:
                    key = entry.name.removesuffix(_SUFFIX)
                    if entry.name.endswith(_SUFFIX) and len(key) == 64:
                        with contextlib.suppress(FileNotFoundError):
                            yield _stat(key, entry.stat())

    def sweep(self, older_than_s: float) -> int:
        """Remove temporary files that nobody has touched for `older_than_s` seconds.

        One whose writer still lives stays for a day: it is being written.
        """
        gone, now = 0, time.time()
        for home in self._homes():
            for path in home.glob(f"{_TEMP}*"):
                with contextlib.suppress(FileNotFoundError):
                    age = now - path.stat().st_mtime
                    if age >= older_than_s and (age > _ABANDONED_S or not _writing(path.name)):
                        path.unlink()
                        gone += 1
        return gone

    def close(self) -> None:
        """Nothing is held open."""

    def _homes(self) -> list[Path]:
        try:
            return sorted(p for p in self.folder.iterdir() if len(p.name) == 2 and p.is_dir())
        except FileNotFoundError:
            return []

    def _path(self, key: str) -> Path:
        if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
            raise ValueError(f"{key!r} is no content id")
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return -1


def _writing(name: str) -> bool:
    """True if the process that a temporary file is named after is alive."""
    try:
        os.kill(int(name.removeprefix(_TEMP).split("-")[0]), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _stat(key: str, s: os.stat_result) -> Stat:
    stamp = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
    return Stat(key, s.st_size, max(s.st_blocks * 512, s.st_size), s.st_mtime, stamp)


def _write(file: int, parts: Sequence[Buffer]) -> None:
    for part in parts:
        for piece in pieces(part):
            left = piece
            while len(left):
                left = left[os.write(file, left) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
