"""Which source is running: the commit of a clean tree, vouched for by git or by a stamp that travels with the files.

A result is worth keeping only if one can say which source produced it. `write_stamp` records the commit and a hash per
tracked file of a clean tree in `.gpu-stamp.json`; where the files travel without their git history, `check_stamp`
compares them with it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefix_reuse.errors import PrefixReuseError

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".gpu-stamp.json"
# Left by a GPU check; they make no tree dirty.
PID_FILE = ".gpu-check.pid"
RECORD = "gpu-check.json"
SOURCE_FOLDERS = ("prefix_reuse", "pallas_kernels", "models", "tests", "scripts", "benchmarks")

# Runs a command in a folder: (argv, cwd) -> (exit code, stdout + stderr). A command that does not exist gives 127.
Runner = Callable[[Sequence[str], Path], tuple[int, str]]


class GpuCheckRefused(PrefixReuseError):
    """The machine or the tree is not in a state whose result would mean something."""


@dataclass(frozen=True)
class Source:
    """Where the code comes from: the commit, and whether git or a stamp vouches for it."""

    commit: str
    vouched_by: str


def run_command(argv: Sequence[str], cwd: Path) -> tuple[int, str]:
    """The real `Runner`."""
    try:
        done = subprocess.run(argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except FileNotFoundError:
        return 127, f"{argv[0]}: not found"
    return done.returncode, done.stdout


def has_history(root: Path, run: Runner = run_command) -> bool:
    """Whether `root` is the top of a git checkout with a commit (and not merely inside of somebody else's)."""
    code, out = run(["git", "rev-parse", "--show-toplevel"], root)
    if code != 0 or Path(out.strip()).resolve() != root.resolve():
        return False
    return run(["git", "rev-parse", "HEAD"], root)[0] == 0  # files may travel with a repository that has no history


def head_commit(root: Path, run: Runner = run_command) -> str:
    """The commit of a clean tree. Raises `GpuCheckRefused` for a dirty one, with the files that make it so."""
    code, out = run(["git", "status", "--porcelain"], root)
    if code != 0:
        raise GpuCheckRefused(f"git status failed: {out.strip()}")
    own = (STAMP, PID_FILE, RECORD)
    dirty = [line for line in out.splitlines() if line.strip() and line[3:].strip('"') not in own]
    if dirty:
        raise GpuCheckRefused("the tree is dirty (commit first):\n  " + "\n  ".join(dirty[:20]))
    code, out = run(["git", "rev-parse", "HEAD"], root)
    if code != 0:
        raise GpuCheckRefused(f"git rev-parse HEAD failed: {out.strip()}")
    return out.strip()


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_stamp(root: Path = ROOT, run: Runner = run_command) -> Path:
    """Writes commit and file hashes of a clean tree to `.gpu-stamp.json`; returns its path."""
    if not has_history(root, run):
        raise GpuCheckRefused(f"{root} has no git history: a stamp is written where the commit can be asked for")
    commit = head_commit(root, run)
    _, out = run(["git", "ls-files", "-z"], root)
    files = {name: file_hash(root / name) for name in out.split("\0") if name and (root / name).is_file()}
    path = root / STAMP
    path.write_text(json.dumps({"commit": commit, "files": files}, indent=0, sort_keys=True) + "\n")
    return path


def read_stamp(root: Path) -> Mapping:
    """The stamp that lies in the tree. Raises `GpuCheckRefused` when there is none or it cannot be read."""
    try:
        stamp = json.loads((root / STAMP).read_text())
        return {"commit": str(stamp["commit"]), "files": dict(stamp["files"])}
    except FileNotFoundError:
        raise GpuCheckRefused(
            f"no git history and no {STAMP}: run `make gpu-stamp` where the history is, and let the file travel along"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise GpuCheckRefused(f"{STAMP} cannot be read ({error}): write it again with `make gpu-stamp`") from None


def check_stamp(root: Path = ROOT) -> str:
    """Compares the files with the stamp; returns its commit.

    Raises:
        GpuCheckRefused: files that differ or are missing (stale build), or Python files that the stamp does not know
            (dirty tree).
    """
    stamp = read_stamp(root)
    files = stamp["files"]
    missing = sorted(name for name in files if not (root / name).is_file())
    changed = sorted(name for name in files if (root / name).is_file() and file_hash(root / name) != files[name])
    if missing or changed:
        listed = [f"missing: {name}" for name in missing] + [f"changed: {name}" for name in changed]
        raise GpuCheckRefused(
            f"stale build: the files are not those of commit {stamp['commit'][:12]} in {STAMP}:\n  "
            + "\n  ".join(listed[:20])
        )
    folders = [root / name for name in SOURCE_FOLDERS if (root / name).is_dir()]
    present = {path.relative_to(root).as_posix() for folder in folders for path in folder.rglob("*.py")}
    unknown = sorted(present - set(files))
    if unknown:
        raise GpuCheckRefused(f"the tree is dirty: files that {STAMP} does not know:\n  " + "\n  ".join(unknown[:20]))
    return stamp["commit"]


def check_source(root: Path = ROOT, run: Runner = run_command) -> Source:
    """The commit under test, vouched for by git or by the stamp. Raises `GpuCheckRefused` otherwise."""
    if not has_history(root, run):
        return Source(check_stamp(root), "stamp")
    commit = head_commit(root, run)
    if (root / STAMP).exists() and (stamped := read_stamp(root)["commit"]) != commit:
        raise GpuCheckRefused(
            f"stale build: {STAMP} is of commit {stamped[:12]}, the tree of {commit[:12]}; "
            "write it again (`make gpu-stamp`) or delete it"
        )
    return Source(commit, "git")
