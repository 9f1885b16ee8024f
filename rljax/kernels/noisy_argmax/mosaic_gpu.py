"""For Hopper: a block of threads takes a stretch of one row's vocabulary, tile by tile, in one pass.

The largest entry and the sum of exponentials of every tile are written separately, so that a row's sum has
the same order, and its log-probability the same bits, for any number of blocks that share the row.
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
_PIECE = 1024  # entries that share the decision whether to compute their noise
_PIECES = 4  # pieces in a tile, which are loaded together
_BLOCKS = 3 * 132  # target: an H200 holds as many at 145 registers a thread


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
    # The interpreter of JAX 0.10 has no layouts.
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
      piece, pieces: entries per piece, pieces per tile.
      splits: number of blocks that share a row.
      tiles_each: whole tiles per block; the last block has those that are left, and the rest of the
        vocabulary.
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
        """Number of whole tiles in a row."""
        return self.vocab_size // self.tile

    @property
    def tiles(self) -> int:
        return -(-self.vocab_size // self.tile)

    @property
    def layout(self) -> Any:
        """Layout of a piece. A thread loads 16 bytes at a time if rows begin at multiples of 16 bytes."""
        wide = self.vocab_size % 4 == 0 and self.piece % (4 * _THREADS) == 0
        return plgpu.Layout.WG_STRIDED((self.piece,), vec_size=4 if wide else 1)


def _kernel(
    logits, key0, key1, least, best, tokens, chosen, tops, sums, *, stretch, sampling, filtered, lay
) -> None:
    row, split = lax.axis_index("row"), lax.axis_index("split")
    key0, key1, least = key0[row], key1[row], least[row]
    entries = lay(lax.iota(jnp.int32, stretch.piece))

    def tile(index, start, pieces, counted, leader):
        """Processes `pieces` pieces from `start` as tile `index`, without the entries below `counted`."""
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
                update = functools.partial(_better, noisy=x, x=x, entries=entries + first)
                leader = lax.cond(top > leader[0], update, _keep, leader)
                continue
            exponentials = jnp.exp2((x - away) * race.LOG2_E)
            total += exponentials
            words = token_words((entries + first).astype(jnp.uint32), key0, key1)
            nearest = jnp.min(race.lead(words, exponentials, race.reach(away, leader[0])))

            def update(leader, first=first, x=x, words=words):
                return _better(leader, x + gumbel_of_words(words, _log1p), x, entries + first)

            leader = lax.cond(nearest > 0, _keep, update, leader)
        tops[row, index] = top
        sums[row, index] = jnp.sum(total)
        return leader

    def whole_tile(index, leader):
        return tile(index, index * stretch.tile, stretch.pieces, None, leader)

    def rest(leader):
        left = stretch.vocab_size - stretch.whole * stretch.tile
        pieces = -(-left // stretch.piece)
        start = stretch.vocab_size - pieces * stretch.piece
        return tile(stretch.whole, start, pieces, stretch.whole * stretch.tile, leader)

    leader = (jnp.float32(-jnp.inf), jnp.int32(0), jnp.float32(-jnp.inf))
    begin = split * stretch.tiles_each
    end = jnp.minimum(begin + stretch.tiles_each, stretch.whole)
    leader = lax.fori_loop(begin, end, whole_tile, leader)
    if stretch.tiles > stretch.whole:
        leader = lax.cond(split == stretch.splits - 1, rest, _keep, leader)
    best[row, split], tokens[row, split], chosen[row, split] = leader


def _keep(x: Any) -> Any:
    return x


def _better(leader, noisy: Array, x: Array, entries: Array):
    """Updates the leader (largest noisy entry, its first index, its x) with a piece of later entries."""
    best = jnp.max(noisy)
    token = jnp.min(jnp.where(noisy == best, entries, jnp.iinfo(jnp.int32).max))
    chosen = jnp.max(jnp.where(entries == token, x, -jnp.inf))
    better = best > leader[0]
    return tuple(jnp.where(better, new, old) for new, old in zip((best, token, chosen), leader, strict=True))


def _log1p(x: Array) -> Array:
    """log(1 + x) for x in (-1, 0], as precise near 0 as elsewhere; the compiler for the device lacks log1p.

    Near 0 it is 2 artanh(x / (2 + x)) (Abramowitz and Stegun, 4.1.27). Kahan's formula divides by
    (1 + x) - 1, of which XLA on a CPU leaves x.
    """
    s = x / (2.0 + x)
    t = s * s
    series = 2.0 * s * (1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9)))))
    return jnp.where(x > -0.25, series, jnp.log(1.0 + x))
