"""What the scores are worth by which NPBML's transductive loss knows query images, with no learner:

    npbml scorer --dataset cifar-fs --protocol best --run runs/encoder
    npbml pretrain --run runs/encoder
    python benchmarks/scores.py runs/encoder
    python benchmarks/scores.py runs/encoder --score-weight 0.5 1 2

The accuracy of the highest score on tasks of the meta-validation classes: of cosines of one network's embeddings
as they are, of those in which a step towards the protocol `best` is taken after another, and of the run's own
settings, by which two networks may score. With scorer.kind=prototypes the network is the learner's own.

With `--score-weight`, also what the run's learner makes of its scores before it is meta-trained, by their weight
in its loss (loss.score_weight), with embeddings as they are and centred (head.centred), against the scores
themselves.
"""

from pathlib import Path
from typing import Any

from common import begin, parser, print_accuracies
from torch import Tensor

from npbml.engine.evaluate import evaluate, learner_answers
from npbml.engine.source import Cache, TaskSource
from npbml.lab.pipeline import Pipeline
from npbml.lab.run_folder import read_config
from npbml.lab.schema import method_config, override
from npbml.learner.learner import Learner
from npbml.shapes import benchmark_shape
from npbml.tensor_files import load_tensors

PLAIN = {"enlarge": 1.0, "flip": False, "rotations": False, "centre": False, "whiten": False, "rounds": 0}
ALL = {"flip": False, "rotations": True, "centre": True, "whiten": True, "rounds": 10}
SCORES: dict[str, dict[str, Any]] = {
    "cosines": PLAIN,
    "of the rotations side by side": {**PLAIN, "rotations": True},
    "and centred": {**PLAIN, "rotations": True, "centre": True},
    "and five rounds": {**PLAIN, "rotations": True, "centre": True, "rounds": 5},
    "and ten": {**PLAIN, "rotations": True, "centre": True, "rounds": 10},
    "and whitened": {**PLAIN, **ALL},
    "and enlarged by 1.2": {**ALL, "enlarge": 1.2},
    "and flipped": {**ALL, "enlarge": 1.2, "flip": True},
    "rounds alone": {**PLAIN, "rounds": 5},
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("run", type=Path, help="a run folder with an encoder that scores")
    made.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    made.add_argument("--tasks", type=int, default=600)
    made.add_argument("--split", choices=("train", "val", "test"), default="val")
    made.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    made.add_argument(
        "--score-weight", "--trust", type=float, nargs="+", default=[], help="values of loss.score_weight"
    )
    options = made.parse_args()
    begin(options)
    run = Pipeline(options.run, override(read_config(options.run), {"device": options.device}))
    scorer = run.config.learner.scorer
    if not (scorer.pretrains or scorer.asks_learner):
        raise SystemExit(f"scorer.kind={scorer.kind} has no embeddings: set encoder, prototypes or both.")
    cache: Cache = {}

    def found(settings: dict[str, Any], score: bool) -> list[Tensor]:
        return [accuracies(run, settings, score, shots, options, cache) for shots in options.shots]

    one = {"kind": "encoder" if scorer.pretrains else "prototypes"}
    alone = {name: found({"scorer": {**one, **changes}}, True) for name, changes in SCORES.items()}
    alone["the run's own"] = own = found({}, True)
    print(f"{run.config.dataset}, {options.tasks} tasks of the {options.split} classes\n")
    print_accuracies("scores", alone, "cosines", alone["cosines"], options.shots)
    if options.score_weight:
        joint = {"final_batch": "joint"}
        learners = {
            f"weight {weight:g}{', centred' if centred else ''}": found(
                {"loss": {"score_weight": weight}, "head": {"centred": centred}, "inner": joint}, False
            )
            for weight in options.score_weight
            for centred in (False, True)
        }
        print(f"\n{run.config.learner.backbone} before meta-training, with the run's own scores\n")
        print_accuracies("learner", learners, "its scores", own, options.shots)


def accuracies(
    run: Pipeline, settings: dict[str, Any], score: bool, shots: int, options: Any, cache: Cache
) -> Tensor:
    """Of each task, by the scores alone or by the learner before meta-training: [tasks]"""
    config = method_config(override(run.config, {**settings, "shots": shots}), "npbml")
    learner, scorer = Learner(config.learner, run.images, config.seed), config.learner.scorer
    if scorer.pretrains:
        learner.take_scorer(load_tensors(run.folder / "relation" / "relation.safetensors")[0])
    if scorer.asks_learner or not score:
        learner.take_pretrained(load_tensors(run.folder / "pretrain" / "network.safetensors")[0])
    learner.to(run.device)
    shape = benchmark_shape(learner.settings.ways, shots, config.queries)
    source = TaskSource(learner, run.splits[options.split], shape, options.precision, cache)

    def by_scores(indices: Tensor) -> tuple[Tensor, Tensor]:
        prepared, labels = source.prepare(indices)
        return prepared.scores, labels

    answer = by_scores if score else learner_answers(learner, source)
    purpose = "test" if options.split == "test" else "validation"
    return evaluate(answer, source.draw, options.tasks, config.test.batch_size, config.seed, purpose).per_task


if __name__ == "__main__":
    main()
