"""Numbers of a store: totals of this process, totals of the store, and how much lies where.

`Meter` is what the parts add to; `snapshot` and `prometheus` are what `Store.metrics` and
`forkserve store stats` show.  The text format is version 0.0.4 of the Prometheus exposition format.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Meter", "prometheus"]

Labels = tuple[tuple[str, str], ...]

# Name of a sample -> (type, help).
_FAMILIES = {
    "restored_tokens": ("counter", "Rows brought back, by tier"),
    "computed_tokens": ("counter", "Rows left to prefill, by reason"),
    "published_bytes": ("counter", "Bytes of chunks written"),
    "published_chunks": ("counter", "Chunks written"),
    "moved_bytes": ("counter", "Bytes of rows copied from device pages to memory"),
    "evicted_bytes": ("counter", "Bytes that left a tier, by tier and reason"),
    "evicted_tokens": ("counter", "Rows that left a tier, by tier and reason"),
    "unusable": ("counter", "Chunks that failed their verification or were gone, by tier and why"),
    "dropped": ("counter", "Requests that a full queue refused, by queue"),
    "failures": ("counter", "Failures that nobody waited for, by error"),
    "ms": ("counter", "Milliseconds spent, by work"),
    "calls": ("counter", "How often, by work"),
    "queued": ("gauge", "Requests that wait, by queue"),
    "bytes": ("gauge", "Bytes held, by tier"),
    "limit_bytes": ("gauge", "Budget, by tier"),
    "parts": ("gauge", "Stored parts, by tier"),
    "total": ("counter", "Totals since the store was made, by name"),
}


class Meter:
    """Sums by name and labels.  Safe to use from several threads."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Labels], float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, by: float = 1, **labels: str) -> None:
        """Add to a sum."""
        assert name in _FAMILIES, name
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._sums[key] = self._sums.get(key, 0) + by

    def took(self, work: str, ms: float) -> None:
        """A piece of work took `ms`."""
        self.add("ms", ms, work=work)
        self.add("calls", 1, work=work)

    def samples(self) -> list[tuple[str, Labels, float]]:
        """(name, labels, value), in order."""
        with self._lock:
            return sorted((name, labels, value) for (name, labels), value in self._sums.items())

    def value(self, name: str, **labels: str) -> float:
        """One sum, 0 if nothing was added."""
        with self._lock:
            return self._sums.get((name, tuple(sorted(labels.items()))), 0)


def prometheus(metrics: Mapping[str, Any]) -> str:
    """What `Store.metrics` returns, as Prometheus text."""
    families: dict[str, list[str]] = {}
    for name, labels, value in _samples(metrics):
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
        shown = f"{value:.6f}".rstrip("0").rstrip(".")
        line = f"forkserve_store_{name}" + (f"{{{inner}}}" if inner else "") + f" {shown}"
        families.setdefault(name, []).append(line)
    out = []
    for name, lines in families.items():
        kind, text = _FAMILIES[name]
        out += [f"# HELP forkserve_store_{name} {text}", f"# TYPE forkserve_store_{name} {kind}"]
        out += lines
    return "\n".join(out) + "\n"


def _samples(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Labels, float]]:
    for sample in metrics["process"]:
        yield sample["name"], tuple(sorted(sample["labels"].items())), sample["value"]
    for tier, row in metrics["tiers"].items():
        for key, name in (("bytes", "bytes"), ("limit", "limit_bytes"), ("parts", "parts")):
            if row.get(key) is not None:
                yield name, (("tier", tier),), row[key]
    for queue, count in metrics["queued"].items():
        yield "queued", (("queue", queue),), count
    for name, count in metrics["totals"].items():
        family, _, rest = name.partition("/")
        if rest and family in _FAMILIES:  # "evicted_bytes/disk/budget": totals by tier and reason
            tier, _, reason = rest.rpartition("/")
            yield family, (("reason", reason), ("tier", tier)), count
        else:
            yield "total", (("name", name),), count


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
