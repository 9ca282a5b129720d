"""Note which kernels were launched; the file named by KERNELS_LAUNCHED gets the list.

`make gpu` runs these tests in several processes, each of them its share.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forkserve.kernels.compile import kernels
from forkserve.kernels.jit import INTERPRETED

from ..interpreter import patch_once

_launched: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    # Triton 3.6's interpreter, with numpy from 1.25 on.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning")


def pytest_sessionstart() -> None:
    torch.set_num_threads(1)
    if INTERPRETED:
        patch_once()
    for kernel in kernels():

        def note(*_: Any, name: str = kernel.name, **__: Any) -> None:
            _launched.add(name)

        kernel.function.add_pre_run_hook(note)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """KERNEL_TESTS_SHARE=i/n keeps every n-th test, from the i-th on."""
    share = os.environ.get("KERNEL_TESTS_SHARE")
    if share:
        first, count = map(int, share.split("/"))
        kept = items[first::count]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    place = os.environ.get("KERNELS_LAUNCHED")
    if place:
        Path(place).write_text("\n".join(sorted(_launched)))
