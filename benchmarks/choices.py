"""What the choices that the paper leaves open are worth, on meta-validation:

    npbml pretrain --dataset cifar-fs --protocol best --run runs/encoder
    npbml scorer --run runs/encoder
    python benchmarks/choices.py --encoder runs/encoder
    python benchmarks/choices.py --encoder runs/encoder --protocol plain
    python benchmarks/choices.py --table

Every choice is meta-trained from the same encoder, with the settings of the protocol but for what its name says,
and compared with `base` on the same tasks of the meta-validation classes. These are not the tasks by which the
best step is chosen. The scores of `best` are nearly all that a learner reaches: with those of `plain`, which needs
no `npbml scorer`, the rule shows what it is worth. Choices can be named, and run beside each other: each writes
a file of its own. Tables of all that is there are printed, and written beside the files as tables.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npbml.data.sets import open_dataset
from npbml.engine.device import choose_device, computing
from npbml.engine.evaluate import evaluate, over_tasks
from npbml.engine.source import Cache, TaskSource
from npbml.json_files import read_json, write_json, write_whole
from npbml.lab.protocols import preset
from npbml.lab.run_folder import read_config
from npbml.lab.schema import Config, method_config, override
from npbml.learner.learner import Learner
from npbml.measures import ACCURACY
from npbml.shapes import benchmark_shape
from npbml.stages.loop import Trainer, run_stage
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.observer import Observer
from npbml.stages.scorer import EpisodicTrainer
from npbml.stages.setup import Setup
from npbml.stages.stage import Stage
from npbml.tensor_files import load_tensors

FULL, CHECKPOINT_SECONDS = "npbml", 60.0


def rates(**lr: float) -> dict[str, Any]:
    return {"train": {"lr": lr}}


# name: what it is, the method, and what it changes in the settings of the protocol
CHOICES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "base": ("the protocol as it is", FULL, {}),
    "rounding": ("the same, rounded in another way: TF32", FULL, {"engine": {"precision": "tf32"}}),
    "no-film": ("without FiLM", "npbml-4", {}),
    "no-warp": ("without the warp", FULL, {"warp": {"kind": "none"}}),
    "loss": ("the learned loss alone: no warp, no FiLM", "npbml-3", {}),
    "warp": ("the warp alone: no learned loss, no FiLM", "npbml-2", {}),
    "init": ("the initialisation alone", "npbml-1", {}),
    "init-support": ("the same, support batch", "npbml-1", {"inner": {"batch": "support"}}),
    "inductive": ("the inductive loss alone", "npbml-7", {}),
    "transductive": ("the transductive loss alone", "npbml-8", {}),
    "regulariser": ("the regulariser alone", "npbml-9", {}),
    "one-rate": ("every rate 1e-5, as in the paper", FULL, rates(theta=1e-5, omega=1e-5, phi=1e-5, psi=1e-5)),
    "one-rate-high": ("every rate 1e-4", FULL, rates(theta=1e-4, omega=1e-4, phi=1e-4, psi=1e-4)),
    "theta": ("theta at 1e-4", FULL, rates(theta=1e-4)),
    "theta-0": ("theta stays as pre-trained", FULL, rates(theta=0.0)),
    "omega": ("omega at 1e-5", FULL, rates(omega=1e-5)),
    "phi": ("phi at 3e-3", FULL, rates(phi=3e-3)),
    "psi": ("psi at 1e-5", FULL, rates(psi=1e-5)),
    "constant": ("rates that stay as they are", FULL, {"train": {"schedule": "constant"}}),
    "argmax": ("the class of the highest score as the target", FULL, {"loss": {"target": "argmax"}}),
    "relation-network": (
        "scores of a trained relation network",
        FULL,
        {"scorer": {"kind": "relation-network"}, "scorer_training": {"steps": 10_000, "validate_every": 2500}},
    ),
    "scorer-own": ("scores by the learner's own encoder", FULL, {"scorer": {"kind": "prototypes"}}),
    "rounds-0": ("query items do not join the means that score them", FULL, {"scorer": {"rounds": 0}}),
    "centre-0": ("scores not centred", FULL, {"scorer": {"centre": False}}),
    "rotations-0": ("scores of images as they stand alone", FULL, {"scorer": {"rotations": False}}),
    "whiten-0": ("scores of embeddings with their directions as they are", FULL, {"scorer": {"whiten": False}}),
    "enlarge-1": ("scores of images in their own size", FULL, {"scorer": {"enlarge": 1.0}}),
    "scorer-both": ("scores by the learner's own encoder as well", FULL, {"scorer": {"kind": "both"}}),
    "centred-head": ("the head sees embeddings less their mean", FULL, {"head": {"centred": True}}),
    "centred-score-weight": (
        "the same, and L^Q begins as four times the cross-entropy to the scores",
        FULL,
        {"head": {"centred": True}, "loss": {"score_weight": 4.0}},
    ),
    "score-weight-0": ("L^Q begins at nearly nothing", FULL, {"loss": {"score_weight": 0.0}}),
    "score-weight-1": ("L^Q begins as the cross-entropy to the scores", FULL, {"loss": {"score_weight": 1.0}}),
    "final-query": ("the scored prediction sees the queries alone", FULL, {"inner": {"final_batch": "query"}}),
    "stem-batch": ("batch norm of the stem by the batch", FULL, {"net": {"stem_norm": "batch"}}),
    "tail-running": ("batch norm of the tail by running statistics", FULL, {"net": {"tail_norm": "running"}}),
    "tail-batch": ("batch norm of the tail by the batch", FULL, {"net": {"tail_norm": "batch"}}),
    "film-batch": ("FiLM by the batch's mean, not by item", FULL, {"film": {"conditioning": "batch"}}),
    "warp-norm": ("batch norm behind the warp, as published", FULL, {"warp": {"norm": True}}),
    "sums": ("R on sums over the layers, as published", FULL, {"loss": {"averaged": False}}),
    "augment": ("tasks augmented as in pre-training", FULL, {"train": {"augment": True}}),
    "augment-hard": (
        "tasks of crops from 0.08 of an image",
        FULL,
        {"train": {"augment": True}, "pretrain": {"augment": {"crop_scale_low": 0.08}}},
    ),
    "quirks": ("the defects of the reference code", "npbml-quirks", {}),
}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHOICES)}; all if none is given")
    made.add_argument("--encoder", type=Path, help="a run folder with both encoders")
    made.add_argument("--protocol", choices=("best", "plain"), default="best")
    made.add_argument(
        "--out", type=Path, default=Path("results/choices"), help="a folder for the folders of outcomes"
    )
    made.add_argument("--work", type=Path, default=Path("runs/choices"), help="the same, for checkpoints")
    made.add_argument("--shots", type=int, default=1)
    made.add_argument("--steps", type=int, default=3000, help="meta-steps")
    made.add_argument("--validation-tasks", type=int, default=600, help="those by which a step is chosen")
    made.add_argument("--tasks", type=int, default=1000, help="meta-validation tasks of the comparison")
    made.add_argument("--device", default="auto")
    made.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="compile the inner step")
    made.add_argument("--engine-tasks", choices=("auto", "vmap", "loop"), default="auto")
    made.add_argument("--precision", choices=("auto", "float32", "tf32", "bfloat16"), default="auto")
    made.add_argument("--table", action="store_true", help="only show what is there")
    options = made.parse_args()
    if unknown := [name for name in options.names if name not in CHOICES]:
        made.error(f"there is no choice {unknown[0]!r}")
    if not options.table:
        if options.encoder is None:
            made.error("--encoder is needed: `npbml pretrain` and `npbml scorer` make one")
        shared = Shared(options)
        for name in options.names or CHOICES:
            train(name, options, shared)
    folder = kept_in(options)
    lines = tables([read_json(path) for path in sorted(folder.glob("*.json"))])
    print("\n".join(lines))
    write_whole(folder / "tables.md", ("\n".join(lines) + "\n").encode())


def kept_in(options: argparse.Namespace) -> Path:
    return options.out / options.protocol


class Shared:
    """What the choices have in common: the encoder's settings, the images, and the frozen work on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.known = read_config(options.encoder)
        self.device = choose_device(options.device)
        store = open_dataset(self.known.dataset)
        self.splits = {split: store.classes(split).to(self.device) for split in ("train", "val")}
        self.cache: Cache = {}

    def setup(self, config: Config, observer: Observer) -> Setup:
        """What the trainers of a choice are given."""
        tasks, batch_size = (config.shots, config.queries), config.test.batch_size
        return Setup(config.learner, *tasks, config.seed, config.engine, self.device, batch_size, observer.said)


def train(name: str, options: argparse.Namespace, shared: Shared) -> None:
    """Meta-train a choice and write how accurate it is on each meta-validation task."""
    known = shared.known
    where = f"{Path(known.dataset).name}-{known.learner.backbone}-{options.shots}shot"
    place = f"{where}-{options.steps}steps-{name}"
    file = kept_in(options) / f"{place}.json"
    if file.exists():
        return
    what, method, changes = CHOICES[name]
    config = configured(options, known, method, changes)
    folder, observer = options.work / options.protocol / place, Spoken(name)
    setup = shared.setup(config, observer)
    with computing(shared.device, setup.resolved_engine.precision):
        summary, per_task = outcome(options, shared, setup, config, folder, observer)
    lines = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    write_json(
        file,
        {
            "name": name,
            "what": what,
            "method": method,
            "changes": changes,
            "dataset": config.dataset,
            "backbone": config.learner.backbone,
            "shots": options.shots,
            "seed": config.seed,
            "steps": options.steps,
            "best_step": summary["best_step"],
            "step_ms": summary["step_ms"],
            "curve": [[line["step"], line["validation"]] for line in lines if "validation" in line],
            "per_task": [round(value, 5) for value in per_task.tolist()],
        },
    )


def configured(options: argparse.Namespace, known: Config, method: str, changes: dict[str, Any]) -> Config:
    """The settings of a choice: those of the protocol, for the encoder that is there, but for its changes."""
    steps = {"steps": options.steps, "validate_every": max(1, options.steps // 6)}
    steps["validation_tasks"] = options.validation_tasks
    config = preset(options.protocol, known.dataset, known.learner.backbone, method, options.shots)
    same = {"seed": known.seed, "net": {"widths": known.learner.net.widths}}
    engine = {"compile": options.compile, "precision": options.precision, "tasks": options.engine_tasks}
    config = override(config, {**same, "train": steps, "engine": engine})
    return override(method_config(config, method), changes)


def outcome(
    options: argparse.Namespace, shared: Shared, setup: Setup, config: Config, folder: Path, observer: Observer
) -> tuple[dict[str, Any], Tensor]:
    """The summary of a choice's meta-training, and the accuracy on each task of the comparison."""
    train, val = shared.splits["train"], shared.splits["val"]
    learner, scorer = Learner(config.learner, train.spec, config.seed), config.learner.scorer
    learner.take_pretrained(load_tensors(options.encoder / "pretrain" / "network.safetensors")[0])
    if scorer.kind == "relation-network":
        episodic = EpisodicTrainer(setup, config.scorer_training, config.pretrain.augment, train, val)
        trained = _stage("relation", config.scorer_training, episodic)
        run_stage(trained, folder, observer, {}, CHECKPOINT_SECONDS)
        learner.take_scorer(load_tensors(trained.file(folder))[0])
    elif scorer.pretrains and learner.scorer is not None:
        learner.take_scorer(load_tensors(options.encoder / "relation" / "relation.safetensors")[0])
    learner.to(shared.device)
    precision = setup.resolved_engine.precision
    shape = benchmark_shape(config.learner.ways, config.shots, config.queries)
    sources = [[TaskSource(learner, classes, shape, precision, shared.cache)] for classes in (train, val)]
    trainer = MetaTrainer(setup, config.train, config.method, learner, *sources, config.pretrain.augment)
    stage = _stage("train", config.train, trainer)
    summary = run_stage(stage, folder, observer, {}, CHECKPOINT_SECONDS)
    learner.load_state_dict(load_tensors(stage.file(folder))[0])
    draw, batch_size = sources[1][0].draw, setup.batch_size
    return summary, evaluate(trainer.answers[0], draw, options.tasks, batch_size, config.seed, "choices").per_task


def _stage(name: str, settings: Any, trainer: Trainer) -> Stage:
    steps = settings.steps, settings.validate_every
    return Stage(name, "learner.safetensors", name, (), name, *steps, lambda: trainer)


class Spoken(Observer):
    """Says what happens in lines that tell whose it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def validated(self, step: int, value: str) -> None:
        self.said(f"step {step}: {value}")

    def said(self, words: str) -> None:
        print(f"{self.name}: {words}", flush=True)


def tables(outcomes: list[dict[str, Any]]) -> list[str]:
    """Markdown: for each data set, network, number of shots and of meta-steps, every choice beside the base."""

    def place(data: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(data[name] for name in ("dataset", "backbone", "shots", "steps"))

    lines = ["# Choices, on meta-validation"]
    for where in dict.fromkeys(map(place, outcomes)):
        found = {data["name"]: data for data in outcomes if place(data) == where}
        some = next(iter(found.values()))
        lines += [
            f"\n5-way {where[2]}-shot {where[0]}, {where[1]}, seed {some['seed']}, {some['steps']} meta-steps, "
            f"{len(some['per_task'])} meta-validation tasks:\n",
            "| choice | | accuracy, % | to the base | best step |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [row(found[name], found.get("base")) for name in CHOICES if name in found]
    return lines


def row(data: dict[str, Any], base: dict[str, Any] | None) -> str:
    per_task = torch.tensor(data["per_task"])
    own, difference = over_tasks(ACCURACY, per_task), ""
    if base and data is not base and len(base["per_task"]) == len(per_task):
        apart = over_tasks(ACCURACY, per_task - torch.tensor(base["per_task"]))
        difference = f"{apart.mean:+.2f} ± {apart.ci95:.2f}"
    cells = [data["name"], data["what"], f"{own.mean:.2f} ± {own.ci95:.2f}", difference, str(data["best_step"])]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
