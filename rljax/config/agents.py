"""Keys of agents that a run trains while they talk to it over HTTP."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rljax.config.section import Count, Section


class AgentsConfig(Section):
    """Agents that sample from the run over OpenAI's interface, and report rewards (docs/agents.md); null for
    none.
    """

    agent: str | None = Field(
        None,
        min_length=1,
        description="An agent of yours, module:function, called for every episode in a worker process with"
        " the address and the problem; it returns the reward. null waits for agents that ask for problems"
        " themselves.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the agent, by name, such as its own settings."
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. Set another one only where agents run on other machines, and"
        " agents.api_key with it.",
    )
    port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        0,
        description="Port to listen on; 0 takes any that is free. Set one for agents that ask for problems.",
    )
    api_key: str | None = Field(
        None,
        min_length=1,
        description="Environment variable with the key that requests must bring; null asks for none. Set it"
        " wherever others can reach the address.",
    )
    parallel: Count = Field(
        8,
        description="Agents that run at a time, each in a process of its own. Raise it while the machine has"
        " room: what agents do besides sampling leaves slots empty.",
    )
    time_limit: float = Field(
        300.0,
        gt=0,
        description="Most seconds of an episode, from the call of the agent, or from handing out its problem."
        " Raise it for slow agents.",
    )
    max_requests: Count = Field(
        64,
        description="Most requests of an episode; further ones are refused. Lower it against agents that do"
        " not come to an end.",
    )
    failures: Literal["zero", "exclude", "stop"] = Field(
        "zero",
        description="What becomes of an episode whose agent raises, hangs or reports nothing: reward 0; left"
        " out of learning and of its group's baseline; or the run stops. Set exclude where agents fail by no"
        " fault of the policy.",
    )
