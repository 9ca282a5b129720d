"""Chunks as files in a directory: ``aa/<64 hex digits>.kv``.

A file is written in the folder ``tmp`` under a name that says who writes it, synced, renamed, and
its directory is synced.  One durable step serves a publish of many: files are written before the
first of them is synced, so the device works on them at once, and each directory is synced once.
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkserve.store import faults, owner
from forkserve.store.chunks import Buffer
from forkserve.store.depots.protocol import Stat
from forkserve.store.pace import breathe, paced, pieces

__all__ = ["LocalDepot", "Waste"]

_SUFFIX = ".kv"
_TEMP = ".tmp-"
_TEMPS = "tmp"
_ABANDONED_S = 86400.0  # s after which a writer that cannot be checked from here has ended
_OPEN = 128  # files that are open at once: a process may have 1,024 in all
ASIDE_FILES = 64  # damaged files that are kept to be looked at
ASIDE_BYTES = 1 << 30
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


@dataclass(frozen=True, slots=True)
class Waste:
    """Files that are no chunks, and their bytes: unfinished ones of writers, and damaged ones."""

    leftovers: int = 0
    leftover_bytes: int = 0
    aside: int = 0
    aside_bytes: int = 0


class LocalDepot:
    """Files below `folder`, which is made if it is missing.  Raises OSError if it cannot be.

    aside: where damaged files are put, by default ``quarantine`` beside the folder; the latest 64
    of at most 1 GiB stay there.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        place: str = "disk",
        create: bool = True,
        aside: Path | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()  # the process may change its directory
        self.place = place
        self.aside = aside or self.folder.parent / "quarantine"
        if create:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
        """Write files; see `Depot.put`."""
        groups = (items[at : at + _OPEN] for at in range(0, len(items), _OPEN))
        return [stat for group in groups for stat in self._put(group)]

    def _put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
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
                    # Somebody may have removed it; a folder below a further place is made here.
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    homes[self.folder] = None
                temp = self._temp(key)
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
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self.folder)  # a full disk is known by its name
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
        """Move a file aside as ``<key>.<reason>.<time>``; the oldest there go when it is many."""
        self.aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path(key), self.aside / f"{key}.{reason}.{time.time_ns():020}")
        self.drop_aside(ASIDE_BYTES)

    def drop_aside(self, most_bytes: int) -> int:
        """Delete the oldest damaged files until no more than that (and 64) are left.

        Returns the bytes that this has freed.
        """
        found = sorted(_files(self.aside), key=lambda pair: pair[0].name.rpartition(".")[2])
        left, freed = sum(used for _, used in found), 0
        for number, (path, used) in enumerate(found):
            if left <= most_bytes and len(found) - number <= ASIDE_FILES:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            left, freed = left - used, freed + used
        return freed

    def waste(self) -> Waste:
        """What takes room and is no chunk.  Raises OSError."""
        temps, aside = _files(self.folder / _TEMPS), _files(self.aside)
        sizes = (sum(used for _, used in temps), sum(used for _, used in aside))
        return Waste(len(temps), sizes[0], len(aside), sizes[1])

    def below(self, folder: str) -> LocalDepot:
        """The folder of that name, with what is damaged inside it."""
        path = self.folder / folder
        return LocalDepot(path, place=self.place, create=False, aside=path / "quarantine")

    def folders(self) -> list[str]:
        """Names of folders that hold no chunks of this depot itself."""
        try:
            inside = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        return [p.name for p in inside if len(p.name) != 2 and p.name != _TEMPS and p.is_dir()]

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
        """Remove unfinished files that nobody has touched for `older_than_s` seconds.

        One whose writer may live stays for a day: it is being written.
        """
        gone, now = 0, time.time()
        for home in (self.folder / _TEMPS, *self._homes()):  # an older version wrote beside them
            for path in home.glob(f"{_TEMP}*"):
                with contextlib.suppress(FileNotFoundError):
                    age = now - path.stat().st_mtime
                    if age >= older_than_s and (age > _ABANDONED_S or _writer_died(path.name)):
                        path.unlink()
                        gone += 1
        return gone

    def tidy(self) -> int:
        """Remove unfinished files of writers that have died; reads one small folder only."""
        gone = 0
        for path, _ in _files(self.folder / _TEMPS):
            if _writer_died(path.name):
                with contextlib.suppress(OSError):
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

    def _temp(self, key: str) -> Path:
        """Where a file is written; its name says by whom, so that leftovers of the dead are known.

        Raises OSError when the folder cannot be made.
        """
        home = self.folder / _TEMPS
        home.mkdir(mode=0o700, exist_ok=True)
        mark = base64.urlsafe_b64encode(owner.who().encode()).decode().rstrip("=")
        return home / f"{_TEMP}{mark}.{time.monotonic_ns()}-{key[:16]}"

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return -1


def _writer_died(name: str) -> bool:
    """True if the process that an unfinished file is named after has certainly ended."""
    text = name.removeprefix(_TEMP).partition(".")[0]
    try:
        holder = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return False  # of an older version: it goes after a day
    return holder.startswith("[") and owner.is_dead(holder)


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Files right in a folder, with what they take; none if there is no folder."""
    out = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        out.append((Path(entry.path), _stat("", entry.stat()).used))
    except FileNotFoundError:
        pass
    return out


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
