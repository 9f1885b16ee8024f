"""Trains a job with TRL's `GRPOTrainer`: `python trl_grpo.py JOB.json OUT.json`.

Runs in an environment of that library, which lacks rljax; bench_peers.py starts it. Every call of the reward
function ends the rollout of a step, so the time from one call to the next is that of an update and a rollout.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def rewards(texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Returns 1 for every text whose last number is the answer, else 0."""
    numbers = [re.findall(r"\d+", text) for text in texts]
    return [
        float(bool(found) and answer.isdigit() and int(found[-1]) == int(answer))
        for found, answer in zip(numbers, answers, strict=True)
    ]


def main(job_file: str, output: str) -> None:
    """Trains, and writes the seconds, tokens and rewards between the calls of the reward function."""
    import datasets
    import torch
    import transformers
    import trl

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    calls: list[dict] = []

    def reward(completions, completion_ids, answer, **_):
        judged = rewards(completions, answer)
        calls.append(
            {
                "at": time.perf_counter(),
                "tokens": sum(map(len, completion_ids)),
                "reward": sum(judged) / len(judged),
            }
        )
        return judged

    tokenizer = transformers.AutoTokenizer.from_pretrained(job["policy"])
    size = job["prompts_per_step"] * job["samples_per_prompt"]
    with tempfile.TemporaryDirectory() as directory:
        config = trl.GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=job["dtype"] == "bfloat16",
            per_device_train_batch_size=job["micro_batch"],
            gradient_accumulation_steps=size // job["micro_batch"],  # and a rollout makes all of a step
            num_generations=job["samples_per_prompt"],
            max_completion_length=job["max_response_length"],
            temperature=job["temperature"],
            top_k=0,
            top_p=1.0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=job["learning_rate"],
            adam_beta2=job["beta2"],
            lr_scheduler_type="constant",
            max_steps=job["steps"],
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
            seed=job["seed"],
            model_init_kwargs={"dtype": "float32"},
            generation_kwargs={"eos_token_id": job["eos_token_ids"]},
        )
        trainer = trl.GRPOTrainer(
            job["policy"],
            reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(job["prompts"]),
            processing_class=tokenizer,
        )
        trainer.train()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    Path(output).write_text(json.dumps({"calls": calls, "versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
