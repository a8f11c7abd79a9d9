"""From a sweep of `benchmarks/kernels.py --tune` to the launch parameters that the kernels use on that card.

    python -m benchmarks.tuned_table SWEEP.json [SWEEP.json ...] [--table pallas_kernels/tuned/nvidia_h200.json]

For each op and backend the default is the launch whose time over the best of each swept shape has the least geometric mean (one
split for all batches, since a row's bits must not depend on its batch); where a shape key has a launch that is more than 3%
faster than the default, and the op may differ by key, it gets an entry of its own. Entries that the sweep did not cover stay.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.pallas_gpu import shape_key

OPS = {"decode": "paged_decode_attention", "shared": "shared_prefix_attention"}
BY_KEY = {"shared_prefix_attention"}
"""Ops whose launch may differ by shape key: their split is the plan's, and no bits are promised across batches."""
LABEL = re.compile(r"(triton|mosaic_gpu)(?: split (\d+) rows (\d+))? (\{.*\})")
WORTH = 1.03


def choose(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """The table of a sweep's rows: `{"op.backend": {"default": launch, "G4 D128 bfloat16": launch}}`."""
    times: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        match = LABEL.fullmatch(row["label"])
        if row["op"] not in OPS or match is None or "kernel_ms" not in row:
            continue
        name, split, tile_rows, launch = match.groups()
        place = json.dumps([row["shape"], split, tile_rows] if split else [row["shape"]])
        times[f"{OPS[row['op']]}.{name}"][place][launch] = row["kernel_ms"]
    return {op: _best(places, op.partition(".")[0] in BY_KEY) for op, places in times.items()}


def _best(places: Mapping[str, Mapping[str, float]], by_key: bool) -> dict[str, dict[str, int]]:
    swept = {place: launches for place, launches in places.items() if len(launches) > 1}
    common = set.intersection(*(set(launches) for launches in swept.values())) if swept else set()
    if not common:
        return {}

    def mean_ratio(launch: str, some: Iterable[str]) -> float:
        ratios = [swept[place][launch] / min(swept[place].values()) for place in some]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    default = min(sorted(common), key=lambda launch: mean_ratio(launch, swept))
    table = {"default": json.loads(default)}
    keys: dict[str, list[str]] = defaultdict(list)
    for place in swept:
        _, num_heads, num_kv_heads, head_dim, *_ = json.loads(place)[0]
        keys[shape_key(num_heads, num_kv_heads, head_dim, "bfloat16")].append(place)  # sweeps run in bf16
    for key, some in keys.items() if by_key else ():
        best = min(sorted(common), key=lambda launch: mean_ratio(launch, some))
        if mean_ratio(default, some) > WORTH * mean_ratio(best, some):
            table[key] = json.loads(best)
    return table


def update(path: Path, chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes entries of `{op: {key: parameters}}` to a table; others in it stay."""
    table = json.loads(path.read_text()) if path.exists() else {}
    entries = {**table, **{op: {**table.get(op, {}), **launches} for op, launches in chosen.items() if launches}}
    lines = []
    for op, launches in entries.items():
        inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(launch)}" for key, launch in launches.items())
        lines.append(f" {json.dumps(op)}: {{\n{inner}\n }}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--table", type=Path, help="the table to update; default: print only")
    options = parser.parse_args()
    chosen = choose(row for sweep in options.sweeps for row in json.loads(sweep.read_text())["rows"])
    print(json.dumps(chosen, indent=1))
    if options.table is not None:
        update(options.table, chosen)


if __name__ == "__main__":
    main()
