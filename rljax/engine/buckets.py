"""Shape buckets: the shapes that programs are compiled for.

Batch and cache length are rounded up to a bucket, in place of CUDA graphs captured per shape (TLT, section
5.1). Fewer buckets compile less, more buckets waste less.
"""

import bisect
import dataclasses

from rljax import target
from rljax.engine.kv_cache import KEY_BLOCK
from rljax.errors import ConfigError
from rljax.numerics.rows import KEY_CHUNK

_SHORT_PROMPTS = (16, 32)  # prefill lengths below a block of the cache
_FIRST_OF_FEW = 8  # slots: tiles of tensor cores and matrix units are not smaller
_MOST_SHARES = 2  # a pass computes attention for this many times a slot's share of rows, for every slot


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Ascending batch and cache-length buckets.

    Attributes:
      batch: numbers of slots.
      cache: numbers of positions per slot.
      verify: numbers of rows of a verifying pass, of all slots together; empty without speculation.
      max_drafts: largest number of draft nodes of a slot in one pass.
      prompts: most prompts that are prefilled together, where that is known; None for as many as slots.
      too_large: (batch, rows) of passes that do not fit into the device's memory.
    """

    batch: tuple[int, ...]
    cache: tuple[int, ...]
    verify: tuple[int, ...] = ()
    max_drafts: int = 0
    prompts: int | None = None
    too_large: set[tuple[int, int]] = dataclasses.field(default_factory=set, compare=False)

    def passes(self, batch: int) -> list[tuple[int, int]]:
        """Returns (rows, draft nodes per slot) of the verifying passes over a batch. They have more rows than
        slots, and up to `_MOST_SHARES` times its share for a slot; those that are too large are left out.
        """
        largest = batch * (self.max_drafts + 1)
        rows = sorted({min(rows, largest) for rows in self.verify if rows > batch})
        fit = [size for size in rows if (batch, size) not in self.too_large]
        return [(size, min(self.max_drafts, _MOST_SHARES * size // batch - 1)) for size in fit]

    def prefill(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the numbers of prompts of one prefill, and their padded lengths, both ascending."""
        rows = tuple(sorted({*self.batch[::2], self.batch[-1]}))
        if self.prompts is not None:  # more come in several prefills
            rows = rows[: bisect.bisect_left(rows, self.prompts) + 1]
        # Prompts are often much shorter than the shortest cache.
        return rows, tuple(sorted({*_SHORT_PROMPTS, KEY_BLOCK, *self.cache}))

    def verified_batches(self, max_batch: int) -> list[int]:
        """Returns the batch buckets up to `max_batch` that have verifying passes; others decode plainly."""
        return [batch for batch in self.batch if batch <= max_batch and self.passes(batch)]

    def batch_for(self, slots: int) -> int:
        """Returns the smallest batch bucket that holds `slots`."""
        return _round_up(slots, self.batch, "slots")

    def cache_for(self, positions: int) -> int:
        """Returns the smallest cache bucket that holds `positions`."""
        return _round_up(positions, self.cache, "positions")

    def cache_up_to(self, positions: int | None) -> list[int]:
        """Returns the cache buckets that sequences of up to `positions` pass through; None for all."""
        longest = self.cache[-1] if positions is None else self.cache_for(positions)
        return [length for length in self.cache if length <= longest]

    def next_cache(self, length: int) -> int:
        """Returns the cache bucket above `length`."""
        return _round_up(length + 1, self.cache, "positions")


def _round_up(value: int, buckets: tuple[int, ...], what: str) -> int:
    for bucket in buckets:
        if bucket >= value:
            return bucket
    raise ValueError(f"{value} {what} exceed the largest bucket, {buckets[-1]}")


def check_slots(slots: int, row_multiple: int) -> None:
    """Raises a ConfigError unless `row_multiple` devices can share the slots evenly."""
    if slots % row_multiple:
        raise ConfigError(
            f"engine.batch_buckets: {slots} slots cannot be split evenly over mesh.data * mesh.fsdp ="
            f" {row_multiple} devices; use multiples of {row_multiple}"
        )


def make_buckets(
    max_slots: int,
    max_length: int,
    row_invariant: bool,
    batch_buckets: tuple[int, ...] | None = None,
    cache_buckets: tuple[int, ...] | None = None,
    row_multiple: int = 1,
    verify_buckets: tuple[int, ...] = (),
    max_drafts: int = 0,
    prompts: int | None = None,
) -> Buckets:
    """Returns buckets up to `max_slots` slots and `max_length` positions.

    Unless they are given, batch buckets double, and cache buckets grow by a half at a time. On an
    accelerator, where programs take long to compile, and empty slots and unused positions little time, batch
    buckets begin at 8 and grow fourfold, and cache buckets double. A row-invariant engine computes at least
    two rows. Batch buckets are multiples of `row_multiple`, the number of devices that share the slots.

    Raises:
      ConfigError: explicit buckets that do not hold max_slots or max_length, batch buckets that the devices
        cannot share, or cache buckets off the key block.
    """
    smallest, few = max(2 if row_invariant else 1, row_multiple), target.platform() != "cpu"
    if batch_buckets is None:
        batch = []
        size = max(smallest, -(-_FIRST_OF_FEW // row_multiple) * row_multiple) if few else smallest
        while size < max_slots:
            batch.append(size)
            size *= 4 if few else 2
        batch.append(max(-(-max_slots // row_multiple) * row_multiple, smallest))
    else:
        batch = sorted({max(bucket, 2 if row_invariant else 1) for bucket in batch_buckets})
        for size in batch:
            check_slots(size, row_multiple)
        if batch[-1] < max_slots:
            raise ConfigError(
                f"engine.batch_buckets: the largest, {batch[-1]}, is below engine.max_slots = {max_slots}"
            )
        largest = _round_up(max_slots, tuple(batch), "slots")
        batch = [size for size in batch if size <= largest]  # the others would never be used
    if cache_buckets is None:
        cache = []
        size = 2 * KEY_BLOCK
        while size < max_length:
            cache.append(size)
            if few:
                size *= 2
            else:
                size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        cache.append(size)
        cache = sorted({_valid_cache_length(size) for size in cache})
    else:
        cache = sorted(set(cache_buckets))
        for size in cache:
            if size != _valid_cache_length(size):
                raise ConfigError(
                    f"engine.cache_buckets: no cache has {size} positions; lengths up to {KEY_CHUNK} are"
                    f" multiples of {KEY_BLOCK}, longer ones multiples of {KEY_CHUNK}: write"
                    f" {_valid_cache_length(size)} in its place"
                )
        if cache[-1] < max_length:
            raise ConfigError(
                f"engine.cache_buckets: the largest, {cache[-1]}, is below the longest sequence, "
                f"{max_length} (rollout.max_prompt_length + rollout.max_response_length)"
            )
    return Buckets(tuple(batch), tuple(cache), tuple(verify_buckets), max_drafts, prompts)


def _valid_cache_length(length: int) -> int:
    """Rounds a length up to whole key blocks and, if there are several key chunks, to whole chunks."""
    unit = KEY_BLOCK if length <= KEY_CHUNK else KEY_CHUNK
    return -(-length // unit) * unit
