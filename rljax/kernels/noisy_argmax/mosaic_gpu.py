"""For Hopper: a block of threads takes a stretch of one row's vocabulary, tile by tile, in one pass.

A tile's largest entry and its sum of exponentials are written out for themselves: a row's sum then has the
same order, and its log-probability the same bits, however many blocks share the row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rljax.kernels.noisy_argmax import race
from rljax.kernels.pallas import gpu_interpreter
from rljax.numerics.rows import Numerics
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import gumbel_of_words, position_keys, token_words

_THREADS = 128
_PIECE = 1024  # entries of which it is decided at once whether noise is made
_PIECES = 4  # of a tile, whose loads are under way together
_BLOCKS = 3 * 132  # wanted: as many as an H200 holds at 145 registers a thread


def noisy_argmax(
    logits: Array,
    keys: Array,
    positions: Array,
    sampling: SamplingParams,
    numerics: Numerics,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See the package's `noisy_argmax`."""
    batch, vocab_size = logits.shape
    least = race.threshold(logits, sampling, numerics)
    if vocab_size < _THREADS:
        logits = jnp.pad(logits, ((0, 0), (0, _THREADS - vocab_size)), constant_values=-jnp.inf)
    stretch = _Stretch.of(*logits.shape)
    # What interprets JAX 0.10's kernels knows no layouts.
    lay = _keep if interpret else functools.partial(plgpu.layout_cast, new_layout=stretch.layout)
    parts = jax.ShapeDtypeStruct((batch, stretch.splits), jnp.float32)
    tiles = jax.ShapeDtypeStruct((batch, stretch.tiles), jnp.float32)
    best, tokens, chosen, tops, sums = plgpu.kernel(
        functools.partial(_kernel, stretch=stretch, sampling=sampling, filtered=least is not None, lay=lay),
        out_type=[parts, parts.update(dtype=jnp.int32), parts, tiles, tiles],
        grid=(batch, stretch.splits),
        grid_names=("row", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=gpu_interpreter() if interpret else None,
    )(logits, *position_keys(keys, positions), jnp.zeros(batch) if least is None else least)
    tokens, logprobs = race.merge(best, tokens, chosen, tops, sums, vocab_size, numerics)
    return tokens, jnp.zeros_like(logprobs) if sampling.greedy else logprobs


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Division of a row into pieces, tiles and splits.

    Attributes:
      vocab_size: V.
      piece, pieces: entries a piece, pieces a tile.
      splits: blocks that share a row.
      tiles_each: whole tiles of each, but for the last, which also takes what is left of the vocabulary.
    """

    vocab_size: int
    piece: int
    pieces: int
    splits: int
    tiles_each: int

    @classmethod
    def of(cls, batch: int, vocab_size: int) -> "_Stretch":
        piece = _PIECE
        while piece > vocab_size:
            piece //= 2
        pieces = min(_PIECES, vocab_size // piece)
        whole = vocab_size // (piece * pieces)
        tiles_each = -(-whole // -(-_BLOCKS // batch))
        return cls(vocab_size, piece, pieces, -(-whole // tiles_each), tiles_each)

    @property
    def tile(self) -> int:
        return self.piece * self.pieces

    @property
    def whole(self) -> int:
        """Whole tiles of a row."""
        return self.vocab_size // self.tile

    @property
    def tiles(self) -> int:
        return -(-self.vocab_size // self.tile)

    @property
    def layout(self) -> Any:
        """Threads load 16 bytes each, where rows begin at a multiple of that."""
        wide = self.vocab_size % 4 == 0 and self.piece % (4 * _THREADS) == 0
        return plgpu.Layout.WG_STRIDED((self.piece,), vec_size=4 if wide else 1)


def _kernel(
    logits, key0, key1, least, best, tokens, chosen, tops, sums, *, stretch, sampling, filtered, lay
) -> None:
    row, split = lax.axis_index("row"), lax.axis_index("split")
    key0, key1, least = key0[row], key1[row], least[row]
    entries = lay(lax.iota(jnp.int32, stretch.piece))

    def tile(index, start, pieces, counted, found):
        """Takes `pieces` pieces from `start`, but for entries below `counted`, as tile `index`."""
        scaled = []
        for piece in range(pieces):
            first = start + piece * stretch.piece
            x = lay(logits[row, pl.ds(first, stretch.piece)])
            x = race.scaled(x, sampling)
            if filtered:
                x = jnp.where(x >= least, x, -jnp.inf)
            if counted is not None:
                x = jnp.where(entries + first >= counted, x, -jnp.inf)
            scaled.append((first, x))
        top = jnp.max(functools.reduce(jnp.maximum, [x for _, x in scaled]))
        away = race.finite_or_zero(top)
        total = jnp.zeros((stretch.piece,), jnp.float32)
        for first, x in scaled:
            if sampling.greedy:
                look = functools.partial(_better, noisy=x, x=x, entries=entries + first)
                found = lax.cond(top > found[0], look, _keep, found)
                continue
            exponentials = jnp.exp2((x - away) * race.LOG2_E)
            total += exponentials
            words = token_words((entries + first).astype(jnp.uint32), key0, key1)
            nearest = jnp.min(race.lead(words, exponentials, race.reach(away, found[0])))

            def look(found, first=first, x=x, words=words):
                return _better(found, x + gumbel_of_words(words, _log1p), x, entries + first)

            found = lax.cond(nearest > 0, _keep, look, found)
        tops[row, index] = top
        sums[row, index] = jnp.sum(total)
        return found

    def whole_tile(index, found):
        return tile(index, index * stretch.tile, stretch.pieces, None, found)

    def rest(found):
        left = stretch.vocab_size - stretch.whole * stretch.tile
        pieces = -(-left // stretch.piece)
        start = stretch.vocab_size - pieces * stretch.piece
        return tile(stretch.whole, start, pieces, stretch.whole * stretch.tile, found)

    found = (jnp.float32(-jnp.inf), jnp.int32(0), jnp.float32(-jnp.inf))
    begin = split * stretch.tiles_each
    end = jnp.minimum(begin + stretch.tiles_each, stretch.whole)
    found = lax.fori_loop(begin, end, whole_tile, found)
    if stretch.tiles > stretch.whole:
        found = lax.cond(split == stretch.splits - 1, rest, _keep, found)
    best[row, split], tokens[row, split], chosen[row, split] = found


def _keep(x: Any) -> Any:
    return x


def _better(found, noisy: Array, x: Array, entries: Array):
    """(largest noisy entry, the first to have it, its x) of what was found before and a piece behind it."""
    best = jnp.max(noisy)
    token = jnp.min(jnp.where(noisy == best, entries, jnp.iinfo(jnp.int32).max))
    chosen = jnp.max(jnp.where(entries == token, x, -jnp.inf))
    better = best > found[0]
    return tuple(jnp.where(better, new, old) for new, old in zip((best, token, chosen), found, strict=True))


def _log1p(x: Array) -> Array:
    """log(1 + x), as precise near 0 as elsewhere (W. Kahan's; Goldberg, "What Every Computer Scientist Should
    Know About Floating-Point Arithmetic", 1991, theorem 4). The compiler for the device has none.
    """
    above = 1.0 + x
    return jnp.where(above == 1.0, x, jnp.log(above) * (x / (above - 1.0)))
