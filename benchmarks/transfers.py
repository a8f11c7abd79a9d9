"""Host pages to the device and back at the shapes of real models, beside the rate of one large pinned copy.

    python -m benchmarks.transfers OUT.json [--pages 256]

The page copies are the engine's own (`prefix_reuse.transfer.PageTransfer`): gather and scatter included, random page numbers,
all layers and groups of a page. "staged": the same pages by way of `prefix_reuse.staging`; "beside a matmul": how much of such
a copy is hidden by a step of the same length that is dispatched after it (1 = all). GB/s are 1e9 bytes a second, medians of
REPEATS; "link" is a copy of one array of 1 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import LayerGroup, page_bytes, pool_shape
from prefix_reuse.host_part import Bundle
from prefix_reuse.staging import Staging
from prefix_reuse.steps import CompilationCounter
from prefix_reuse.transfer import PageTransfer, PendingCopy, whole_bundles

REPEATS, PAGE = 9, 64
MODELS = {
    "Qwen3-8B": (LayerGroup(tuple(range(36)), 8, 128, jnp.bfloat16),),
    "gpt-oss-20b": (
        LayerGroup(tuple(range(0, 24, 2)), 8, 64, jnp.bfloat16, window=128),
        LayerGroup(tuple(range(1, 24, 2)), 8, 64, jnp.bfloat16),
    ),
}


def rate(run: Callable[[], Any], nbytes: int) -> dict[str, float]:
    """GB/s of `run`, which must have finished when it returns. What it returns is freed off the clock."""
    run()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        kept = run()
        seconds.append(time.perf_counter() - start)
        del kept
    rates = sorted(nbytes / s / 1e9 for s in seconds)
    return {"GBps": statistics.median(rates), "GBps_min": rates[0], "GBps_max": rates[-1]}


def link_rates(device: Any, nbytes: int) -> dict[str, dict[str, float]]:
    """One large array between pinned memory and the device."""
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    numbers = jax.device_put(jnp.ones(nbytes // 2, jnp.bfloat16), device)
    to_host = jax.jit(lambda x: x, out_shardings=pinned)
    to_device = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
    host = jax.block_until_ready(to_host(numbers))
    return {
        "to_device": rate(lambda: jax.block_until_ready(to_device(host)), nbytes),
        "to_host": rate(lambda: jax.block_until_ready(to_host(numbers)), nbytes),
    }


def page_rates(groups: tuple[LayerGroup, ...], device: Any, num_pages: int) -> dict[str, dict[str, float]]:
    """The engine's page copies."""
    transfer = PageTransfer(device, CompilationCounter())
    pools = [
        jax.device_put(
            jnp.ones(pool_shape(len(g.layers), 4 * num_pages, PAGE, g.num_kv_heads, g.head_dim), g.dtype), device
        )
        for g in groups
    ]
    rng = np.random.default_rng(0)
    ids = [rng.permutation(4 * num_pages)[:num_pages].astype(np.int32) for _ in groups]
    nbytes = num_pages * sum(page_bytes(g, PAGE) for g in groups)
    pending = transfer.offload(pools, ids, np.arange(num_pages))
    pending.wait()
    parts = list(zip(*pending.payloads, strict=True))

    def load() -> None:
        nonlocal pools
        pools = list(jax.block_until_ready(transfer.load(pools, parts, ids)))

    def to_host() -> PendingCopy:
        pending = transfer.offload(pools, ids, np.arange(num_pages))
        pending.wait()
        return pending

    def staged() -> None:
        nonlocal pools
        staging.start(bundles)
        pools = list(jax.block_until_ready(transfer.load(pools, parts, ids, staging.arrays)))
        staging.clear()

    staging = Staging(device, 2 * nbytes)
    bundles = [bundle for column in parts for bundle in whole_bundles(column)]
    return {
        "to_device": rate(load, nbytes),
        "to_device, staged": rate(staged, nbytes),
        "beside a matmul": {"hidden": hidden_share(staging, bundles)},
        "to_host": rate(to_host, nbytes),
    }


def hidden_share(staging: Staging, bundles: list[Bundle]) -> float:
    """Which share of the time of copies into staging goes by while a step runs that was dispatched after them."""
    side = 4096 if jax.default_backend() == "gpu" else 256
    matrix = jnp.full((side, side), 1 / side, jnp.bfloat16)
    work = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: y @ x, x))

    def seconds(copies: bool, steps: int) -> float:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            if copies:
                staging.start(bundles)
            out = work(matrix, steps) if steps else matrix
            jax.block_until_ready((out, list(staging.arrays.values())))
            times.append(time.perf_counter() - start)
            staging.clear()
        return statistics.median(times)

    work(matrix, 1).block_until_ready()
    copy = seconds(True, 0)
    steps = max(1, round(100 * copy / seconds(False, 100)))
    return (copy + seconds(False, steps) - seconds(True, steps)) / copy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--link-bytes", type=int, default=1 << 30)
    options = parser.parse_args()
    device = jax.devices()[0]
    link = link_rates(device, options.link_bytes)
    result: dict[str, Any] = {"gpu": device.device_kind, "jax": jax.__version__, "pages": options.pages, "link": link}
    for name, groups in MODELS.items():
        rows = page_rates(groups, device, options.pages)
        for direction, row in rows.items():
            if "hidden" in row:
                print(f"{name} copies {direction}: {row['hidden']:.2f} hidden", flush=True)
                continue
            limit = link[direction.partition(",")[0]]["GBps"]
            row["of_link"] = row["GBps"] / limit
            print(f"{name} {direction}: {row['GBps']:.1f} GB/s, {row['of_link']:.3f} of {limit:.1f}", flush=True)
        result[name] = {"page_MB": sum(page_bytes(g, PAGE) for g in groups) / 1e6, **rows}
    options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
