"""report.html in headless Chromium: nothing is missing, nothing sticks out, nothing is executed."""

import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse

import pytest

from rljax.reports import write_report
from rljax.reports.runs import read_runs
from tests.reports.test_page import HOSTILE, PANELS
from tests.synthetic_run import write_full_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian's package chromium)")

# Scripts must not run in the page itself, so a page around it looks at it, at a phone's width and a desk's.
HARNESS = """<!doctype html><body><script>
window.executed = [];
window.alert = what => window.executed.push(String(what));
function look(width) {
  return new Promise(done => {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px"; frame.style.height = "900px";
    frame.onload = () => {
      const page = frame.contentDocument, box = node => node.getBoundingClientRect();
      frame.contentWindow.alert = window.alert;
      for (const each of page.querySelectorAll("details")) each.open = true;
      const plots = [...page.querySelectorAll(".plot svg")];
      const cards = [...page.querySelectorAll(".card")].map(box);
      done({
        width: page.documentElement.clientWidth,
        scrollWidth: page.documentElement.scrollWidth,
        plots: plots.map(node => [node.getAttribute("aria-label"), box(node).width, box(node).height]),
        shapes: plots.map(node => [...node.querySelectorAll("path, use, image")]
          .filter(part => box(part).width + box(part).height > 0).length),
        outside: plots.flatMap(node => [...node.querySelectorAll("text")]
          .filter(text => box(text).right > box(node).right + 1 || box(text).left < box(node).left - 1)
          .map(text => text.textContent)),
        columns: new Set(cards.map(card => Math.round(card.left))).size,
        page: getComputedStyle(page.body).backgroundColor,
        ink: getComputedStyle(plots[0].querySelector("text")).fill,
        scripts: page.scripts.length, images: page.images.length,
        text: page.querySelector("#samples ~ details").textContent,
      });
    };
    frame.src = "report.html"; document.body.append(frame);
  });
}
(async () => {
  const found = {390: await look(390), 1400: await look(1400)};
  await new Promise(done => setTimeout(done, 200));
  found.executed = window.executed;
  const result = document.createElement("pre");
  result.id = "found"; result.textContent = encodeURIComponent(JSON.stringify(found));
  document.body.append(result);
})();
</script></body>"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A folder with the page, its address, and the paths that were asked for."""
    folder, asked = tmp_path_factory.mktemp("page"), []
    runs = [
        write_full_run(folder / "a run with a rather long name that has to fit", steps=6, response=HOSTILE),
        write_full_run(folder / ("x" * 120), steps=5, learning_rate=3e-4, mismatch=1e-3),
    ]
    write_report(read_runs(runs[:1]), folder / "report.html")
    write_report(read_runs(runs), folder / "several" / "report.html")
    for place in (folder, folder / "several"):
        (place / "harness.html").write_text(HARNESS)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, message, *args):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


def look(address, profile, *flags):
    """What the harness found, and what the browser's console said."""
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=10000"),
        *(*flags, "--dump-dom", address),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'id="found">([^<]*)<', done.stdout)
    assert found, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(urllib.parse.unquote(found.group(1))), console


def brightness(color):
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


@pytest.mark.parametrize("folder", ["", "several/"])
def test_the_page_on_a_phone_and_on_a_desk(server, tmp_path, folder):
    address, asked = server
    asked.clear()
    found, console = look(f"{address}/{folder}harness.html", tmp_path)
    assert console == []
    paths = {path for path in asked if "favicon" not in path}
    assert paths == {f"/{folder}harness.html", f"/{folder}report.html"}
    assert found["executed"] == []
    for width in ("390", "1400"):
        seen = found[width]
        assert seen["scrollWidth"] <= seen["width"] <= int(width), width
        if not folder:
            assert [label for label, _, _ in seen["plots"]] == PANELS
        for (label, wide, high), shapes in zip(seen["plots"], seen["shapes"], strict=True):
            assert wide > 250 and high > 120, label
            assert shapes > 5, label
        assert seen["outside"] == []
        assert seen["scripts"] == 0 and seen["images"] == 0
        assert brightness(seen["page"]) >= 60 and brightness(seen["ink"]) <= 200
    assert found["390"]["columns"] == 1 and found["1400"]["columns"] >= 3
    if not folder:
        assert HOSTILE in found["390"]["text"]


def test_colours_are_dark_where_the_reader_wants_it(server, tmp_path):
    found, _ = look(f"{server[0]}/harness.html", tmp_path, "--blink-settings=preferredColorScheme=0")
    assert brightness(found["1400"]["page"]) < 60 and brightness(found["1400"]["ink"]) > 200
