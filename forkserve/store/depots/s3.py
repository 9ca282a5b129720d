"""Chunks in an S3-compatible object store, through the library `obstore`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any

from forkserve.errors import ConfigError, MissingExtra
from forkserve.store.chunks import Buffer
from forkserve.store.depots.memory import MemoryBlob
from forkserve.store.depots.protocol import Stat

__all__ = ["S3Depot"]

_SUFFIX = ".kv"
_ASIDE = "quarantine"
_ANSWER = re.compile(r"<Code>(.*?)</Code><Message>(.*?)</Message>")
_MANY = 1000  # objects that one request may delete


class S3Depot:
    """Objects ``<prefix>/<aa>/<key>.kv`` of a bucket.

    An object is uploaded in one request that fails if the key is there by then (``If-None-Match``),
    so no writer replaces what another has written, and an upload that breaks off leaves no parts.
    Where the server doesn't know that, give ``conditional_put="disabled"``: a key stands for its
    bytes, so writing it twice is only work.

    options: what `obstore.store.S3Store` takes (endpoint, region, access_key_id, ...); without
    them it reads the usual AWS variables.  timeout_s: deadline of one request; after it, and two
    retries, the call raises OSError and the caller recomputes.  Raises MissingExtra without
    obstore, ConfigError for an option that it does not know.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "forkserve",
        *,
        place: str = "object",
        timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise MissingExtra("An S3 depot", "s3", "obstore") from error
        self.place = place
        self._api: Any = obstore
        self._prefix = prefix.strip("/")
        self._conditional = options.get("conditional_put") != "disabled"
        client: Any = {"timeout": f"{timeout_s}s", "connect_timeout": f"{min(timeout_s, 10.0)}s"}
        if str(options.get("endpoint", "")).startswith("http://"):
            client["allow_http"] = "true"
        retry: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=timeout_s)}
        try:
            self._store: Any = S3Store(bucket, client_options=client, retry_config=retry, **options)
        except Exception as error:  # the library has a type of its own for each option
            why = str(error).partition("\n")[0]
            raise ConfigError(f"the bucket '{bucket}' cannot be used: {why}") from error

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> list[Stat]:
        """Upload objects that are not there yet; an upload shows whole or not at all."""
        out = []
        for key, parts in items:
            size = sum(len(part) for part in parts)
            known = self.stat(key)
            if known is None or known.bytes != size:
                self._upload(self._path(key), b"".join(parts), fresh=known is None)
                known = self.stat(key)
            if known is not None and known.bytes != size:  # a damaged one came in between
                self._upload(self._path(key), b"".join(parts), fresh=False)
                known = self.stat(key)
            if known is None or known.bytes != size:
                raise OSError(f"object {key[:16]} is not there after its upload")
            out.append(known)
        return out

    def _upload(self, path: str, data: bytes, *, fresh: bool) -> None:
        """One request; `fresh`: unless somebody was faster, whose object then stays."""
        mode = "create" if fresh and self._conditional else "overwrite"
        with suppress(FileExistsError):
            self._call("put", path, data, mode=mode, use_multipart=False)

    def open(self, key: str) -> MemoryBlob:
        """Download an object.  Raises FileNotFoundError."""
        got = self._call("get", self._path(key))
        stat = _stat(key, got.meta)
        try:
            data = bytearray(memoryview(got.bytes()))
        except Exception as error:
            raise OSError(f"object {key[:16]} broke off: {error}") from error
        return MemoryBlob(stat, data)

    def head(self, key: str, count: int) -> tuple[Stat, bytes]:
        """Stat and first bytes of an object.  Raises FileNotFoundError."""
        stat = _stat(key, self._call("head", self._path(key)))
        if stat.bytes == 0:
            return stat, b""
        try:
            part = self._api.get_range(
                self._store, self._path(key), start=0, end=min(count, stat.bytes)
            )
        except Exception as error:
            raise _translated(error) from error
        return stat, bytes(part)

    def stat(self, key: str) -> Stat | None:
        """Length and stamp of an object, or None."""
        try:
            return _stat(key, self._call("head", self._path(key)))
        except FileNotFoundError:
            return None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, many in one request."""
        for begin in range(0, len(keys), _MANY):
            paths = [self._path(key) for key in keys[begin : begin + _MANY]]
            try:
                self._call("delete", paths)
            except FileNotFoundError:  # an object store need not say so; what is left goes singly
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._call("delete", [path])

    def quarantine(self, key: str, reason: str) -> None:
        """Move an object below ``quarantine/``."""
        try:
            target = f"{self._prefix}/{_ASIDE}/{key}.{reason}"
            self._call("copy", self._path(key), target)
        except FileNotFoundError:
            return
        self.delete([key])

    def entries(self) -> Iterator[Stat]:
        """Every chunk object."""
        names = self._names()
        if all(len(name) == 2 or name == _ASIDE for name in names):
            names = [""]  # nothing of others is there: one listing for all
        try:
            for name in names:
                if len(name) == 2 or not name:
                    yield from self._listed(f"{self._prefix}/{name}".rstrip("/") + "/")
        except Exception as error:
            raise _translated(error) from error

    def _listed(self, below: str) -> Iterator[Stat]:
        for batch in self._api.list(self._store, below, chunk_size=1000):
            for meta in batch:
                key = str(meta["path"]).rpartition("/")[2].removesuffix(_SUFFIX)
                if len(key) == 64 and str(meta["path"]) == self._path(key):
                    yield _stat(key, meta)

    def below(self, folder: str) -> S3Depot:
        """The objects below ``<prefix>/<folder>``."""
        out = copy(self)
        out._prefix = f"{self._prefix}/{folder}".strip("/")
        return out

    def folders(self) -> list[str]:
        """Names of folders below the prefix that are not its own."""
        return [name for name in self._names() if len(name) != 2 and name != _ASIDE]

    def _names(self) -> list[str]:
        found = self._call("list_with_delimiter", self._prefix + "/")
        return [str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

    def sweep(self, older_than_s: float) -> int:
        """An upload that broke off leaves nothing: it is one request."""
        return 0

    def close(self) -> None:
        """The client has nothing to close."""

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key[:2]}/{key}{_SUFFIX}"

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._api, name)(self._store, *args, **options)
        except Exception as error:
            raise _translated(error) from error


def _translated(error: Exception) -> OSError:
    """Every fault of the client as the OSError that the rest of the store expects.

    A bucket that does not exist is no missing object: nothing in it is known to be lost.
    """
    kind, text = type(error).__name__, str(error)
    said = [f"({found[1]}: {found[2]})" for found in _ANSWER.finditer(text)]
    why = " ".join([text.partition("\n")[0].partition(": <?xml")[0], *said[:1]])
    if kind in ("NotFoundError", "FileNotFoundError") and "<Code>NoSuchBucket</Code>" not in text:
        return FileNotFoundError(why)
    if kind in ("AlreadyExistsError", "FileExistsError"):
        return FileExistsError(why)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return error
    return OSError(f"object store: {kind}: {why}")


def _stat(key: str, meta: Any) -> Stat:
    at = meta["last_modified"].timestamp()
    mark = hash((meta["size"], meta.get("e_tag"), at))
    return Stat(key, meta["size"], meta["size"], at, (mark,))
