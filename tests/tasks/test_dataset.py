"""Problems from files and Hugging Face datasets: what is read, in which split and what order it comes."""

import json

import pytest
import yaml

from rljax.assembly.task import configured_task
from rljax.config import TaskConfig
from rljax.errors import ConfigError
from rljax.tasks.base import Task, is_heldout
from rljax.tasks.dataset import Dataset
from tests.configs import table

ROWS = [
    {"question": f"What is {i} plus {i}?", "answer": f"So #### {2 * i}", "level": f"Level {i % 5}", "id": i}
    for i in range(40)
]
COLUMNS = {"prompt": "question", "answer_marker": "####", "difficulty": "level"}


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "sums.jsonl")


def texts(problems):
    return [problem.messages[-1]["content"] for problem in problems]


def first(task, split, count):
    return [task.problem(split, index) for index in range(count)]


def test_a_row_becomes_a_problem(path):
    task = Dataset(0, path, **COLUMNS, solution="answer", system="Be brief.", template="Q: {prompt}\nA:")
    assert isinstance(task, Task)
    problem = next(each for each in task.finite_problems() if each.data["id"] == 7)
    assert problem.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: What is 7 plus 7?\nA:"},
    )
    assert (problem.id, problem.answer, problem.difficulty) == ("sums.jsonl:8", "14", 2)
    assert problem.solution == "So #### 14" and problem.data == ROWS[7]


def test_prompts_may_be_conversations(tmp_path):
    said = (("user", "Hi"), ("assistant", "Hello"), ("user", "2+2?"))
    turns = [{"role": role, "content": text} for role, text in said]
    heldout = write(tmp_path / "b.jsonl", [{"prompt": "1+1?", "answer": 2}])
    trained = write(tmp_path / "a.jsonl", [{"prompt": turns, "answer": 4}])
    task = Dataset(0, trained, template="{prompt}!", heldout_path=heldout)
    problem = task.problem("train", 0)
    assert [message["content"] for message in problem.messages] == ["Hi", "Hello", "2+2?!"]
    assert problem.answer == "4"


def test_a_column_of_floats_holds_whole_numbers(tmp_path):
    heldout = write(tmp_path / "b.jsonl", [{"prompt": "1+1?", "answer": 2}])
    numbers = {"31.0": "31", "-2.0": "-2", "0.5": "0.5", "1e16": "1e+16", '"31.0"': "31.0", "31": "31"}
    for stored, answer in numbers.items():
        (tmp_path / "a.jsonl").write_text(f'{{"prompt": "Hi", "answer": {stored}}}\n')
        assert Dataset(0, str(tmp_path / "a.jsonl"), heldout).problem("train", 0).answer == answer


def test_splits_are_disjoint_by_the_prompt_and_cover_the_file(path):
    task = Dataset(0, path, **COLUMNS)
    heldout = sum(is_heldout(row["question"]) for row in ROWS)
    assert 0 < heldout < len(ROWS)
    trained, held = texts(first(task, "train", 40 - heldout)), texts(first(task, "heldout", heldout))
    assert sorted(trained + held) == sorted(row["question"] for row in ROWS)
    assert all(map(is_heldout, held))
    other = Dataset(5, path, **COLUMNS, template="{prompt} Think.")
    assert {t.removesuffix(" Think.") for t in texts(first(other, "heldout", heldout))} == set(held)


def test_every_epoch_has_its_own_order_of_all_problems(path):
    task, size = Dataset(3, path, **COLUMNS), len(Dataset(3, path, **COLUMNS).finite_problems())
    size -= sum(is_heldout(row["question"]) for row in ROWS)
    epochs = [[task.problem("train", epoch * size + i).id for i in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3 and len(set(epochs[0])) == size
    again = Dataset(3, path, **COLUMNS)
    assert [again.problem("train", 2 * size + i).id for i in reversed(range(size))] == epochs[2][::-1]
    assert [Dataset(4, path, **COLUMNS).problem("train", i).id for i in range(size)] != epochs[0]
    held = 40 - size  # and held-out problems keep theirs
    assert first(task, "heldout", held) * 2 == first(task, "heldout", 2 * held)


def test_a_file_of_its_own_is_held_out_and_never_trained_on(tmp_path, path):
    other = [{**ROWS[3]}, {"question": "What is 99 plus 1?", "answer": "#### 100", "level": 1}]
    task = Dataset(0, path, write(tmp_path / "test.jsonl", other), **COLUMNS)
    assert sorted(texts(first(task, "heldout", 2))) == sorted(row["question"] for row in other)
    trained = texts(first(task, "train", 39))
    assert len(set(trained)) == 39 and ROWS[3]["question"] not in trained


def test_its_fingerprint_is_that_of_its_rows(tmp_path, path):
    known = Dataset(0, path, **COLUMNS).fingerprint()
    assert list(known) == [path] and Dataset(1, path, **COLUMNS, difficulties=[1, 2]).fingerprint() == known
    for other in (ROWS[1:], ROWS[::-1], [*ROWS, ROWS[0]], [{**ROWS[0], "level": "Level 1"}, *ROWS[1:]]):
        write(tmp_path / "sums.jsonl", other)
        assert Dataset(0, path, **COLUMNS).fingerprint() != known
    section = {"name": "dataset", "args": {"path": path, **COLUMNS}, "rewards": [{"name": "exact"}]}
    mixed = {"name": "mixture", "mixture": [section], "problems": 3}
    now = Dataset(0, path, **COLUMNS).fingerprint()
    for each in (section, mixed):
        assert configured_task(TaskConfig.model_validate(each), 0).fingerprint() == now


def test_filters(path):
    task = Dataset(0, path, **COLUMNS, difficulties=[3, 4])
    assert {problem.difficulty for problem in task.finite_problems()} == {3, 4}
    short = Dataset(0, path, **COLUMNS, longest_prompt=len("What is 1 plus 1?"))
    assert {problem.data["id"] for problem in short.finite_problems()} == set(range(10))


def test_parquet_is_read_as_jsonl_is(tmp_path, path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "sums.parquet")
    task, expected = Dataset(0, str(tmp_path / "sums.parquet"), **COLUMNS), Dataset(0, path, **COLUMNS)
    for split in ("train", "heldout"):
        for ours, theirs in zip(first(task, split, 30), first(expected, split, 30), strict=True):
            assert (ours.messages, ours.answer, ours.data) == (theirs.messages, theirs.answer, theirs.data)
            assert ours.id == theirs.id.replace("jsonl", "parquet")


def test_a_hugging_face_dataset(tmp_path, monkeypatch):
    """A directory of data files goes the way of an id on the hub."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    write(tmp_path / "sums" / "train.jsonl", ROWS[:30])
    write(tmp_path / "sums" / "test.jsonl", ROWS[30:])
    hub = str(tmp_path / "sums")
    task = Dataset(0, hub=hub, heldout_split="test", **COLUMNS)
    assert {problem.data["id"] for problem in first(task, "train", 30)} == set(range(30))
    assert {problem.data["id"] for problem in first(task, "heldout", 10)} == set(range(30, 40))
    assert task.problem("train", 0).id.startswith("sums/train:")
    with pytest.raises(ConfigError, match=r"^task.args.hub: cannot load .*, split 'validation': "):
        Dataset(0, hub=hub, split="validation", **COLUMNS)
    with pytest.raises(ConfigError, match=r"^task.args.hub: cannot load "):
        Dataset(0, hub=str(tmp_path / "nothing"), **COLUMNS)


GOOD = '{"prompt": "1+1?", "answer": "2"}\n'
BAD_LINES = r"""
{'prompt': 1} -> bad.jsonl:2: is not valid JSON
{"prompt": "3 -> bad.jsonl:2: is not valid JSON
[1, 2] -> bad.jsonl:2: should be a JSON object, not a list
{"question": "x", "answer": 1} -> bad.jsonl:2: -> no column 'prompt' -> 'question'
{"prompt": "x"} -> bad.jsonl:2: -> no column 'answer'
{} -> bad.jsonl:2: -> an empty object
{"prompt": null, "answer": 1} -> bad.jsonl:2: 'prompt' is null
{"prompt": "  ", "answer": 1} -> bad.jsonl:2: the prompt is empty
{"prompt": [], "answer": 1} -> bad.jsonl:2: the prompt should be text
{"prompt": [{"role": "boss", "content": "x"}], "answer": 1} -> bad.jsonl:2: -> 'boss'
{"prompt": [{"role": "assistant", "content": "x"}], "answer": 1} -> :2: the last message should be the user's
{"prompt": "x", "answer": {"value": 1}} -> bad.jsonl:2: the answer should be text
{"prompt": "x", "answer": NaN} -> bad.jsonl:2: the answer is nan, which is no number
"""
LINES = [
    *((GOOD + line, {}, *says) for line, *says in table(BAD_LINES)),
    (GOOD + "\n[1]", {}, "bad.jsonl:3: should be a JSON object"),
    (GOOD + "[" * 100_000, {}, "bad.jsonl:2: is not valid JSON"),
    (GOOD.encode() + b'{"prompt": "\xff"}\n', {}, "bad.jsonl:2: is not UTF-8"),
    (GOOD, {"answer": "answer.right"}, "bad.jsonl:1: there is no column 'answer.right', only 'prompt'"),
    ('{"prompt": "x", "a": {"b": null}}', {"answer": "a.b"}, "bad.jsonl:1: 'a.b' is null"),
    (GOOD, {"answer_marker": "####"}, "bad.jsonl:1: there is nothing after '####' in 'answer'"),
    (GOOD, {"difficulty": "answer", "difficulties": [3, 4]}, "task.args.path:", "has no problem"),
    (GOOD, {"difficulty": "prompt"}, "bad.jsonl:1: the difficulty should be one whole number"),
    (GOOD, {"solution": "worked"}, "bad.jsonl:1: there is no column 'worked'"),
    ("", {}, "task.args.path:", "has no problem"),
]


@pytest.mark.parametrize("case", LINES, ids=lambda case: str(case[-1])[:40])
def test_a_bad_line_is_one_error_that_names_it(tmp_path, case):
    text, args, *says = case
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        Dataset(0, str(path), **args)
    assert "\n" not in str(caught.value)
    for part in says:
        assert part in str(caught.value)


ARGUMENTS = """
{} -> task.args.path: give the path of a file, or hub
{path: a.jsonl, hub: b} -> task.args.path: give
{path: missing.jsonl} -> task.args.path: there is no file missing.jsonl
{path: data.csv} -> task.args.path: data.csv should end in .jsonl
{path: a.jsonl, subset: main} -> task.args.subset: belongs to task.args.hub
{path: a.jsonl, template: no place} -> task.args.template: should hold {prompt}
{path: a.jsonl, difficulties: [1, 2]} -> task.args.difficulties: needs task.args.difficulty
{path: a.jsonl, difficulty: x, difficulties: [2, 1]} -> task.args.difficulties: should be
{path: SUMS, heldout_path: none.jsonl} -> task.args.heldout_path: there is no file none.jsonl
{path: BROKEN} -> is not a readable Parquet file
"""


@pytest.mark.parametrize(("args", "says"), table(ARGUMENTS))
def test_bad_arguments_are_named(tmp_path, path, args, says):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    args = args.replace("SUMS", path).replace("BROKEN", str(tmp_path / "broken.parquet"))
    with pytest.raises(ConfigError) as caught:
        Dataset(0, **{"prompt": "question"} | yaml.safe_load(args))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ConfigError, match=r"sums\.jsonl: cannot be read: Permission denied"):
        Dataset(0, path, **COLUMNS)


def test_a_file_that_leaves_no_split_empty_is_needed(tmp_path):
    kept = [row for row in ROWS if not is_heldout(row["question"])]
    task = Dataset(0, write(tmp_path / "a.jsonl", kept), **COLUMNS)
    with pytest.raises(ConfigError, match="no problem is held out"):
        task.problem("heldout", 0)
    held = [row for row in ROWS if is_heldout(row["question"])]
    with pytest.raises(ConfigError, match="has no problem for training"):
        Dataset(0, write(tmp_path / "b.jsonl", held), **COLUMNS)
    for split, index in (("test", 0), ("train", -1)):
        with pytest.raises(ValueError):
            task.problem(split, index)
