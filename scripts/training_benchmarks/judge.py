"""Seconds that a judge behind an endpoint takes for a step's responses, here a stand-in that only waits."""

import concurrent.futures
import contextlib
import http.server
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljax.benchmarking import Row, counted_row
from rljax.config import RewardConfig, TaskConfig
from rljax.tasks.base import Problem
from rljax.tasks.chain_arithmetic import ChainArithmetic
from rljax.tasks.rewards.combined import RewardedTask

SECONDS = 0.1
"""What the stand-in takes for an answer."""


class _Judge(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "judge"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(SECONDS)
        self._answer({"choices": [{"message": {"content": "Score: 7"}}]})

    def _answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def _judge() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def judge_rows(responses: int) -> list[Row]:
    """Judges so many responses with 1 and with 16 requests at a time, and again from the cache."""
    rows = []
    with _judge() as url, tempfile.TemporaryDirectory() as directory:
        alone = _seconds(url, responses, 1, Path(directory) / "alone")
        for name in ("16 at a time", "from the cache"):
            seconds = _seconds(url, responses, 16, Path(directory) / "scores")
            row, baseline = f"judge/{responses} responses/{name}", f"one at a time, {SECONDS:g} s each"
            rows.append(counted_row(row, seconds, alone, "s", baseline, less=True))
    return rows


def _seconds(url: str, responses: int, parallel: int, cache: Path) -> float:
    arguments = {"url": url, "model": "judge", "parallel": parallel, "cache": str(cache)}
    config = TaskConfig(name="chain_arithmetic", rewards=[RewardConfig(name="judge", args=arguments)])
    problem = Problem("train/0", ({"role": "user", "content": "1+1=?"},), "2", 0)
    with contextlib.closing(RewardedTask(ChainArithmetic(seed=0), config, print)) as task:
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(parallel) as threads:
            scores = list(threads.map(lambda i: task.reward(problem, f"{i}"), range(responses)))
        seconds = time.perf_counter() - start
    assert all(score["judge"] == 0.7 for score in scores)
    return seconds
