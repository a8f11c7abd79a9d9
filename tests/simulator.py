"""Mosaic GPU kernels in the simulator, in a process of their own.

It blocks one worker thread of XLA's CPU client per waiting warpgroup, and their number is fixed when the client starts.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import Any


def run_simulator(script: str, names: Iterable[str], *, threads: int, timeout: int) -> dict[str, Any]:
    """Runs a test file as a program with these cases: the JSON of its last line. Fails on a race, or any other exit than 0.

    `threads`: of XLA's CPU client. `timeout`: seconds.
    """
    tests = pathlib.Path(__file__).parent
    path = os.pathsep.join(map(str, (tests.parent, tests)))
    environment = {**os.environ, "NPROC": str(threads), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, script, *names]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "RACE" not in process.stdout + process.stderr
    return json.loads(process.stdout.splitlines()[-1])
