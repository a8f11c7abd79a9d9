"""`make gpu-check` refuses what would make its result meaningless (A31), and opted-in GPU tests do not skip (B29)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefix_reuse.build_stamp import (
    PID_FILE,
    STAMP,
    GpuCheckRefused,
    check_stamp,
    has_history,
    run_command,
    write_stamp,
)

REPOSITORY = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("gpu_check", REPOSITORY / "scripts" / "gpu_check.py")
assert _spec is not None
assert _spec.loader is not None
gpu_check = importlib.util.module_from_spec(_spec)
sys.modules["gpu_check"] = gpu_check
_spec.loader.exec_module(gpu_check)

COMMIT = "a" * 40


class FakeMachine:
    """Answers git, nvidia-smi and the import probe; a test changes the one answer that it is about."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.history = True
        self.status = ""
        self.cards = "NVIDIA H200, 570.86.15, 4, 143771\n"
        self.processes = ""
        self.smi_code = 0
        self.jax = "0.11.2"
        self.found: dict[str, str | None] = {"prefix_reuse": None, "pallas_kernels": None, "models": None}

    def __call__(self, argv: Sequence[str], cwd: Path) -> tuple[int, str]:
        match list(argv):
            case ["git", *_] if not self.history:
                return 128, "fatal: not a git repository"
            case ["git", "rev-parse", "--show-toplevel"]:
                return 0, f"{self.root}\n"
            case ["git", "rev-parse", "HEAD"]:
                return 0, f"{COMMIT}\n"
            case ["git", "status", *_]:
                return 0, self.status
            case ["git", "ls-files", "-z"]:
                files = [path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()]
                return 0, "".join(f"{name}\0" for name in files if name != STAMP)
            case ["nvidia-smi", query, *_] if query.startswith("--query-gpu"):
                return self.smi_code, self.cards
            case ["nvidia-smi", *_]:
                return self.smi_code, self.processes
            case [_, "-c", _]:
                return 0, json.dumps({"found": self.found, "versions": {"jax": self.jax, "python": "3.12.1"}})
        raise AssertionError(f"unexpected command {argv}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "prefix_reuse").mkdir()
    (tmp_path / "prefix_reuse" / "engine.py").write_text("x = 1\n")
    (tmp_path / "pyproject.toml").write_text('dependencies = ["jax>=0.11.2,<0.13"]\n')
    return tmp_path


@pytest.fixture
def machine(root: Path) -> FakeMachine:
    return FakeMachine(root)


def nobody(pid: int) -> str | None:
    return None


def preflight(root: Path, machine: FakeMachine, lookup=nobody) -> dict:
    return gpu_check.preflight(root, machine, lookup)


def test_clean_tree_on_an_idle_card_is_accepted_and_recorded(root: Path, machine: FakeMachine) -> None:
    record = preflight(root, machine)
    assert record["commit"] == COMMIT
    assert record["vouched_by"] == "git"
    assert record["cards"] == [
        {"name": "NVIDIA H200", "driver": "570.86.15", "memory_used_mib": 4, "memory_total_mib": 143771}
    ]
    assert record["versions"] == {"jax": "0.11.2", "python": "3.12.1"}


def test_dirty_tree_is_refused_with_the_file_named(root: Path, machine: FakeMachine) -> None:
    machine.status = " M prefix_reuse/engine.py\n"
    with pytest.raises(GpuCheckRefused, match=r"dirty(.|\n)*engine\.py"):
        preflight(root, machine)


def test_files_of_the_check_itself_do_not_make_a_tree_dirty(root: Path, machine: FakeMachine) -> None:
    machine.status = f"?? {STAMP}\n?? {PID_FILE}\n"
    assert preflight(root, machine)["commit"] == COMMIT


def test_stamp_of_another_commit_is_a_stale_build(root: Path, machine: FakeMachine) -> None:
    (root / STAMP).write_text(json.dumps({"commit": "b" * 40, "files": {}}))
    with pytest.raises(GpuCheckRefused, match="stale build"):
        preflight(root, machine)


def test_stamp_vouches_for_files_that_travel_without_history(root: Path, machine: FakeMachine) -> None:
    write_stamp(root, machine)
    machine.history = False
    record = preflight(root, machine)
    assert (record["commit"], record["vouched_by"]) == (COMMIT, "stamp")


def test_stamp_is_not_written_on_a_dirty_tree_or_without_history(root: Path, machine: FakeMachine) -> None:
    machine.status = "?? prefix_reuse/new.py\n"
    with pytest.raises(GpuCheckRefused, match="dirty"):
        write_stamp(root, machine)
    machine.history = False
    with pytest.raises(GpuCheckRefused, match="history"):
        write_stamp(root, machine)
    assert not (root / STAMP).exists()


def test_without_history_and_stamp_the_source_is_unknown(root: Path, machine: FakeMachine) -> None:
    machine.history = False
    with pytest.raises(GpuCheckRefused, match="gpu-stamp"):
        preflight(root, machine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_text("x = 2\n"), r"stale build(.|\n)*changed: prefix_reuse/engine\.py"),
        (lambda file: file.unlink(), r"stale build(.|\n)*missing: prefix_reuse/engine\.py"),
        (lambda file: file.with_name("new.py").write_text(""), r"dirty(.|\n)*prefix_reuse/new\.py"),
    ],
    ids=["changed", "missing", "unknown"],
)
def test_stamp_refuses_files_that_are_not_those_of_its_commit(
    root: Path, machine: FakeMachine, change, message: str
) -> None:
    write_stamp(root, machine)
    change(root / "prefix_reuse" / "engine.py")
    with pytest.raises(GpuCheckRefused, match=message):
        check_stamp(root)


def test_unreadable_stamp_is_refused(root: Path, machine: FakeMachine) -> None:
    machine.history = False
    (root / STAMP).write_text("{")
    with pytest.raises(GpuCheckRefused, match="cannot be read"):
        preflight(root, machine)


def test_installed_copy_that_differs_is_a_stale_build(root: Path, machine: FakeMachine, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "prefix_reuse"
    installed.mkdir(parents=True)
    (installed / "engine.py").write_text("x = 1\n")
    machine.found["prefix_reuse"] = str(installed)
    assert preflight(root, machine)["commit"] == COMMIT
    (installed / "engine.py").write_text("x = 0\n")
    with pytest.raises(GpuCheckRefused, match="stale build: the installed prefix_reuse"):
        preflight(root, machine)


@pytest.mark.parametrize("version", ["0.11.1", "0.13.0", "0.9.2"])
def test_jax_outside_the_declared_range_is_refused(root: Path, machine: FakeMachine, version: str) -> None:
    machine.jax = version
    with pytest.raises(GpuCheckRefused, match=f"jax {version}"):
        preflight(root, machine)


def test_machine_without_a_card_is_refused(root: Path, machine: FakeMachine) -> None:
    machine.smi_code, machine.cards = 127, "nvidia-smi: not found"
    with pytest.raises(GpuCheckRefused, match="no NVIDIA GPU"):
        preflight(root, machine)


def test_busy_card_is_refused_by_process_and_by_memory(root: Path, machine: FakeMachine) -> None:
    machine.processes = "4711, python3, 70000 MiB\n"
    with pytest.raises(GpuCheckRefused, match=r"busy(.|\n)*4711"):
        preflight(root, machine)
    machine.processes = ""
    machine.cards = "NVIDIA H200, 570.86.15, 4, 143771\nNVIDIA H200, 570.86.15, 90000, 143771\n"
    with pytest.raises(GpuCheckRefused, match="card 1"):
        preflight(root, machine)


def test_process_left_from_an_earlier_run_is_refused(root: Path, machine: FakeMachine) -> None:
    (root / PID_FILE).write_text("[100, 101]")
    with pytest.raises(GpuCheckRefused, match="101: python -m pytest -m gpu"):
        preflight(root, machine, lambda pid: "python -m pytest -m gpu" if pid == 101 else None)
    assert (root / PID_FILE).exists()


def test_pid_file_of_ended_or_reused_processes_is_removed(root: Path, machine: FakeMachine) -> None:
    (root / PID_FILE).write_text("[100, 101]")
    preflight(root, machine, lambda pid: "vim notes.txt" if pid == 101 else None)
    assert not (root / PID_FILE).exists()


def test_real_process_table_knows_this_process_and_no_absurd_one() -> None:
    assert "python" in (gpu_check.command_line(os.getpid()) or "")
    assert gpu_check.command_line(2**22 + 12345) is None


def test_command_line_reports_a_refusal_with_exit_code_2(monkeypatch, capsys) -> None:
    def refuse() -> None:
        raise GpuCheckRefused("the GPU is busy")

    monkeypatch.setattr(gpu_check, "preflight", refuse)
    assert gpu_check.main(["run"]) == 2
    assert "refused: the GPU is busy" in capsys.readouterr().err


def test_import_probe_runs_in_a_real_interpreter() -> None:
    assert gpu_check.check_build(REPOSITORY, run_command)["jax"]


def test_a_repository_without_commits_counts_as_no_history(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert not has_history(tmp_path)


def test_opted_in_gpu_test_fails_instead_of_being_skipped(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((REPOSITORY / "tests" / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_on_gpu():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")

    def outcome(require: str) -> str:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PREFIX_REUSE_REQUIRE_GPU": require}
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        return subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    assert "1 skipped" in outcome("0")
    assert "1 failed" in (opted_in := outcome("1")) or "1 error" in opted_in
    assert "capability is missing: " in opted_in
