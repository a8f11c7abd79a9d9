"""Configuration of the engine and of one request: frozen, every knob documented in place with its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from prefix_reuse.errors import ConfigError, InvalidRequestError

Implementation = Literal["reference", "triton", "mosaic_gpu"]


def is_power_of_two(n: int) -> bool:
    return n >= 1 and n & (n - 1) == 0


@dataclass(frozen=True)
class EngineConfig:
    """How an `Engine` is sized and which reuse stages it runs. Raises `ConfigError` on values that cannot work."""

    page_size: int = 64
    """Token slots per page; a power of two. Only whole pages are shared."""
    num_device_pages: int = 256
    """Pages in the device pool of each layer group without a sliding window."""
    num_window_pages: int | None = None
    """Pages in the device pool of each layer group with a sliding window, whose rows keep the last pages only. None = as many
    as `max_rows` rows can use at once, and never more than `num_device_pages`."""
    num_host_pages: int = 1024
    """Pages in the host store."""
    max_host_bytes: int | None = None
    """Bytes of the host store at most; lowers `num_host_pages`. None = no cap in bytes. Pages that were copied together share a
    buffer, freed with its last page and rewritten once half of them are gone: buffers may take twice their pages' bytes."""
    staging_bytes: int | None = None
    """Device memory for host pages whose copies start before their row is let in (`prefetch.py`); 0 = none start early. None:
    512 MiB on a GPU, where copies run beside the steps; 0 elsewhere. Acts only with `enable_prefix_reuse`."""
    max_rows: int = 8
    """Sequences that hold device pages at once (rows of the page table)."""
    max_context: int | None = None
    """Tokens per sequence at most, prompt and output; None = the model's own limit."""
    max_prefill_tokens: int = 512
    """Tokens computed by one prefill call; longer suffixes are prefilled in chunks. A power of two."""
    prefill_calls: int = 1
    """Prefill calls of a turn at most, one after the other while rows wait for theirs, before others decode on. More: decode
    batches are fuller (throughput of many requests); 1: rows that decode are held up least."""
    min_prefill_tokens: int = 16
    """Tokens of the smallest prefill program, a power of two: shorter suffixes are padded to it. Larger compiles less."""
    min_decode_rows: int = 1
    """Rows of the smallest decode program, a power of two: fewer rows are padded to it. Larger compiles less."""
    decode_steps: int = 8
    """Decode steps inside one jitted call, between two scheduling boundaries."""
    max_stop_ids: int = 8
    """Stop token ids per request at most (a static shape)."""

    enable_prefix_reuse: bool = False
    """Master switch. Off: no index, no pins, no reference above 1."""
    host_page_reuse: bool = True
    """M1, host pages: equal full pages are kept once on the host. Acts only with `enable_prefix_reuse`."""
    suffix_prefill: bool = True
    """M2, prefill: only the tokens after a hit are computed and offloaded. Needs M1."""
    decode_page_sharing: bool = True
    """M3, decode: rows share one device page per host page. Needs M1."""
    shared_prefix_decode: bool | None = None
    """Decode reads a page that several rows share once for all of them (X2; acts with M3). None: on a GPU, where so much is
    shared that it was measured to pay; True: wherever a whole split is shared; False: never."""
    deterministic: bool = False
    """A token's logits and KV have the same bits however it comes to be computed: cold, after any hit, decoded, resumed or
    re-entered, in any batch. Holds on one type of device, with one version of jax."""
    deterministic_means: Literal["row-invariant", "one program"] | None = None
    """How (acts with `deterministic`; see `deterministic.py`). "row-invariant": by operations whose rows do not depend on the
    shape of the call; prefill and decode keep their programs. "one program": every token goes through one program of
    `max_prefill_tokens` tokens and `max_rows` rows, decoding too, so a decode step costs a whole prefill call: choose
    `max_prefill_tokens` small for long answers. None: the former on a GPU, for models that support it; else the latter."""
    publish_generated: bool = False
    """Also index full pages that hold generated tokens (useful for multi-turn chat). Off: prompt pages only."""
    share_in_wave: bool = True
    """Requests of one wave wait for the one that computes their common prefix (acts with M2)."""
    max_index_entries: int | None = None
    """Pages that the index may hold; None = as many as the host store has."""
    revision: str = ""
    """Free text that joins the namespace: a model revision, an experiment id."""

    snapshot_dir: str | None = None
    """Folder of a snapshot of the cache: loaded when the engine starts, written by `engine.cache.save_snapshot()`. Acts only
    with `enable_prefix_reuse`."""
    integrity: bool = False
    """Checksum every indexed page per layer and check it when it is reused."""
    poison: bool = False
    """Fill freed and reclaimed pages with NaN, on host and device, so that a stale read shows. For tests; slow."""
    attention: Implementation | None = None
    """Force one kernel implementation; None = the one that measured fastest, where it supports the case."""
    compilation_cache: bool = True
    """Keep XLA programs on disk between processes (JAX's persistent compilation cache, in `~/.cache/prefix_reuse/xla`), unless
    a folder is configured already."""

    def __post_init__(self) -> None:
        if not is_power_of_two(self.page_size):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if not is_power_of_two(self.max_prefill_tokens) or self.max_prefill_tokens < self.page_size:
            raise ConfigError(
                f"max_prefill_tokens must be a power of two and at least page_size={self.page_size}, "
                f"got {self.max_prefill_tokens}"
            )
        for name in ("min_prefill_tokens", "min_decode_rows"):
            if not is_power_of_two(getattr(self, name)):
                raise ConfigError(f"{name} must be a power of two, got {getattr(self, name)}")
        for name in ("num_device_pages", "num_host_pages", "max_rows", "prefill_calls", "decode_steps", "max_stop_ids"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.staging_bytes is not None and self.staging_bytes < 0:
            raise ConfigError(f"staging_bytes must not be negative, got {self.staging_bytes}")
        for name in ("max_context", "max_index_entries", "max_host_bytes", "num_window_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1 or None, got {value}")
        if self.deterministic and self.shared_prefix_decode:
            raise ConfigError(
                "deterministic decodes with the attention of prefill, row by row, which shared_prefix_decode=True does not: "
                "leave shared_prefix_decode at None or set it to False"
            )
        if self.deterministic_means not in (None, "row-invariant", "one program"):
            raise ConfigError(
                f'deterministic_means must be "row-invariant", "one program" or None, got {self.deterministic_means!r}'
            )
        if self.attention is not None and self.attention not in get_args(Implementation):
            names = ", ".join(get_args(Implementation))
            raise ConfigError(f"attention must be one of {names}, or None, got {self.attention!r}")
        if self.enable_prefix_reuse and not self.host_page_reuse:
            raise ConfigError(
                "stages: M2 (suffix_prefill) and M3 (decode_page_sharing) each need M1 (host_page_reuse); "
                "to turn everything off set enable_prefix_reuse=False"
            )

    @property
    def m1(self) -> bool:
        return self.enable_prefix_reuse and self.host_page_reuse

    @property
    def m2(self) -> bool:
        return self.m1 and self.suffix_prefill

    @property
    def m3(self) -> bool:
        return self.m1 and self.decode_page_sharing


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Raises `InvalidRequestError` on values out of range.

    The three penalties count tokens over the whole text so far, prompt included, cached or not.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    """0 = greedy (top_k, top_p and seed are then ignored)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least top_p."""
    seed: int = 0
    """Same seed, same prompt: same tokens, in any batch. Sample i of n uses stream i of the seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's own end ids; the id is the last token of the output."""
    ignore_eos: bool = False
    """Do not stop at the model's own end ids."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen so far; 1 = off (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token seen so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was seen."""
    n: int = 1
    """Independent samples of the same prompt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(t) for t in self.stop_token_ids))
        checks = (
            (self.max_tokens >= 1, "max_tokens must be at least 1", self.max_tokens),
            (
                self.temperature == 0 or 1e-4 <= self.temperature <= 1e4,
                "temperature must be 0 or in [1e-4, 1e4]",
                self.temperature,
            ),
            (0 <= self.top_k < 2**31, "top_k must be in [0, 2**31)", self.top_k),
            (0.0 < self.top_p <= 1.0, "top_p must be in (0, 1]", self.top_p),
            (0 <= self.seed < 2**32, "seed must fit 32 unsigned bits", self.seed),
            (
                1e-4 <= self.repetition_penalty <= 1e4,
                "repetition_penalty must be in [1e-4, 1e4]",
                self.repetition_penalty,
            ),
            (abs(self.presence_penalty) <= 1e4, "presence_penalty must be in [-1e4, 1e4]", self.presence_penalty),
            (abs(self.frequency_penalty) <= 1e4, "frequency_penalty must be in [-1e4, 1e4]", self.frequency_penalty),
            (self.n >= 1, "n must be at least 1", self.n),
            (all(self.stop), "stop strings must not be empty", self.stop),
            (all(t >= 0 for t in self.stop_token_ids), "stop_token_ids must be >= 0", self.stop_token_ids),
        )
        for ok, message, value in checks:
            if not ok:
                raise InvalidRequestError(f"{message}, got {value!r}")

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
