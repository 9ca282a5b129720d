"""Tests under device/ launch kernels: on a GPU, or on the CPU under Triton's interpreter.

The interpreter must be asked for before the kernels are imported, so `test_interpreted.py` runs
that folder in a process of its own.
"""

from __future__ import annotations

import os

import torch

ON_DEVICE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if ON_DEVICE else ["device"]
