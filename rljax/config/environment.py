"""Keys of environments, whose problems take several turns."""

from pydantic import Field

from rljax.config.section import Count, Section


class EnvironmentConfig(Section):
    """Episodes of an environment (docs/environments.md); read where `task.name` is one."""

    max_turns: Count = Field(
        8,
        description="Most turns of the policy in an episode; one that is not done by then is cut off. Raise"
        " it for problems of many steps, lower it where an episode should be short.",
    )
    max_observation_length: Count = Field(
        2048,
        description="Most characters of a message of the environment; a longer one is cut and ends with a"
        " note. Raise it where the end of observations matters; they count towards"
        " rollout.max_response_length.",
    )
