"""Publishes versions of the weights in the background, and hands each worker what it needs of one.

publisher.publish(version, params)              # returns at once
publisher.failed(worker, version)               # its next delivery comes through the object store
weights = publisher.weights(worker, version)    # None while the version is not there yet
"""

import concurrent.futures
import dataclasses
import time

from rljax.cluster.messages import Weights
from rljax.cluster.weights import Published, WeightChannel, digest_of, parts_of
from rljax.models.host_params import Part
from rljax.models.transformer import Params


@dataclasses.dataclass
class _Version:
    parts: list[Part]
    published: Published
    fallback: Published | None = None


class Publisher:
    """See the module's docstring.

    Args:
      channel: the channel that workers fetch from.
      fallback: the one that comes in its place for a worker that could not.
      keep: number of versions that are kept.

    Attributes:
      seconds: time spent on publishing since it was last set to 0.
    """

    def __init__(self, channel: WeightChannel, fallback: WeightChannel, keep: int) -> None:
        self._channel, self._fallback, self._keep = channel, fallback, keep
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "publish")
        self._versions: dict[int, concurrent.futures.Future[_Version]] = {}
        self._failed: set[tuple[str, int]] = set()
        self.seconds = 0.0

    def publish(self, version: int, params: Params) -> None:
        """Begins to publish a version, unless it is there. The arrays must stay as they are until `wait`."""
        if version in self._versions:
            return
        self._versions[version] = self._thread.submit(self._publish, version, params)
        for old in [old for old in self._versions if old <= version - self._keep]:
            future = self._versions.pop(old)
            if future.done() and future.exception() is None:
                self._channel.remove(future.result().published)
        self._failed = {(worker, each) for worker, each in self._failed if each in self._versions}

    def _publish(self, version: int, params: Params) -> _Version:
        start = time.perf_counter()
        parts = parts_of(params)
        published = self._channel.publish(version, params, parts, digest_of(parts))
        self.seconds += time.perf_counter() - start
        return _Version(parts, published)

    def newest(self) -> int | None:
        """Returns the newest version, if workers may copy it to their hosts before they load it."""
        version = max(self._versions, default=None)
        if version is None or not (self._channel.early and self._versions[version].done()):
            return None
        return version

    def wait(self, version: int) -> None:
        """Waits until a version is published.

        Raises:
          ClusterError: it cannot be.
        """
        self._versions[version].result()

    def weights(self, worker: str, version: int) -> Weights | None:
        """Returns what a worker needs to fetch a version; None while it is being published, or once it is
        kept no longer.

        Raises:
          ClusterError: it cannot be published.
        """
        future = self._versions.get(version)
        if future is None or not future.done():
            return None
        known = future.result()
        if (worker, version) not in self._failed:
            return self._channel.deliver(known.published)
        if known.fallback is None:
            digest = known.published.digest
            known.fallback = self._fallback.publish(version, {}, known.parts, digest)
        return self._fallback.deliver(known.fallback)

    def failed(self, worker: str, version: int) -> None:
        """A worker could not fetch a version."""
        if version in self._versions:
            self._failed.add((worker, version))

    def close(self) -> None:
        """Ends the thread, and removes all versions."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._channel.close()
