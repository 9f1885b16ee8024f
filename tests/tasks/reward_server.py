"""A judge and a reward model behind HTTP, for tests."""

import contextlib
import http.server
import json
import threading
import time


class Server(http.server.BaseHTTPRequestHandler):
    """Judges by what the response says; keeps the requests."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(200, {"data": [{"id": "grand-judge"}]})

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, content, self.headers.get("Authorization")))
        said = content["messages"][-1]["content"]
        if "slow" in said:
            self.server.slow += 1
            self.server.most_slow = max(self.server.most_slow, self.server.slow)
            time.sleep(1.5)
            self.server.slow -= 1
        if "busy" in said and len(self.server.asked) < 3:
            return self.answer(503, {"error": "later"})
        if "refuse" in said:
            return self.answer(400, {"error": "too long"})
        if self.path == "/score":
            return self.answer(200, {"data": [{"data": [0.0, len(said) / 8]}]})
        reply = "nothing" if "silent" in said else "It says Score: 10.\nBut no.\n**Score:** 7"
        return self.answer(200, {"choices": [{"message": {"content": reply}}]})

    def answer(self, status, content):
        body = json.dumps(content).encode()
        with contextlib.suppress(OSError):  # nobody waits any more
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def reward_server():
    """Serves while the context lasts; `asked` has the requests, `url` is the address, `most_slow` the number
    of slow answers that were waited for at a time.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.asked, server.url = [], f"http://127.0.0.1:{server.server_port}"
        server.slow = server.most_slow = 0
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
