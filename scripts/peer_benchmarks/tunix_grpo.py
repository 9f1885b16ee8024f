"""Trains a job with Tunix's `GRPOLearner`: `python tunix_grpo.py JOB.json OUT.json`.

Runs in an environment of that library, which lacks rljax. Every call of the reward function ends the rollout
of a step, so the time from one call to the next is that of an update and a rollout.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

from right_answer import rewards


def main(job_file: str, output: str) -> None:
    """Trains, and writes the seconds, tokens and rewards between the calls of the reward function."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import transformers
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params as qwen3_params
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    shape = json.loads((Path(job["policy"]) / "config.json").read_text(encoding="utf-8"))
    dtype = jnp.dtype(job["dtype"])
    config = qwen3.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=int(shape.get("rope_theta") or shape["rope_parameters"]["rope_theta"]),
        norm_eps=shape["rms_norm_eps"],
        use_tied_embedding=shape["tie_word_embeddings"],
        dtype=dtype,
        param_dtype=jnp.float32,
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["policy"])
    calls: list[dict] = []

    def reward(prompts, completions, answer, **_):
        judged = rewards(completions, answer)
        tokens = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in completions)
        calls.append({"at": time.perf_counter(), "tokens": tokens, "reward": sum(judged) / len(judged)})
        return judged

    def batches():
        size = job["prompts_per_step"]
        for step in range(job["steps"]):
            rows = job["prompts"][step * size : (step + 1) * size]
            yield {
                "prompts": np.asarray([row["prompt"] for row in rows]),
                "answer": np.asarray([row["answer"] for row in rows]),
            }

    with mesh:
        actor = qwen3_params.create_model_from_safe_tensors(job["policy"], config, mesh, jnp.float32)
        roles = dict.fromkeys(
            (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
        )
        cluster = rl_cluster.RLCluster(
            actor=actor,
            tokenizer=tokenizer,
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=roles,
                rollout_engine="vanilla",
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adamw(job["learning_rate"], b2=job["beta2"], weight_decay=0.0),
                    eval_every_n_steps=10**9,
                    max_steps=job["steps"],
                    mini_batch_size=job["prompts_per_step"],
                    train_micro_batch_size=job["micro_batch"] // job["samples_per_prompt"],
                ),
                rollout_config=base_rollout.RolloutConfig(
                    max_tokens_to_generate=job["max_response_length"],
                    max_prompt_length=job["max_prompt_length"],
                    kv_cache_size=job["max_prompt_length"] + job["max_response_length"] + 1,
                    temperature=job["temperature"],
                    top_p=1.0,
                    top_k=None,
                    eos_tokens=job["eos_token_ids"],
                ),
            ),
        )
        learner = grpo_learner.GRPOLearner(
            cluster,
            reward_fns=reward,
            algo_config=grpo_learner.GRPOConfig(num_generations=job["samples_per_prompt"], beta=0.0),
        )
        learner.train(batches())
    versions = {"google-tunix": version("google-tunix"), "jax": jax.__version__}
    Path(output).write_text(json.dumps({"calls": calls, "versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
