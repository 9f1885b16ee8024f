"""The README.md of an exported policy: description, measurements, and the config of the run."""

import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rljax.assembly.saved_policy import SavedPolicy
from rljax.config import ExperimentConfig
from rljax.config.yaml_dialect import Dumper
from rljax.errors import UserError
from rljax.evaluation.records import default_output
from rljax.hub import hub_name
from rljax.models.digest import weights_digest
from rljax.models.transformer import num_params
from rljax.provenance import git_commit
from rljax.run_directory import RunDirectory


def model_card(saved: SavedPolicy, dtype: str, name: str, adapter_of: str | None = None) -> str:
    """Returns Markdown with the YAML header that model hubs read.

    Args:
      dtype: dtype of the exported weights.
      name: name of the exported directory.
      adapter_of: directory of the base, if an adapter is exported and not the policy.
    """
    config, policy = saved.experiment, saved.policy.config
    directory = RunDirectory(saved.path)
    header = {
        "library_name": "transformers" if adapter_of is None else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["rljax", "reinforcement-learning", config.algorithm.name],
    }
    path, start = config.policy.path, "made from scratch"
    if path is not None:
        start = f"from `{path if hub_name(path) else Path(path).name}`"
    what = "A" if adapter_of is None else "The LoRA adapter of a"
    lines = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {name}",
        f"{what} {policy.architecture} policy with {num_params(policy):,} parameters, {start}, after"
        f" {saved.step:,} of {config.training.steps:,} steps of {config.algorithm.name} on the task"
        f" `{config.task.name}`. Weights are stored as {dtype}.",
        _USE.format(name=name) if adapter_of is None else _USE_ADAPTER.format(name=name, base=adapter_of),
        "## Metrics",
        *_metrics(directory, saved.step),
        *_evaluation(saved),
        "## How it was made",
        *_provenance(directory),
        "The config of the run:",
        _fenced(_config_text(config)),
    ]
    return "\n\n".join(lines) + "\n"


_USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
prompt = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "..."}}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**prompt, do_sample=True)[0]))
```"""


_USE_ADAPTER = """## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{name}")
```"""


def _metrics(directory: RunDirectory, step: int) -> Iterator[str]:
    """A table of rewards and response lengths: first measured, and at this step."""
    lines = [line for line in directory.read_metrics() if line["step"] <= step]
    rows = []
    for label, key in (
        ("reward on held-out problems", "evaluation/reward"),
        ("reward in training", "reward/mean"),
        ("response length in training, tokens", "response_length/mean"),
    ):
        measured = [line for line in lines if line.get(key) is not None]
        if measured:
            first, last = measured[0], measured[-1]
            cells = [f"{line[key]:.4g} (step {line['step']})" for line in (first, last)]
            rows.append(f"| {label} | {' | '.join(cells)} |")
    if rows:
        yield "\n".join(["| | first | at this step |", "| --- | ---: | ---: |", *rows])
    else:
        yield "The run has left no metrics."


def _evaluation(saved: SavedPolicy) -> Iterator[str]:
    """A table of the results of scripts/evaluate.py for this checkpoint, if there are any."""
    file = default_output(saved.path, saved.step, "heldout") / "results.json"
    if not file.is_file():
        return
    try:
        results = json.loads(file.read_bytes())
        if results["settings"]["policy"] != weights_digest(saved.policy.params):
            return  # the step was trained again after this evaluation
        rows = [f"| {name} | {_with_interval(result)} |" for name, result in results["overall"].items()]
        problems, samples = int(results["problems"]), int(results["samples"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file}: not the results of scripts/evaluate.py; delete it or run that again"
        ) from error
    yield (
        f"Evaluated on {problems:,} held-out problems, {samples:,} response{'' if samples == 1 else 's'} each"
        " (95 % bootstrap intervals over problems):"
    )
    yield "\n".join(["| | |", "| --- | ---: |", *rows])


def _with_interval(estimate: Mapping[str, float | None]) -> str:
    if estimate["low"] is None:
        return f"{estimate['value']:.4g}"
    return f"{estimate['value']:.4g} ({estimate['low']:.4g} to {estimate['high']:.4g})"


def _provenance(directory: RunDirectory) -> Iterator[str]:
    """Version and commit of the export, and a table of the sessions that trained the policy."""
    try:
        version = importlib.metadata.version("rljax")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    yield f"Exported by rljax {version}, commit {git_commit() or 'unknown'}. Trained by:"
    rows = [
        f"| {session['date']} | {session['step']} | {session['commit'] or 'unknown'}"
        f" | {_machine(session['machine'])} |"
        for session in directory.read_sessions()
    ]
    yield "\n".join(["| date | from step | commit | machine |", "| --- | ---: | --- | --- |", *rows])


def _machine(facts: Mapping[str, Any]) -> str:
    return f"{facts['accelerator'] or facts['cpu']}, JAX {facts['jax']}"


def _config_text(config: ExperimentConfig) -> str:
    """Returns the config as YAML, absolute paths reduced to file names: a machine's folders mean nothing
    elsewhere.
    """

    def shortened(node: Any, key: str = "") -> Any:
        if isinstance(node, dict):
            return {name: shortened(value, name) for name, value in node.items()}
        is_path = isinstance(node, str) and key.endswith(("path", "_dir", "_cache"))
        return Path(node).name if is_path and Path(node).is_absolute() else node

    return yaml.dump(
        shortened(config.model_dump()), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100
    )


def _fenced(text: str) -> str:
    """Returns a block of YAML whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}yaml\n{text.rstrip()}\n{fence}"
