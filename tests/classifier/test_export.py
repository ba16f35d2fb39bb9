"""ONNX: the exported network gives the classifier's answers on pictures that Pillow has resized."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

import npbml
from npbml import FewShotClassifier, RunError, SettingError
from npbml.classifier.export import Baked
from npbml.learner.learner import Learner
from npbml.methods import find_recipe
from npbml.nets.encoder import Encoder
from npbml.settings import from_dict

Pictures = Callable[..., np.ndarray]
LABELS = ["cat", "cat", "dog", "dog", "eel", "eel"]


def run(path: Path, pictures: list[Image.Image]) -> np.ndarray:
    """What a program without npbml does: as the file's metadata say."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    told = session.get_modelmeta().custom_metadata_map
    preprocessing = json.loads(told["preprocessing"])
    mode = {"RGB": "RGB", "grey": "L"}[preprocessing["channels"]]
    size = tuple(preprocessing["size"])
    planes = [np.asarray(picture.convert(mode).resize(size, Image.Resampling.BILINEAR)) for picture in pictures]
    images = np.stack(planes).reshape(len(planes), *size, -1).transpose(0, 3, 1, 2).astype(np.float32) / 255
    return session.run(["probabilities"], {"images": images})[0]


def check(classifier: FewShotClassifier, path: Path, pictures: np.ndarray) -> None:
    """The file and the classifier agree, on one picture and on seven."""
    classifier.export(path)
    given = [Image.fromarray(picture) for picture in pictures]
    for count in (1, 7):
        expected = classifier.predict_proba(given[:count])
        np.testing.assert_allclose(run(path, given[:count]), expected, atol=1e-4)


def test_the_shipped_learner(pictures: Pictures, tmp_path: Path) -> None:
    classifier = FewShotClassifier("cifar-fs-conv4", device="cpu")
    classifier.fit(pictures(6), LABELS, pictures(5, seed=1))
    before = {name: value.clone() for name, value in classifier.learner_.state_dict().items()}
    query = np.random.default_rng(2).integers(0, 256, (7, 51, 37, 3), dtype=np.uint8)
    check(classifier, tmp_path / "x.onnx", query)
    kinds = [node.op_type for node in onnx.load(tmp_path / "x.onnx").graph.node]
    assert "BatchNormalization" not in kinds
    after = classifier.learner_.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"backbone": "resnet12"},
        {"net": {"embedding": "flatten", "bias": True}},
        {"net": {"affine": "meta", "per_step_norm": True}},
    ],
)
def test_learners_of_other_kinds(
    make_learner: Callable[..., Learner], pictures: Pictures, tmp_path: Path, changes: dict[str, Any]
) -> None:
    rule: dict[str, Any] = dict(find_recipe("npbml-any").rule)
    net = {**rule["net"], "filters": 6, **changes.pop("net", {})}
    learner = make_learner(channels=1, **{**rule, **changes, "net": net}).float()
    check(FewShotClassifier(learner).fit(pictures(6), LABELS), tmp_path / "x.onnx", pictures(7, seed=2))


@pytest.fixture
def backbone() -> Iterator[str]:
    """The name of an encoder of one's own."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    npbml.BACKBONES.register("exported-encoder", Encoder(module, 24, (0.5,) * 3, (0.25,) * 3, power=0.5))
    yield "exported-encoder"
    del npbml.BACKBONES.parts["exported-encoder"]


def test_an_encoder_of_ones_own(pictures: Pictures, tmp_path: Path, backbone: str) -> None:
    rule: dict[str, Any] = dict(find_recipe("npbml-any").rule)
    rule |= {"backbone": backbone, "net": {**rule["net"], "filters": 6}}
    settings = from_dict(npbml.LearnerSettings, rule, npbml.LearnerSettings())
    learner = npbml.Learner(settings, npbml.ImageSpec(3, 24, (0.5,) * 3, (0.25,) * 3))
    classifier = FewShotClassifier(learner).fit(pictures(6), LABELS, pictures(3, seed=1))
    check(classifier, tmp_path / "x.onnx", pictures(7, seed=2))
    classifier.save(tmp_path / "x.npbml")
    loaded = FewShotClassifier.load(tmp_path / "x.npbml", device="cpu")
    query = pictures(3, seed=4)
    np.testing.assert_allclose(loaded.predict_proba(query), classifier.predict_proba(query), atol=1e-6)


def test_the_metadata_say_what_the_caller_has_to_do(learner: Learner, pictures: Pictures, tmp_path: Path) -> None:
    FewShotClassifier(learner).fit(pictures(2), [("a", 1), "b"]).export(tmp_path / "x.onnx")
    model = onnx.load(tmp_path / "x.onnx")
    onnx.checker.check_model(model, full_check=True)
    told = {prop.key: prop.value for prop in model.metadata_props}
    assert json.loads(told["classes"]) == [{"tuple": ["a", 1]}, "b"] and told["npbml"] == npbml.__version__
    preprocessing = json.loads(told["preprocessing"])
    assert preprocessing["size"] == [32, 32] and preprocessing["channels"] == "RGB"
    assert preprocessing["range"] == [0.0, 1.0] and "Pillow bilinear" in preprocessing["resampling"]
    assert "ONNX's Resize is not Pillow's" in preprocessing["note"]


def test_the_baked_network_is_the_classifier(learner: Learner, pictures: Pictures) -> None:
    """It shares no tensor with it."""
    classifier = FewShotClassifier(learner).fit(pictures(6), LABELS)
    baked = Baked(classifier._fitted)
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    expected = classifier.predict_proba(images)
    np.testing.assert_allclose(baked(images / 255).numpy(), expected, atol=1e-5)
    theta = classifier._fitted.theta or {}
    shared = {tensor.data_ptr() for tensor in (*learner.state_dict().values(), *theta.values())}
    assert not shared & {tensor.data_ptr() for tensor in baked.state_dict().values() if tensor.numel()}


def test_a_learner_that_predicts_together_cannot_be_exported(
    make_learner: Callable[..., Learner], ce_only: dict[str, Any], pictures: Pictures, tmp_path: Path
) -> None:
    classifier = FewShotClassifier(make_learner(channels=3, loss=ce_only).float()).fit(pictures(6), LABELS)
    with pytest.raises(SettingError, match="predicted together, so that no network can be exported"):
        classifier.export(tmp_path / "x.onnx")


def test_a_missing_extra_is_named(
    learner: Learner, pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = FewShotClassifier(learner).fit(pictures(2), ["a", "b"])
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(RunError, match=r"pip install 'npbml\[onnx\]'"):
        classifier.export(tmp_path / "x.onnx")


# As tests/test_global_effects.py does; what other packages do when they are imported is not the export's.
EFFECTS = """
import hashlib, logging, os, random, sys, threading, warnings
import numpy as np, onnx, onnxscript, torch
import torch.onnx._internal.exporter._core
import npbml
warnings.simplefilter("error")

def state():
    return {
        "environment": dict(os.environ), "filters": [str(entry) for entry in warnings.filters],
        "torch": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "numpy": hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(),
        "Python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(),
        "levels": {name: logging.getLogger(name).level for name in ("", "torch", "torch.onnx", "onnxscript")},
        "handlers": len(logging.getLogger().handlers), "folder": os.getcwd(),
        "TF32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "deterministic": torch.are_deterministic_algorithms_enabled(), "limit": sys.getrecursionlimit(),
    }

pictures = np.random.default_rng(0).integers(0, 256, (2, 20, 20, 3), dtype=np.uint8)
classifier = npbml.FewShotClassifier("cifar-fs-conv4", device="cpu").fit(pictures, ["a", "b"])
before = state()
classifier.export(sys.argv[1])
after = state()
print({name: [before[name], value] for name, value in after.items() if value != before[name]})
"""


def test_exporting_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EFFECTS, str(tmp_path / "x.onnx")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{}\n" and done.stderr == ""
