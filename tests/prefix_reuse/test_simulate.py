"""The trace simulator and its command, against figures that are known or counted independently."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.hit_rates import compare, ideal_hits, lru_hits, mooncake_chains
from prefix_reuse import cli
from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.host_store import HostPageStore, PrefixRequest
from prefix_reuse.index import PrefixIndex
from prefix_reuse.simulate import SimulatedPool, parse_tokens, simulate
from prefix_reuse.traces import mooncake_prompts

FIELDS = {"capacity_tokens", "requests", "hit_rate_pages", "hit_rate_tokens", "us_per_request", "evicted_pages"}


def write_trace(path, requests: int, seed: int = 0):
    """Requests over a few shared beginnings; the last block of each is partly filled. Some are empty."""
    rng = np.random.default_rng(seed)
    lines = [{"input_length": 0, "hash_ids": []}]
    for i in range(requests):
        shared = list(range(int(rng.integers(0, 6))))
        own = [100 + 10 * i + k for k in range(int(rng.integers(1, 4)))]
        if rng.random() < 0.3 and len(lines) > 1:  # an earlier request goes on
            shared = lines[int(rng.integers(1, len(lines)))]["hash_ids"][: int(rng.integers(1, 8))]
        length = 32 * (len(shared) + len(own)) - int(rng.integers(0, 32))
        lines.append({"timestamp": i, "input_length": length, "output_length": 1, "hash_ids": shared + own})
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "trace.jsonl", 60)


def without_time(row: dict) -> dict:
    return {name: value for name, value in row.items() if name != "us_per_request"}


@pytest.mark.parametrize("page", [8, 16, 32])
def test_an_unbounded_cache_reaches_the_ideal_hit_rate(trace, page):
    """B6: full pages only, empty requests skipped, nothing evicted."""
    result = simulate(trace, 1_000_000, "lru", page, block=32)
    chains, lengths = zip(*mooncake_chains(str(trace), page, 32), strict=True)
    hits, pages = ideal_hits(chains), sum(map(len, chains))
    assert result["hit_rate_pages"] == hits / pages
    assert result["hit_rate_tokens"] == hits * page / sum(lengths)
    assert (result["requests"], result["evicted_pages"]) == (60, 0)
    assert 0.2 < hits / pages < 1


def leaf_first_hits(chains, capacity: int) -> int:
    """The plainest model: look at every page, drop the least recently used one that nothing hangs behind."""
    last: dict[tuple, int] = {}
    total = 0
    for now, whole in enumerate(chains):
        chain = [tuple(whole[: i + 1]) for i in range(min(len(whole), capacity))]
        hit = next((i for i, page in enumerate(chain) if page not in last), len(chain))
        total += hit
        last.update(dict.fromkeys(chain[:hit], now))
        for page in chain[hit:]:
            if len(last) == capacity:
                parents = {other[:-1] for other in last}
                leaves = [other for other in last if other not in parents and other not in chain]
                del last[min(leaves, key=lambda other: last[other])]
            last[page] = now
    return total


@pytest.mark.parametrize("capacity", [64, 320, 1000, 3000])
@pytest.mark.parametrize("seed", [1, 2])
def test_hits_equal_an_independent_leaf_first_lru_count_at_every_capacity(tmp_path, seed, capacity):
    """B6: the index, one line of pages in an ordered dictionary, and a search through all leaves agree to the page."""
    path = write_trace(tmp_path / "trace.jsonl", 150, seed)
    chains, _ = zip(*mooncake_chains(str(path), 8, 32), strict=True)
    row = simulate(path, capacity, "lru", 8, block=32)
    hits = round(row["hit_rate_pages"] * sum(map(len, chains)))
    assert hits == lru_hits(chains, capacity // 8) == leaf_first_hits(chains, capacity // 8) > 0
    assert row["evicted_pages"] > 0


def test_the_published_comparison_finds_no_difference(tmp_path):
    """B6: `benchmarks/hit_rates.py` on a stream: the ideal, with room for everything, at two page sizes."""
    prompts = list(mooncake_prompts(write_trace(tmp_path / "trace.jsonl", 80), 32))
    path = tmp_path / "stream.npz"
    np.savez(path, tokens=np.concatenate(prompts).astype(np.uint16), offsets=np.cumsum([0, *map(len, prompts)]))
    for page in (16, 64):
        (row,) = compare(str(path), page, None)
        assert row["hit_pages"] == row["counted_hit_pages"] > 0
        assert row["hit_rate_tokens"] == row["counted_hit_rate_tokens"]
        assert row["evicted_pages"] == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority-ttl"])
def test_a_smaller_cache_evicts_and_hits_less(trace, policy):
    """B6: every policy runs; a hit rate never exceeds the ideal."""
    large = simulate(trace, 1_000_000, policy, 8, block=32)
    small = simulate(trace, 320, policy, 8, block=32)
    assert small["evicted_pages"] > 0
    assert small["hit_rate_pages"] < large["hit_rate_pages"]
    assert set(small) == FIELDS


def test_the_store_hits_what_the_simulator_says(trace):
    """A14, B6: the pages that rows, references and pins keep are those of the index alone."""
    pool = SimulatedPool(40, 8)
    store = HostPageStore(40, 8, index=PrefixIndex(8))
    hits = 0
    for prompt in mooncake_prompts(trace, 32):
        kept = prompt[: min(len(prompt) // 8, 40) * 8]
        if len(kept):
            got = store.allocate_pages_for_sequences_with_prefix([PrefixRequest(0, kept, len(kept), b"ns")])[0]
            if got.newly_allocated:
                store.begin_copy(got.private_pages)
                store.finish_copy(got.private_pages, None)
                store.publish(0, kept, b"ns")
            store.release(0)
            assert len(got.shared_pages) == pool.request(prompt)
            hits += len(got.shared_pages)
    assert hits > 50
    assert store.counters.evictions == pool.index.stats().evicted_pages > 0
    pool.index.check_integrity()
    store.check_integrity()


def test_a_token_stream_is_replayed_like_a_trace(trace, tmp_path):
    """The two formats give the same figures for the same prompts."""
    prompts = list(mooncake_prompts(trace, 32))
    path = tmp_path / "tokens.npz"
    offsets = np.cumsum([0, *(len(p) for p in prompts)])
    np.savez(path, tokens=np.concatenate(prompts).astype(np.uint32), offsets=offsets)
    a, b = simulate(path, 320, "lru", 8), simulate(trace, 320, "lru", 8, block=32)
    assert without_time(a) == without_time(b)


def test_bad_arguments_are_refused(trace):
    """Unknown policies and capacities below a page say so."""
    with pytest.raises(InvalidRequestError, match="choose from lru"):
        simulate(trace, 1000, "random")
    with pytest.raises(InvalidRequestError, match="below one page"):
        simulate(trace, 8, "lru", 16)
    with pytest.raises(InvalidRequestError, match="below one page"):
        simulate(trace, 8, "lru", 0)


def test_numbers_of_tokens_may_be_written_short():
    """k, M and G are powers of ten."""
    assert [parse_tokens(t) for t in ("4096", " 400k", "1M", "1.5M", "2g")] == [
        4096,
        400_000,
        10**6,
        1_500_000,
        2 * 10**9,
    ]
    for bad in ("", "M", "1T", "0", "-1k", "1.0005k", "nan", "inf", "1M;2M"):
        with pytest.raises(InvalidRequestError):
            parse_tokens(bad)


# ---- the command


def run(*arguments: object):
    return CliRunner().invoke(cli.app, ["simulate", *map(str, arguments)])


def test_the_command_prints_a_table_writes_rows_and_draws(trace, tmp_path):
    """One row a capacity, the same figures as `simulate`; progress on stderr only."""
    rows_file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    done = run(
        trace, "--capacity-tokens", "320,1k,1M", "--policy", "lru", "--page-size", 8, "--block", 32,
        "--json", rows_file, "--plot", plot,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = json.loads(rows_file.read_text())
    assert [without_time(row) for row in rows] == [
        without_time(simulate(trace, capacity, "lru", 8, 32)) for capacity in (320, 1000, 1_000_000)
    ]
    assert all(set(row) == FIELDS and row["us_per_request"] > 0 for row in rows)
    for row in rows:
        assert f"{row['capacity_tokens']:,}" in done.stdout
        assert f"{100 * row['hit_rate_pages']:.2f}%" in done.stdout
    assert re.search(r"61/61", done.stderr)
    assert "61/61" not in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("policy", ["lfu", "priority-ttl"])
def test_the_command_knows_every_policy(trace, policy):
    done = run(trace, "--capacity-tokens", "320", "--policy", policy, "--page-size", 8, "--block", 32)
    assert done.exit_code == 0, done.output
    assert policy in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity-tokens", "1M", "--policy", "fifo"], "unknown policy 'fifo'; choose from lru, lfu, priority-ttl"),
        (["--capacity-tokens", "1M,many"], "'many' is no number of tokens"),
        (["--capacity-tokens", "1M,,2M"], "'' is no number of tokens"),
        (["--capacity-tokens", "4"], "a capacity of 4 tokens is below one page of 16"),
        (["--capacity-tokens", "1M"], "is the block right?"),
        (["--capacity-tokens", "1M", "--json", "no/such/folder/rows.json"], "does not exist"),
        (["--capacity-tokens", "1M", "--json", "/"], "is a folder"),
        (["--capacity-tokens", "1M", "--plot", "plot.txt"], "must end in one of .png, .svg, .pdf"),
        (["--capacity-tokens", "1M", "--page-size", "0"], "page-size"),
        (["--capacity-tokens", "100000000G"], "has more than 2,147,483,647 pages of 16"),
        (["--capacity-tokens", "1M", "--block", "100000000000000000000"], "a block of 100000000000000000000 tokens"),
        ([], "capacity-tokens"),
    ],
)
def test_bad_input_ends_with_a_message_and_exit_code_2(trace, arguments, message):
    done = run(trace, *arguments)
    assert done.exit_code == 2
    assert message in " ".join(re.sub(r"[│\n]", " ", done.stderr).split())
    assert done.stdout == ""


def test_an_absent_trace_ends_with_a_message_and_exit_code_2(tmp_path):
    done = run(tmp_path / "none.jsonl", "--capacity-tokens", "1M")
    assert done.exit_code == 2
    assert "cannot read the trace" in done.stderr


def test_an_empty_trace_ends_with_a_message_and_exit_code_2(tmp_path):
    """0% of nothing is no hit rate."""
    (tmp_path / "empty.jsonl").write_text("\n")
    np.savez(tmp_path / "empty.npz", tokens=np.zeros(0, np.int32), offsets=np.zeros(1, np.int64))
    for name in ("empty.jsonl", "empty.npz"):
        done = run(tmp_path / name, "--capacity-tokens", "1M")
        assert done.exit_code == 2
        assert "holds no requests" in done.stderr


def test_a_pool_far_larger_than_memory_costs_what_the_trace_fills(trace):
    """Its pages are named as they are needed; the figures are those of any pool that holds everything."""
    want = simulate(trace, 1_000_000, "lru", 8, block=32)
    got = simulate(trace, 8 * (2**31 - 1), "lru", 8, block=32)
    assert without_time(got) | {"capacity_tokens": 0} == without_time(want) | {"capacity_tokens": 0}


def test_a_pool_that_is_named_in_steps_gives_every_page_once():
    """Beyond the pages that are named at first: distinct ids, all of them, and eviction only behind the last."""
    pool = SimulatedPool(200_000, 1)
    prompts = [np.arange(70_000, dtype=np.int32) + 70_000 * i for i in range(3)]
    assert [pool.request(prompt) for prompt in prompts] == [0, 0, 0]
    entries = [run.page_ids for run in pool.index]
    ids = np.concatenate(entries)
    assert len(ids) == len(set(ids.tolist())) == 200_000
    assert ids.max() == 199_999
    assert pool.index.stats().evicted_pages == 10_000


def test_what_cannot_be_written_ends_with_a_message_and_leaves_the_old_file(trace, tmp_path, monkeypatch, capsys):
    """Results are written whole or not at all."""
    rows = tmp_path / "rows.json"
    rows.write_text("before")

    def torn(self, text, **options):
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    arguments = ["simulate", str(trace), "--capacity-tokens", "320", "--block", "32", "--json", str(rows)]
    monkeypatch.setattr(sys, "argv", ["prefix-reuse", *arguments])
    with monkeypatch.context() as patch:
        patch.setattr(type(rows), "write_text", torn)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert rows.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "trace.jsonl"]
    link = tmp_path / "link.json"
    link.symlink_to(rows)
    assert run(trace, "--capacity-tokens", "320", "--block", 32, "--json", link).exit_code == 0
    assert link.is_symlink()
    assert json.loads(rows.read_text())[0].keys() == FIELDS


def test_a_plot_without_matplotlib_is_refused_before_the_work(trace, tmp_path, monkeypatch):
    """It is an extra: the message says which."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    done = run(trace, "--capacity-tokens", "320", "--block", 32, "--plot", tmp_path / "plot.png")
    assert done.exit_code == 2
    assert "pip install 'prefix-reuse[plot]'" in done.stderr
    assert done.stdout == ""
