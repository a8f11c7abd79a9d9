"""What a multiprocessor of a Hopper GPU gives to one block, and how warpgroups share its registers."""

from __future__ import annotations

SHARED_BYTES = 232448  # for one block
REGISTERS = 65536
MOST_REGISTERS = 240  # of a consumer's thread, where it gets more than its even share
PRODUCER_REGISTERS = 24


def moved_registers(needed: int, consumers: int) -> tuple[int, int] | None:
    """Registers that each thread of a consumer and of the producer sets; None where an even share holds the `needed` ones.

    All of them together are at most what the launch gave: a block never gets more, and `setmaxnreg` waits until it does.

    Args:
        needed: of a consumer's thread.
        consumers: warpgroups beside the one producer.
    """
    even = launch_registers(consumers)
    if needed <= even:
        return None
    share = (even * (consumers + 1) - PRODUCER_REGISTERS) // consumers // 8 * 8
    return min(share, MOST_REGISTERS), PRODUCER_REGISTERS


def launch_registers(consumers: int) -> int:
    """Registers of each thread at launch, at most: ptxas gives them in eights (96 of 640 threads, 168 of 384)."""
    return REGISTERS // (128 * (consumers + 1)) // 8 * 8
