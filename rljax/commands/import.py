"""Turn a GGUF file into a Hugging Face directory: `rljax import model.gguf models/mine`."""

import argparse
import sys
from collections.abc import Sequence

from rljax.accelerators import skip_absent
from rljax.errors import UserError


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the policy in a GGUF file (architecture llama, qwen2 or qwen3) as a Hugging Face"
        " directory, with tokenizer and chat template. Needs the extra gguf.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="a GGUF file")
    parser.add_argument("output", metavar="DIR", help="where the policy goes")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights; bfloat16 is half as large and rounds them (default: float32)",
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = _parser(prog).parse_args(argv)
    try:
        skip_absent()
        # JAX takes seconds to import, and --help should be instant.
        from rljax.models.gguf_files import import_gguf

        import_gguf(arguments.file, arguments.output, arguments.dtype)
        print(f"policy: {arguments.output}")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
