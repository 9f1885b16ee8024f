"""Turn a GGUF file into a Hugging Face directory: `rljax import model.gguf models/mine`."""

import argparse
from collections.abc import Sequence

from rljax.accelerators import skip_absent
from rljax.errors import UserError, exit_status


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


@exit_status()
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Runs the command line."""
    arguments = _parser(prog).parse_args(argv)
    skip_absent()
    # JAX takes seconds to import, and --help should be instant.
    from rljax.models.gguf_files import import_gguf

    try:
        import_gguf(arguments.file, arguments.output, arguments.dtype)
    except OSError as error:
        raise UserError(str(error)) from error
    print(f"policy: {arguments.output}")
