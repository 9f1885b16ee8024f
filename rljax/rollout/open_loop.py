"""From the parts of a scheduler or a server to their decode loop."""

from rljax.engine.engine import DecodeEngine
from rljax.environments.use import EnvironmentUse
from rljax.models.transformer import Params
from rljax.rollout.decode_loop import DecodeLoop, LoopPolicy, OnSync
from rljax.rollout.slots import Slots, SpeculativeSlots
from rljax.rollout.sources.environment_turns import EnvironmentTurns
from rljax.rollout.sources.idle import IDLE, IdleSlots
from rljax.rollout.sources.tool_turns import ToolTurns
from rljax.rollout.sources.turns import Turns
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator
from rljax.tools.use import ToolUse

_POLICY = LoopPolicy()
PLAIN = NoDrafts()


def open_slots(
    engine: DecodeEngine,
    params: Params,
    speculator: Speculator | NoDrafts = PLAIN,
    overlap: bool = False,
    version: int = 0,
) -> Slots:
    """Returns slots without responses, decoded with drafts if the speculator has drafters.

    Args:
      params: weights from `engine.load_params`; with copy=True where a trainer goes on with them.
      speculator, overlap: as of `SpeculativeSlots`.
    """
    if speculator.drafters:
        return SpeculativeSlots(speculator, params, version, overlap)
    return Slots(engine, params, version)


def open_loop(
    slots: Slots,
    max_slots: int,
    tools: ToolUse | EnvironmentUse | None = None,
    policy: LoopPolicy = _POLICY,
    on_sync: OnSync = lambda responses: None,
    idle: IdleSlots = IDLE,
) -> DecodeLoop:
    """Returns a decode loop without requests; arguments as of `DecodeLoop`. `tools` are what responses call,
    or the environment whose turns they are.
    """
    turns = Turns()
    if isinstance(tools, EnvironmentUse):
        turns = EnvironmentTurns(tools, slots.engine.eos_token_ids)
    elif tools is not None:
        turns = ToolTurns(tools)
    return DecodeLoop(slots, max_slots, turns, idle, policy, on_sync)
