import json
from pathlib import Path

import pytest

from examples.reasoning.program import CHARACTERS, LENGTH, STALENESS, Judge, Settings, words
from tests.engines import needs_torch
from tests.examples.running import run_example

SETTINGS = Settings(target=0.9, tail_s=0.0, hang="", device="cpu", width=32, output=None)


def test_a_reward_is_for_the_word_of_the_prompt() -> None:
    (word,) = words(1, seed=3)
    assert (word,) == tuple(words(1, seed=3))
    assert len(word) == LENGTH
    assert set(word) <= set(CHARACTERS[:-1])
    judge = Judge(SETTINGS)
    assert judge.reward(word, (None, None, word)) == 1
    assert judge.reward(word, (None, None, word[:-1] + "=")) == 0


@needs_torch
@pytest.mark.slow
def test_the_model_does_not_look_ahead_and_its_probabilities_have_a_sum_of_one() -> None:
    import torch

    from examples.reasoning.program import answered, initial, log_p, tensor_of

    params = initial(SETTINGS)
    tokens = answered(params, tensor_of(words(5, seed=0), "cpu"))
    first = []
    for character in range(len(CHARACTERS)):
        others = tokens.clone()
        others[:, -1] = character
        found = log_p(params, others)
        torch.testing.assert_close(found[:, :-1], log_p(params, tokens)[:, :-1])
        first.append(found[:, -1].exp())
    torch.testing.assert_close(torch.stack(first).sum(0), torch.ones(5))


@needs_torch
@pytest.mark.slow
def test_the_loss_follows_advantages_until_the_policy_has_moved_too_far() -> None:
    import torch

    from examples.reasoning.program import policy_loss

    old = torch.zeros(4, 1)
    new = torch.tensor([[0.0], [0.0], [0.5], [-0.5]], requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    policy_loss(new, old, advantages).backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-0.25], [0.25], [0.0], [0.0]]))


@needs_torch
@pytest.mark.slow
@pytest.mark.xdist_group("training")  # one at a time: each takes all cores
def test_the_script_learns_while_nodes_are_killed_and_hang(tmp_path: Path) -> None:
    arguments = ("--target=0.6", "--tail=0.3", "--environments=6", "--kill=6")
    done = run_example("reasoning", *arguments, "--hang=environment[1]", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "environment[1] hangs: " in done.stdout + done.stderr
    assert ", 1 time each" in done.stdout
    started_again = done.stdout.splitlines()[-1]
    assert "generator[" in started_again
    assert "environment[1]" in started_again
    lines = (tmp_path / "0" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    staleness = {group[1] for line in lines for group in json.loads(line)["groups"]}
    assert max(staleness) <= STALENESS["async"]
    assert (tmp_path / "post_training.svg").exists()
