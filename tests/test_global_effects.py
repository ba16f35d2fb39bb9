"""Importing, loading, predicting and adapting leave the caller's process as it was."""

import json
import os
import subprocess
import sys

import pytest

# What a program sees of its process; each entry is compared before and after.
PROGRAM = """
import hashlib, json, os, random, signal, sys, threading, warnings
import numpy as np
import torch

def state():
    threads = []
    fresh = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
    fresh.start(); fresh.join()
    return {
        "TF32 of products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 of convolutions": torch.backends.cudnn.allow_tf32,
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "filling of new tensors": torch.utils.deterministic.fill_uninitialized_memory,
        "cuDNN's own choice": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "torch's generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "numpy's generator": hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(),
        "Python's generator": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "threads": torch.get_num_threads(),
        "threads of a new thread": threads[0],
        "threads between operations": torch.get_num_interop_threads(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "warning filters": [str(entry) for entry in warnings.filters],
        "working folder": os.getcwd(),
        "pyplot": "matplotlib.pyplot" in sys.modules,
    }

warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of other packages
steps, before, environment = {}, state(), dict(os.environ)

def step(name):
    after = state()
    after["environment"] = {key: value for key, value in os.environ.items() if environment.get(key) != value}
    before["environment"] = {}
    steps[name] = {key: [before[key], value] for key, value in after.items() if value != before[key]}

import npbml
step("import npbml")
for name in npbml.__all__:
    getattr(npbml, name)
step("import of every public name")
learner = npbml.load("cifar-fs-conv4", device="cpu")
step("load")
seeded = torch.Generator().manual_seed(0)
random_bytes = torch.randint(0, 256, (10, 3, 32, 32), generator=seeded, dtype=torch.uint8)
task = npbml.Task(random_bytes[:5], torch.arange(5), random_bytes[5:], torch.arange(5))
learner.adapt(task)
step("adapt")
learner.predict(task)
step("predict")
classifier = npbml.FewShotClassifier(learner).fit(random_bytes[:5], list("abcde"))
classifier.predict(random_bytes[5:])
classifier.add(random_bytes[5:], list("abcde")).leave_one_out()
classifier.save(sys.argv[1] + ".npbml")
npbml.FewShotClassifier.load(sys.argv[1] + ".npbml", device="cpu").predict(random_bytes)
step("FewShotClassifier")
import npbml.lab.pipeline, npbml.cli, npbml.report.pictures
step("import of the laboratory")
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import preset
from npbml.lab.schema import override

@npbml.register_dataset("blobs")
def blobs():
    random = np.random.default_rng(0)
    def pictures():
        return np.clip(random.uniform(0, 1, 3) + random.normal(0, 0.1, (8, 16, 16, 3)), 0, 1)
    return {split: {f"{split} {n}": pictures() for n in range(4)} for split in ("train", "val", "test")}

tiny = {"steps": 2, "validate_every": 2, "validation_tasks": 4}
tables = {"ways": 3, "queries": 3, "net": {"filters": 4}, "scorer": {"widths": [2], "pools": 1}}
tables |= {"pretrain": {**tiny, "batch_size": 8}, "scorer_training": tiny, "train": tiny, "test": {"tasks": 6}}
run = Pipeline.start(sys.argv[1], override(preset("quick", "blobs"), tables))
with run.at_work():
    for stage in (*run.needs(["npbml"]), "npbml"):
        run.run(stage)
    run.test("npbml")
step("a whole run")
print(json.dumps({"items": list(before), "steps": steps}))
"""
STEPS = (
    "import npbml",
    "import of every public name",
    "load",
    "adapt",
    "predict",
    "FewShotClassifier",
    "import of the laboratory",
    "a whole run",
)
# rich, which draws progress bars, draws a number when it is imported.
OTHERS = dict.fromkeys(("import of the laboratory", "a whole run"), ("Python's generator",))


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[object]]]:
    """What has changed after each step, by item."""
    # Two threads, so that work which spreads over threads does so here.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("effects") / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["items"]) == 19
    return found["steps"]


@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_changed(changes: dict[str, dict[str, list[object]]], step: str) -> None:
    assert {item: found for item, found in changes[step].items() if item not in OTHERS.get(step, ())} == {}
