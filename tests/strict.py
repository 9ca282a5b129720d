"""Hooks for CI: a test may not be skipped for what CI has to have, and tests may not get lost.

Only where `CI` is set: a developer may lack a server, a model or the right to mount.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

# Tests that a whole run has to run, below what there are by as many as machines differ.  Raise it
# when many come; lower it only in a change that says which tests go.
FLOOR = 5_000
_HERE = re.compile(  # reasons that mean: CI is not set up
    r"could not import|needs seaweedfs|S3 server did not start|command mount"
    r"|may not mount|needs Linux|needs os\.fork|Triton is not installed|no native kernels"
    r"|native kernels (?:are|were) not|is not installed|not installed:"
)


def _strict(report: Any) -> None:
    """Make a failure of a skip that must not be."""
    if not report.skipped or hasattr(report, "wasxfail") or not os.environ.get("CI"):
        return
    where = report.longrepr
    reason = str(where[2] if isinstance(where, tuple) else where)
    if _HERE.search(reason):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where it has to run: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    _strict(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    _strict(report)
    return report


def _whole(config: pytest.Config) -> bool:
    """Whether all tests were asked for, and none is a worker's share."""
    option = config.option
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not (option.keyword or option.collectonly or option.deselect or option.maxfail)
        and not (getattr(option, "lf", False) or getattr(option, "stepwise", False))
        and option.markexpr == "not long"
        and not hasattr(config, "workerinput")
    )


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI") or not _whole(session.config):
        return result
    ran = sum(len(reporter.stats.get(kind, ())) for kind in ("passed", "failed"))
    floor = int(session.config.getini("floor"))
    if ran < floor:
        reporter.write_line(f"\nonly {ran} tests ran, of at least {floor}: where are the others?")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("floor", "tests that a whole run in CI has to run", default=str(FLOOR))
