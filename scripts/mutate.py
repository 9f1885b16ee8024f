"""Breaks one mechanism at a time in a copy of the code, and says which breakages no test notices.

    python scripts/mutate.py                            # all, of every mutations.yaml in tests
    python scripts/mutate.py --only race,tests/cluster  # those with such a text in name, file or tests

Tests of a mutation run until the first one fails, which is what should happen and is said; a mutation whose
tests pass survives. They are those that `pytest` runs without `--all`. What was found is kept, so the same
command goes on where it stopped; where the code has changed since, it begins anew. The exit status is 1 if a
mutation survived, or if its tests fail on the code as it is.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = "mutations.yaml"
_LIMIT = 300.0  # seconds of a mutation's tests
_COPIED = ("rljax", "drafters", "scripts", "configs", "tests", "colab", "docs", "benchmarks")
_FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mechanism, and how to break it: `name` says what is wrong in the broken code, where `by` takes the
    place of the text to `replace`, which occurs once in the `file`, a path from the repository's root. One of
    `tests` should notice: the test where that is known, else a file or folder, as pytest takes them.
    """

    name: str
    file: str
    replace: str
    by: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Returns the file's text, broken; raises a ValueError unless the text to replace occurs once."""
        if (count := text.count(self.replace)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}")
        return text.replace(self.replace, self.by)


def read_mutations() -> list[Mutation]:
    """Returns the mutations of all files."""
    paths = sorted((ROOT / "tests").rglob(MUTATIONS))
    entries = [entry for path in paths for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def first_failure(copy: Path, tests: Sequence[str], limit: float) -> str | None:
    """Returns the first test that fails in a copy of the repository within `limit` seconds, after which they
    count as failed; None if all pass.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"cache_dir={cache}", *tests]
        process = subprocess.Popen(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:  # what hangs is noticed
            return f"nothing ended within {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status == 0:
            return None
        last_failed = Path(cache) / "v" / "cache" / "lastfailed"
        if last_failed.exists():
            return next(iter(json.loads(last_failed.read_text(encoding="utf-8"))))
        return f"pytest ended with {status}"


def copy_repository(into: Path, left_out: Sequence[str] = ("__pycache__", ".*")) -> None:
    """Copies what tests read, but for files and folders of such names."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns(*left_out))
    for name in _FILES:
        shutil.copy(ROOT / name, into / name)


def digest(copy: Path) -> str:
    """Returns a digest of a copy's Python files and mutations."""
    found = hashlib.sha256()
    for path in sorted([*copy.rglob("*.py"), *copy.rglob(MUTATIONS)]):
        found.update(path.relative_to(copy).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


class Findings:
    """The first test that fails, by mutation, and by noticing test on the code as it is; None if all pass.

    Kept in a file: {"code": digest, "failed": {mutation or noticing test: test}}.
    """

    def __init__(self, path: Path, code: str) -> None:
        self._path, self._code = path, code
        self.failed: dict[str, str | None] = {}
        if path.exists() and (kept := json.loads(path.read_text(encoding="utf-8")))["code"] == code:
            self.failed = kept["failed"]

    def add(self, name: str, failed: str | None) -> None:
        self.failed[name] = failed
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"code": self._code, "failed": self.failed}, indent=1) + "\n")


def chosen(mutations: Sequence[Mutation], only: str | None) -> Iterator[Mutation]:
    """Yields the mutations with one of the comma-separated texts of `only` in name, file or tests."""
    wanted = only.split(",") if only else [""]
    for mutation in mutations:
        described = " ".join((mutation.name, mutation.file, *mutation.tests))
        if any(text in described for text in wanted):
            yield mutation


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="texts, separated by commas; one of them is in name, file or tests")
    parser.add_argument(
        "--findings", type=Path, default=Path("cache/mutations.json"), help="what was found so far"
    )
    arguments = parser.parse_args(argv)
    mutations = list(chosen(read_mutations(), arguments.only))
    with tempfile.TemporaryDirectory(prefix="rljax-mutations-") as directory:
        copy = Path(directory) / "copy"
        copy_repository(copy)
        # Programs that a mutation leaves as they are need not be compiled again.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(directory) / "compiled"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        findings = Findings(arguments.findings, digest(copy))
        for number, mutation in enumerate(mutations, 1):
            start = time.monotonic()
            if mutation.name not in findings.failed:
                path = copy / mutation.file
                text = path.read_text(encoding="utf-8")
                path.write_text(mutation.applied(text), encoding="utf-8")
                findings.add(mutation.name, first_failure(copy, mutation.tests, _LIMIT))
                path.write_text(text, encoding="utf-8")
            noticed = findings.failed[mutation.name]
            if noticed and noticed not in findings.failed:
                tests = (noticed,) if "::" in noticed else mutation.tests
                findings.add(noticed, first_failure(copy, tests, 4 * _LIMIT))
            outcome = f"noticed by {noticed}" if noticed else "SURVIVES"
            if noticed and findings.failed[noticed]:
                outcome = f"FAILS ON THE CODE AS IT IS: {findings.failed[noticed]}"
            seconds = time.monotonic() - start
            print(f"[{number}/{len(mutations)}] {seconds:5.0f} s  {mutation.name}: {outcome}", flush=True)
    survivors = [each.name for each in mutations if not findings.failed[each.name]]
    failing = {test for each in mutations if (test := findings.failed.get(findings.failed[each.name]))}
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} noticed")
    for tests in sorted(failing):
        print(f"fail on the code as it is: {tests}")
    return 1 if survivors or failing else 0


if __name__ == "__main__":
    sys.exit(main())
