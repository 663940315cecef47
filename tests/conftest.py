"""Settings of every test, and the ONE place that judges skips: in continuous integration (CI=true) a skip is a failure.

A test may skip only because something that the machine may lack is not there (a browser, a GPU), with a reason that says
how to get it. `make test` installs what CI needs, so in CI a skip means that something was not tested.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched from a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, os.cpu_count() or 1)))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")

import pytest  # noqa: E402  (the settings above must come before anything that reads them)

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def _forbid(report) -> None:
    """Turn a skipped report into a failed one; an expected failure (xfail) is not a skip."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped in continuous integration, where everything must run: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _forbid(report)
    return report
