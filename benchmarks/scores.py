"""What the scores are worth by which NPBML's transductive loss knows query images, with no learner:

    npbml relation --dataset cifar-fs --protocol best --run runs/encoder
    npbml pretrain --run runs/encoder
    python benchmarks/scores.py runs/encoder

The accuracy of the highest score on tasks of the meta-validation classes: of cosines of one network's embeddings
as they are, of those in which a step towards the protocol `best` is taken after another, and of the run's own
settings, by which two networks may score. With relation.kind=prototypes the network is the learner's own.
"""

from pathlib import Path
from typing import Any

from common import begin, parser, print_table
from torch import Tensor

from npbml.config import method_config, override, with_device
from npbml.engine.evaluate import ACCURACY, evaluate
from npbml.engine.source import Features, TaskSource
from npbml.files import load_tensors
from npbml.learner import Learner
from npbml.run_folder import read_config
from npbml.runs import Run

PLAIN = {"enlarged": 1.0, "turns": False, "centred": False, "evened": False, "rounds": 0}
ALL = {"turns": True, "centred": True, "evened": True, "rounds": 10}
SCORES: dict[str, dict[str, Any]] = {
    "cosines": PLAIN,
    "of the turns side by side": {**PLAIN, "turns": True},
    "and centred": {**PLAIN, "turns": True, "centred": True},
    "and five rounds": {**PLAIN, "turns": True, "centred": True, "rounds": 5},
    "and ten": {**PLAIN, "turns": True, "centred": True, "rounds": 10},
    "and evened": {**PLAIN, **ALL},
    "and enlarged by 1.2": {**ALL, "enlarged": 1.2},
    "rounds alone": {**PLAIN, "rounds": 5},
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("run", type=Path, help="a run folder with an encoder that scores")
    made.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    made.add_argument("--tasks", type=int, default=600)
    made.add_argument("--split", choices=("train", "val", "test"), default="val")
    made.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    options = made.parse_args()
    begin(options)
    run = Run(options.run, with_device(read_config(options.run), options.device))
    if run.config.relation.kind == "network":
        raise SystemExit("relation.kind=network has no embeddings: set relation.kind=encoder, prototypes or both.")
    kept: Features = {}
    rows = []
    one = {"kind": "encoder" if run.config.relation.pretrains else "prototypes"}
    asked = {name: {**one, **changes} for name, changes in SCORES.items()} | {"the run's own": {}}
    for name, changes in asked.items():
        found = [accuracies(run, changes, shots, options, kept) for shots in options.shots]
        if name == "cosines":
            first = found
        row = [name]
        for own, start in zip(found, first, strict=True):
            total, apart = ACCURACY.over(own), ACCURACY.over(own - start)
            row.append(f"{total.mean:.2f} ± {total.ci95:.2f}")
            row.append(f"{apart.mean:+.2f} ± {apart.ci95:.2f}" if found is not first else "")
        rows.append(row)
    print(f"{run.config.dataset}, {options.tasks} tasks of the {options.split} classes\n")
    headings = [words for shots in options.shots for words in (f"{shots}-shot, %", "to cosines")]
    print_table(["scores", *headings], rows)


def accuracies(run: Run, changes: dict[str, Any], shots: int, options: Any, kept: Features) -> Tensor:
    """Of each task, by its scores alone: [tasks]"""
    config = method_config(override(run.config, {"relation": changes, "shots": shots}), "npbml")
    learner = Learner(config, run.images, config.seed)
    if config.relation.pretrains:
        learner.take_relation(load_tensors(run.folder / "relation" / "relation.safetensors")[0])
    if config.relation.asks_learner:
        learner.take_pretrained(load_tensors(run.folder / "pretrain" / "network.safetensors")[0])
    source = TaskSource(
        learner.to(run.device), run.splits[options.split], shots, config.queries, options.precision, kept
    )

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        prepared, labels = source.prepare(indices)
        return prepared.scores, labels

    purpose = "test" if options.split == "test" else "validation"
    return evaluate(answer, source.draw, options.tasks, config.test.together, config.seed, purpose)


if __name__ == "__main__":
    main()
