"""report.html: everything is on it, it needs nothing else, and text stays text; in headless Chromium nothing
sticks out, and nothing is executed.
"""

import dataclasses
import html
import html.parser
import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse

import numpy as np
import pytest

from rljax.reports import page, write_report_of_run
from rljax.reports.figures import COLORS, new_figure
from rljax.reports.learning import draw_mismatch, draw_rewards
from rljax.reports.rollouts import draw_histogram, draw_lengths
from rljax.reports.runs import Series, colors_of, differing_keys, read_run, read_runs, series_of, t_interval
from rljax.run_directory import RunDirectory
from tests.synthetic_run import write_full_run

NAME, LONG_NAME = "$a_b$ <i>run with a rather long name that has to fit", "fast$er$" + 112 * "x"
HOSTILE = '</pre><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} & "quotes"'
_PANELS = """Reward, Held-out reward, Entropy, Gradient norm, Mismatch, Response lengths,
Response lengths by step, Running requests, Where a step's time goes, Rollout speed, Accept length,
Strategy within a rollout, Strategy by step, Accept length by drafter, Accept length by position,
Predicted and measured gain"""
PANELS = _PANELS.replace("\n", " ").split(", ")


class Elements(html.parser.HTMLParser):
    """All start tags with their attributes, and all text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return write_full_run(tmp_path_factory.mktemp("one") / NAME, steps=7, response=HOSTILE)


@pytest.fixture(scope="module")
def one_page(one):
    """As at the end of a run."""
    said = []
    write_report_of_run(one, said.append)
    assert said == [f"report: {one / 'report.html'}"]
    return (one / "report.html").read_text(encoding="utf-8")


def test_every_panel_is_there(one_page):
    labels = [attrs["aria-label"] for tag, attrs in Elements(one_page).tags if "aria-label" in attrs]
    assert labels == PANELS


def test_the_page_needs_nothing_and_runs_nothing(one_page):
    elements = Elements(one_page)
    assert "default-src 'none'" in one_page
    assert not {"script", "link", "iframe", "object", "img"} & {tag for tag, _ in elements.tags}
    for tag, attrs in elements.tags:
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, attrs)
    assert not re.search(r"url\((?!#)|@import", one_page)


def test_at_the_end_of_a_run_nothing_can_fail(one, one_page, monkeypatch):
    said = []
    monkeypatch.setattr(page, "report_html", lambda runs: 1 / 0)
    write_report_of_run(one, said.append)
    assert said == ["no report: division by zero"]


def test_figures_take_their_colours_from_the_page(one_page):
    figures = "".join(re.findall(r"<svg role.*?</svg>", one_page, re.DOTALL))
    for color in COLORS[:3]:
        assert color not in figures
    assert "var(--s0)" in figures and "var(--ink)" in figures and "#000000" not in figures
    assert "--s0: #0072b2" in one_page and "prefers-color-scheme: dark" in one_page


def test_unusual_values_are_shown_and_tick_labels_are_whole(tmp_path):
    """A token that a filter excludes in the training pass is infinitely far off; in the order of arrival a
    step's groups may all have ended before it. Coordinates are rounded, what is to be read is not.
    """
    run = read_run(write_full_run(tmp_path / "run", steps=3, drafts=False, mismatch=0.1))
    for line in run.steps:
        line["gradient_norm"] = 0.001 + 1e-3 * line["step"] / 8
    run.steps[1]["mismatch/logprob_abs_max"] = float("inf")
    for line in run.rollouts:
        line["running"] = [[], []]
    text = page.report_html([run])
    assert ">inf<" in text and 'aria-label="Running requests"' in text
    figure = re.search(r'aria-label="Gradient norm".*?</svg>', text, re.DOTALL).group()
    labels = [label for label in re.findall(r">([\d.]+)</text>", figure) if "." in label]
    assert len({len(label) for label in labels}) == 1 and len(set(labels)) == len(labels) > 2
    assert any(len(label) > 4 for label in labels)
    assert not re.search(r'(?: d| x|points)="[^"]*\d\.\d{3}', figure)


def test_samples_sessions_and_config_are_there_as_text(one_page):
    text = Elements(one_page).text
    assert HOSTILE in text and f"<title>{html.escape(NAME)}</title>" in one_page
    assert "<|im_start|>user\n47a5b8c9=<|im_end|>" in text
    assert "<mark>" in one_page and re.search(r"<mark>[^<]{6}</mark>", one_page)
    assert "hidden_size: 192" in text and "0123456789ab" in text and "cpu: A processor" in text
    assert re.search(r"worst.*reward 0\.0 · 11 tokens, eos", text)


def test_long_runs_stay_small(tmp_path):
    """The size of a page does not grow with the steps: curves, bars, heat map and samples are thinned."""
    run, sizes = read_run(write_full_run(tmp_path / "run", steps=100, drafts=False)), []
    for times in (3, 12):
        steps, rollouts = (
            [line | {"step": 100 * i + line["step"]} for i in range(times) for line in lines]
            for lines in (run.steps, run.rollouts)
        )
        sizes.append(len(page.report_html([dataclasses.replace(run, steps=steps, rollouts=rollouts)])))
    assert sizes[1] < 1.25 * sizes[0] and sizes[1] < 500_000


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    base = tmp_path_factory.mktemp("several")
    seeds = [write_full_run(base / f"chains-seed{s}", steps=6, seed=s, drafts=False) for s in range(3)]
    fast = write_full_run(base / LONG_NAME, steps=5, learning_rate=3e-4, mismatch=1e-3)
    return read_runs([*seeds[:2], fast, seeds[2]])


@pytest.fixture(scope="module")
def page_of_several(several):
    return page.report_html(several)


def test_seeds_are_one_series_and_runs_of_the_same_name_are_told_apart(several, tmp_path):
    first, other = series_of(several)
    assert first.name == "chains-seed (3 seeds)" and other.name == LONG_NAME
    assert [run.name for run in first.runs] == ["chains-seed0", "chains-seed1", "chains-seed2"]
    colors = colors_of(several)
    assert [colors[run.name] for run in several] == [COLORS[0], COLORS[0], COLORS[1], COLORS[0]]
    assert differing_keys(several)["optimizer.learning_rate"] == [1e-4, 1e-4, 3e-4, 1e-4]
    same = read_runs([write_full_run(tmp_path / side / "run", steps=1) for side in ("a", "b")])
    assert [run.name for run in same] == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_several_runs_are_on_one_page(page_of_several):
    labels = [attrs["aria-label"] for _, attrs in Elements(page_of_several).tags if "aria-label" in attrs]
    assert labels.count("Reward") == 1
    assert "Response lengths by step: chains-seed0" in labels and "Running requests" in labels
    reward = re.search(r'aria-label="Reward".*?</svg>', page_of_several, re.DOTALL).group()
    assert "chains-seed (3 seeds)</text>" in reward and ">fast$er$xxxxxxxxxxxxx...xxxx" in reward
    assert len(labels) == len(set(labels))


def test_the_interval_over_seeds_is_students():
    for seeds, quantile in ((3, 4.303), (11, 2.228), (12, 2.201), (31, 2.042), (121, 1.980)):
        values = np.stack([np.arange(float(seeds)), np.zeros(seeds)], axis=1)
        mean, half = t_interval(values)
        np.testing.assert_array_equal(mean, [(seeds - 1) / 2, 0.0])
        np.testing.assert_allclose(half, quantile * values.std(axis=0, ddof=1) / np.sqrt(seeds), rtol=2e-3)


def test_a_run_that_lacks_almost_everything(tmp_path):
    """One step, of an older version, with a metric that is no number."""
    RunDirectory(tmp_path / "old").append_metrics({"step": 1, "reward/mean": 0.5, "x": float("nan")})
    text = page.report_html([read_run(tmp_path / "old")])
    assert 'aria-label="Reward"' in text and "config.yaml is missing" in text and "None were kept" in text


def test_a_run_of_one_step_has_a_dot_in_every_panel(tmp_path):
    """A line through a single point is nothing at all."""
    run = read_run(write_full_run(tmp_path / "run", steps=1, drafts=False, mismatch=0.1))
    for draw in (
        lambda axes: draw_lengths(axes, [run]),
        lambda axes: draw_mismatch(axes, series_of([run])),
        lambda axes: draw_rewards(axes, [Series("both", [run, run])]),
    ):
        axes = new_figure(4, 3).subplots()
        draw(axes)
        assert axes.lines and all(line.get_marker() == "o" for line in axes.lines)


def test_lengths_of_other_bins_have_their_places(tmp_path):
    """After rollout.max_response_length was doubled: two bins of 6 tokens are one of 12."""
    run = read_run(write_full_run(tmp_path / "run", steps=2, drafts=False))
    lengths = {"bin": 6, "counts": [0, 4, 0, 2]}, {"bin": 12, "counts": [4, 2]}
    rollouts = [line | {"lengths": each} for line, each in zip(run.rollouts, lengths, strict=True)]
    axes = new_figure(4, 3).subplots()
    draw_histogram(axes, dataclasses.replace(run, rollouts=rollouts))
    shares = axes.images[0].get_array()[..., 3]
    assert shares.shape == (2, 2) and axes.images[0].get_extent()[3] == 24
    np.testing.assert_array_equal(shares[:, 0], shares[:, 1])


# --- in a browser ----------------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian's package chromium)")

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
def server(one_page, page_of_several, tmp_path_factory):
    """The address of the pages, and the paths that were asked for."""
    folder, asked = tmp_path_factory.mktemp("pages"), []
    for place, text in (("one", one_page), ("several", page_of_several)):
        (folder / place).mkdir()
        (folder / place / "report.html").write_text(text, encoding="utf-8")
        (folder / place / "harness.html").write_text(HARNESS)

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


@needs_browser
@pytest.mark.parametrize("folder", ["one", "several"])
def test_the_page_on_a_phone_and_on_a_desk(server, tmp_path, folder):
    address, asked = server
    asked.clear()
    found, console = look(f"{address}/{folder}/harness.html", tmp_path)
    assert console == []
    paths = {path for path in asked if "favicon" not in path}
    assert paths == {f"/{folder}/harness.html", f"/{folder}/report.html"}
    assert found["executed"] == []
    for width in ("390", "1400"):
        seen = found[width]
        assert seen["scrollWidth"] <= seen["width"] <= int(width), width
        if folder == "one":
            assert [label for label, _, _ in seen["plots"]] == PANELS
        for (label, wide, high), shapes in zip(seen["plots"], seen["shapes"], strict=True):
            assert wide > 250 and high > 120, label
            assert shapes > 5, label
        assert seen["outside"] == []
        assert seen["scripts"] == 0 and seen["images"] == 0
        assert brightness(seen["page"]) >= 60 and brightness(seen["ink"]) <= 200
    assert found["390"]["columns"] == 1 and found["1400"]["columns"] >= 3
    if folder == "one":
        assert HOSTILE in found["390"]["text"]


@needs_browser
def test_colours_are_dark_where_the_reader_wants_it(server, tmp_path):
    found, _ = look(f"{server[0]}/one/harness.html", tmp_path, "--blink-settings=preferredColorScheme=0")
    assert brightness(found["1400"]["page"]) < 60 and brightness(found["1400"]["ink"]) > 200
