"""SmolLM2-135M on the CPU, fp32: prefill with and without reuse and decode, beside HF transformers on the same machine.

    python -m benchmarks.cpu_smollm2 --hf-python PATH [--rounds 9] [--json FILE]

`PATH` is a Python with torch, transformers and gguf; it runs this file as a child process, and both sides take turns, so
that a busy machine slows both. Prompts: 960 cached + 64 new tokens, fresh ones in each round. HF keeps its cache in a
`DynamicCache` that is cropped back after each measurement.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHED, NEW, DECODE = 960, 64, 32
THREADS = 2


def prompt(seed: int, length: int) -> list[int]:
    """Random ids without the special ones; the first 960 are the same for every seed."""
    import random

    shared = random.Random(0)
    base = [shared.randrange(100, 49000) for _ in range(CACHED)]
    own = random.Random(seed + 1)
    return (base + [own.randrange(100, 49000) for _ in range(NEW)])[-length:]


def peer(gguf: str) -> None:
    """Child process: answers `full`, `short`, `reuse` and `decode` with milliseconds, one JSON line each."""
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    torch.set_num_threads(THREADS)
    path = Path(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    cache = transformers.DynamicCache()

    @torch.inference_mode()
    def forward(ids: list[int], past: Any) -> Any:
        return model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]

    forward(prompt(0, CACHED + NEW)[:CACHED], cache)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        name, seed = line.split()
        ids = prompt(int(seed), CACHED + NEW)
        start = time.perf_counter()
        if name == "full":
            forward(ids, transformers.DynamicCache()).argmax().item()
        elif name == "short":
            forward(ids[CACHED:], transformers.DynamicCache()).argmax().item()
        elif name == "reuse":
            token = forward(ids[CACHED:], cache).argmax().item()
            print(json.dumps({"ms": (time.perf_counter() - start) * 1e3, "token": token}), flush=True)
            cache.crop(-NEW)
            continue
        else:
            token = forward(ids[CACHED:], cache).argmax().item()
            start = time.perf_counter()
            for _ in range(DECODE):
                token = forward([token], cache).argmax().item()
            spent = (time.perf_counter() - start) / DECODE
            cache.crop(-NEW - DECODE)
            print(json.dumps({"ms": spent * 1e3}), flush=True)
            continue
        print(json.dumps({"ms": (time.perf_counter() - start) * 1e3}), flush=True)


class Peer:
    """The HF side."""

    def __init__(self, python: str, gguf: Path):
        # -P: this folder holds files with names that transformers looks for.
        command = [python, "-P", str(Path(__file__).resolve()), "--peer", str(gguf)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the HF process ended; see its messages above")
        return json.loads(line)

    def __call__(self, name: str, seed: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {seed}\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-python", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import jax

    import models
    from models.registry import resolve
    from prefix_reuse import Engine, EngineConfig, SamplingParams
    from prefix_reuse.programs import Programs

    jax.config.update("jax_platforms", "cpu")
    model = models.load("smollm2")
    sizes: dict[str, Any] = {
        "page_size": 64, "num_device_pages": 64, "num_host_pages": 128, "max_rows": 1, "max_context": 2048,
        "max_prefill_tokens": 1024,
    }  # fmt: skip
    config = EngineConfig(**sizes)
    programs = Programs(model, config, jax.devices()[0])
    off = Engine(model, config, programs=programs)
    on = Engine(model, EngineConfig(**sizes, enable_prefix_reuse=True), programs=programs)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    many = SamplingParams(max_tokens=DECODE + 1, ignore_eos=True)
    on.generate(prompt(0, CACHED + NEW)[:CACHED], one)

    def ttft(engine: Engine, ids: list[int]) -> dict[str, Any]:
        output = engine.generate(ids, one)[0]
        return {"ms": output.ttft_ms, "token": output.token_ids[0], "cached": output.cached_tokens}

    def decode(seed: int) -> dict[str, Any]:
        arrivals: list[tuple[float, int]] = []
        for event in off.stream(prompt(seed, CACHED + NEW), many):
            arrivals.append((time.perf_counter(), len(event.token_ids)))
        tokens = sum(n for _, n in arrivals[1:])
        return {"ms": (arrivals[-1][0] - arrivals[0][0]) / tokens * 1e3}

    hf = Peer(args.hf_python, resolve("smollm2"))
    ours: dict[str, Callable[[int], dict[str, Any]]] = {
        "full": lambda seed: ttft(off, prompt(seed, CACHED + NEW)),
        "short": lambda seed: ttft(off, prompt(seed, NEW)),
        "reuse": lambda seed: ttft(on, prompt(seed, CACHED + NEW)),
        "decode": decode,
    }
    times: dict[str, dict[str, list[float]]] = {name: {"ours": [], "hf": []} for name in ours}
    same = 0
    for seed in range(-2, args.rounds):  # two rounds warm up
        for name, run in ours.items():
            mine, theirs = run(seed + 1000), hf(name, seed + 1000)
            if name == "reuse":
                assert mine["cached"] == CACHED, mine
                same += mine["token"] == theirs["token"]
            if seed >= 0:
                times[name]["ours"].append(mine["ms"])
                times[name]["hf"].append(theirs["ms"])
    hf.close()
    medians = {name: {side: statistics.median(t) for side, t in pair.items()} for name, pair in times.items()}
    reuse, full, short = (medians[n]["ours"] for n in ("reuse", "full", "short"))
    result = {
        "what": "SmolLM2-135M fp32, CPU, 960 cached + 64 new tokens; decode at context 1024; medians, milliseconds",
        "machine": {"processor": platform.processor() or platform.machine(), "threads": THREADS},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, **hf.versions},
        "rounds": args.rounds,
        "medians_ms": medians,
        "spread_ms": {n: {s: [min(t), max(t)] for s, t in pair.items()} for n, pair in times.items()},
        "gain": full / reuse,
        "ceiling": full / short,
        "gain_over_ceiling": short / reuse,
        "gain_hf": medians["full"]["hf"] / medians["reuse"]["hf"],
        "same_first_tokens": f"{same} of {args.rounds + 2}",
    }
    for name, pair in medians.items():
        print(
            f"{name:8s} ours {pair['ours']:8.1f} ms   HF {pair['hf']:8.1f} ms   ratio {pair['ours'] / pair['hf']:.2f}"
        )
    print(f"gain {result['gain']:.1f}x of a ceiling of {result['ceiling']:.1f}x: {result['gain_over_ceiling']:.2f}")
    print(f"HF's gain {result['gain_hf']:.1f}x; same first tokens {result['same_first_tokens']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--peer":
        peer(sys.argv[2])
    else:
        main()
