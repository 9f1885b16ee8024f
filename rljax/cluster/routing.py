"""The router of a run, from its keys, and what routers go by."""

import pkgutil
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.cluster.messages import Key
from rljax.cluster.router import Balancing, Router, SharedQueue
from rljax.config.cluster import ClusterConfig
from rljax.config.speculation import SpeculationConfig
from rljax.config.wing import MECHANISMS
from rljax.requests import Completion, DecodeStatistics, Request


class Routing:
    """What a mechanism has to say in who decodes what. By default it has nothing to say, and learns nothing.

    Args:
      config: keys of the cluster.

    Attributes:
      parks: whether groups of responses may be left to the next step.
    """

    parks: bool = False

    def __init__(self, config: ClusterConfig) -> None:
        del config

    def queues(self, speculation: SpeculationConfig, slots: int) -> Router | None:
        """Returns what has the waiting requests, in the place of `SharedQueue`; None leaves them there.

        Args:
          speculation: keys of speculation.
          slots: responses that a worker decodes at a time.
        """
        del speculation, slots
        return None

    def around(self, router: Router, speculation: SpeculationConfig) -> Router:
        """Returns a router with what it adds, or as it is."""
        del speculation
        return router

    def trained(self, seconds: float) -> None:
        """Takes the time from the end of the last rollout to the beginning of the next one."""

    def learn(
        self,
        requests: Sequence[Request],
        completions: Sequence[Completion],
        by_worker: Mapping[str, tuple[DecodeStatistics, float]],
    ) -> None:
        """Takes the responses of a rollout, and what each worker counted, with the seconds it was busy."""

    def outliers(
        self,
        prompts: Sequence[tuple[int, ...]],
        running: Sequence[Mapping[Key, int]],
        sizes: Sequence[int],
        workers: int,
    ) -> list[int]:
        """Returns the places of a step's groups that may be left to the next step.

        Args:
          prompts: of each group, token ids.
          running: of each, the tokens so far of its responses that have not ended.
          sizes: responses of each.
          workers: number that there should be.
        """
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps: `ROUTING` begins their names."""
        return {}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes up what `state` returned, or nothing of it."""


def make_routings(config: ClusterConfig) -> list[Routing]:
    """Returns all that have a say in who decodes what; which of them have one is a matter of their keys."""
    return [pkgutil.resolve_name(each.routing)(config) for each in MECHANISMS.values() if each.routing]


def make_router(
    config: ClusterConfig, routings: Sequence[Routing], speculation: SpeculationConfig, slots: int
) -> Router:
    """Returns the router that the keys of a run ask for.

    Args:
      config: keys of the cluster.
      routings: from `make_routings`.
      speculation, slots: see `Routing.queues`.
    """
    made = (each.queues(speculation, slots) for each in routings)
    router = next((queues for queues in made if queues is not None), SharedQueue())
    if config.balance:
        router = Balancing(router, config.balance)
    for each in routings:
        router = each.around(router, speculation)
    return router
