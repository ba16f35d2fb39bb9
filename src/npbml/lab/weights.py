"""What the stages of a run have left: encoders, scorers and learners, read from their files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from npbml.errors import RunError
from npbml.lab.run import Run
from npbml.lab.schema import Config, method_config
from npbml.lab.stages import PRETRAIN, SCORER, stage_value
from npbml.learner.file import read_images, take_tensors
from npbml.learner.learner import Learner
from npbml.nets.network import Network
from npbml.rule.settings import HeadSettings
from npbml.settings import from_dict
from npbml.stages.pretrain import pretrain_network, use_norms
from npbml.tensor_files import check_weights, load_tensors


def weights_file(run: Run, name: str, rank: int = 0) -> Path:
    """The file of a stage's best state, or of a later one of an ensemble."""
    return stage_value(run.config, name).file(run.folder.path, rank)


def read_learner(run: Run, method: str, rank: int = 0) -> Learner:
    """The meta-trained learner of a method; of an ensemble, that of a rank."""
    config, path = method_config(run.config, method), weights_file(run, method, rank)
    if not path.exists():
        raise RunError(
            f"{path} is not there: train it with `npbml train --run {run.folder.path} --method {method}`."
        )
    tensors, about = load_tensors(path)
    # Its file knows the temperature, which may have been chosen after meta-training.
    head = from_dict(HeadSettings, about.get("settings", {}).get("head", {}), config.learner.head)
    learner = Learner(replace(config.learner, head=head), read_images(path, about), config.seed)
    take_tensors(learner, tensors, path)
    return learner.to(run.device)


def fresh_learner(run: Run, config: Config) -> Learner:
    """A learner at the start of meta-training: pre-trained encoder, trained scorer, new rule."""
    learner = Learner(config.learner, run.images, config.seed)
    if config.learner.init.source == "pretrained":
        _load(learner.take_pretrained, weights_file(run, PRETRAIN.name))
    if learner.scorer is not None and config.learner.scorer.trains:
        take_scorer(run, learner.take_scorer)
    return learner.to(run.device)


def take_scorer(run: Run, take: Callable[[dict[str, Tensor]], object]) -> None:
    """Have something take what the scorer's stage has trained."""
    _load(take, weights_file(run, SCORER.name))


def pretrained_network(run: Run) -> Network:
    """The pre-trained encoder, normalising as in meta-learning."""
    network = pretrain_network(run.config.learner, run.config.pretrain, run.images)
    _load(network.load_state_dict, weights_file(run, PRETRAIN.name))
    use_norms(network, run.config.learner)
    return network.to(run.device)


def _load(take: Callable[[dict[str, Tensor]], object], path: Path) -> None:
    tensors, _ = load_tensors(path)
    check_weights(path, tensors)
    try:
        take(tensors)
    except (KeyError, RuntimeError) as error:
        raise RunError(f"{path} does not fit this run's settings: {' '.join(str(error).split())}") from None
