"""What all tasks have in common: they are deterministic, within bounds, and listed."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from logdepth.errors import UserError
from logdepth.tasks import (
    FAMILIES,
    TASKS,
    Case,
    Examples,
    balancing_weights,
    constant_accuracy,
    held_out_batch,
    last_only,
    task_named,
    tasks_of,
    training_batch,
)

ROOT = Path(__file__).parent.parent


def same(left: Examples, right: Examples) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


def short_cases(name: str) -> list[Case]:
    """The cases of training and of tests up to 256 tokens."""
    return [case for case in (*TASKS[name].train_cases, *TASKS[name].test_cases) if case.length <= 256]


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_arrays_within_bounds(name: str) -> None:
    chosen = TASKS[name]
    assert chosen.train_cases[0].length == min(case.length for case in chosen.train_cases)
    assert chosen.test_cases[-1].length > chosen.train_cases[-1].length
    for case in short_cases(name)[:: 1 if chosen.family == "recall" else 7]:
        examples = chosen.sample(np.random.default_rng(0), 3, case)
        tokens, targets, mask = examples
        assert tokens.shape == targets.shape == mask.shape
        assert (tokens.dtype, targets.dtype, mask.dtype) == (np.int64, np.int64, np.bool_)
        assert all(part.flags.writeable for part in examples)
        assert 0 <= tokens.min() <= tokens.max() < chosen.num_symbols
        assert 0 <= targets.min() <= targets.max() < chosen.num_classes
        assert mask.any(axis=1).all()
        assert not targets[~mask].any()
        assert {chosen.token_text(token) for token in tokens.ravel().tolist()}
        assert all(chosen.answer_text(answer) for answer in targets[mask].tolist())


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_functions_of_seed_and_step(name: str) -> None:
    chosen = TASKS[name]
    cases = [case for case in short_cases(name) if case.length >= 20][:3]
    batch = training_batch(chosen, 1, 7, 4, cases)
    assert same(batch, training_batch(chosen, 1, 7, 4, cases))
    # A state that a draw leaves behind, such as a table that has grown, changes nothing.
    chosen.sample(np.random.default_rng(0), 2, chosen.train_cases[-1])
    assert same(batch, training_batch(chosen, 1, 7, 4, cases))
    others = [training_batch(chosen, 1, 8, 4, cases), training_batch(chosen, 2, 7, 4, cases)]
    assert not any(same(batch, other) for other in others)

    case = cases[0]
    tested = held_out_batch(chosen, 1, case, 4)
    assert same(tested, held_out_batch(chosen, 1, case, 4))
    assert not same(tested, held_out_batch(chosen, 1, case, 4, number=1))
    assert not same(tested, held_out_batch(chosen, 2, case, 4))
    assert not any(same(tested, training_batch(chosen, 1, step, 4, [case])) for step in range(20))


@pytest.mark.parametrize("name", TASKS)
def test_all_training_cases_are_drawn(name: str) -> None:
    chosen = TASKS[name]
    if name == "passkey":
        assert training_batch(chosen, 0, 0, 2).tokens.shape[1] in [case.length for case in chosen.train_cases]
        return
    found = {training_batch(chosen, 0, step, 1).tokens.shape[1] for step in range(120)}
    lengths = {chosen.sample(np.random.default_rng(0), 1, case).tokens.shape[1] for case in chosen.train_cases}
    assert found <= lengths
    assert len(found) > 0.6 * len(lengths)


@pytest.mark.parametrize("name", TASKS)
def test_most_tested_lengths_are_beyond_those_of_training(name: str) -> None:
    chosen = TASKS[name]
    longest = max(case.length for case in chosen.train_cases)
    assert sum(case.length > longest for case in chosen.test_cases) >= len(chosen.test_cases) / 3


def test_last_only_asks_for_one_answer() -> None:
    examples = TASKS["parity"].sample(np.random.default_rng(0), 5, Case(9))
    last = last_only(examples)
    assert last.mask.sum() == 5
    assert last.mask[:, -1].all()
    assert last.targets[:, -1].tolist() == (examples.tokens.sum(axis=1) % 2).tolist()
    assert not last.targets[:, :-1].any()
    assert examples.mask.all()
    with pytest.raises(ValueError, match="ask nothing at their last position"):
        last_only(TASKS["mqar"].sample(np.random.default_rng(0), 5, Case(65, 4)))


@pytest.mark.parametrize("name", [*tasks_of("regular-languages"), *tasks_of("groups"), "bracket-arithmetic", "listops"])
def test_tasks_of_whole_sequences_have_a_last_answer(name: str) -> None:
    for case in TASKS[name].train_cases:
        examples = last_only(TASKS[name].sample(np.random.default_rng(0), 1, case))
        assert examples.mask.sum() == 1


def test_chance_levels_of_given_examples() -> None:
    tokens = np.zeros((2, 3), dtype=np.int64)
    targets = np.array([[0, 2, 2], [2, 0, 5]])
    mask = np.array([[False, True, True], [True, True, False]])
    examples = Examples(tokens, targets, mask)
    assert constant_accuracy(examples) == 3 / 4
    weights = balancing_weights(examples)
    assert weights.tolist() == [[0, 1 / 6, 1 / 6], [1 / 6, 1 / 2, 0]]


def test_tasks_are_found_by_name_and_family() -> None:
    assert task_named("s5") is TASKS["s5"]
    with pytest.raises(UserError, match="there is no task 'partiy'; did you mean 'parity'"):
        task_named("partiy")
    with pytest.raises(UserError, match="there is no family of tasks 'group'; did you mean 'groups'"):
        tasks_of("group")
    assert sorted(name for family in FAMILIES for name in tasks_of(family)) == sorted(TASKS)
    titles = [one.title for one in TASKS.values()]
    assert len(set(titles)) == len(titles)
    for name in TASKS:
        assert name == name.lower()
        assert hash(TASKS[name]) == hash(task_named(name))  # settings, not arrays


@pytest.mark.parametrize("name", ["s5", "d12", "stack", "bracket-arithmetic", "mqar"])
def test_sixty_four_thousand_tokens_are_made(name: str) -> None:
    length = 65536 if name in ("s5", "mqar") else 8192
    examples = TASKS[name].sample(np.random.default_rng(0), 1, Case(length, 256 if name == "mqar" else 0))
    assert examples.tokens.shape[1] >= length


def test_a_new_task_is_one_file_and_one_entry(tmp_path: Path) -> None:
    """docs/tasks.md, followed to the letter in a copy of the project; the tests of all tasks run on the new one."""
    document = (ROOT / "docs" / "tasks.md").read_text()
    ((file, code),) = re.findall(r'```python title="(\S+)"\n(.*?)    ```', document, flags=re.DOTALL)
    ((table, listed, entry, name, kind),) = re.findall(
        r'\*\*One entry\*\* in `(\w+)` \(`(\S+)`\): `("(\w+)": (\w+)\(.*?\))`', document
    )
    for part in ("logdepth", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / file).write_text(textwrap.dedent(code))
    module = file.removesuffix(".py").replace("/", ".")
    text = (tmp_path / listed).read_text()
    text = text.replace("from logdepth.tasks.task", f"from {module} import {kind}\nfrom logdepth.tasks.task", 1)
    text, entered = re.subn(rf"^({table}: .* = {{)$", rf"\1\n    {entry},", text, flags=re.MULTILINE)
    assert entered == 1
    (tmp_path / listed).write_text(text)
    # pytest would import torch, which the tasks do not need.
    laws = [
        test_examples_are_arrays_within_bounds,
        test_batches_are_functions_of_seed_and_step,
        test_all_training_cases_are_drawn,
        test_most_tested_lengths_are_beyond_those_of_training,
    ]
    calls = "; ".join(f"test_tasks.{law.__name__}({name!r})" for law in laws)
    program = f"import sys; from tests import test_tasks; {calls}; print('torch' in sys.modules)"
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
