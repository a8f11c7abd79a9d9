"""The whole engine on full-size models with random weights, each figure beside the least time that the card allows.

    python -m benchmarks.engine_models --model qwen3-8b --json OUT.json
    python -m benchmarks.engine_models --model gpt-oss-20b --only ttft,decode --workload --profile --json OUT.json

Sections: `ttft` (cold, warm, and reuse off beside on where nothing hits), `host` (the prefix lies on the host only), `decode`,
`deterministic` (`verify`, and what the mode costs), `workload` (500 requests). MODELS.md says how each is measured. A figure is
printed when it is there and then written to the file; a file that exists is added to.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engine_bench import Bench, Lengths
from benchmarks.engine_decode import decode
from benchmarks.engine_deterministic import deterministic
from benchmarks.engine_prefill import host, ttft
from benchmarks.engine_report import print_row
from benchmarks.engine_workload import workload
from benchmarks.model_costs import FULL, TINY, make_model

SECTIONS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "ttft": ttft,
    "host": host,
    "decode": decode,
    "deterministic": deterministic,
    "workload": workload,
}
"""Each yields rows (plain dicts)."""


def run_model(name: str, options: argparse.Namespace, lengths: Lengths) -> None:
    """Runs the sections that are asked for, and writes what there is after each."""
    started = time.perf_counter()
    model = make_model(name, options.embed_std)
    jax.block_until_ready(model.params)
    weights_s = time.perf_counter() - started
    bench = Bench(
        name,
        model,
        lengths,
        repeats=options.repeats,
        decode_steps=options.decode_steps,
        workload_rows=options.workload_rows,
        profile=options.profile,
    )
    head = {
        "device": bench.device.device_kind,
        "jax": jax.__version__,
        "page_size": lengths.page,
        "dtype": str(np.dtype(model.config.dtype)),
        "params_GB": bench.costs.param_bytes / 1e9,
        "weights_s": weights_s,
        "embed_std": options.embed_std,
        "rates": bench.rates.to_json(),
    }
    print(f"{name}: {json.dumps(head)}", flush=True)
    result = load_result(options.json)
    record = result.setdefault(name, {})
    for section in options.sections:
        record[section] = {**head, "rows": []}
        begun = time.perf_counter()
        print(f" {section}", flush=True)
        for row in SECTIONS[section](bench):
            record[section]["rows"].append(row)
            print_row(row)
            save_result(options.json, result)  # a run that is cut has the rows so far
        record[section]["seconds"] = time.perf_counter() - begun
        record[section]["compilations"] = dict(bench.programs.counter.counts)
        print(f"  {record[section]['seconds']:.1f} s", flush=True)
        save_result(options.json, result)
    bench.release()


def load_result(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def save_result(path: Path | None, result: dict[str, Any]) -> None:
    """Writes beside, then renames: a run that is cut leaves a whole file."""
    if path is not None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(path)


def row_counts(text: str) -> tuple[int, ...]:
    """Numbers from 1 on, by comma."""
    rows = tuple(map(int, text.split(",")))
    if min(rows) < 1:
        raise ValueError(text)
    return rows


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, help=f"one or more of {', '.join((*FULL, *TINY))}; tiny = all tiny ones"
    )
    parser.add_argument("--only", help="sections, by comma; default all but workload")
    parser.add_argument("--workload", action="store_true", help="the 500 requests too")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--profile", action="store_true", help="top kernels and host phases of a warm TTFT and of decoding"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode-steps", type=int, default=16)
    parser.add_argument("--rows", type=row_counts, help="rows of the decode cases, by comma; default 1,16,64")
    parser.add_argument(
        "--embed-std",
        type=positive,
        help="standard deviation of the embedding (10: what a token is outweighs its context, so that rows choose their own "
        "experts); default that of random weights, hidden_size ** -0.5",
    )
    parser.add_argument("--workload-rows", type=int, default=256)
    parser.add_argument("--scale", type=int, default=8, help="tiny models: lengths are divided by this")
    options = parser.parse_args(arguments)
    options.models = list(TINY) if options.model == "tiny" else options.model.split(",")
    options.sections = options.only.split(",") if options.only else [s for s in SECTIONS if s != "workload"]
    if options.workload and "workload" not in options.sections:
        options.sections.append("workload")
    unknown = [n for n in options.models if n not in (*FULL, *TINY)] + [
        s for s in options.sections if s not in SECTIONS
    ]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    # Before the first use of the device: 64 contexts of 8192 tokens and the weights take more than the default share.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    for name in options.models:
        lengths = Lengths() if name in FULL else Lengths().scaled(options.scale)
        if options.rows:
            lengths = dataclasses.replace(lengths, rows=options.rows)
        run_model(name, options, lengths)
        gc.collect()


if __name__ == "__main__":
    main()
