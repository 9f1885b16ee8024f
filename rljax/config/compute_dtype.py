"""The number type that `policy.compute_dtype: auto` stands for."""

from rljax.config.schema import ExperimentConfig


def with_compute_dtype(
    config: ExperimentConfig, platform: str, recorded: str | None = None
) -> ExperimentConfig:
    """Returns the config with a number type in the place of auto, and unchanged without auto.

    Args:
      platform: "cpu", "gpu" or "tpu".
      recorded: the number type of the run that goes on; None for a new run.
    """
    if config.policy.compute_dtype != "auto":
        return config
    dtype = recorded or ("float32" if platform == "cpu" else "bfloat16")
    policy = config.policy.model_copy(update={"compute_dtype": dtype})
    return config.model_copy(update={"policy": policy})
