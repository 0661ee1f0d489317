"""The page's snippet for a loop of one's own, which is what all other tests here compare with."""

from __future__ import annotations

import torch
from common import data, make, net, on_ranks, trained
from snippets import plain
from torch import nn


def test_the_microbatches_of_a_step_are_one_commit_whose_scales_come_from_all_of_them() -> None:
    """The scale of the first layer's input is that of the largest input of the window, computed here by hand."""

    def run(rank: int, world: int) -> tuple[int, int, float, float]:
        coordinator = make()
        model = net(coordinator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mine = data(world * 3)[rank::world]
        plain.train(model, coordinator, optimizer, [mine], nn.functional.cross_entropy)
        result = trained(coordinator, model)
        largest = max(float(x.abs().max()) for x, _ in data(world * 3))
        scale = coordinator.state_dict()["slots"]["0.input"]["scale"]
        return (
            result.commits,
            result.collectives,
            float(scale),
            float(torch.tensor(448.0) / torch.tensor(largest)),
        )

    for commits, collectives, scale, expected in on_ranks(run):
        assert commits == collectives == 1
        assert scale == expected
