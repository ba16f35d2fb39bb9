"""What the scores are worth by which NPBML's transductive loss knows query images, with no learner:

    npbml relation --dataset cifar-fs --protocol best --run runs/encoder
    npbml pretrain --run runs/encoder
    python benchmarks/scores.py runs/encoder
    python benchmarks/scores.py runs/encoder --trust 0.5 1 2

The accuracy of the highest score on tasks of the meta-validation classes: of cosines of one network's embeddings
as they are, of those in which a step towards the protocol `best` is taken after another, and of the run's own
settings, by which two networks may score. With relation.kind=prototypes the network is the learner's own.

With `--trust`, also what the run's learner makes of its scores before it is meta-trained, by how much it trusts
them (loss.trust), with embeddings as they are and centred (head.centred), against the scores themselves.
"""

from pathlib import Path
from typing import Any

from common import begin, parser, print_accuracies
from torch import Tensor

from npbml.engine.evaluate import evaluate, learner_answers
from npbml.engine.source import Features, TaskSource
from npbml.lab.pipeline import Pipeline
from npbml.lab.run_folder import read_config
from npbml.lab.schema import method_config, override, with_device
from npbml.learner.learner import Learner
from npbml.tensor_files import load_tensors

PLAIN = {"enlarged": 1.0, "mirrored": False, "turns": False, "centred": False, "evened": False, "rounds": 0}
ALL = {"mirrored": False, "turns": True, "centred": True, "evened": True, "rounds": 10}
SCORES: dict[str, dict[str, Any]] = {
    "cosines": PLAIN,
    "of the turns side by side": {**PLAIN, "turns": True},
    "and centred": {**PLAIN, "turns": True, "centred": True},
    "and five rounds": {**PLAIN, "turns": True, "centred": True, "rounds": 5},
    "and ten": {**PLAIN, "turns": True, "centred": True, "rounds": 10},
    "and evened": {**PLAIN, **ALL},
    "and enlarged by 1.2": {**ALL, "enlarged": 1.2},
    "and mirrored": {**ALL, "enlarged": 1.2, "mirrored": True},
    "rounds alone": {**PLAIN, "rounds": 5},
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("run", type=Path, help="a run folder with an encoder that scores")
    made.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    made.add_argument("--tasks", type=int, default=600)
    made.add_argument("--split", choices=("train", "val", "test"), default="val")
    made.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    made.add_argument("--trust", type=float, nargs="+", default=[], help="values of loss.trust")
    options = made.parse_args()
    begin(options)
    run = Pipeline(options.run, with_device(read_config(options.run), options.device))
    if run.config.relation.kind == "network":
        raise SystemExit("relation.kind=network has no embeddings: set relation.kind=encoder, prototypes or both.")
    kept: Features = {}

    def found(settings: dict[str, Any], score: bool) -> list[Tensor]:
        return [accuracies(run, settings, score, shots, options, kept) for shots in options.shots]

    one = {"kind": "encoder" if run.config.relation.pretrains else "prototypes"}
    alone = {name: found({"relation": {**one, **changes}}, True) for name, changes in SCORES.items()}
    alone["the run's own"] = own = found({}, True)
    print(f"{run.config.dataset}, {options.tasks} tasks of the {options.split} classes\n")
    print_accuracies("scores", alone, "cosines", alone["cosines"], options.shots)
    if options.trust:
        learners = {
            f"trust {trust:g}{', centred' if centred else ''}": found(
                {"loss": {"trust": trust}, "head": {"centred": centred}, "inner": {"final_batch": "joint"}}, False
            )
            for trust in options.trust
            for centred in (False, True)
        }
        print(f"\n{run.config.backbone} before meta-training, with the run's own scores\n")
        print_accuracies("learner", learners, "its scores", own, options.shots)


def accuracies(
    run: Pipeline, settings: dict[str, Any], score: bool, shots: int, options: Any, kept: Features
) -> Tensor:
    """Of each task, by the scores alone or by the learner before meta-training: [tasks]"""
    config = method_config(override(run.config, {**settings, "shots": shots}), "npbml")
    learner = Learner(config, run.images, config.seed)
    if config.relation.pretrains:
        learner.take_relation(load_tensors(run.folder / "relation" / "relation.safetensors")[0])
    if config.relation.asks_learner or not score:
        learner.take_pretrained(load_tensors(run.folder / "pretrain" / "network.safetensors")[0])
    learner.to(run.device)
    source = TaskSource(learner, run.splits[options.split], shots, config.queries, options.precision, kept)

    def by_scores(indices: Tensor) -> tuple[Tensor, Tensor]:
        prepared, labels = source.prepare(indices)
        return prepared.scores, labels

    answer = by_scores if score else learner_answers(learner, source)
    purpose = "test" if options.split == "test" else "validation"
    return evaluate(answer, source.draw, options.tasks, config.test.together, config.seed, purpose)


if __name__ == "__main__":
    main()
