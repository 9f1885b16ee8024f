"""Takes a policy to a machine in two halves: `python scripts/gpu_parts/carry.py split FILE.gguf FOLDER`.

What may travel at a time is often less than weights take. `split` writes two halves of the file with their
digests. On the machine, the report's part `rollout` joins the halves in the folder that `REPORT_POLICY`
names, for which it needs the library gguf; `join FOLDER` does so before.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rljax.errors import UserError, exit_status
from rljax.models.gguf_files import import_gguf

HALVES = ("weights-first-half", "weights-second-half")
_DIGESTS = "digests.json"


def split(file: Path, folder: Path) -> None:
    """Writes the halves of a GGUF file and their digests; raises UserError if the file cannot be read."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    folder.mkdir(parents=True, exist_ok=True)
    write_halves(content, folder)


def write_halves(content: bytes, folder: Path) -> None:
    """Writes two halves and their digests."""
    middle = len(content) // 2
    parts = dict(zip(HALVES, (content[:middle], content[middle:]), strict=True))
    for name, part in parts.items():
        (folder / name).write_bytes(part)
    digests = {name: _digest(part) for name, part in parts.items()}
    (folder / _DIGESTS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def joined(folder: Path) -> Path:
    """Returns the Hugging Face directory in a folder: makes it of the halves, unless that was done, or the
    folder was one to begin with.

    Raises:
      UserError: something is missing, or a half is not the one that was split off.
    """
    if (folder / "config.json").exists():
        return folder
    policy = folder / "policy"
    if policy.exists():
        return policy
    whole = folder / "weights.gguf"
    whole.write_bytes(read_halves(folder))
    try:
        import_gguf(whole, policy, "bfloat16")
    finally:
        whole.unlink()
    return policy


def read_halves(folder: Path) -> bytes:
    """Returns what `write_halves` was given; raises as `joined` does."""
    try:
        digests = json.loads((folder / _DIGESTS).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no {_DIGESTS} of gpu_parts/carry.py split is there") from error
    parts = []
    for name in HALVES:
        try:
            parts.append((folder / name).read_bytes())
        except OSError as error:
            raise UserError(
                f"{folder / name}: cannot be read ({error.strerror}); it has not arrived"
            ) from error
        if _digest(parts[-1]) != digests.get(name):
            raise UserError(f"{folder / name}: its digest is another one than in {_DIGESTS}; bring it again")
    return b"".join(parts)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@exit_status()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="carry.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="cut a GGUF file in two")
    splitting.add_argument("file", type=Path)
    splitting.add_argument("folder", type=Path, help="where the halves will be; it is what travels")
    joining = commands.add_parser("join", help="check and join the halves")
    joining.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.command == "split":
        split(arguments.file, arguments.folder)
    else:
        joined(arguments.folder)


if __name__ == "__main__":
    sys.exit(main())
