"""What every test gets: CPU unless GPU tests were asked for, and no silent skip once they were."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# Set by `make gpu-check`: whoever asks for GPU tests wants to hear about a missing capability, not to have it skipped.
REQUIRE_GPU = os.environ.get("PREFIX_REUSE_REQUIRE_GPU") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU test without a GPU is skipped, which `make gpu-check` counts as a failure."""
    if item.get_closest_marker("gpu") is None:
        return
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; jax runs on {jax.default_backend()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns the skip of an opted-in GPU test into a failure with the same reason."""
    report = yield
    if (
        REQUIRE_GPU
        and report.skipped
        and item.get_closest_marker("gpu") is not None
        and not hasattr(report, "wasxfail")
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"a GPU test was opted in and its capability is missing: {reason}"
    return report
