"""Chunks in an S3-compatible object store, through the library `obstore`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from forkserve.errors import ConfigError, MissingExtra
from forkserve.store.chunks import Buffer
from forkserve.store.depots.memory import MemoryBlob
from forkserve.store.depots.protocol import Stat

__all__ = ["S3Depot"]

_SUFFIX = ".kv"
_MANY = 1000  # objects that one request may delete


class S3Depot:
    """Objects ``<prefix>/<aa>/<key>.kv`` of a bucket.

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
                self._call("put", self._path(key), b"".join(parts))
                known = self.stat(key)
            if known is None or known.bytes != size:
                raise OSError(f"object {key[:16]} is not there after its upload")
            out.append(known)
        return out

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
            target = f"{self._prefix}/quarantine/{key}.{reason}"
            self._call("copy", self._path(key), target)
        except FileNotFoundError:
            return
        self.delete([key])

    def entries(self) -> Iterator[Stat]:
        """Every chunk object."""
        try:
            for batch in self._api.list(self._store, self._prefix + "/", chunk_size=1000):
                for meta in batch:
                    folder, _, name = str(meta["path"]).rpartition("/")
                    key = name.removesuffix(_SUFFIX)
                    if name.endswith(_SUFFIX) and len(key) == 64 and folder.endswith(key[:2]):
                        yield _stat(key, meta)
        except Exception as error:
            raise _translated(error) from error

    def sweep(self, older_than_s: float) -> int:
        """An upload that broke off leaves nothing visible; its parts are the bucket's business."""
        return 0

    def close(self) -> None:
        """The client has nothing to close."""

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key[:2]}/{key}{_SUFFIX}"

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._api, name)(self._store, *args)
        except Exception as error:
            raise _translated(error) from error


def _translated(error: Exception) -> OSError:
    """Every fault of the client as the OSError that the rest of the store expects."""
    if isinstance(error, OSError):
        return error
    if type(error).__name__ == "NotFoundError":
        return FileNotFoundError(str(error))
    return OSError(f"object store: {type(error).__name__}: {error}")


def _stat(key: str, meta: Any) -> Stat:
    at = meta["last_modified"].timestamp()
    mark = hash((meta["size"], meta.get("e_tag"), at))
    return Stat(key, meta["size"], meta["size"], at, (mark,))
