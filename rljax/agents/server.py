"""The server that agents talk to, in a thread of the run."""

import os
import socket
import threading
import time

from rljax.config.agents import AgentsConfig
from rljax.errors import ConfigError, UserError

_START_SECONDS = 30.0


class AgentServer:
    """Listens as the config says. The port is bound here, and served from `start` on.

    Raises:
      ConfigError: the port is taken, the key is not set, or the packages of the server are missing.

    Attributes:
      address: where agents reach the server, such as http://127.0.0.1:8000.
      api_key: key that requests must bring; None for none.
    """

    def __init__(self, config: AgentsConfig) -> None:
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"agents: need {error.name}: pip install 'rljax[serve]'") from error
        self.api_key = None
        if config.api_key is not None:
            self.api_key = os.environ.get(config.api_key)
            if not self.api_key:
                raise ConfigError(f"agents.api_key: the environment variable {config.api_key} is not set")
        host = config.host
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, config.port))
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"agents.port: cannot listen on {host}:{config.port}: {error}") from error
        port = self._listener.getsockname()[1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._server = self._thread = None

    def start(self, app) -> None:
        """Serves an ASGI application, in a thread: signals stay the run's."""
        import uvicorn

        self._listener.listen(1024)
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="agents", daemon=True
        )
        self._thread.start()
        end = time.monotonic() + _START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        if not self._server.started:
            raise UserError(f"agents: the server at {self.address} did not start")

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(10)
        self._listener.close()
