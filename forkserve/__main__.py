"""`python -m forkserve` is the command `forkserve`."""

from __future__ import annotations

from forkserve.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
