"""Tasks by name: what a config may say, and what the user is told otherwise."""

import pytest
import yaml

from rljax.assembly.task import configured_task
from rljax.config import TaskConfig
from rljax.errors import ConfigError
from tests.configs import table

MISTAKES = """
name: chain_arithmetics -> task.name -> 'chain_arithmetics' -> did you mean 'chain_arithmetic'?
name: gsm8k -> task.name -> 'gsm8k' -> Known: chain_arithmetic
chain_arithmetic: {max_term: 5} -> task.args.max_term: -> did you mean 'max_terms'? -> max_number
chain_arithmetic: {zzz: 5} -> task.args.zzz: -> Known: demonstration_noise
chain_arithmetic: {max_terms: ten} -> task.args.max_terms -> an integer from 2 to 53 -> 'ten'
chain_arithmetic: {max_terms: 1} -> task.args.max_terms -> from 2 to 53 -> not 1
chain_arithmetic: {demonstration_noise: 1.5} -> task.args.demonstration_noise -> from 0 to 1 -> 1.5
chain_arithmetic: {tail_exponent: .nan} -> task.args.tail_exponent -> nan
worded_arithmetic: {max_steps: 44} -> task.args.max_steps -> 45
worded_arithmetic: {digressions: 1.5} -> task.args.digressions
instructions: {rules: [ends]} -> task.args.rules: unknown rule 'ends'; -> did you mean 'end'
instructions: {rules: end} -> task.args.rules: should be a list of names
instructions: {max_rules: 4} -> task.args.max_rules: must be an integer from 1 to 3
reasoning_gym: {} -> task.args.environment: must be set for reasoning_gym
reasoning_gym: {environment: leg_count} -> did you mean 'leg_counting'?
reasoning_gym: {environment: leg_counting, config: {animals: 3}} -> task.args.config.animals:
    -> did you mean 'min_animals'?
reasoning_gym: {environment: leg_counting, config: {min_animals: 0}} -> leg_counting refuses
reasoning_gym: {environment: leg_counting, tag: <a>} -> task.args.tag: should be a name
mixture: {name: chain_arithmetics} -> task.mixture.0.name: -> did you mean 'chain_arithmetic'?
mixture: {name: chain_arithmetic, args: {max_terms: 1}} -> task.mixture.0.args.max_terms:
mixture: {name: chain_arithmetic, rewards: [{name: exactly}]}
    -> task.mixture.0.rewards.0.name: -> did you mean 'exact'?
"""


@pytest.mark.parametrize("row", table(MISTAKES), ids=lambda row: row[0])
def test_a_mistake_is_one_line_that_names_it(row):
    """Of the name of a task, of its arguments, and of a part of a mixture."""
    ((name, given),) = yaml.safe_load(row[0]).items()
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    sections = {"name": {"name": given}, "mixture": {"name": name, "mixture": [given]}}
    section = sections.get(name, {"name": name, "args": given})
    with pytest.raises(ConfigError) as caught:
        configured_task(TaskConfig.model_validate(section), 0)
    message = str(caught.value)
    assert "\n" not in message
    for part in row[1:]:
        assert part in message
    assert ("did you mean" in message) == ("did you mean" in " ".join(row))  # only what is near
