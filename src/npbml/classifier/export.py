"""A fitted classifier as an ONNX file: one plain network from pictures to probabilities."""

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from npbml.classifier.file import encode_label
from npbml.classifier.fitted import Fitted
from npbml.errors import RunError, SettingError
from npbml.json_files import write_whole
from npbml.learner.learner import SHIFT, TAIL, Learner
from npbml.learner.prepare import normalised, stem_features
from npbml.nets.encoder import Encoder, FrozenStem
from npbml.nets.functional import with_tensors
from npbml.nets.layers import ConvUnit
from npbml.nets.network import Tail
from npbml.version import __version__

INPUT, OUTPUT = "images", "probabilities"


class Baked(nn.Module):
    """Images -> probabilities at the adapted parameters, which are its own like all the others.

    It shares nothing with the classifier that it is made from. Batch norm that follows a convolution is folded
    into it.
    """

    def __init__(self, fitted: Fitted) -> None:
        super().__init__()
        theta = fitted.theta
        if theta is None:
            raise SettingError(
                "The answers of this learner depend on the pictures that are predicted together, so that no "
                "network can be exported: use a learner of npbml-any."
            )
        learner = copy.deepcopy(fitted.learner).cpu().float()
        last = learner.test_steps - 1
        tail = {name.removeprefix(TAIL): value for name, value in theta.items() if name.startswith(TAIL)}
        tail |= {name: learner.network.tail.get_parameter(name)[last] for name in learner._by_step}
        own = {name: nn.Parameter(value.detach().cpu().float()) for name, value in tail.items()}
        learner.network.tail = cast(Tail, with_tensors(learner.network.tail, own))
        _own_encoders(learner)
        _fold_norms(learner)
        self.learner = learner
        weight, bias = learner.head.start(len(fitted.classes))
        weight, bias = theta.get("head.weight", weight), theta.get("head.bias", bias)
        self.weight = nn.Parameter(weight.detach().cpu().float().clone())
        self.bias = nn.Parameter(bias.detach().cpu().float().clone())
        self.temperature = fitted.temperature
        self.shift = nn.Parameter(theta.get(SHIFT, torch.zeros(())).detach().cpu().float().clone())
        self.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Tensor:
        """Images [n, channels, size, size], floats in 0 to 1 -> probabilities [n, classes]."""
        features = stem_features(self.learner, normalised(self.learner, images))
        embeddings = self.learner.network.tail(features - self.shift)
        return (self.learner.head(embeddings, self.weight, self.bias) / self.temperature).softmax(-1)


def _own_encoders(learner: Learner) -> None:
    """Give the stem a copy of an encoder's module that is a part of it: by itself it is shared by all learners."""
    for part in learner.network.stem.modules():
        if isinstance(part, FrozenStem):
            source = part.encoder
            part.module = copy.deepcopy(source.module(torch.device("cpu")))
            part.encoder = Encoder(part.module, source.size, source.mean, source.std, source.power)
            part.encoder._on = {torch.device("cpu"): part.module}
            part.encoder._digest = source.digest


def _fold_norms(learner: Learner) -> None:
    """Fold batch norm into the convolution before it, where nothing stands between them."""
    for part in learner.network.modules():
        if isinstance(part, ConvUnit) and part.warp is None and part.norm is not None:
            conv, norm = part.conv, part.norm
            assert norm.mode == "running"  # as in every learner that answers pictures one by one
            weight, bias = fuse_conv_bn_weights(
                conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
            conv.weight, conv.bias, part.norm = nn.Parameter(weight), nn.Parameter(bias), None


def export_onnx(fitted: Fitted, path: Path) -> None:
    """Write a fitted classifier as an ONNX file.

    Raises:
        SettingError: The learner's answers depend on the pictures that are predicted together.
        RunError: The extra is missing, or the file cannot be written.
    """
    baked = Baked(fitted)
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError:
        raise RunError("To export takes an extra that is not installed: pip install 'npbml[onnx]'.") from None
    images = fitted.learner.images
    # torch.export takes a dimension of 1 in its example for a constant.
    example = torch.rand(2, images.channels, images.size, images.size, generator=torch.Generator())
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            baked,
            (example,),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    if not model.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise RunError(
            "The network could not be exported for any number of pictures: a part of it, such as an encoder of "
            "your own, depends on how many there are."
        )
    onnx.helper.set_model_props(model, metadata(fitted))
    onnx.checker.check_model(model, full_check=True)
    write_whole(path, model.SerializeToString())


def metadata(fitted: Fitted) -> dict[str, str]:
    """What the file says about itself: values are text or JSON."""
    images = fitted.learner.images
    channels = "RGB" if images.channels == 3 else "grey"
    preprocessing = {
        "size": [images.size, images.size],
        "channels": channels,
        "layout": "NCHW",
        "dtype": "float32",
        "range": [0.0, 1.0],
        "resampling": "Pillow bilinear (antialiased), of the whole picture to size x size, aspect not kept",
        "steps": [
            "turn the picture upright by its EXIF orientation",
            "lay it on white where it is transparent",
            f"convert it to {channels}, 8 bits a channel",
            f"resize it with Pillow: image.resize(({images.size}, {images.size}), Image.Resampling.BILINEAR)",
            "divide the bytes by 255; mean and standard deviation are inside the network",
        ],
        "note": "ONNX's Resize is not Pillow's resizing: it gives other pixels, and so other answers.",
    }
    return {
        "npbml": __version__,
        "classes": json.dumps([encode_label(label) for label in fitted.classes]),
        "preprocessing": json.dumps(preprocessing),
        "input": f"{INPUT}: float32 [n, {images.channels}, {images.size}, {images.size}]",
        "output": f"{OUTPUT}: float32 [n, {len(fitted.classes)}], in the order of classes",
    }


@contextlib.contextmanager
def _quietly() -> Iterator[Any]:
    """Keep the exporter's words, warnings and levels of loggers to itself."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    state = torch.get_rng_state()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            torch.set_rng_state(state)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
