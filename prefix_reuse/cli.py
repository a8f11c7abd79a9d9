"""The command line: `prefix-reuse demo`, `simulate`, `verify`, `convert`."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prefix_reuse.config import EngineConfig
from prefix_reuse.demo import QUESTIONS, DemoReport, run_demo
from prefix_reuse.errors import ConfigError, InvalidRequestError, PrefixReuseError
from prefix_reuse.simulate import POLICIES, parse_tokens, plot_hit_rates
from prefix_reuse.simulate import simulate as run_simulation
from prefix_reuse.traces import count_prompts
from prefix_reuse.verify import VerifyReport, run_verify

PLOT_FORMATS = (".png", ".svg", ".pdf")
Dequantise = Annotated[bool, typer.Option("--dequantise", help="Expand MXFP4 weights to the model's dtype.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Prefix KV reuse for JAX.")


@app.callback()
def commands() -> None:
    """Prefix KV reuse for JAX: what prompts share is computed once and kept once."""


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="A checkpoint folder, a .gguf file, or a known name.")] = "smollm2",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 32,
    page_size: Annotated[int, typer.Option(min=1, help="Token slots per page, a power of two.")] = 64,
    dequantise: Dequantise = False,
) -> None:
    """Several questions over one long document: cold, warm, and as a batch. Exit code 1 when tokens differ."""
    from prefix_reuse.checkpoints import load_model

    # The report goes to stdout, progress to stderr.
    console, progress = Console(), Console(stderr=True)
    try:
        check_outputs(json_file)
        loaded = load_model(model, progress=True, dequantise=dequantise)
    except (ValueError, OSError) as error:  # `models.CheckpointError` is a ValueError
        fail(error)
    report = run_demo(
        loaded,
        questions=QUESTIONS,
        max_tokens=max_tokens,
        page_size=page_size,
        progress=True,
        say=lambda line: progress.print(line, style="dim"),
    )
    print_report(report, console)
    if json_file is not None:
        write_json(json_file, report.to_json())
        console.print(f"numbers written to {json_file}")
    raise typer.Exit(report.exit_code)


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSON lines, or an .npz with tokens and offsets.")],
    capacity_tokens: Annotated[str, typer.Option(help="Tokens that the cache holds; several: 1M,2M,4M.")],
    policy: Annotated[str, typer.Option(help=f"Order of eviction: {', '.join(POLICIES)}.")] = "lru",
    page_size: Annotated[int, typer.Option(min=1, help="Token slots per page.")] = 16,
    block: Annotated[int, typer.Option(min=1, help="Tokens per hash id of a Mooncake trace.")] = 512,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate over capacity into this file (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Replay a trace on the host index: hit rates and time for each capacity. Needs no model and no GPU."""
    try:
        capacities = [parse_tokens(part) for part in capacity_tokens.split(",")]
        check_outputs(json_file, plot)
        check_plot(plot)
        total = count_prompts(trace)
        if not total:
            raise InvalidRequestError(f"the trace {trace} holds no requests")
        rows = []
        for capacity in capacities:
            bar = partial(track_prompts, title=f"{capacity:,} tokens", total=total)
            rows.append(run_simulation(trace, capacity, policy, page_size, block, progress=bar))
    except PrefixReuseError as error:
        fail(error)
    print_rows(rows, f"{trace.name}, {policy}, page {page_size}", Console())
    if json_file is not None:
        write_json(json_file, rows)
    if plot is not None:
        figure = plot_hit_rates(rows, f"{trace.name}, {policy}, page {page_size}")
        write_output(plot, lambda path: figure.savefig(path, dpi=150))


def check_outputs(*files: Path | None) -> None:
    """Raise `ConfigError` before the work begins if its results could not be written."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"the folder of {file} does not exist")
        if file is not None and file.is_dir():
            raise ConfigError(f"{file} is a folder, not a file")
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise ConfigError(f"{file} cannot be written: no permission")


def check_plot(plot: Path | None) -> None:
    """Raise `ConfigError` if a figure of this name could not be drawn."""
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with `pip install 'prefix-reuse[plot]'`")
    if plot.suffix.lower() not in PLOT_FORMATS:
        raise ConfigError(f"--plot {plot} must end in one of {', '.join(PLOT_FORMATS)}")


def write_json(file: Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all. Raises `ConfigError`."""
    text = json.dumps(value, indent=2) + "\n"
    write_output(file, lambda path: path.write_text(text, encoding="utf-8"))


def write_output(file: Path, write: Callable[[Path], Any]) -> None:
    """Lets `write` make a file beside `file`, which then takes its place: what is there stays if that fails.

    What is no regular file, such as a pipe, is written directly. Raises `ConfigError`.
    """
    try:
        if file.exists() and not file.is_file():
            write(file)
            return
        file = file.resolve()  # of a link its target is replaced
        partial = file.with_name(f"{file.stem}.partial-{os.getpid()}{file.suffix}")
        try:
            write(partial)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


def track_prompts(prompts: Iterable[Any], title: str, total: int) -> Iterable[Any]:
    """Yields `prompts` behind a progress bar on stderr, which is drawn a few times a second only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        yield from bar.track(prompts, total=total, description=title)


def print_rows(rows: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    """A table with one line a capacity."""
    table = Table(title=title, title_justify="left")
    for heading in (
        "capacity\ntokens",
        "requests",
        "hit rate\nfull pages",
        "hit rate\ntokens",
        "us a\nrequest",
        "evicted\npages",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['capacity_tokens']:,}",
            f"{row['requests']:,}",
            f"{100 * row['hit_rate_pages']:.2f}%",
            f"{100 * row['hit_rate_tokens']:.2f}%",
            f"{row['us_per_request']:.1f}",
            f"{row['evicted_pages']:,}",
        )
    console.print(table)


def print_report(report: DemoReport, console: Console) -> None:
    """The answers, a line per question, the pages of the batch, and the verdict."""
    for result in report.questions:
        console.print(f"[bold]Q: {result.question}[/bold]")
        console.print(f"A: {result.answer}\n", markup=False, highlight=False)

    questions = Table(title=f"{report.model} on {report.device}", title_justify="left")
    questions.add_column("question")
    for heading in (
        "prompt\ntokens",
        "computed\ncold",
        "computed\nwarm",
        "TTFT cold\nms",
        "TTFT warm\nms",
        "tokens\nequal",
    ):
        questions.add_column(heading, justify="right")
    for result in report.questions:
        questions.add_row(
            result.question,
            f"{result.prompt_tokens}",
            f"{result.computed_tokens_cold}",
            f"{result.computed_tokens_warm}",
            f"{result.ttft_cold_ms:.1f}",
            f"{result.ttft_warm_ms:.1f}",
            "yes" if result.tokens_equal else "no",
        )
    console.print(questions)

    pages = Table(title=f"the {len(report.questions)} questions as one batch", title_justify="left")
    pages.add_column("pages")
    for heading in ("logical", "physical", "saved"):
        pages.add_column(heading, justify="right")
    for name, logical, physical in (
        ("host", report.host_pages_logical, report.host_pages_physical),
        ("device", report.gpu_pages_logical, report.gpu_pages_physical),
    ):
        pages.add_row(name, str(logical), str(physical), str(logical - physical))
    console.print(pages)
    console.print(f"host-to-device page copies skipped: {report.h2d_pages_skipped}")
    console.print(f"largest difference of a logit, warm against cold: {report.max_logit_diff:.3g}")

    for flip in report.flips:
        verdict = "excused" if flip.excused else "[bold red]not excused[/bold red]"
        console.print(
            f"question {flip.question + 1}, {flip.run}: token {flip.position} is {flip.other_token}, "
            f"cold {flip.cold_token}; cold top-2 margin {flip.margin:.3g}, noise {flip.noise:.3g}: {verdict}"
        )
    if report.tokens_equal:
        console.print("[bold green]all tokens equal[/bold green]: cold, warm, and in the batch")


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a known name.")],
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Hold deterministic mode to equal bits.")
    ] = False,
    page_size: Annotated[int, typer.Option(min=1, help="Token slots per page, a power of two.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    dequantise: Dequantise = False,
) -> None:
    """Whether a hit changes an answer: disabled, cold, warm, full hit, reloaded, mixed batch. Exit code 2 when it does."""
    from prefix_reuse.checkpoints import load_model

    try:
        check_outputs(json_file)  # said now, not after all the runs
        EngineConfig(page_size=page_size, max_prefill_tokens=max(page_size, 512))  # nor after loading
        loaded = load_model(model, progress=True, dequantise=dequantise)
        report = run_verify(loaded, deterministic=deterministic, page_size=page_size, progress=True)
    except (ValueError, OSError) as error:
        fail(error)
    print_verification(report, Console())
    if json_file is not None:
        write_json(json_file, report.to_json())
    errors = Console(stderr=True, soft_wrap=True)
    for violation in report.violations:
        errors.print(f"violation: {violation}", markup=False, highlight=False, style="red")
    if report.violations:
        where = report.first_layer or "no layer alone: rounding that adds up, or decoding"
        errors.print(f"the first difference is in {where}", markup=False, highlight=False, style="red")
    raise typer.Exit(report.exit_code)


@app.command()
def convert(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or a known name.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new folder, or an older export to replace.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = None,
    dequantise: Dequantise = False,
) -> None:
    """Write a checkpoint as it lies in device memory, to be loaded by its folder afterwards."""
    from prefix_reuse.checkpoints import check_target, load_model, save_model

    try:
        check_target(folder)
        save_model(load_model(checkpoint, dtype=dtype, progress=True, dequantise=dequantise), folder)
    except (ValueError, OSError) as error:
        fail(error)
    Console(soft_wrap=True).print(f"written: {folder}", markup=False, highlight=False)


def print_verification(report: VerifyReport, console: Console) -> None:
    """A line per run, the flips, and the verdict; a digest ends with = where it is the cold one."""
    mode = "deterministic" if report.deterministic else "default"
    title = f"{report.model} in {report.dtype} on {report.device}, {mode} mode, pages of {report.page_size}"
    table = Table(title=title, title_justify="left")
    table.add_column("run")
    headings = ("cached\ntokens", "computed\ntokens", "max logit\ndiff.", "flips", "tokens\nsha256", "logits\nsha256")
    for heading in headings:
        table.add_column(heading, justify="right")
    for run in report.runs:
        digests = (run.tokens_sha256, run.cold_tokens_sha256), (run.logits_sha256, run.cold_logits_sha256)
        table.add_row(
            run.run,
            f"{run.cached_tokens}",
            f"{run.computed_tokens}",
            f"{run.max_logit_diff:.2g}",
            f"{len(run.flips)}",
            *(f"{digest[:8]}{'=' if digest == cold else ' '}" if digest else "none " for digest, cold in digests),
        )
    console.print(table)
    for run in report.runs:
        for flip in run.flips:
            console.print(
                f"{run.run}, {flip.prompt}: token {flip.position} is {flip.other_token}, cold {flip.cold_token}; "
                f"cold top-2 margin {flip.margin:.3g}, noise {report.noise:.3g}: "
                f"{'excused' if flip.excused else 'not excused'}"
            )
    if not report.deterministic:
        console.print(f"noise between cold schedules: {report.noise:.3g}; allowed difference: {report.bar:.3g}")
    if not report.violations:
        bits = "every bit is equal" if report.deterministic else "no hit changes an answer beyond rounding"
        console.print(f"[bold green]{bits}[/bold green]")


def main() -> None:
    """Entry point; errors of this package end as one line and exit code 2, not as a traceback."""
    try:
        app()
    except PrefixReuseError as error:
        fail(error)


def fail(error: Exception) -> NoReturn:
    """Says what is wrong on stderr and ends with exit code 2."""
    Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False, style="red")
    raise SystemExit(2) from error


if __name__ == "__main__":
    main()
