"""Tasks by name: what a config may say, and what the user is told otherwise."""

import pytest
import yaml

from rljax.errors import ConfigError
from rljax.tasks.registry import make_task
from tests.configs import table

MISTAKES = """
chain_arithmetics: {} -> task.name -> 'chain_arithmetics' -> did you mean 'chain_arithmetic'?
gsm8k: {} -> task.name -> 'gsm8k' -> Known: chain_arithmetic
chain_arithmetic: {max_term: 5} -> task.args.max_term: -> did you mean 'max_terms'? -> max_number
chain_arithmetic: {zzz: 5} -> task.args.zzz: -> Known: demonstration_noise
chain_arithmetic: {max_terms: ten} -> task.args.max_terms -> an integer from 2 to 53 -> 'ten'
chain_arithmetic: {max_terms: 1} -> task.args.max_terms -> from 2 to 53 -> not 1
chain_arithmetic: {demonstration_noise: 1.5} -> task.args.demonstration_noise -> from 0 to 1 -> 1.5
chain_arithmetic: {tail_exponent: .nan} -> task.args.tail_exponent -> nan
"""


@pytest.mark.parametrize("row", table(MISTAKES), ids=lambda row: row[0])
def test_a_mistake_is_one_line_that_names_it(row):
    task, *says = row
    ((name, args),) = yaml.safe_load(task).items()
    with pytest.raises(ConfigError) as caught:
        make_task(name, 0, **args)
    message = str(caught.value)
    assert "\n" not in message
    for part in says:
        assert part in message
    assert ("did you mean" in message) == ("did you mean" in " ".join(says))  # only what is near
