"""A learner's encoder: the backbone with the rule's parts in it, and what of it meta-learning may touch."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from npbml.errors import RunError
from npbml.learner.settings import ImageSpec, LearnerSettings, scoring_encoder
from npbml.nets.layers import Norm, freeze, initialise, set_norm
from npbml.nets.network import Network, build_network
from npbml.nets.settings import WarpPosition
from npbml.parts import BACKBONES, SCORERS
from npbml.rule.modulate import FiLM
from npbml.rule.warp import Warp
from npbml.scorers.scorer import Scorer


def encoder(
    settings: LearnerSettings, images: ImageSpec, with_film: bool = True, with_warp: bool = True
) -> Network:
    """The network z with the rule's parts."""
    film: Callable[[int, int], FiLM] | None = None
    if with_film and settings.film.enabled:
        film = partial(FiLM, conditioning=settings.film.conditioning)
    warp: Callable[[int], Warp] | None = None
    if with_warp and settings.warp.kind != "none":
        warp = partial(Warp, settings=settings.warp, film=film)
    position: WarpPosition = BACKBONES.fact(settings.backbone, "warp_positions")[0]
    if settings.warp.position != "auto":
        position = settings.warp.position
    return build_network(
        settings.backbone,
        images.channels,
        settings.net,
        film,
        settings.film.shortcut,
        warp,
        warp_position=position,
        size=images.size,
        warp_everywhere=settings.warp.blocks == "all",
    )


def make_scorer(settings: LearnerSettings, images: ImageSpec, random: torch.Generator) -> Scorer:
    """What scores the query items, with the networks that it asks for; frozen."""
    kind, own, tail = settings.scorer.kind, None, None
    if settings.scorer.pretrains:
        own = encoder(scoring_encoder(settings), images, False, False)
    if settings.scorer.asks_learner:
        tail = encoder(settings, images, False, False).tail
    scorer: Scorer = SCORERS.get(kind)(images.channels, settings.scorer, own, tail)
    if scorer.embeds:
        set_norm(scorer, "running")
    initialise(scorer, settings.init.std, random)
    if not scorer.learned:
        freeze(scorer)
    return scorer


def begin_network(network: Network, settings: LearnerSettings, generator: torch.Generator) -> None:
    """The start of an encoder that is not pre-trained yet; the rule's parts have their own."""
    initialise(network, settings.init.std, generator)
    if settings.init.weights == "xavier":
        for part in network.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.xavier_uniform_(part.weight, generator=generator)


def freeze_fixed_parts(network: Network, settings: LearnerSettings) -> None:
    """Freeze what meta-learning does not touch, and set the batch-norm modes."""
    freeze(network.stem)
    for part in network.tail.modules():
        if isinstance(part, Norm):
            part.adapts = settings.net.affine == "inner"
            if settings.net.affine in ("pretrained", "identity"):
                freeze(part)
        elif isinstance(part, Warp) and settings.warp.kind == "fixed":
            freeze_but_film(part)
    if settings.net.per_step_norm:
        for part in own_norms(network.tail).values():
            for name in ("weight", "bias"):
                each = getattr(part, name).detach().repeat(settings.inner.steps, 1)
                setattr(part, name, nn.Parameter(each))
    set_norm(network.stem, settings.net.stem_norm)
    set_norm(network.tail, settings.net.tail_norm)


def freeze_but_film(warp: Warp) -> None:
    film, warp.film = warp.film, None
    freeze(warp)
    warp.film = film


def own_norms(tail: nn.Module) -> dict[str, Norm]:
    """The batch norms of the network itself, those in warps aside."""
    warps = {name + "." for name, part in tail.named_modules() if isinstance(part, Warp)}
    return {
        name: part
        for name, part in tail.named_modules()
        if isinstance(part, Norm) and not any(name.startswith(warp) for warp in warps)
    }


def take_encoder(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Start from a pre-trained encoder; the rule's own parts keep their start."""
    state = network.state_dict()
    own = {name for name, part in network.named_modules() if isinstance(part, (FiLM, Warp))}
    missing = [n for n in state if n not in tensors and not any(n.startswith(part + ".") for part in own)]
    taken = {}
    for name, value in state.items():
        tensor = tensors.get(name, value)
        # What is kept for each inner step starts alike in all of them.
        taken[name] = tensor.expand_as(value) if value.shape[1:] == tensor.shape else tensor
    wrong = [name for name, value in state.items() if taken[name].shape != value.shape]
    if missing or wrong:
        raise RunError(f"The pre-trained encoder does not fit this network: {', '.join((missing + wrong)[:3])}.")
    network.load_state_dict(taken)


def adapted_names(tail: nn.Module, settings: LearnerSettings) -> list[str]:
    """The parameters of the tail that the inner loop changes."""
    return [name for name, _ in tail.named_parameters() if _adapts(tail, name, settings)]


def _adapts(tail: nn.Module, name: str, settings: LearnerSettings) -> bool:
    place, blocks = name.split("."), len(tail.get_submodule("blocks"))  # type: ignore[arg-type]
    block = int(place[1]) if place[0] == "blocks" else blocks
    if settings.inner.layers == "head" or block < blocks - (settings.inner.last_blocks or blocks):
        return False
    owners = [tail.get_submodule(".".join(place[:end])) for end in range(1, len(place))]
    if any(isinstance(owner, FiLM) for owner in owners):
        return settings.film.adapt
    if any(isinstance(owner, Warp) for owner in owners):
        return False
    return settings.net.affine == "inner" if isinstance(owners[-1], Norm) else True


def per_step_names(tail: nn.Module) -> list[str]:
    """The parameters of the tail that can have a row for each inner step: scale and shift of its batch norms."""
    return [f"{name}.{part}" for name in own_norms(tail) for part in ("weight", "bias")]
