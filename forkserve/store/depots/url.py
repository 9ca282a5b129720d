"""A further place by its URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from forkserve.errors import ConfigError
from forkserve.store.depots.local import LocalDepot
from forkserve.store.depots.protocol import Depot

__all__ = ["depot_at"]


def depot_at(url: str) -> Depot:
    """``s3://bucket/prefix?endpoint=...&region=...``, or a directory (a path, or ``file:///path``).

    What the query leaves out, credentials above all, comes from the usual AWS variables.  The place
    is called "object" or "far".  A directory is made when something is written.  Raises
    ConfigError, MissingExtra.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        from forkserve.store.depots.s3 import S3Depot

        if not parts.netloc:
            raise ConfigError(f"'{url}' names no bucket: s3://BUCKET/PREFIX")
        prefix = parts.path.strip("/") or "forkserve"
        options: dict[str, Any] = dict(parse_qsl(parts.query))
        return S3Depot(parts.netloc, prefix, **options)
    if parts.scheme == "file":
        return LocalDepot(unquote(parts.path), place="far", create=False)
    if "://" in url or not url:
        raise ConfigError(f"'{url}' is no place: s3://BUCKET/PREFIX, or a directory")
    return LocalDepot(url, place="far", create=False)
