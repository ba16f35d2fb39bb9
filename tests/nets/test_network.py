"""The backbones, their shapes and where the rule's parts stand in them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.errors import SettingError
from npbml.learner.learner import Learner
from npbml.nets.network import Network, build_network
from npbml.nets.settings import NetworkSettings, block_count, block_widths, frozen_blocks, smallest_image
from npbml.parts import BACKBONES
from npbml.randomness import generator
from npbml.rule.modulate import FiLM
from npbml.rule.settings import WarpSettings
from npbml.rule.warp import Warp
from npbml.tasks import Task

NAMES = tuple(name for name in BACKBONES if not BACKBONES.fact(name, "pretrained"))  # encoders: test_encoder.py
RESNETS = ("resnet12", "resnet12-wide")
WARP_POSITIONS = {name: BACKBONES.fact(name, "warp_positions") for name in NAMES}
SMALL: dict[str, Any] = {"filters": 3, "widths": (3, 4, 5)}


def small(**changes: Any) -> NetworkSettings:
    return NetworkSettings(**(SMALL | changes))


def build(backbone: str, settings: NetworkSettings, **parts: Any) -> Network:
    """A backbone for images of two channels whose convolutions are the same at every call."""
    torch.manual_seed(0)
    return build_network(backbone, 2, settings, **parts).double()


def pictures(size: int) -> Tensor:
    return torch.randn(4, 2, size, size, generator=generator(0, "pictures"), dtype=torch.float64)


def side(backbone: str) -> int:
    return 1 if backbone == "mlp" else 32


def count(module: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(part, kind) for part in module.modules())


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


@pytest.mark.parametrize(
    ("backbone", "size", "sides"),
    [
        ("conv4", 84, [42, 21, 10, 5]),
        ("conv4", 32, [16, 8, 4, 2]),
        ("resnet12", 84, [42, 21, 10]),
        ("resnet12", 32, [16, 8, 4]),
        ("wrn28-10", 84, [84] * 4 + [42] * 4 + [21] * 4),
        ("wrn28-10", 32, [32] * 4 + [16] * 4 + [8] * 4),
        ("wrn28-10", 9, [9] * 4 + [5] * 4 + [3] * 4),
        ("mlp", 1, [1, 1]),
    ],
)
def test_every_block_leaves_its_channels_and_its_size(backbone: str, size: int, sides: list[int]) -> None:
    settings = small(embedding="flatten")
    network, widths = build(backbone, settings, size=size), block_widths(backbone, settings)
    assert len(widths) == block_count(backbone, settings)
    x = images = pictures(size)
    for block, width, length in zip((*network.stem.blocks, *network.tail.blocks), widths, sides, strict=True):
        x = block(x)
        assert x.shape == (4, width, length, length)
    assert network.width == widths[-1] * sides[-1] ** 2
    torch.testing.assert_close(network(images), x.flatten(1), rtol=0, atol=1e-12)
    averaged = build(backbone, small())
    assert averaged.width == widths[-1]
    torch.testing.assert_close(averaged(images), x.mean((2, 3)), rtol=0, atol=1e-12)


def test_flattened_embeddings_need_the_size_of_the_images() -> None:
    with pytest.raises(SettingError, match=r"net\.embedding=flatten"):
        build_network("conv4", 3, NetworkSettings(embedding="flatten"))


def test_widths_and_stem_are_the_backbones_own_unless_named() -> None:
    usual = NetworkSettings()
    assert [block_widths(backbone, usual) for backbone in NAMES] == [
        (128,) * 4,
        (64, 128, 256, 512),
        (64, 160, 320, 640),
        (160,) * 4 + (320,) * 4 + (640,) * 4,
        (128,) * 2,
    ]
    assert [frozen_blocks(backbone, usual) for backbone in NAMES] == [3, 3, 3, 11, 0]
    assert [block_widths(backbone, small()) for backbone in NAMES] == [
        (3,) * 4,
        (3, 4, 5),
        (3, 4, 5),
        (3,) * 4 + (4,) * 4 + (5,) * 4,
        (3,) * 2,
    ]
    assert [frozen_blocks(backbone, small(frozen_blocks=1)) for backbone in NAMES] == [1] * 5
    assert block_widths("resnet12", small(widths=())) == ()


@pytest.mark.parametrize("backbone", NAMES)
def test_the_smallest_image_passes(backbone: str) -> None:
    least = smallest_image(backbone, small())
    assert least == {"conv4": 16, "mlp": 1}.get(backbone, 8)
    network = build(backbone, small())
    assert network(pictures(least)).isfinite().all()
    if backbone not in ("wrn28-10", "mlp"):
        with pytest.raises(RuntimeError, match="too small"):
            network(pictures(least - 1))


@pytest.mark.parametrize("backbone", NAMES)
def test_the_network_is_the_same_wherever_stem_and_tail_part(backbone: str) -> None:
    whole = build(backbone, small(frozen_blocks=0))
    images, blocks = pictures(side(backbone)), list(whole.tail.blocks)
    assert len(whole.stem.blocks) == 0 and len(blocks) == block_count(backbone, small())
    for frozen in range(1, len(blocks) + 1):
        parted = build(backbone, small(frozen_blocks=frozen))
        assert len(parted.stem.blocks) == frozen and len(parted.tail.blocks) == len(blocks) - frozen
        x = images
        for block in blocks[:frozen]:
            x = block(x)
        torch.testing.assert_close(parted.stem(images), x, rtol=0, atol=1e-12)
        torch.testing.assert_close(parted(images), whole(images), rtol=0, atol=1e-12)


def test_wrn_28_10_has_the_published_number_of_parameters() -> None:
    """36.5 million with a head of ten classes (Zagoruyko and Komodakis 2016)"""
    with torch.device("meta"):
        network = build_network("wrn28-10", 3, NetworkSettings())

    def block(inputs: int, outputs: int) -> int:
        shortcut = 0 if inputs == outputs else inputs * outputs
        return 2 * inputs + 9 * inputs * outputs + 2 * outputs + 9 * outputs * outputs + shortcut

    groups = sum(block(i, o) + 3 * block(o, o) for i, o in ((16, 160), (160, 320), (320, 640)))
    expected = 9 * 3 * 16 + groups + 2 * 640
    total = sum(parameter.numel() for parameter in network.parameters())
    assert total == expected
    assert (total + 10 * 640 + 10) / 1e6 == pytest.approx(36.5, abs=0.05)
    assert count(network, nn.Conv2d) == 28 and network.width == 640


def test_wrn_ends_with_norm_and_activation() -> None:
    network = build("wrn28-10", small())
    last, _ = network.tail.blocks[0].blocks
    features = network.stem(pictures(32))
    expected = F.batch_norm(last(features), None, None, training=True).relu().mean((2, 3))
    torch.testing.assert_close(network.tail(features), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_mlp_is_a_fully_connected_network(bias: bool) -> None:
    """Its layers have biases whatever net.bias says."""
    network = build("mlp", small(bias=bias))
    layers = []
    for block in network.tail.blocks:
        conv = block.unit.conv
        layers += [nn.Linear(conv.in_channels, conv.out_channels).double(), nn.ReLU()]
        layers[-2].load_state_dict({"weight": conv.weight[:, :, 0, 0].detach(), "bias": conv.bias.detach()})
    assert len(layers) == 4 and len(list(network.parameters())) == 4
    images = pictures(1)
    torch.testing.assert_close(network(images), nn.Sequential(*layers)(images[:, :, 0, 0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backbone", ["conv4", "resnet12", "wrn28-10"])
def test_every_convolution_has_a_bias_or_none_has(backbone: str) -> None:
    for bias in (False, True):
        network = build(backbone, small(bias=bias))
        convs = [part for part in network.modules() if isinstance(part, nn.Conv2d)]
        assert convs and all((conv.bias is not None) is bias for conv in convs)


@pytest.mark.parametrize(("backbone", "films"), [("conv4", 1), ("resnet12", 3), ("wrn28-10", 3), ("mlp", 1)])
def test_only_the_last_block_is_modulated_and_warped(backbone: str, films: int) -> None:
    warp = partial(Warp, settings=WarpSettings())
    network = build(backbone, small(frozen_blocks=0), film=FiLM, warp=warp)
    *others, last = network.tail.blocks
    for kind, expected in ((FiLM, films), (Warp, 1)):
        assert count(last, kind) == expected
        assert not any(count(block, kind) for block in others)
    fixed: dict[Any, Any] = {}
    network.tail(pictures(side(backbone)), fixed)
    assert set(fixed) == {part.place for part in network.modules() if isinstance(part, FiLM)}


PLACES = [(backbone, position) for backbone in NAMES for position in WARP_POSITIONS[backbone]]


@pytest.mark.parametrize(("backbone", "position"), PLACES)
def test_a_warp_everywhere_is_in_every_block_of_the_tail_and_in_none_of_the_stem(
    backbone: str, position: str
) -> None:
    warp = partial(Warp, settings=WarpSettings())
    network = build(backbone, small(frozen_blocks=1), warp=warp, warp_position=position, warp_everywhere=True)
    units = 3 if backbone in RESNETS and position == "pre_norm" else 1
    assert count(network.stem, Warp) == 0
    assert [count(block, Warp) for block in network.tail.blocks] == [units] * len(network.tail.blocks)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": 1},
        {"kernel": 3, "bias": True},
    ],
)
@pytest.mark.parametrize(("backbone", "position"), PLACES)
def test_a_network_with_warps_starts_as_the_network_without(
    backbone: str, position: str, changes: dict[str, Any], everywhere: bool
) -> None:
    """C1: Dirac without batch norm; and it is there, for a change of any omega shows."""
    settings, images = small(frozen_blocks=0), pictures(side(backbone))
    warp = partial(Warp, settings=WarpSettings(norm=False, **changes))
    network = build(backbone, settings, warp=warp, warp_position=position, warp_everywhere=everywhere)
    plain = build(backbone, settings)(images).detach()
    torch.testing.assert_close(network(images).detach(), plain, rtol=0, atol=1e-12)
    for part in network.modules():
        if isinstance(part, Warp):
            with torch.no_grad():
                part.omega.add_(torch.eye(len(part.omega)).flip(0)[:, :, None, None])
                assert (network(images) - plain).abs().max() > 1e-3
                part.omega.sub_(torch.eye(len(part.omega)).flip(0)[:, :, None, None])


@pytest.mark.parametrize("backbone", NAMES)
def test_the_first_position_is_the_default(backbone: str) -> None:
    warp = partial(Warp, settings=WarpSettings())
    outputs = [
        build(backbone, small(), warp=warp, warp_position=position)(pictures(side(backbone)))
        for position in (None, *WARP_POSITIONS[backbone])
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert not any(torch.equal(outputs[0], other) for other in outputs[2:])


def test_film_shortcut_modulates_the_shortcut_too(make_learner: Callable[..., Learner]) -> None:
    for shortcut in (False, True):
        learner = make_learner(backbone="resnet12", film={"shortcut": shortcut})
        assert (learner.network.tail.blocks[0].shortcut.film is not None) is shortcut


@pytest.mark.parametrize(
    ("backbone", "activation", "slope"),
    [
        ("conv4", "auto", 0.0),
        ("resnet12", "auto", 0.01),
        ("resnet12-wide", "auto", 0.01),
        ("conv4", "leaky_relu", 0.01),
        ("resnet12", "relu", 0.0),
        ("wrn28-10", "auto", 0.0),
        ("wrn28-10", "leaky_relu", 0.01),
        ("mlp", "auto", 0.0),
        ("mlp", "leaky_relu", 0.01),
    ],
)
def test_the_activation_is_the_papers_unless_named(backbone: str, activation: str, slope: float) -> None:
    network = build(backbone, small(activation=activation))
    activations = [part.activation for part in network.modules() if hasattr(part, "activation")]
    assert len(activations) >= block_count(backbone, small())
    for function in activations:
        torch.testing.assert_close(function(torch.tensor([-1.0, 2.0])), torch.tensor([-slope, 2.0]))
