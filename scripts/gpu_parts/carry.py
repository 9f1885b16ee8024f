"""Takes a policy to a machine in two halves: `python scripts/gpu_parts/carry.py split FILE.gguf FOLDER`.

What may travel at a time is often less than weights take. `split`, where transformers and gguf are installed,
writes two halves of the file with their digests, and beside them the tokenizer and the config. On the
machine, the report's part `rollout` joins the halves in the folder that `REPORT_POLICY` names, for which gguf
is enough; `join FOLDER` does so before.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

from rljax.errors import UserError

HALVES = ("weights-first-half", "weights-second-half")
_DIGESTS = "digests.json"
_WEIGHTS = "model.safetensors"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


def split(file: Path, folder: Path) -> None:
    """Writes the halves of a GGUF file, their digests, its config and its tokenizer.

    Raises:
      UserError: the file cannot be read, or its architecture is another one.
    """
    import transformers

    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if config.model_type != "llama" or not config.tie_word_embeddings:
        raise UserError(f"{file}: only tensors of Llama's architecture with tied embeddings are known")
    config.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
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
    """Returns a folder as a Hugging Face directory: joins the halves in it, unless that was done, or it was
    one to begin with.

    Raises:
      UserError: something is missing, or a half is not the one that was split off.
    """
    if (folder / _WEIGHTS).exists():
        return folder
    content = read_halves(folder)
    whole = folder / "weights.gguf"
    whole.write_bytes(content)
    try:
        tensors = _tensors(whole, json.loads((folder / "config.json").read_bytes()))
    finally:
        whole.unlink()
    safetensors.numpy.save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    return folder


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


def _tensors(file: Path, config: dict) -> dict[str, np.ndarray]:
    """Returns a GGUF file's tensors by Hugging Face's names, in bfloat16."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "gguf is not installed, which reads the weights: bring its wheel, or pip install it"
        ) from error

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if layer is None:
            name = f"model.{_NAMES[tensor.name.removesuffix('.weight')]}.weight"
        else:
            name = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
            if layer[2] in heads:
                values = _halved_rotation(values, heads[layer[2]])
        tensors[name] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
    return tensors


def _halved_rotation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes what llama.cpp does to the rows of queries and keys, whose rotary pairs it puts side by side."""
    rows, inputs = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(prog="carry.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="cut a GGUF file in two")
    splitting.add_argument("file", type=Path)
    splitting.add_argument("folder", type=Path, help="where the halves will be; it is what travels")
    joining = commands.add_parser("join", help="check and join the halves")
    joining.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "split":
            split(arguments.file, arguments.folder)
        else:
            joined(arguments.folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
