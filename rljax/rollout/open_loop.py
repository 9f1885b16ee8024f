"""From the parts of a scheduler or a server to their decode loop."""

from rljax.engine.engine import DecodeEngine
from rljax.environments.use import EnvironmentUse
from rljax.models.transformer import Params
from rljax.rollout.decode_loop import DecodeLoop, LoopPolicy, OnSync
from rljax.rollout.slots import Slots
from rljax.rollout.sources.environment_turns import EnvironmentTurns
from rljax.rollout.sources.idle import IDLE, IdleSlots
from rljax.rollout.sources.tool_turns import ToolTurns
from rljax.rollout.sources.turns import Turns
from rljax.rollout.speculative_slots import SpeculativeSlots
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator
from rljax.tools.use import ToolUse

_POLICY = LoopPolicy()
PLAIN = NoDrafts()


def open_loop(
    engine: DecodeEngine,
    params: Params,
    max_slots: int,
    speculator: Speculator | NoDrafts = PLAIN,
    overlap: bool = False,
    tools: ToolUse | EnvironmentUse | None = None,
    policy: LoopPolicy = _POLICY,
    on_sync: OnSync = lambda responses: None,
    version: int = 0,
    idle: IdleSlots = IDLE,
) -> DecodeLoop:
    """Returns a decode loop without requests; the arguments are those of `Scheduler` and `DecodeLoop`.

    Args:
      params: weights from `engine.load_params`; with copy=True where a trainer goes on with them.
      version: the number of the weights.
    """
    slots, turns = Slots(engine, params, version), Turns()
    if speculator.drafters:
        slots = SpeculativeSlots(speculator, params, version, overlap)
    if isinstance(tools, EnvironmentUse):
        turns = EnvironmentTurns(tools, engine.eos_token_ids)
    elif tools is not None:
        turns = ToolTurns(tools)
    return DecodeLoop(slots, max_slots, turns, idle, policy, on_sync)
