"""A mock that also holds the engine to the backend's contract, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

from forkserve.engine import MockBackend
from forkserve.types import Batch, BatchResult, Span, Work

__all__ = ["StrictMock"]

Slot = tuple[int, int]  # page, row


class StrictMock(MockBackend):
    """`MockBackend` that asserts what `forkserve.types` promises about a batch."""

    debug = True

    def execute(self, batch: Batch) -> BatchResult:
        self._check_copies(batch)
        written: set[Slot] = set()
        for work in batch.works:
            self._check_work(work)
            slots = set(self._slots(work.write)) if work.write is not None else set()
            assert not slots & written, f"two works write the rows {sorted(slots & written)}"
            stand = {(page, row) for page, row in slots if row < batch.standing.get(page, 0)}
            assert not stand, f"node {work.node} writes the rows {sorted(stand)}, which stand"
            written |= slots
        for work in batch.works:
            for span in work.context:
                both = written & set(self._slots(span))
                assert not both, f"node {work.node} reads rows {sorted(both)} of the same batch"
        self._check_keys(batch)
        return super().execute(batch)

    def _slots(self, span: Span) -> Iterator[Slot]:
        size = self.config.page_size
        for row in range(span.offset, span.offset + span.length):
            yield span.pages[row // size], row % size

    def _check_work(self, work: Work) -> None:
        assert len(work.tokens) > 0, f"node {work.node} has an empty work"
        at = 0
        if self.window and work.context:  # what is out of the window may have been given back
            at = min(work.context[0].start, max(work.start - self.window + 1, 0))
        for span in work.context:
            assert (span.start, span.length > 0) == (at, True), (
                f"context of node {work.node} goes on at {span.start} after {at} rows"
            )
            assert span.offset >= 0
            assert span.offset + span.length <= len(span.pages) * self.config.page_size
            at += span.length
        assert at == work.start or self.window == 1, (
            f"context of {at} rows before position {work.start}"
        )
        if work.write is not None:
            assert (work.write.start, work.write.length) == (work.start, len(work.tokens))
        if work.speculative:
            assert work.sample is None, f"speculation on node {work.node} is sampled"

    def _check_copies(self, batch: Batch) -> None:
        for copy in batch.copies:
            assert copy.src_page != copy.dst_page, f"page {copy.src_page} is copied onto itself"
            assert 0 < copy.rows <= self.config.page_size - max(copy.src_row, copy.dst_row)

    def _check_keys(self, batch: Batch) -> None:
        """Spans of equal key name the same rows, whatever their lengths."""
        seen: dict[object, Span] = {}
        for work in batch.works:
            for span in work.context:
                other = seen.setdefault(span.key, span)
                rows = min(span.length, other.length)
                assert (span.start, span.offset) == (other.start, other.offset)
                mine = list(self._slots(span))[:rows]
                assert mine == list(self._slots(other))[:rows], f"key {span.key} is ambiguous"
