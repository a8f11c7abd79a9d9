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
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engine_cases import ONE, close, drain, first_event, first_token, without_host_copies
from benchmarks.engine_phases import phase_times
from benchmarks.engine_report import beside, print_kernels, print_phases, print_row, print_timeline, summary
from benchmarks.model_costs import FULL, TINY, Costs, Rates, make_model, measure_rates
from benchmarks.profiling import kernel_times, timeline
from prefix_reuse import Engine, EngineConfig, SamplingParams
from prefix_reuse.deterministic import ONE_PROGRAM, deterministic_means
from prefix_reuse.plan import pages_for
from prefix_reuse.programs import Programs
from prefix_reuse.verify import run_verify

SECTIONS = ("ttft", "host", "decode", "deterministic", "workload")
PREFILL_CALLS = 16
"""Of a turn of the workload: enough for all rows, which then decode together."""
HEADROOM = 10 << 30
"""Device bytes that are left to activations, logits and staging when the pool of the decode section is sized."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of every case; `scaled` gives the same proportions on a CPU, page size included."""

    page: int = 64
    cached: int = 8192
    new: int = 128
    host: tuple[tuple[int, int], ...] = ((8192, 128), (4096, 1024), (32768, 128))
    """Cached on the host, and new."""
    context: int = 8192
    """Of a row that decodes."""
    shared: int = 7168
    rows: tuple[int, ...] = (1, 16, 64)
    chunk: int = 8192
    """Tokens of the largest prefill program."""
    deterministic_chunk: int = 512
    requests: int = 500
    groups: int = 20
    group_shared: int = 4096
    group_own: int = 256
    answer: int = 128

    def scaled(self, by: int) -> Lengths:
        """All lengths divided by `by`, and fewer requests."""
        return Lengths(
            page=self.page // by,
            cached=self.cached // by,
            new=self.new // by,
            host=tuple((cached // by, new // by) for cached, new in self.host),
            context=self.context // by,
            shared=self.shared // by,
            rows=tuple(dict.fromkeys(max(1, rows // by) for rows in self.rows)),
            chunk=self.chunk // by,
            deterministic_chunk=self.deterministic_chunk // by,
            requests=self.requests // by,
            groups=max(1, self.groups // by),
            group_shared=self.group_shared // by,
            group_own=self.group_own // by,
            answer=self.answer // by,
        )


class Bench:
    """One model, its rates and its engines; each section is a method that yields rows (plain dicts).

    Args:
      name: of the model, one of `FULL` or `TINY`.
      model: see `make_model`.
      lengths: of the cases.
      repeats: timed runs of each case, after one that is not timed.
      decode_steps: steps of one jitted decode call.
      workload_rows: rows of the workload's engine.
      profile: also print kernel times and host phases.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        lengths: Lengths,
        *,
        repeats: int = 5,
        decode_steps: int = 16,
        workload_rows: int = 256,
        profile: bool = False,
    ):
        self.name, self.model, self.lengths = name, model, lengths
        self.repeats, self.decode_steps, self.workload_rows = repeats, decode_steps, workload_rows
        self.profile = profile
        self.device = jax.devices()[0]
        self.costs = Costs(model, lengths.page)
        self.rates: Rates = measure_rates(model.config.dtype, small=name in TINY)
        self.programs = Programs(model, self._config(), self.device)
        self._rng = np.random.default_rng(0)
        self._latency: Engine | None = None

    def fresh(self, n: int) -> np.ndarray:
        """n token ids that no prompt began with so far."""
        return self._rng.integers(2, self.model.vocab_size, n).astype(np.int32)

    # ---- engines

    def _config(self, **sizes: Any) -> EngineConfig:
        at = self.lengths
        defaults: dict[str, Any] = {
            "page_size": at.page,
            "max_prefill_tokens": at.chunk,
            "min_prefill_tokens": at.new,
            "decode_steps": self.decode_steps,
            "enable_prefix_reuse": True,
        }
        return EngineConfig(**{**defaults, **sizes})

    def _engine(self, config: EngineConfig) -> Engine:
        return Engine(self.model, config, programs=self.programs)

    @property
    def latency_config(self) -> EngineConfig:
        """For one request at a time, up to the longest context."""
        at = self.lengths
        longest = max(cached + new for cached, new in (*at.host, (at.cached, at.new)))
        context = longest + at.page + 8 * self.decode_steps
        pages = 2 * pages_for(context, at.page)
        return self._config(num_device_pages=pages, num_host_pages=pages, max_rows=8, max_context=context)

    @property
    def latency(self) -> Engine:
        """The engine of `latency_config`, kept between sections until another needs the memory."""
        if self._latency is None:
            engine = self._latency = self._engine(self.latency_config)
            if engine.runner.transfer.pins_memory:  # as `warmup` does, which would also compile every shape
                engine.runner.transfer.reserve(engine.memory.host_bytes)
        return self._latency

    def release(self) -> None:
        """Gives back the memory of the kept engine."""
        if self._latency is not None:
            close(self._latency)
            self._latency = None

    @property
    def turns_a_page(self) -> int:
        """Turns of decoding until a page is full."""
        return -(-self.lengths.page // self.decode_steps)

    # ---- sections

    def ttft(self) -> Iterator[dict[str, Any]]:
        """Cold and warm, and reuse off beside on with nothing to hit, taking turns."""
        at, engine = self.lengths, self.latency
        off = self._engine(dataclasses.replace(self.latency_config, enable_prefix_reuse=False))
        pairs: list[tuple[float, float]] = []
        colds: list[dict[str, Any]] = []
        for i in range(1 + max(7, self.repeats)):  # the first compiles
            prompts = [self.fresh(at.cached + at.new) for _ in range(2)]
            order = ((engine, 0), (off, 1)) if i % 2 else ((off, 1), (engine, 0))
            runs = {n: first_token(e, prompts[n], cached=0) for e, n in order}
            if i:
                colds.append(runs[0])
                pairs.append((runs[0]["ms"], runs[1]["ms"]))
        close(off)
        case = {"cached": at.cached, "new": at.new}
        ideal = self.costs.prefill_ms(self.rates, 0, at.cached + at.new)
        yield {"case": "cold", **case, **summary(colds), **beside(ideal, colds)}
        ratios = sorted(on / off for on, off in pairs)
        yield {
            "case": "0% hits, reuse on / off",
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
            "on_ms": statistics.median(on for on, _ in pairs),
            "off_ms": statistics.median(off for _, off in pairs),
        }
        base = self.fresh(at.cached)
        engine.generate(base, ONE)
        warm = self._repeat(lambda: first_token(engine, self._after(base, at.new), cached=at.cached))
        ideal = self.costs.prefill_ms(self.rates, at.cached, at.new)
        yield {"case": "warm", **case, **summary(warm), **beside(ideal, warm)}
        streams = sorted(
            self._repeat(lambda: first_event(engine, self._after(base, at.new))), key=lambda run: run["ms"]
        )
        times = [run["ms"] for run in streams]
        yield {"case": "warm, stream", "ms": statistics.median(times), "ms_min": times[0], "ms_max": times[-1]}
        yield self._memory("memory", engine)
        if self.profile:
            self._profile_warm(engine, base)

    def host(self) -> Iterator[dict[str, Any]]:
        """The cached pages lie on the host only: they come over the link first."""
        engine = self.latency
        for cached, new in self.lengths.host:
            base = self.fresh(cached)
            engine.generate(base, ONE)

            def run(base: np.ndarray = base, cached: int = cached, new: int = new) -> dict[str, Any]:
                engine.drop_device_pages()
                before = engine.stats().decode.host_pages_loaded
                row = first_token(engine, self._after(base, new), cached=cached)
                return {**row, "pages_loaded": engine.stats().decode.host_pages_loaded - before}

            runs = self._repeat(run)
            transfer = self.costs.load_ms(self.rates, cached)
            compute = self.costs.prefill_ms(self.rates, cached, new)
            warm = self._repeat(lambda b=base, c=cached, n=new: first_token(engine, self._after(b, n), cached=c))
            yield {
                "case": "host only",
                "cached": cached,
                "new": new,
                **summary(runs),
                "pages_loaded": runs[-1]["pages_loaded"],
                "ideal_transfer_ms": transfer,
                "ideal_compute_ms": compute,
                **beside(max(transfer, compute), runs),
                "warm_ms": statistics.median(run["ms"] for run in warm),
            }

    def decode(self) -> Iterator[dict[str, Any]]:
        """Steps of B rows, each with a context of its own or with most of it shared."""
        self.release()
        at = self.lengths
        turns = 5 + self.turns_a_page + max(8, self.repeats)  # timed, and those that start, end and profile
        steps = self.decode_steps * turns
        tail = pages_for(steps + 1, at.page) + 1
        own_pages = at.context // at.page + tail
        room = self._free_bytes()
        limit = room // self.costs.page_bytes if room is not None else max(at.rows) * own_pages + tail
        fits = [rows for rows in at.rows if rows * own_pages <= limit]
        most = max(at.rows)
        shared_pages = at.shared // at.page + most * (own_pages - at.shared // at.page)
        pages = max([rows * own_pages for rows in fits] + [shared_pages]) + tail
        config = self._config(
            num_device_pages=pages,
            num_host_pages=pages + tail,
            max_rows=most,
            max_context=own_pages * at.page,
            min_prefill_tokens=max(at.new, most),
        )
        engine = self._engine(config)
        params = SamplingParams(max_tokens=steps, ignore_eos=True)
        for shared in (0, at.shared):
            head = self.fresh(shared)
            prompts = [
                np.concatenate([head, self.fresh(at.context - shared)]) for _ in range(most if shared else max(fits))
            ]
            started = time.perf_counter()
            with without_host_copies(engine):
                engine.generate(prompts, ONE)
            filled = time.perf_counter() - started
            for rows in at.rows:
                if shared and rows == 1:
                    continue
                case = {"case": "decode", "rows": rows, "shared": shared, "own": at.context - shared}
                if not shared and rows not in fits:
                    need = rows * own_pages * self.costs.page_bytes
                    yield {**case, "left_out": f"{need / 1e9:.1f} GB of pages do not fit {(room or 0) / 1e9:.1f} GB"}
                    continue
                yield {**case, **self._decode_rows(engine, prompts[:rows], params, shared), "fill_s": filled}
            engine.clear_cache()
        yield self._memory("memory, decode", engine)
        close(engine)

    def _decode_rows(
        self, engine: Engine, prompts: Sequence[np.ndarray], params: SamplingParams, shared: int
    ) -> dict[str, Any]:
        """Times turns of the engine in which all rows decode. Every prompt is cached: a turn starts them all."""
        rows, earlier = len(prompts), engine.stats().decode.tokens
        requests = [engine.submit(prompt, params) for prompt in prompts]
        engine.step()  # admits, replays last tokens, compiles
        for _ in range(self.turns_a_page):  # until pages are full: their copy compiles, too
            engine.step()
        before = engine.stats()
        if (before.decode.tokens - earlier) % rows or len(engine.scheduler.running) != rows:
            raise RuntimeError("the rows did not start together")
        turns = [self._turn_ms(engine) for _ in range(max(8, self.repeats))]
        after = engine.stats()
        if after.decode.tokens - before.decode.tokens != rows * len(turns) * self.decode_steps:
            raise RuntimeError("a row stopped while it was timed")
        if self.profile:
            self._profile_decode(engine, rows, shared)
        for request in requests:
            engine.cancel(request)
        drain(engine)
        ideal = self.costs.decode_ms(self.rates, len(prompts[0]), rows, shared)
        ms = statistics.mean(turns)
        return {
            "ms": ms,  # of all turns: those in which pages fill and are copied to the host count too
            "ms_median": statistics.median(turns),
            "ms_min": min(turns),
            "ms_max": max(turns),
            "tokens_per_s": rows / ms * 1e3,
            "ideal_ms": ideal,
            "of_ideal": ideal / ms,
            "shared_reads": after.decode.shared_prefix_steps > before.decode.shared_prefix_steps,
        }

    def deterministic(self) -> Iterator[dict[str, Any]]:
        """Whether every way to a token gives the same bits, and what deterministic mode costs."""
        started = time.perf_counter()
        report = run_verify(self.model, deterministic=True, page_size=self.lengths.page)
        yield {
            "case": "verify --deterministic",
            "violations": list(report.violations),
            "same_bits": {run.run: run.same_bits for run in report.runs},
            "cached_tokens": {run.run: run.cached_tokens for run in report.runs},
            "first_layer": report.first_layer,
            "seconds": time.perf_counter() - started,
        }
        default, at = self.latency, self.lengths
        config = dataclasses.replace(self.latency_config, deterministic=True)
        means = deterministic_means(self.model, config, jax.devices()[0])
        if means == ONE_PROGRAM:  # otherwise programs have the shapes of default mode
            chunk = at.deterministic_chunk
            config = dataclasses.replace(config, max_prefill_tokens=chunk, min_prefill_tokens=min(at.new, chunk))
        strict = self._engine(config)
        figures = {name: self._price(engine) for name, engine in (("default", default), ("deterministic", strict))}
        close(strict)
        for name, ms in figures["default"].items():
            other = figures["deterministic"][name]
            yield {
                "case": f"price: {name}",
                "means": means,
                "default_ms": ms,
                "deterministic_ms": other,
                "ratio": other / ms,
            }

    def _price(self, engine: Engine) -> dict[str, float]:
        """Milliseconds of a cold prompt, a warm one, and a decode step of one row and of eight."""
        at = self.lengths
        cold = self._repeat(lambda: first_token(engine, self.fresh(at.cached + at.new), cached=0))
        base = self.fresh(at.context)
        engine.generate(base, ONE)
        warm = self._repeat(lambda: first_token(engine, self._after(base, at.new), cached=at.cached))
        figures = {"prefill": cold, "warm TTFT": warm}
        out = {name: statistics.median(run["ms"] for run in runs) for name, runs in figures.items()}
        params = SamplingParams(max_tokens=6 * self.decode_steps, ignore_eos=True)
        for rows, context in ((1, at.context), (8, at.context // 8)):
            prompts = [self.fresh(context) for _ in range(rows)]
            engine.generate(prompts, ONE)
            requests = [engine.submit(prompt, params) for prompt in prompts]
            engine.step()  # all of them hit and start together
            turns = [self._turn_ms(engine) for _ in range(4)]
            for request in requests:
                engine.cancel(request)
            drain(engine)
            out[f"decode step, {rows} rows of {context}"] = statistics.median(turns)
        return out

    def _turn_ms(self, engine: Engine) -> float:
        """Milliseconds a decode step, of one turn that only decodes."""
        start = time.perf_counter()
        engine.step()
        return (time.perf_counter() - start) / self.decode_steps * 1e3

    def workload(self) -> Iterator[dict[str, Any]]:
        """All requests at once: groups with a common beginning each, greedy, run to the end."""
        self.release()
        at = self.lengths
        tokens = at.group_shared + at.group_own + at.answer
        own_pages = pages_for(tokens, at.page) - at.group_shared // at.page + 1
        groups = at.groups * at.group_shared // at.page
        config = self._config(
            num_device_pages=groups + self.workload_rows * own_pages,
            num_host_pages=groups + (at.requests + self.workload_rows) * own_pages // 2,
            max_rows=self.workload_rows,
            prefill_calls=PREFILL_CALLS,
            max_context=pages_for(tokens, at.page) * at.page,
            min_prefill_tokens=at.chunk // 4,
            min_decode_rows=max(1, self.workload_rows // 4),
        )
        engine = self._engine(config)
        params = SamplingParams(max_tokens=at.answer, ignore_eos=True)
        for attempt in ("first, compiling", "timed"):
            heads = [self.fresh(at.group_shared) for _ in range(at.groups)]
            prompts = [self._after(heads[i % at.groups], at.group_own) for i in range(at.requests)]
            before = engine.stats()
            start = time.perf_counter()
            outputs = engine.generate(prompts, params)
            seconds = time.perf_counter() - start
            after = engine.stats()
            if any(len(output.token_ids) != at.answer for output in outputs):
                raise RuntimeError("an answer is too short")
            computed = after.prefill.computed_tokens - before.prefill.computed_tokens
            yield {
                "case": f"workload, {attempt}",
                "requests": at.requests,
                "seconds": seconds,
                "tokens_per_s": at.requests * at.answer / seconds,
                "cached_tokens": after.prefill.cached_tokens - before.prefill.cached_tokens,
                "computed_tokens": computed,
                "least_computed_tokens": at.groups * at.group_shared + at.requests * at.group_own,
                "prefill_batches": after.prefill.batches - before.prefill.batches,
                "decode_steps": after.decode.steps - before.decode.steps,
                "compiled": sum(after.compilations.values()) - sum(before.compilations.values()),
                "ideal_s": self._workload_ideal(computed),
            }
            engine.clear_cache()
        if self.profile:
            self._profile_workload(engine, params)
        yield self._memory("memory, workload", engine)
        close(engine)

    def _workload_ideal(self, computed: int) -> float:
        """Seconds: the computed prompt tokens' FLOPs, and decoding with all rows of the engine at work."""
        at = self.lengths
        own = at.group_own + at.answer // 2
        prefill = self.costs.prefill_flops(at.group_shared // 2, 1) * computed / self.rates.matmul
        rows = min(self.workload_rows, at.requests)
        shared = at.groups * self.costs.kv_bytes(at.group_shared)
        step = self.costs.weight_bytes(rows) + shared + rows * self.costs.kv_bytes(own)
        return prefill + at.requests / rows * at.answer * step / self.rates.read

    # ---- parts

    def _after(self, base: np.ndarray, n: int) -> np.ndarray:
        return np.concatenate([base, self.fresh(n)])

    def _repeat(self, run: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        run()
        return [run() for _ in range(self.repeats)]

    def _free_bytes(self) -> int | None:
        """Device bytes that a pool may take now; None where the device does not say."""
        stats = self.device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return int(stats["bytes_limit"] - stats["bytes_in_use"] - HEADROOM)

    def _memory(self, case: str, engine: Engine) -> dict[str, Any]:
        stats = self.device.memory_stats() or {}
        host = engine.store.stats()
        return {
            "case": case,
            "params_GB": self.costs.param_bytes / 1e9,
            "pools_GB": engine.memory.device_bytes / 1e9,
            "page_MB": self.costs.page_bytes / 1e6,
            "host_GB": (host.num_pages - host.free_pages) * self.costs.page_bytes / 1e9,
            **{
                f"{name}_GB": stats[name] / 1e9
                for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
                if name in stats
            },
        }

    # ---- profiles, printed only

    def _profile_warm(self, engine: Engine, base: np.ndarray) -> None:
        at = self.lengths
        print_kernels("a cold TTFT", kernel_times(lambda: first_token(engine, self.fresh(at.cached + at.new))), 1)
        print_timeline("a warm TTFT", timeline(lambda: first_token(engine, self._after(base, at.new))))
        runs = [phase_times(engine, lambda: first_token(engine, self._after(base, at.new))) for _ in range(5)]
        print_phases("a warm TTFT", runs)

    def _profile_decode(self, engine: Engine, rows: int, shared: int) -> None:
        what = f"a decode step of {rows} rows, {shared} shared"
        print_phases(f"a turn of {self.decode_steps} steps, {rows} rows", [phase_times(engine, engine.step)])
        print_kernels(what, kernel_times(engine.step), self.decode_steps)

    def _profile_workload(self, engine: Engine, params: SamplingParams) -> None:
        at = self.lengths
        heads = [self.fresh(at.group_shared) for _ in range(at.groups)]
        prompts = [self._after(heads[i % at.groups], at.group_own) for i in range(at.requests)]
        print_phases("the workload", [phase_times(engine, lambda: engine.generate(prompts, params))])


# ---- the program


def run_model(name: str, options: argparse.Namespace, lengths: Lengths) -> None:
    """Runs the sections that are asked for, and writes what there is after each."""
    started = time.perf_counter()
    model = make_model(name)
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
        "rates": bench.rates.to_json(),
    }
    print(f"{name}: {json.dumps(head)}", flush=True)
    result = load_result(options.json)
    record = result.setdefault(name, {})
    for section in options.sections:
        record[section] = {**head, "rows": []}
        begun = time.perf_counter()
        print(f" {section}", flush=True)
        for row in getattr(bench, section)():
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
