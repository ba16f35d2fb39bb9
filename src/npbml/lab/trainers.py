"""The trainer of each stage of a run."""

from npbml.lab.run import Run
from npbml.lab.schema import method_config
from npbml.lab.stages import METATRAIN, PRETRAIN, SCORER, scorer_config, spec_of
from npbml.lab.weights import fresh_learner, take_scorer
from npbml.stages.loop import Trainer
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.pretrain import Pretrainer
from npbml.stages.projection import ProjectionTrainer
from npbml.stages.scorer import EncoderTrainer, EpisodicTrainer, teacher


def make_trainer(run: Run, name: str) -> Trainer:
    """What trains a stage: a shared one, or the method of that name."""
    spec = spec_of(name)
    if spec is METATRAIN:
        return _meta_trainer(run, name)
    return _pretrainer(run) if spec is PRETRAIN else _scorer_trainer(run)


def _pretrainer(run: Run) -> Trainer:
    config, train, val, known = run.config, run.splits["train"], run.splits["val"], None
    if run.encoder is not None:
        return ProjectionTrainer(run.setup(), config.pretrain, train, val, run.images)
    if config.pretrain.distill:
        scoring = scorer_config(config)
        known = teacher(run.setup(scoring), scoring.pretrain, train)
        take_scorer(run, known.load_state_dict)
    return Pretrainer(run.setup(), config.pretrain, train, val, teacher=known)


def _scorer_trainer(run: Run) -> Trainer:
    config, train, val = run.config, run.splits["train"], run.splits["val"]
    if config.learner.scorer.pretrains:
        scoring = scorer_config(config)
        return EncoderTrainer(run.setup(scoring), scoring.pretrain, train, val, SCORER.name)
    return EpisodicTrainer(run.setup(), config.scorer_training, config.pretrain.augment, train, val)


def _meta_trainer(run: Run, method: str) -> Trainer:
    config = method_config(run.config, method)
    learner = fresh_learner(run, config)
    train, val = run.sources(learner, "train"), run.sources(learner, "val")
    return MetaTrainer(run.setup(config), config.train, method, learner, train, val, config.pretrain.augment)
