"""The section of rollout workers: the keys of all mechanisms; see docs/cluster.md."""

from typing import TYPE_CHECKING

from pydantic import create_model

from rljax.config.cluster_keys import ClusterKeys
from rljax.config.wing import MECHANISMS

if TYPE_CHECKING:
    _Keys = ClusterKeys
else:
    # Of several bases, pydantic takes the keys of the last one first.
    _of_papers = (each.keys for each in reversed(MECHANISMS.values()) if each.keys is not ClusterKeys)
    _Keys = create_model("_Keys", __base__=(*_of_papers, ClusterKeys))


class ClusterConfig(_Keys):
    """Rollout workers on Ray; tokens, rewards and weights are those of a run without, bit for bit."""
