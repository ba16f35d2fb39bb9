"""The settings of augmentation."""

from dataclasses import dataclass

from npbml.settings import setting


@dataclass(frozen=True)
class AugmentSettings:
    """How the images of pre-training are varied."""

    crop_scale_low: float = setting(0.08, above=0, high=1)
    """The smallest crop, as a part of the image's area."""
    flip: bool = setting(True)
    """Mirror half of the images; not for characters, which a mirror changes."""
