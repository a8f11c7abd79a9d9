"""Bundles of host pages on their way to the device, before a row has pages for them.

A copy into staging runs on a copy stream of its own, beside every step that is dispatched after it. It waits for the steps
that were dispatched before it, whose memory it may be given: so copies are started before a step is dispatched, not while
somebody waits for it. From staging into the pool the bytes go by a scatter on the device, which takes its turn among the
steps, since all of them donate the pool.

A bundle never changes, so that what is staged can be dropped, or never be used, at any time: it is found again by its identity
only, and a host page that was freed and filled again lies in another bundle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax

from prefix_reuse.host_part import Bundle


class Staging:
    """Device copies of whole bundles, `max_bytes` at most. Owned by one engine.

    Args:
      device: where the copies go.
      max_bytes: of all copies together; 0 = none.
    """

    def __init__(self, device: Any, max_bytes: int):
        self._place = jax.sharding.SingleDeviceSharding(device)
        self.max_bytes = max_bytes
        self.arrays: dict[Bundle, jax.Array] = {}
        """Copies, landed or under way."""

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def start(self, bundles: Iterable[Bundle]) -> int:
        """Starts the copies of those that are not there, in order, until one does not fit. Returns the bytes of these copies.

        What raises leaves the copies that were started before.
        """
        before = used = self.num_bytes
        for bundle in bundles:
            if bundle in self.arrays:
                continue
            if used + bundle.array.nbytes > self.max_bytes:
                break
            self.arrays[bundle] = self._copy(bundle.array)
            used += bundle.array.nbytes
        return used - before

    def _copy(self, array: jax.Array) -> jax.Array:
        return jax.device_put(array, self._place)

    def keep(self, bundles: Collection[Bundle]) -> None:
        """Drops the copies of all others."""
        for bundle in [bundle for bundle in self.arrays if bundle not in bundles]:
            del self.arrays[bundle]

    def clear(self) -> None:
        """Drops all copies."""
        self.arrays.clear()
