"""Encoders of one's own: any module that maps images to vectors or to maps, frozen, with a small tail on top.

    encoder = npbml.Encoder(module, size=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    npbml.BACKBONES.register("my-resnet", encoder)

The name then stands for a backbone in configurations, commands, run folders and learner files. The module is the
frozen stem; the tail is a linear map of its features to `net.filters` numbers, with the rule's FiLM and warp. The
module's weights are not part of a learner's file: the file has their digest, which is compared when it is read.
"""

import copy
import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.errors import SettingError
from npbml.nets.backbones import OwnBlock, Plan

EPS = 1e-6  # of the mean square of an image's features


class Encoder:
    """A backbone made of a frozen module.

    Args:
        module: Maps images [n, 3, size, size] to vectors [n, width] or to maps [n, width, h, w]; or a function
            without arguments that makes such a module, called when the encoder is first used. It is copied, put
            into eval mode and never trained.
        size: Side of the images that the module takes. Images of other sizes are resized.
        mean: Of the pixels, in 0 to 1, for each channel: what the module's images are normalised by.
        std: Likewise.
        power: Features f become sign(f) |f|^power before their scale is removed. 0.5 suits features that are
            never negative, where a few large ones would outweigh the rest.

    Example:
        >>> tiny = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> npbml.BACKBONES.register("tiny", npbml.Encoder(tiny, size=32, mean=(0.5,) * 3, std=(0.5,) * 3))
    """

    # Facts of a backbone (parts.py).
    blocks = 2
    warp_positions = ("after_block",)
    pretrained = True

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        power: float = 1.0,
    ) -> None:
        self.size, self.power = int(size), float(power)
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        if self.size < 1 or not self.power > 0:
            raise SettingError(f"An encoder has a size of at least 1 and a power above 0, not {size} and {power}.")
        if not len(self.mean) == len(self.std) == 3 or not all(value > 0 for value in self.std):
            raise SettingError(
                f"An encoder takes the mean and std of 3 channels, std above 0, not {self.mean} and {self.std}."
            )
        self._source = module
        self._lock = threading.Lock()
        self._on: dict[torch.device, nn.Module] = {}  # the frozen module on each device
        self._digest: bytes | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Encoder":
        return self  # nothing in it changes

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to make the same encoder: it loads the module for itself."""
        return {**self.__dict__, "_lock": None, "_on": {}, "_digest": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_lock": threading.Lock()}

    def __call__(self, plan: Plan) -> list[nn.Module]:
        """The blocks of a network: the frozen stem and the tail."""
        inputs, width = self.width, plan.settings.filters
        return [FrozenStem(self), OwnBlock(nn.Conv2d(inputs, width, 1), inputs, width, plan.film, plan.warp)]

    def module(self, device: torch.device) -> nn.Module:
        """The frozen module on a device, loaded and moved once."""
        with self._lock:
            if device not in self._on:
                if self._digest is None:
                    self._on[torch.device("cpu")] = self._load()
                self._on.setdefault(device, copy.deepcopy(self._on[torch.device("cpu")]).to(device))
            return self._on[device]

    def _load(self) -> nn.Module:
        made = copy.deepcopy(self._source) if isinstance(self._source, nn.Module) else self._source()
        if not isinstance(made, nn.Module):
            raise SettingError(f"An encoder is made of a torch module, not of {type(made).__name__}.")
        # Channels last: a picture takes EfficientNet-Lite0 74 ms in the place of 99 on a CPU core.
        made = made.cpu().eval().requires_grad_(False)
        made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        digest = hashlib.sha256()
        for name, tensor in sorted(made.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self._digest = digest.digest()
        return made

    @cached_property
    def width(self) -> int:
        """Channels of the features, found by showing the module an empty image."""
        return self.features(torch.zeros(1, 3, self.size, self.size)).shape[1]

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the module's weights."""
        self.module(torch.device("cpu"))
        assert self._digest is not None
        return self._digest

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Normalised images [n, 1 or 3, height, width] -> features [n, width, h, w], of mean square 1 each."""
        images = images.float()
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        if images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)
        found = self.module(images.device)(images.contiguous(memory_format=torch.channels_last))
        if not isinstance(found, Tensor) or found.dim() not in (2, 4) or found.shape[0] != images.shape[0]:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise SettingError(
                f"An encoder's module gives vectors [n, width] or maps [n, width, h, w], and not {what}."
            )
        found = found.float().reshape(*found.shape[:2], *(found.shape[2:] or (1, 1)))
        if self.power != 1:
            found = found.sign() * found.abs() ** self.power
        return found / (found.square().mean((1, 2, 3), keepdim=True) + EPS).sqrt()


class FrozenStem(nn.Module):
    """An encoder as the frozen block of a network; of its weights it keeps the digest alone."""

    digest: Tensor
    centre: Tensor  # the mean of the training features, [width, 1, 1]

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("centre", torch.zeros(encoder.width, 1, 1))
        self.register_buffer("digest", torch.frombuffer(bytearray(encoder.digest), dtype=torch.uint8))

    def forward(self, images: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        """Features of normalised images; what has more channels than images is such features already."""
        return self.encoder.features(images).to(images.dtype) if images.shape[1] <= 3 else images

    def _load_from_state_dict(self, tensors: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        theirs = tensors.get(prefix + "digest")
        if theirs is not None and not torch.equal(theirs.cpu(), self.digest.cpu()):
            errors.append("the encoder has other weights than the one that this learner was trained on")
        super()._load_from_state_dict(tensors, prefix, *rest)
