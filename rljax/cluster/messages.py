"""What coordinator, driver and workers say to each other. No Ray, no JAX.

    event    what has happened, for the coordinator: from a worker, from the fabric, or from the driver
    command  what the coordinator wants done: by a worker, by the fabric, or by the driver

Events and commands may be lost, late, doubled and out of order, except between coordinator and driver, which
are one process. So each says a state rather than a change of one: a `Piece` has the position where it begins,
a `Status` has the version of the weights that are loaded. `worker` is the name of a worker.
"""

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from rljax.provenance import source_digest
from rljax.requests import DecodeStatistics, PartialResponse, Request

Key = int
"""A request; keys are never used again within a session."""

ALL_DRAFTERS = ""
"""In the place of a drafter's name: a worker chooses among all that it has, as in the beginning."""

Sample = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and response ids, to train drafters on."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What must be equal in driver and workers, and where a worker is; the default is this process.

    Attributes:
      code: digest of the source of `rljax` and `drafters`.
      jax: version of JAX.
      host: name of the machine.
      pid: process id there.
    """

    code: str = dataclasses.field(default_factory=lambda: source_digest()[:8])
    jax: str = dataclasses.field(default_factory=lambda: metadata.version("jax"))
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a response.

    Attributes:
      key: the request.
      version: version of the weights that sampled them.
      begin: position of the first one in the response.
      tokens: token ids.
      logprobs: one per token, the values of float32 numbers.
      ending: reason of the response's end after these tokens; None if it goes on.
      drafted, accepted: draft nodes verified for the response on this worker so far, and tokens from them.
      answers: (begin, end) in the response of every tool's answer among the tokens, each of which is whole.
      order: number of the `Decode` by which the worker decodes it.
    """

    key: Key
    version: int
    begin: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ending: str | None = None
    drafted: int = 0
    accepted: int = 0
    answers: tuple[tuple[int, int], ...] = ()
    order: int = 0


# -- events ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A worker's process runs, and has built nothing yet."""

    worker: str
    facts: Facts


@dataclasses.dataclass(frozen=True)
class Heard:
    """A worker's process has answered. Every other event of a worker says the same."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Status:
    """A worker has its engine.

    Attributes:
      fingerprint: of its numerics (`Invariance.fingerprint`).
      slots: responses that it decodes at a time.
      version: version of the weights that it has loaded; None before the first.
      fetch_seconds: that fetching and loading them took.
      prefetched: whether it began to copy them to its host while it decoded with older ones.
    """

    worker: str
    fingerprint: str | None
    slots: int
    version: int | None
    fetch_seconds: float = 0.0
    prefetched: bool = False


@dataclasses.dataclass(frozen=True)
class Pieces:
    """New tokens from a worker, with its counts of decoding in the rollout so far; `cpu_seconds` are those
    that all cores together worked for it while it was busy.
    """

    worker: str
    rollout: int
    pieces: tuple[Piece, ...]
    statistics: DecodeStatistics | None = None
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class UnknownRequests:
    """A worker does not know requests that it was asked for: the command was lost."""

    worker: str
    rollout: int
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class FetchFailed:
    """A worker could not fetch the weights, or their digest was another one."""

    worker: str
    version: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """A worker met an error that is the user's to mend: it would come back anywhere.

    Attributes:
      kind: name of the class in `rljax.errors`.
      message: the line for the user.
    """

    worker: str
    kind: str
    message: str


@dataclasses.dataclass(frozen=True)
class Died:
    """A worker's process has ended."""

    worker: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Begin:
    """The driver begins a rollout, or adds requests to one that is `renewed`. Others may be in progress.

    Attributes:
      rollout: its number, ascending.
      version: version of the weights that its tokens are sampled with.
      requests: by key, those of one prompt together, in the order in which they should begin.
      renewed: whether its responses go on under newer weights once there are some (`Renew`).
      partials: what is known of some responses already, by key.
    """

    rollout: int
    version: int
    requests: Mapping[Key, Request]
    renewed: bool = False
    partials: Mapping[Key, PartialResponse] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class End:
    """The driver has taken responses of a rollout that have ended, or gives some up that have not: they are
    forgotten.
    """

    rollout: int
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Renew:
    """There are newer weights: responses of rollouts that are `renewed` go on under them."""

    version: int


@dataclasses.dataclass(frozen=True)
class DesiredWorkers:
    """Another number of workers is to be kept running from now on."""

    workers: int


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclasses.dataclass(frozen=True)
class IdleEvent:
    """What a worker says of its work in idle time, which has events of its own (`idle_work.py`)."""

    worker: str


Event = (
    Arrived
    | Heard
    | Status
    | Pieces
    | UnknownRequests
    | FetchFailed
    | Failed
    | Died
    | Begin
    | End
    | Renew
    | DesiredWorkers
    | Tick
    | IdleEvent
)

# -- commands ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spawn:
    """Start a process for a new worker."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the process of a worker, if it still runs."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Build:
    """Build the engine on a worker, and compile.

    Attributes:
      blueprint: reference to the `Blueprint`, which the driver adds.
    """

    worker: str
    blueprint: Any = None


@dataclasses.dataclass(frozen=True)
class Weights:
    """A version of the weights, published once.

    Attributes:
      version: its number.
      digest: of names, shapes, types and bytes.
      where: where they are, for the channel that published them (`rljax/cluster/weights`).
      nbytes: size.
    """

    version: int
    digest: str
    where: Any
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Load:
    """Fetch weights on a worker. The driver adds where they are, and what drafters get with them.

    Attributes:
      version: the version to load.
      carry: whether its responses go on under that version; False forgets them.
      weights: the weights.
      state: reference to the arrays that drafters begin with (`Speculator.state`); None if they go on.
      outcomes: references to lists of `Outcome` that they learn then, in this order.
      drafters: reference to the newest weights of drafters that the driver trains (`Speculator.weights`);
        None where it trains none.
    """

    worker: str
    version: int
    carry: bool = False
    weights: Weights | None = None
    state: Any = None
    outcomes: Sequence[Any] = ()
    drafters: Any = None


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Copy weights that come next to the host, while older ones decode. One that comes late or never costs
    time alone.
    """

    worker: str
    weights: Weights


@dataclasses.dataclass(frozen=True)
class Decode:
    """Decode requests on a worker. One that it decodes already is left as it is, unless this has more of it.

    Attributes:
      rollout, version: of all these requests.
      work: (key, request, the response so far) of each.
      more: whether others may follow in this rollout: while they may, the worker keeps its slots.
      drafter: name of the one to draft with from now on; `ALL_DRAFTERS` for all again; None changes nothing.
      number: of this order, ascending; pieces say by which one they came about.
    """

    worker: str
    rollout: int
    version: int
    work: tuple[tuple[Key, Request, PartialResponse], ...]
    more: bool
    drafter: str | None = None
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Withdraw:
    """Decode these requests no longer: they have ended, or go on elsewhere. One that comes late or never
    costs time alone.
    """

    worker: str
    rollout: int
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Ask:
    """Send again what a worker has of these requests, from a position on.

    Attributes:
      rollout: of the requests.
      positions: (key, position) of each.
      more: see `Decode`.
      orders: numbers of the orders by which they are decoded, where it matters: what the worker has by an
        earlier order is missing.
    """

    worker: str
    rollout: int
    positions: tuple[tuple[Key, int], ...]
    more: bool
    orders: Mapping[Key, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class IdleOrder:
    """What a worker without requests should do; its work in idle time has orders of its own."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Fail:
    """End the run with this error, a class of `rljax.errors`."""

    kind: str
    message: str


@dataclasses.dataclass(frozen=True)
class Say:
    """Show a line to the user."""

    message: str


Order = Build | Load | Prefetch | Decode | Withdraw | Ask | IdleOrder
"""What a worker receives."""

Command = Spawn | Stop | Order | Fail | Say
