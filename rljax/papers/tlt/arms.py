"""The arms that a bandit has at each batch size (TLT, section 5.1 and lines 1 to 4 of Algorithm 1).

TLT groups strategies by the number of tokens that they verify, and maps the groups to batch sizes: the larger
the batch, the fewer tokens. `arms_by_threshold` does that, with the plain step as a further arm.
`arms_by_batch` lays each drafter's groups along the engine's batch buckets, with their neighbours, as far as
passes have room for them.
"""

import collections
import itertools
from collections.abc import Sequence

from rljax.engine.buckets import Buckets
from rljax.errors import ConfigError
from rljax.speculation.proposals import Proposer
from rljax.speculation.strategies import MIXED, Arm, Strategy

_CHAIN_LENGTHS = (2, 4, 8)  # of a drafter that drafts chains
_NODES = (3, 7, 15, 31)  # of one on the host


def default_strategies(proposers: Sequence[Proposer], room: int, mix: bool) -> list[Strategy]:
    """A few sizes of every drafter, with up to `room` draft nodes of a slot.

    Args:
      proposers: the drafters.
      room: draft nodes of a slot at most.
      mix: also mix the first drafter on the host with each one on the device: these fail in different places.
    """
    sizes = {proposer.name: _sizes(proposer, room) for proposer in proposers}
    host = next((proposer for proposer in proposers if proposer.on_host), None)
    for proposer in proposers if mix and host is not None else ():
        if not proposer.on_host:
            shapes = {(depth, top_k, room) for depth, top_k, _ in sizes[proposer.name]}
            sizes[f"{host.name}{MIXED}{proposer.name}"] = shapes
    return [Strategy(*size, name) for name, known in sizes.items() for size in sorted(known)]


def _sizes(proposer: Proposer, room: int) -> set[tuple[int, int, int]]:
    """Depth, top_k and nodes of some strategies of a drafter."""
    if proposer.only_chains:
        return {(length, 1, length) for length in (min(each, room) for each in _CHAIN_LENGTHS)}
    if proposer.trees:
        most = [(tree.depth, tree.top_k, min(tree.nodes, room)) for tree in proposer.trees]
        return {(*shape, nodes) for *shape, largest in most for nodes in (largest, max(largest // 2, 1))}
    return {(nodes, nodes, nodes) for nodes in (min(each, room) for each in _NODES)}  # trees of any shape


def group_by_nodes(strategies: Sequence[Strategy]) -> list[tuple[Strategy, ...]]:
    """Strategies grouped by the nodes that they verify, the most nodes first."""
    groups = collections.defaultdict(list)
    for strategy in strategies:
        groups[strategy.nodes].append(strategy)
    return [tuple(groups[nodes]) for nodes in sorted(groups, reverse=True)]


def room_per_slot(buckets: Buckets, batch: int) -> int:
    """Draft nodes that one pass can verify of every slot of a batch; 0 where there is no such pass."""
    rows = max((rows for rows, _ in buckets.passes(batch)), default=0)
    return max(min(rows // batch - 1, buckets.max_drafts), 0)


def arms_by_batch(
    strategies: Sequence[Strategy], buckets: Buckets, max_batch: int, neighbours: int = 1
) -> dict[int, tuple[Arm, ...]]:
    """The arms of every batch bucket: the plain step, then strategies in the order given.

    A drafter's m groups, those with the most nodes first, are laid along the n batch buckets that verify: the
    j-th bucket has the groups between j/n and (j + 1)/n of the way, so group j where n = m, as in Algorithm
    1, and `neighbours` groups on either side. Groups with more nodes than a pass over the batch has room for
    are left out, except the smallest group, whose pass goes to the likeliest nodes. So neither the most nor
    the fewest nodes of a bucket increase with its size, and every strategy is an arm somewhere. Batches above
    `max_batch`, and those that no pass verifies, only have the plain step.

    Args:
      strategies: the configured ones.
      buckets: the engine's.
      max_batch: `speculation.max_batch`.
      neighbours: further groups on either side; 0 is the paper's mapping.

    Raises:
      ConfigError: a strategy with more nodes than any pass has room for.
    """
    batches = buckets.verified_batches(max_batch)
    rooms = [room_per_slot(buckets, batch) for batch in batches]
    arms: dict[int, set[Strategy]] = {batch: set() for batch in buckets.batch}
    for drafter in {strategy.drafter for strategy in strategies}:
        groups = group_by_nodes([strategy for strategy in strategies if strategy.drafter == drafter])
        if batches and groups[0][0].nodes > rooms[0]:
            raise ConfigError(
                f"speculation.strategies: {groups[0][0]} has more nodes than the {rooms[0]} that a pass over"
                f" a batch of {batches[0]} has room for; lower nodes, or raise speculation.verify_buckets"
            )
        spans = _spans(rooms, [group[0].nodes for group in groups], neighbours)
        for batch, (first, last) in zip(batches, spans, strict=True):
            arms[batch].update(itertools.chain.from_iterable(groups[first : last + 1]))
    return {batch: (None, *(s for s in strategies if s in chosen)) for batch, chosen in arms.items()}


_THRESHOLDS = "speculation.batch_thresholds"


def arms_by_threshold(
    strategies: Sequence[Strategy], thresholds: Sequence[int], buckets: Buckets, max_batch: int
) -> dict[int, tuple[Arm, ...]]:
    """The arms of ranges of running responses, by the largest number in each range.

    Lines 2 to 4 of TLT's Algorithm 1: the group with the i-th most nodes, whatever its drafters, has the
    range from thresholds[i] up to the next threshold. Below the first threshold there is only the plain step,
    which is an arm everywhere.

    Args:
      strategies: the configured ones.
      thresholds: numbers of running responses, ascending, the last at most `max_batch`.
      buckets: the engine's.
      max_batch: `speculation.max_batch`.

    Raises:
      ConfigError: not as many thresholds as groups, or a group that no pass over a batch of its range has
        room for.
    """
    groups = group_by_nodes(strategies)
    if len(groups) != len(thresholds):
        sizes = ", ".join(str(group[0].nodes) for group in groups)
        raise ConfigError(
            f"{_THRESHOLDS}: {len(thresholds)} for {len(groups)} groups of speculation.strategies, which"
            f" verify {sizes} nodes; give one for each group"
        )
    largest = max(buckets.batch[-1], thresholds[-1])
    arms: dict[int, tuple[Arm, ...]] = {} if thresholds[0] == 1 else {thresholds[0] - 1: (None,)}
    for group, first, next_first in zip(groups, thresholds, [*thresholds[1:], largest + 1], strict=True):
        _check_room(group[0].nodes, first, min(next_first - 1, max_batch), buckets, max_batch)
        arms[next_first - 1] = (None, *(strategy for strategy in strategies if strategy in group))
    return arms


def _check_room(nodes: int, first: int, last: int, buckets: Buckets, max_batch: int) -> None:
    """Raises a ConfigError unless passes have room for `nodes` of each of `first` to `last` responses."""
    for smaller, batch in itertools.pairwise((0, *buckets.batch)):
        if batch > max_batch or batch < first or smaller >= last:
            continue
        responses = min(batch, last)
        rows, width = max(buckets.passes(batch), default=(0, 0))
        if rows < responses * (nodes + 1) or width < nodes:
            raise ConfigError(
                f"{_THRESHOLDS}: {nodes} nodes of each of {responses} responses need a pass over"
                f" {responses * (nodes + 1)} tokens, and the largest over a batch of {batch} has {rows};"
                " lower nodes, or raise speculation.verify_buckets"
            )


def _spans(rooms: Sequence[int], sizes: Sequence[int], neighbours: int) -> list[tuple[int, int]]:
    """The first and the last group of every batch.

    Args:
      rooms: draft nodes that a pass has room for of each slot, by batch.
      sizes: nodes of the groups, descending.
      neighbours: further groups on either side.
    """
    batches, groups = len(rooms), len(sizes)
    spans = []
    for j, room in enumerate(rooms):
        fitting = next((i for i, size in enumerate(sizes) if size <= room), groups - 1)
        first = max(j * groups // batches - neighbours, fitting, 0)
        behind = -(-(j + 1) * groups // batches) + neighbours
        spans.append((first, min(max(behind - 1, fitting), groups - 1)))
    # A group that fits a batch stays there, even if the next batch has no room for it.
    for j in range(batches - 1):
        first, last = spans[j]
        spans[j] = first, max(last, spans[j + 1][0] - 1)
    return spans
