"""What ``bench.rollout`` learns from, on numbers; a run compares its replay with the server's."""

import torch

from bench.rollout import Rollouts, difference, loss_of


def rollouts(rewards: list[float], lengths: list[int], logprobs: list[list[float]]) -> Rollouts:
    nothing: list[list[int]] = [[]] * len(rewards)
    return Rollouts(
        nothing, nothing, nothing, logprobs, lengths, torch.tensor(rewards, dtype=torch.float32)
    )


def test_groups_that_agree_teach_nothing():
    found = rollouts([1, 1, 0, 1, 0, 0], [1, 2, 3, 4, 5, 6], [[0.0]] * 6).undecided(2)
    assert found.lengths == [3, 4]
    assert found.rewards.tolist() == [0, 1]


def test_right_answers_become_likelier_and_what_is_behind_their_end_does_not_count():
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    loss_of(logprobs, rollouts([1, 0], [2, 3], [[0.0]] * 2), group=2).backward()
    assert logprobs.grad is not None
    right, wrong = logprobs.grad.tolist()
    assert right[0] == right[1] < 0 == right[2]
    assert wrong[0] == wrong[1] == wrong[2] > 0
    assert abs(sum(right) + sum(wrong)) < 1e-6  # an answer counts alike, however long it is


def test_the_difference_is_that_of_decided_tokens():
    found = rollouts([1, 0], [2, 1], [[-1.0, None], [-2.0]])
    assert difference(torch.tensor([[-1.5, 7.0], [-2.25, 9.0]]), found) == 0.5
