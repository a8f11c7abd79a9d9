"""Snapshots: what a later process may rely on, whatever happened to the files in between (X7, B8, B30, H02, H32)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import GREEDY, cold, drained, engine, index_of, prompt
from store_helpers import GROUPS, MODEL, PLATFORM, contents, fill, make_cache, make_store, seq

from pallas_kernels.layout import LayerGroup
from prefix_reuse import cache as cache_module
from prefix_reuse import snapshot
from prefix_reuse.errors import SnapshotError
from prefix_reuse.hashing import Namespace

ROOT = Path(__file__).resolve().parents[2]
FIVE, OTHER_THREE = seq(1, 20), seq(101, 112)


def saved(folder: Path, *prompts: np.ndarray, **identity: Any) -> Any:
    """A cache with these prompts, saved to `folder`."""
    cache = make_cache(**identity)
    for tokens in prompts:
        fill(cache.store, tokens)
    cache.save_snapshot(folder)
    return cache


def newest(folder: Path) -> Path:
    return max(p for p in folder.iterdir() if p.suffix == "")


def page_files(folder: Path, entry: int) -> list[Path]:
    """Files with the bytes of a page of the newest set."""
    return [p for p in newest(folder).glob(f"pages-*/page{entry:08d}.*/0*") if p.is_file()]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def test_what_comes_back_is_what_was_there(tmp_path: Path) -> None:
    """X7, B8: tokens, namespaces, bytes of all groups, and the order in which entries will be evicted."""
    cache = make_cache()
    for tokens in (seq(1, 20), np.append(seq(1, 8), seq(50, 61)), seq(200, 207)):
        fill(cache.store, tokens)
    fill(cache.store, seq(1, 8), b"tenant")
    fill(cache.store, seq(1, 20))  # used again: evicted last
    report = cache.save_snapshot(tmp_path)
    assert (report.pages, report.present) == (12, 12)
    fresh = make_cache()
    loaded = fresh.load_snapshot(tmp_path)
    assert (loaded.pages, loaded.present, loaded.dropped, loaded.skipped) == (12, 12, 0, 0)
    assert contents(fresh.store) == contents(cache.store)
    order = [[tuple(t.tolist()) for _, t, _ in c.index.prefixes()] for c in (cache, fresh) if c.index is not None]
    assert order[0] == order[1]
    fresh.check_integrity()
    assert (fresh.store.stats().index_only_pages, fresh.store.stats().reserved_pages) == (12, 0)
    assert fresh.load_snapshot(tmp_path).pages == 0  # known pages keep what they have
    assert len(fresh) == 12


def test_an_empty_cache_is_a_snapshot_too(tmp_path: Path) -> None:
    saved(tmp_path, FIVE)
    make_cache().save_snapshot(tmp_path)
    assert make_cache().load_snapshot(tmp_path).present == 0


def test_keys_on_disk_are_the_documented_chain(tmp_path: Path) -> None:
    """A7, H02: sha256 over parent, position and tokens, the same bytes for everybody."""
    from prefix_reuse.hashing import page_keys

    saved(tmp_path, FIVE)
    entries = snapshot._load_entries(newest(tmp_path), 5, 4, 2)
    assert [bytes(k) for k in entries.keys] == page_keys(FIVE.tolist(), 4, MODEL)


# ---- torn saves


class Torn(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("cleans_up", [True, False])
def test_a_torn_save_leaves_the_old_set_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleans_up: bool
) -> None:
    """H32: abort at every step of the second save, with and without the clean-up that a kill prevents."""
    monkeypatch.setattr(snapshot, "LARGEST_SHARD", 2)
    steps = seen = 0
    outcomes = []
    while steps == seen:
        steps += 1
        folder = tmp_path / f"{steps}"
        old = contents(saved(folder, FIVE).store)
        cache = make_cache()
        fill(cache.store, OTHER_THREE)
        new = contents(cache.store)
        seen = 0

        def die(name: str, at: int = steps) -> None:
            nonlocal seen
            seen += name.startswith("snapshot")
            if seen == at:
                raise Torn(name)

        cache.store._fault = die
        with monkeypatch.context() as patch:
            if not cleans_up:
                patch.setattr(snapshot, "discard", lambda path: None)
            try:
                cache.save_snapshot(folder)
                seen = -1
            except Torn:
                pass
        fresh = make_cache()
        fresh.load_snapshot(folder)
        got = contents(fresh.store)
        assert got in (old, new)
        outcomes.append(got == new)
        fresh.check_integrity()
        cache.store._fault = None
        cache.save_snapshot(folder)  # the next save works and tidies up
        assert [p.suffix for p in folder.iterdir()] == [""]
    assert outcomes == [False] * 6 + [True, True]  # begin, 2 x pages, index, manifest, commit | clean, done


@pytest.mark.parametrize("stage", ["rename", "fsync", "orbax"])
def test_a_save_that_cannot_write_leaves_the_previous_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """H32: a full disk or a failing rename is the caller's error; nothing of the new set stays."""
    cache = saved(tmp_path, FIVE)
    fill(cache.store, OTHER_THREE)

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    target: dict[str, tuple[Any, str]] = {
        "rename": (Path, "rename"),
        "fsync": (os, "fsync"),
        "orbax": (snapshot, "save_tree"),
    }
    before = cache.store.snapshot_counters()
    with monkeypatch.context() as patch:
        patch.setattr(*target[stage], fails)
        with pytest.raises(OSError, match="no space"):
            cache.save_snapshot(tmp_path)
    assert cache.store.snapshot_counters() == before
    assert make_cache().load_snapshot(tmp_path).pages == 5
    assert [p.name for p in tmp_path.iterdir()] == ["set-00000001"]


def test_the_previous_whole_set_is_used_when_the_newest_is_not(tmp_path: Path) -> None:
    """X7: a set whose manifest or index is damaged is passed over, counted, and the one before it serves."""
    cache = saved(tmp_path, FIVE)
    shutil.copytree(newest(tmp_path), tmp_path / "spare")
    for damage in ("manifest", "manifest gone", "index"):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        shutil.copytree(tmp_path / "spare", tmp_path / "set" / "set-00000001")
        shutil.copytree(tmp_path / "spare", tmp_path / "set" / "set-00000002")
        bad = tmp_path / "set" / "set-00000002"
        if damage == "manifest":
            flip(bad / "manifest.json")
        elif damage == "index":
            shutil.rmtree(bad / "index" / "tokens")
        else:
            (bad / "manifest.json").unlink()
        fresh = make_cache()
        report = fresh.load_snapshot(tmp_path / "set")
        assert (report.pages, report.damaged_sets, Path(report.path).name) == (5, 1, "set-00000001")
        assert contents(fresh.store) == contents(cache.store)
        shutil.rmtree(tmp_path / "set" / "set-00000001")
        with pytest.raises(SnapshotError, match="damaged"):
            make_cache().load_snapshot(tmp_path / "set")


# ---- damaged files


def branches() -> list[np.ndarray]:
    """Entries 0..4 are one chain; 5, 6 hang below entry 1."""
    return [FIVE, np.append(seq(1, 8), seq(51, 58))]


@pytest.mark.parametrize(
    "harm", [flip, lambda p: p.write_bytes(p.read_bytes()[:-3]), lambda p: p.write_bytes(b""), Path.unlink]
)
@pytest.mark.parametrize(("entry", "lost"), [(0, 7), (1, 6), (3, 2), (4, 1), (6, 1)])
def test_a_damaged_page_goes_with_what_follows_it_and_nothing_else(
    tmp_path: Path, harm: Callable[[Path], Any], entry: int, lost: int
) -> None:
    """X7, H32: a flipped byte, a truncated, an empty, a missing file of one page in a complete set."""
    cache = saved(tmp_path, *branches())
    assert len(page_files(tmp_path, entry)) == len(GROUPS)
    harm(page_files(tmp_path, entry)[-1])
    fresh = make_cache()
    report = fresh.load_snapshot(tmp_path)
    assert (report.pages, report.dropped, report.faults) == (7 - lost, lost, 1)
    assert (fresh._counters.faults, fresh._counters.dropped_pages) == (1, lost)
    good = contents(fresh.store)
    assert good.items() <= contents(cache.store).items()
    fresh.check_integrity()


@pytest.mark.parametrize("name", ["tokens", "parents", "namespace", "keys", "checksums", "parts"])
def test_a_damaged_index_loses_pages_but_never_mixes_them_up(tmp_path: Path, name: str) -> None:
    """H32, H01: whatever byte of the index changes, each page that comes back has its own bytes."""
    cache = saved(tmp_path, *branches())
    (file,) = (p for p in (newest(tmp_path) / "index" / name).iterdir() if p.name != ".zarray")
    flip(file)
    fresh = make_cache()
    report = fresh.load_snapshot(tmp_path)
    assert report.faults == 1
    assert report.dropped >= 1
    assert contents(fresh.store).items() < contents(cache.store).items()
    fresh.check_integrity()


def test_pages_swapped_on_disk_are_noticed(tmp_path: Path) -> None:
    """H32: sound bytes of another page are wrong bytes."""
    cache = saved(tmp_path, *branches())
    one, two = page_files(tmp_path, 2)[0], page_files(tmp_path, 4)[0]
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    fresh = make_cache()
    assert fresh.load_snapshot(tmp_path).dropped == 3
    assert contents(fresh.store).items() < contents(cache.store).items()


def test_an_index_with_another_token_count_is_no_whole_set(tmp_path: Path) -> None:
    """H32."""
    saved(tmp_path, FIVE)
    path = newest(tmp_path)
    entries = snapshot._load_entries(path, 5, 4, 2)
    entries.tokens = entries.tokens[:4]
    shutil.rmtree(path / "index")
    snapshot.save_tree(path / "index", dict(vars(entries)))
    with pytest.raises(SnapshotError, match="damaged"):
        make_cache().load_snapshot(tmp_path)


# ---- pages that lack the bytes of a sliding layer group (X3)


def with_holes(*places: int) -> Any:
    """A cache of one prompt of six pages; those at `places` have given up the bytes of layer group 1 (window 8)."""
    cache = make_cache()
    pages = np.array(fill(cache.store, seq(1, 24)))
    assert len(cache.store.drop_group(pages[list(places)], 1)) == len(places)
    return cache


@pytest.mark.parametrize("places", [(0,), (1, 2), (0, 1, 2, 3, 4, 5)])
def test_a_page_that_lacks_a_group_comes_back_lacking_it(tmp_path: Path, places: tuple[int, ...]) -> None:
    """X3, X7: absent stays absent, never a page of zeros; hits end where they did, and the rest is the same to the byte."""
    cache = with_holes(*places)
    assert cache.save_snapshot(tmp_path / "all").pages == 6
    fresh = make_cache()
    report = fresh.load_snapshot(tmp_path / "all")
    assert (report.pages, report.dropped, report.faults) == (6, 0, 0)
    contents_of: list[Any] = []
    for store in (cache.store, fresh.store):
        assert store.index is not None
        pages = store.index.peek(seq(1, 24), MODEL.digest).page_ids
        assert np.flatnonzero(store.lacking(pages)[1]).tolist() == list(places)
        assert not store.lacking(pages)[0].any()
        assert store.stats().partial_pages == len(places)
        bytes_of = [[None if part is None else part.tobytes() for part in store.read(int(page))] for page in pages]
        contents_of.append(bytes_of)
    assert contents_of[0] == contents_of[1]
    for tokens in range(1, 30):
        assert fresh.lookup(seq(1, tokens)).num_pages == cache.lookup(seq(1, tokens)).num_pages
    fresh.check_integrity()


def test_a_prefix_with_holes_is_saved_and_loaded(tmp_path: Path) -> None:
    """X6: the holes lie before the window of what is held."""
    cache = with_holes(0, 1, 2)
    held = cache.hold(seq(1, 24))
    assert len(held) == 24
    assert held.save(tmp_path) == 6
    fresh = make_cache()
    loaded = fresh.load(tmp_path)
    assert (len(loaded), loaded.is_complete) == (24, True)
    assert fresh.store.lacking(loaded.page_ids)[1].tolist() == [True] * 3 + [False] * 3


def test_a_set_that_lies_about_its_groups_loses_those_pages(tmp_path: Path) -> None:
    """A page whose bytes are there although the index says absent, or the other way round, is not what was written."""
    cache = with_holes(4)
    cache.save_snapshot(tmp_path)
    path = newest(tmp_path)
    for entry, lie in ((5, 0), (4, 1)):
        entries = snapshot._load_entries(path, 6, 4, 2)
        entries.parts[entry, 1] = lie
        shutil.rmtree(path / "index")
        snapshot.save_tree(path / "index", dict(vars(entries)))
        fresh = make_cache()
        report = fresh.load_snapshot(tmp_path)
        assert report.faults >= 1
        assert report.pages <= entry
        fresh.check_integrity()


def test_a_snapshot_of_the_first_version_is_still_read(tmp_path: Path) -> None:
    """It has no word about layer groups: every page has all of them."""
    cache = saved(tmp_path, FIVE)
    path = newest(tmp_path)
    index = dict(vars(snapshot._load_entries(path, 5, 4, 2)))
    del index["parts"]
    shutil.rmtree(path / "index")
    snapshot.save_tree(path / "index", index)
    reseal(tmp_path, version=1)
    fresh = make_cache()
    assert fresh.load_snapshot(tmp_path).pages == 5
    assert contents(fresh.store) == contents(cache.store)


# ---- foreign snapshots


def reseal(folder: Path, **changes: Any) -> None:
    from prefix_reuse.snapshot_format import seal

    path = newest(folder) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_text(seal({**manifest, **changes}))


OTHER_GROUPS = (LayerGroup((0, 2), 1, 2, np.float16), GROUPS[1])


@pytest.mark.parametrize(
    ("reader", "reason", "word"),
    [
        ({"model": MODEL.replace(weights="w2")}, "other-namespace", "weights is 'w', here 'w2'"),
        ({"model": MODEL.replace(tokenizer="t2")}, "other-namespace", "tokenizer"),
        ({"model": Namespace(model_id="m")}, "other-namespace", None),
        ({"groups": OTHER_GROUPS}, "other-geometry", "parts"),
        ({"platform": {**PLATFORM, "device": "H200"}}, "other-platform", "device is 'cpu', here 'H200'"),
    ],
)
def test_a_snapshot_of_somebody_else_is_refused_with_the_reason(
    tmp_path: Path, reader: dict[str, Any], reason: str, word: str | None
) -> None:
    """X7, B4, H05, H34: other weights, tokenizer, dtype or kind of device; nothing is read into the store."""
    saved(tmp_path, FIVE)
    fresh = make_cache(**reader)
    before = fresh.store.snapshot_counters()
    with pytest.raises(SnapshotError, match=word) as caught:
        fresh.load_snapshot(tmp_path)
    assert caught.value.reason == reason == fresh._counters.refused
    assert fresh.store.snapshot_counters() == before


def test_a_newer_format_and_another_format_are_refused(tmp_path: Path) -> None:
    """X7: versioned; what a later version wrote is neither guessed at nor removed."""
    saved(tmp_path, FIVE)
    reseal(tmp_path, version=3)
    with pytest.raises(SnapshotError, match="version 3") as caught:
        make_cache().load_snapshot(tmp_path)
    assert caught.value.reason == "newer-format"
    reseal(tmp_path, version=1, format="something else")
    with pytest.raises(SnapshotError) as caught:
        make_cache().load_snapshot(tmp_path)
    assert caught.value.reason == "not-a-snapshot"


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    """A folder with other files is neither read nor written; a missing or empty one is no snapshot."""
    cache = make_cache()
    fill(cache.store, FIVE)
    for folder, reason in ((tmp_path / "missing", "no-snapshot"), (tmp_path / "empty", "no-snapshot")):
        if folder.name == "empty":
            folder.mkdir()
        with pytest.raises(SnapshotError) as caught:
            cache.load_snapshot(folder)
        assert caught.value.reason == reason
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for use in (cache.load_snapshot, cache.save_snapshot):
        with pytest.raises(SnapshotError, match=r"thesis\.tex"):
            use(foreign)
    assert [p.name for p in foreign.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapshotError, match="is a file"):
        cache.save_snapshot(tmp_path / "file")


def test_a_model_that_does_not_say_what_it_is_cannot_be_saved(tmp_path: Path) -> None:
    """B4: missing identity is unique to the process; the message names what is missing."""
    cache = make_cache(model=MODEL.replace(weights=None, tokenizer=None))
    fill(cache.store, FIVE)
    with pytest.raises(SnapshotError, match="weights, tokenizer") as caught:
        cache.save_snapshot(tmp_path)
    assert caught.value.reason == "namespace-not-portable"
    assert not list(tmp_path.iterdir())


# ---- room and faults


def test_a_small_store_takes_the_hottest_pages_and_evicts_nothing(tmp_path: Path) -> None:
    """Most recently used prefixes first, each with its beginning; what is cached here already stays."""
    cache = make_cache()
    for first in (1, 101, 201):
        fill(cache.store, seq(first, first + 11))
    fill(cache.store, seq(101, 112))
    cache.save_snapshot(tmp_path)
    fresh = make_cache(make_store(8))
    fill(fresh.store, seq(900, 911))
    report = fresh.load_snapshot(tmp_path)
    assert (report.pages, report.skipped) == (5, 4)
    assert fresh.store.num_free == 0
    for tokens, pages in ((seq(101, 112), 3), (seq(201, 212), 2), (seq(1, 12), 0), (seq(900, 911), 3)):
        assert fresh.lookup(tokens).num_pages == pages
    capped = make_cache(make_store(24, max_entries=4))
    assert capped.load_snapshot(tmp_path).pages == 4
    capped.check_integrity()


def test_a_fault_at_any_step_of_a_save_or_load_changes_nothing(tmp_path: Path) -> None:
    """A12, B8: full counters before = after; a retry works."""
    saved(tmp_path / "saved", *branches())
    for action in ("save_snapshot", "load_snapshot"):
        step, steps = 0, set()
        while True:
            step += 1
            cache = make_cache(make_store(integrity=True))
            fill(cache.store, OTHER_THREE)
            before, left = cache.store.snapshot_counters(), step

            def fault(name: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise RuntimeError(name)

            cache.store._fault = fault
            folder = tmp_path / "saved" if action == "load_snapshot" else tmp_path / f"save{step}"
            try:
                getattr(cache, action)(folder)
            except RuntimeError as error:
                steps.add(str(error))
                assert cache.store.snapshot_counters() == before
                cache.store._fault = None
                cache.check_integrity()
                getattr(cache, action)(folder)
                cache.check_integrity()
            else:
                break
        common = {"snapshot-begin", "snapshot-pages", "snapshot-index", "snapshot-manifest", "snapshot-commit"}
        if action == "save_snapshot":
            assert steps == common | {"snapshot-clean", "export"}
        else:
            assert steps == {"snapshot-open", "snapshot-read", "lease", "evict", "allocate", "insert"}


# ---- whole engines


RESTART = """
import sys
sys.path.insert(0, "tests")
import jax.numpy as jnp, numpy as np
from engine_helpers import GREEDY, cold, engine, index_of, prompt

folder, out = sys.argv[1:]
e = engine(snapshot_dir=folder)
tokens = np.arange(1, 14, dtype=np.int32)
assert len(index_of(e)) == 3, e.stats().snapshot
logits, first = e.score(tokens, reuse=True)
assert first == 12
e2 = engine(snapshot_dir=folder)
answer = e2.generate(tokens, GREEDY)[0]
salted = e2.cache.lookup(tokens, salt="t").num_pages
np.savez(out, logits=logits, tokens=answer.token_ids, cached=answer.cached_tokens, salted=salted)
"""


def test_a_restarted_process_hits_what_the_last_one_cached(tmp_path: Path) -> None:
    """X7, H02: another process, another hash seed: hit 3 of [1..12]+[13], and the logits of a cold run."""
    tokens = seq(1, 13)
    e = engine()
    want = e.generate(tokens, GREEDY)[0]
    assert e.cache.save_snapshot(tmp_path / "cache").pages == 3
    drained(e)
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", RESTART, str(tmp_path / "cache"), str(tmp_path / "out.npz")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(out["logits"], cold(tokens)[12:], atol=1e-4)
    assert tuple(out["tokens"]) == want.token_ids
    assert (int(out["cached"]), int(out["salted"])) == (12, 0)


def test_an_engine_with_new_weights_starts_cold_and_says_why(tmp_path: Path) -> None:
    """H05, X7: the snapshot of w1 is refused under w2; the engine runs, cold."""
    tokens = prompt(14, seed=1)
    first = engine()
    first.generate(tokens, GREEDY)
    first.cache.save_snapshot(tmp_path)
    same = engine(snapshot_dir=str(tmp_path))
    assert same.generate(tokens, GREEDY)[0].cached_tokens == 12
    other = engine(seed=1, snapshot_dir=str(tmp_path))
    assert len(index_of(other)) == 0
    assert other.stats().snapshot.refused == "other-namespace"
    out = other.generate(tokens, GREEDY)[0]
    assert out.cached_tokens == 0
    assert out.token_ids == engine(on=False, seed=1).generate(tokens, GREEDY)[0].token_ids
    for e in (first, same, other):
        drained(e)


def test_without_the_flag_no_snapshot_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B30: rollback. The folder is not even looked at, and the answers are those of a build without it, to the bit."""
    tokens = prompt(14, seed=1)
    on = engine()
    on.generate(tokens, GREEDY)
    on.cache.save_snapshot(tmp_path)
    files = sorted(tmp_path.rglob("*"))

    def touched(*_: Any, **__: Any) -> Any:
        raise AssertionError("a snapshot was touched")

    monkeypatch.setattr(cache_module, "read_snapshot", touched)
    monkeypatch.setattr(cache_module, "write_snapshot", touched)
    off, plain = engine(on=False, snapshot_dir=str(tmp_path)), engine(on=False)
    assert (off.stats().active, off.stats().disabled_reason) == (False, "disabled")
    np.testing.assert_array_equal(off.score(tokens), plain.score(tokens))
    assert off.generate(tokens, GREEDY)[0].token_ids == plain.generate(tokens, GREEDY)[0].token_ids
    for use in (off.cache.save_snapshot, off.cache.load_snapshot):
        with pytest.raises(SnapshotError) as caught:
            use()
        assert caught.value.reason == "disabled"
    assert sorted(tmp_path.rglob("*")) == files
    assert off.stats().snapshot == plain.stats().snapshot
