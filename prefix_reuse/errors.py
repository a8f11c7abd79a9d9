"""Every error that the package raises on purpose; all derive from `PrefixReuseError`."""

from __future__ import annotations


class PrefixReuseError(Exception):
    """Base of all errors of this package."""


class ConfigError(PrefixReuseError, ValueError):
    """A configuration that cannot work (page size not a power of two, stages without M1, pools too small)."""


class InvalidRequestError(PrefixReuseError, ValueError):
    """A request that can never be served (empty prompt, token out of range, duplicate id, bad sampling values)."""


class CapacityError(InvalidRequestError):
    """Prompt + 1 token exceeds the context or a whole page pool; nothing was allocated."""


class UnknownRequestError(PrefixReuseError, KeyError):
    """A request or sequence id that is not live."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # without the quotes of a KeyError


class LengthsError(PrefixReuseError, ValueError):
    """Query, context and KV lengths of a batch contradict each other."""


class StateTransitionError(PrefixReuseError):
    """A sequence was moved along an edge that its life cycle does not have."""


class UnsupportedAttentionError(PrefixReuseError):
    """An attention kind whose KV has no K/V pages (MLA, DSA); refused before any matching."""


class PagesExhausted(PrefixReuseError):
    """A page pool cannot meet an allocation; the pool is as before the call."""


class HostPagesExhausted(PagesExhausted):
    """The host page store cannot meet an allocation."""


class DevicePagesExhausted(PagesExhausted):
    """The device page pool cannot meet an allocation."""


class RefcountError(PrefixReuseError):
    """A reference, pin or copy count would fall below zero, or disagrees with the rows."""


class SharedPageWriteError(PrefixReuseError):
    """A write was aimed at a page that is shared, indexed or not owned by the writer."""


class LeaseError(PrefixReuseError):
    """A lease was used by another owner, twice, or in the wrong state."""


class TransferError(PrefixReuseError):
    """A page could not be copied between host and device."""


class IntegrityError(PrefixReuseError):
    """Stored state contradicts itself: a broken invariant or a checksum that does not match."""


class GeometryError(PrefixReuseError, ValueError):
    """A host store and pages (of a model, an export, a file) that do not fit each other; `reason` is a stable word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class SnapshotError(PrefixReuseError):
    """A snapshot that cannot be written or must not be used; `reason` is a stable word (`snapshot_format.Refusal`)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = str(reason)
