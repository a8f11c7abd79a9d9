"""GPU validation: accepts only a clean commit on an idle card, records what ran, runs `pytest -m gpu`.

    python scripts/gpu_check.py run [--record FILE] [pytest arguments]   # `make gpu-check`
    python scripts/gpu_check.py stamp                                    # `make gpu-stamp`

Refused, each with its reason: a dirty tree, a stale build (stamp of another commit, an installed copy that differs from
the checkout, a jax outside the declared range), a busy GPU, processes left from an earlier run. How a commit is vouched
for where the files travel without their git history: `prefix_reuse/build_stamp.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# The checkout itself is under test, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prefix_reuse.build_stamp import (
    PID_FILE,
    RECORD,
    ROOT,
    STAMP,
    GpuCheckRefused,
    Runner,
    check_source,
    file_hash,
    run_command,
    write_stamp,
)

PACKAGES = ("prefix_reuse", "pallas_kernels", "models")
# An idle card still shows a little memory in use (driver, display); a JAX process takes gigabytes at once.
IDLE_MEMORY_MIB = 1024
OUR_COMMANDS = ("pytest", "gpu_check")


@dataclass(frozen=True)
class Card:
    """One line of nvidia-smi."""

    name: str
    driver: str
    memory_used_mib: int
    memory_total_mib: int


# ---- the build: what Python would import -----------------------------------------------------------------------------

_PROBE = """
import importlib.metadata, importlib.util, json, os, sys
sys.path = [entry for entry in sys.path if entry not in ("", os.getcwd())]
found = {}
for name in PACKAGES:
    spec = importlib.util.find_spec(name)
    found[name] = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None
versions = {}
for name in ("jax", "jaxlib", "flax", "numpy", "triton", "jax-triton", "jax-cuda12-plugin", "jax-cuda13-plugin"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
versions["python"] = sys.version.split()[0]
print(json.dumps(dict(found=found, versions=versions)))
"""


def version_tuple(text: str) -> tuple[int, ...]:
    """`0.12.0.1` -> (0, 12, 0, 1); stops at the first part that is not a number."""
    parts = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in parts.group().split(".")) if parts else ()


def declared_jax_range(root: Path) -> tuple[str, str]:
    """Lower (inclusive) and upper (exclusive) bound of jax in pyproject.toml."""
    found = re.search(r'"jax>=([\d.]+),<([\d.]+)"', (root / "pyproject.toml").read_text())
    if not found:
        raise GpuCheckRefused("pyproject.toml declares no jax range of the form jax>=A,<B")
    return found.group(1), found.group(2)


def check_build(root: Path = ROOT, run: Runner = run_command) -> dict[str, str]:
    """Versions of what would run. Raises `GpuCheckRefused` for a stale installed copy or a jax outside the range."""
    code, out = run([sys.executable, "-c", _PROBE.replace("PACKAGES", repr(PACKAGES))], root)
    if code != 0:
        raise GpuCheckRefused(f"{sys.executable} cannot look up the packages:\n{out.strip()}")
    answer = json.loads(out.strip().splitlines()[-1])
    for name, location in answer["found"].items():
        # Absent is fine: pytest puts the checkout itself on the path. Elsewhere is fine only as an identical copy.
        if location is None or Path(location).resolve() == (root / name).resolve():
            continue
        ours = {path.relative_to(root / name): file_hash(path) for path in (root / name).rglob("*.py")}
        theirs = {path.relative_to(location): file_hash(path) for path in Path(location).rglob("*.py")}
        if ours != theirs:
            raise GpuCheckRefused(
                f"stale build: the installed {name} ({location}) differs from the checkout; pip install -e ."
            )
    lower, upper = declared_jax_range(root)
    jax = answer["versions"].get("jax")
    if jax is None:
        raise GpuCheckRefused(f"{sys.executable} has no jax: make gpu-check PY=/path/to/python that has it")
    if not version_tuple(lower) <= version_tuple(jax) < version_tuple(upper):
        raise GpuCheckRefused(f"stale build: jax {jax} is installed, pyproject.toml asks for >={lower},<{upper}")
    return answer["versions"]


# ---- the machine: idle, and nothing left behind ----------------------------------------------------------------------


def check_gpu_idle(run: Runner = run_command, root: Path = ROOT) -> list[Card]:
    """The cards, all idle. Raises `GpuCheckRefused` without a card, or when a process or memory is found on one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader,nounits"]
    code, out = run(query, root)
    if code != 0:
        raise GpuCheckRefused(f"no NVIDIA GPU: nvidia-smi says: {out.strip() or f'exit code {code}'}")
    cards = []
    for line in out.strip().splitlines():
        name, driver, used, total = [part.strip() for part in line.split(",")]
        cards.append(Card(name, driver, int(float(used)), int(float(total))))
    if not cards:
        raise GpuCheckRefused("no NVIDIA GPU: nvidia-smi lists none")
    code, out = run(["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"], root)
    processes = [line.strip() for line in out.splitlines() if re.match(r"\s*\d+\s*,", line)] if code == 0 else []
    if processes:
        raise GpuCheckRefused("the GPU is busy; processes on it:\n  " + "\n  ".join(processes))
    # In a container the processes of others are invisible, their memory is not.
    for number, card in enumerate(cards):
        if card.memory_used_mib > IDLE_MEMORY_MIB:
            raise GpuCheckRefused(
                f"the GPU is busy: card {number} ({card.name}) has {card.memory_used_mib} MiB in use, "
                f"more than the {IDLE_MEMORY_MIB} MiB of an idle card"
            )
    return cards


def command_line(pid: int) -> str | None:
    """The command line of a live process, None when there is none of that id. The real process table."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() or None
    except OSError:
        return "unknown"


def check_no_leftovers(root: Path = ROOT, lookup: Callable[[int], str | None] = command_line) -> None:
    """Raises `GpuCheckRefused` while a process of an earlier run lives; removes a pid file whose processes are gone."""
    path = root / PID_FILE
    if not path.exists():
        return
    try:
        pids = [int(pid) for pid in json.loads(path.read_text())]
    except (ValueError, TypeError):
        pids = []
    alive = []
    for pid in pids:
        line = lookup(pid)
        # Process ids are used again: only a command like ours is ours.
        if line is not None and (line == "unknown" or any(word in line for word in OUR_COMMANDS)):
            alive.append(f"{pid}: {line}")
    if alive:
        raise GpuCheckRefused("processes are left from an earlier run; end them first:\n  " + "\n  ".join(alive))
    path.unlink()


# ---- all together ----------------------------------------------------------------------------------------------------


def preflight(
    root: Path = ROOT, run: Runner = run_command, lookup: Callable[[int], str | None] = command_line
) -> dict[str, object]:
    """Every refusal in turn; returns what is to be recorded: source, cards, versions."""
    check_no_leftovers(root, lookup)
    source = check_source(root, run)
    versions = check_build(root, run)
    cards = check_gpu_idle(run, root)
    return {
        "commit": source.commit,
        "vouched_by": source.vouched_by,
        "cards": [asdict(card) for card in cards],
        "versions": versions,
    }


def run_tests(root: Path, arguments: Sequence[str]) -> int:
    """`pytest -m "gpu and not slow"`, its process id on file while it lives; a skip counts as a failure (tests/conftest.py)."""
    argv = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "tests/gpu", *arguments]
    process = subprocess.Popen(argv, cwd=root, env={**os.environ, "PREFIX_REUSE_REQUIRE_GPU": "1"})
    pid_file = root / PID_FILE
    pid_file.write_text(json.dumps([os.getpid(), process.pid]))
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        code = process.wait()
    # Kept only if pytest could not be ended, which is what the next run asks about.
    pid_file.unlink(missing_ok=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 0 passed, 1 tests failed (or none ran), 2 refused."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("stamp", help=f"write {STAMP} on a clean tree")
    run_parser = commands.add_parser("run", help="check the tree and the machine, then run the GPU tests")
    run_parser.add_argument("--record", type=Path, default=ROOT / RECORD, help="JSON file of what ran, and the result")
    options, arguments = parser.parse_known_args(argv)
    try:
        if options.command == "stamp":
            print(f"wrote {write_stamp()}")
            return 0
        record = preflight()
    except GpuCheckRefused as refused:
        print(f"gpu-check refused: {refused}", file=sys.stderr)
        return 2
    print(json.dumps(record, indent=2))
    start = time.monotonic()
    code = run_tests(ROOT, arguments)
    result = {**record, "pytest_exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    options.record.write_text(json.dumps(result, indent=2) + "\n")
    print(f"recorded in {options.record}")
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
