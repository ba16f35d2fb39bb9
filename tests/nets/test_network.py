"""The backbones, their shapes and where the rule's parts stand in them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.data.tasks import Task
from npbml.learner import Learner
from npbml.nets.network import NetworkSettings, build_network
from npbml.rule.modulate import FiLM
from npbml.rule.warp import Warp


@pytest.mark.parametrize(
    ("backbone", "size", "stem", "warp"),
    [
        ("conv4", 84, 10, 5),
        ("conv4", 32, 4, 2),
        ("conv4", 28, 3, 1),
        ("resnet12", 84, 10, 10),
        ("resnet12", 32, 4, 4),
        ("resnet12", 28, 3, 3),
    ],
)
def test_maps_have_the_sizes_of_the_paper(
    make_learner: Callable[..., Learner], backbone: str, size: int, stem: int, warp: int
) -> None:
    learner, seen = make_learner(backbone=backbone, size=size), []
    (unit,) = (part for part in learner.network.modules() if isinstance(part, Warp))
    unit.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    images = torch.randn(2, 2, size, size, dtype=torch.float64)
    features = learner.network.stem(images)
    width = 4 if backbone == "conv4" else 3
    assert features.shape == (2, width, stem, stem)
    assert learner.network.tail(features).shape == (2, 4) and learner.network.width == 4
    assert seen == [(2, 4, warp, warp)]
    torch.testing.assert_close(learner.network(images), learner.network.tail(features))


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_stem_and_tail_share_the_blocks(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], frozen: int
) -> None:
    """Wherever the line is drawn, the network is the same; behind it, everything adapts."""
    learner, images = make_learner(net={"frozen_blocks": frozen}, shaken=False), make_task().query_images
    assert len(learner.network.stem.blocks) == frozen and len(learner.network.tail.blocks) == 4 - frozen
    adapted = [name for name in learner.adapt(make_task()) if name.startswith("network.tail.")]
    assert adapted == [f"network.tail.blocks.{block}.unit.conv.weight" for block in range(4 - frozen)]
    usual = make_learner(shaken=False).network(images)
    torch.testing.assert_close(learner.network(images), usual, rtol=0, atol=1e-12)


def test_only_the_last_block_is_modulated_and_warped() -> None:
    for backbone, films in (("conv4", 1), ("resnet12", 3)):
        network = build_network(
            backbone,  # type: ignore[arg-type]
            2,
            NetworkSettings(filters=3, widths=(3, 3, 3, 3), frozen_blocks=0),
            FiLM,
            warp=Warp,
        )
        blocks = list(network.tail.blocks)
        for kind, count in ((FiLM, films), (Warp, 1)):
            counts = [sum(isinstance(part, kind) for part in block.modules()) for block in blocks]
            assert counts == [0, 0, 0, count]


def test_film_shortcut_modulates_the_shortcut_too(make_learner: Callable[..., Learner]) -> None:
    for shortcut in (False, True):
        learner = make_learner(backbone="resnet12", film={"shortcut": shortcut})
        assert (learner.network.tail.blocks[0].shortcut.film is not None) is shortcut


class Shift(nn.Module):
    """A warp that does not commute with what stands around it."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, y: Tensor, fixed: object = None) -> Tensor:
        return 3 * y - 0.5


@pytest.mark.parametrize("position", ["after_pool", "pre_activation"])
def test_the_warp_of_conv4_stands_where_it_is_put(position: str) -> None:
    settings = NetworkSettings(filters=3, frozen_blocks=3)
    network = build_network("conv4", 2, settings, warp=Shift, warp_position=position)  # type: ignore[arg-type]
    (block,) = network.tail.blocks
    u = torch.randn(3, 3, 4, 4)
    y, warp = block.unit(u), block.warp
    expected = {
        "after_pool": warp(F.max_pool2d(y.relu(), 2)),
        "pre_activation": F.max_pool2d(warp(y).relu(), 2),
    }
    torch.testing.assert_close(network.tail(u), expected[position].mean((2, 3)))


@pytest.mark.parametrize(
    ("backbone", "activation", "slope"),
    [
        ("conv4", "auto", 0.0),
        ("resnet12", "auto", 0.01),
        ("conv4", "leaky_relu", 0.01),
        ("resnet12", "relu", 0.0),
    ],
)
def test_the_activation_is_the_papers_unless_named(backbone: str, activation: str, slope: float) -> None:
    settings = NetworkSettings(filters=2, widths=(2, 2, 2, 2), activation=activation)  # type: ignore[arg-type]
    network = build_network(backbone, 2, settings)  # type: ignore[arg-type]
    for block in (*network.stem.blocks, *network.tail.blocks):
        y = block.activation(torch.tensor([-1.0, 2.0]))
        torch.testing.assert_close(y, torch.tensor([-slope, 2.0]))
