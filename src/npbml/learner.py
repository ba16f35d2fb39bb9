"""A learner: a network and a learning rule, ready to adapt to a task (the paper's Equation 6)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from npbml.data.tasks import Task
from npbml.errors import DataError, RunError, SettingError
from npbml.nets.layers import Norm, freeze, initialise, set_norm
from npbml.nets.network import WARP_POSITIONS, Backbone, Network, NetworkSettings, WarpPosition, build_network
from npbml.nets.relation import RelationNetwork, RelationSettings
from npbml.randomness import generator
from npbml.rule.descend import InnerSettings, Parameters, descend
from npbml.rule.head import Head, HeadSettings
from npbml.rule.loss import LearnedLoss, LossNetwork, LossSettings, one_hot
from npbml.rule.modulate import FiLM, FilmSettings
from npbml.rule.warp import Warp, WarpSettings
from npbml.settings import group, setting
from npbml.threads import each_in_a_thread

GROUPS = ("theta", "omega", "phi", "psi")
TAIL = "network.tail."  # adapted parameters are named as in `named_parameters()`


@dataclass(frozen=True)
class ImageSpec:
    """The pictures a learner takes: their size, channels and normalisation."""

    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class InitSettings:
    """How what is learned starts (docs/method.md, items 32 and 33)."""

    std: float = setting(0.01, low=0)
    """Standard deviation of the normal start of every weight: the paper's N(0, 1e-2)."""
    uniform_bias: bool = setting(False)
    """Start biases from torch's uniform default instead of zero."""


@dataclass(frozen=True)
class LearnerSettings:
    """Everything that makes a learner what it is."""

    backbone: Backbone = setting("conv4")
    """The network: conv4 or resnet12."""
    ways: int = setting(5, low=2)
    """Classes in a task, N."""
    net: NetworkSettings = group(NetworkSettings)
    head: HeadSettings = group(HeadSettings)
    warp: WarpSettings = group(WarpSettings)
    film: FilmSettings = group(FilmSettings)
    loss: LossSettings = group(LossSettings)
    inner: InnerSettings = group(InnerSettings)
    init: InitSettings = group(InitSettings)
    relation: RelationSettings = group(RelationSettings)


def check_learner(settings: LearnerSettings) -> None:
    """Refuse combinations of settings that make no sense."""
    if settings.inner.batch == "support" and settings.loss.transductive:
        raise SettingError(
            "inner.batch=support leaves the query images out of the inner loop, where loss.transductive needs "
            "them: set inner.batch=joint or loss.transductive=false."
        )
    if settings.film.refresh == "task" and settings.film.conditioning != "batch":
        raise SettingError(
            "film.refresh=task keeps one modulation for batches of any size: it needs film.conditioning=batch."
        )
    if settings.inner.nesterov and settings.inner.momentum == 0:
        raise SettingError("inner.nesterov needs inner.momentum above 0.")
    position, allowed = settings.warp.position, WARP_POSITIONS[settings.backbone]
    if position != "auto" and position not in allowed:
        raise SettingError(
            f"warp.position={position} does not exist in {settings.backbone}: {' or '.join(allowed)}."
        )
    for name, widths in (("net.widths", settings.net.widths), ("relation.widths", settings.relation.widths)):
        if not widths:
            raise SettingError(f"{name} takes the filters of at least one block.")
    blocks = 4 if settings.backbone == "conv4" else len(settings.net.widths)
    if settings.net.frozen_blocks > blocks:
        raise SettingError(
            f"net.frozen_blocks is {settings.net.frozen_blocks}, but {settings.backbone} has {blocks} blocks."
        )
    if settings.net.frozen_blocks == blocks and (settings.warp.kind == "learned" or settings.film.enabled):
        raise SettingError(
            f"net.frozen_blocks={settings.net.frozen_blocks} leaves no block to warp or to modulate: set "
            "warp.kind=fixed or none, and film.enabled=false."
        )
    if not any(
        (settings.loss.base, settings.loss.inductive, settings.loss.transductive, settings.loss.regulariser)
    ):
        raise SettingError("loss has every term switched off: switch on loss.base or another.")
    if settings.loss.share and not (settings.loss.inductive and settings.loss.transductive):
        raise SettingError("loss.share needs both loss.inductive and loss.transductive.")


class Prepared(NamedTuple):
    """The frozen work of a task, done once: stem features, one-hot labels, relation scores."""

    inner: Tensor  # [items of the inner batch, filters, h, w], support first
    final: Tensor  # [items of the final batch, filters, h, w], query last
    labels: Tensor  # [support, ways]
    scores: Tensor  # [query, ways], or [query, 0] where no loss asks for them


class Learner(nn.Module):
    """`adapt`, `predict` and `meta_loss` of one network and rule.

    `parameters()` are the meta-parameters Phi = {theta, omega, phi, psi}; everything that meta-learning keeps
    frozen is a buffer. The images of a task are bytes, or floats normalised by `images.mean` and `images.std`.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, settings: LearnerSettings, images: ImageSpec, seed: int = 0) -> None:
        super().__init__()
        check_learner(settings)
        self.settings, self.images = settings, images
        self.register_buffer("mean", torch.tensor(images.mean)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(images.std)[:, None, None], persistent=False)
        self.together = True  # all tasks in one vmap; False: one after another
        self.network = encoder(settings, images.channels)
        rows = 1 if settings.head.kind == "unicorn" else settings.ways
        self.head = Head(self.network.width, rows, settings.head.copy == "expand")
        initialise(self.network, settings.init.std, generator(seed, "network"))
        freeze_fixed_parts(self.network, settings)
        self._adapted = [name for name, _ in self.network.tail.named_parameters() if self._adapts(name)]
        self.loss = LearnedLoss(settings.loss, settings.ways, len(self._adapted) + 2)
        rule = generator(seed, "rule")
        for part in self.network.modules():
            if isinstance(part, FiLM):
                initialise(part, settings.init.std, rule, settings.init.uniform_bias)
        initialise(self.loss, settings.init.std, rule, settings.init.uniform_bias)
        with torch.no_grad():
            self.head.weight.normal_(0.0, settings.init.std, generator=rule)
        self.relation: RelationNetwork | None = None
        if settings.loss.transductive:
            relation = RelationNetwork(images.channels, settings.relation)
            initialise(relation, settings.init.std, generator(seed, "relation"))
            self.relation = freeze(relation)  # type: ignore[assignment]

    def adapt(self, task: Task) -> Parameters:
        """theta_J: the parameters adapted to the task, by name (Algorithm 2)."""
        ways = self._check_task(task)
        prepared = self.prepare(ways, task)
        return self._adapt(prepared, self._modulations(prepared))

    def predict(self, task: Task, final_batch: str | None = None) -> Tensor:
        """Query logits [query, ways] after adaptation; `final_batch` overrides inner.final_batch."""
        ways = self._check_task(task)
        return self.logits(self.prepare(ways, task, final_batch=final_batch))

    def meta_loss(self, tasks: Task | Sequence[Task]) -> Tensor:
        """The outer objective of Algorithm 1: the mean query cross-entropy over the tasks, after adaptation.

        `tasks` is a sequence of tasks or one batched task with a leading tasks dimension.
        """
        batch = tasks if isinstance(tasks, Task) else stack_tasks(tasks)
        if not len(batch.support_labels) or batch.support_images.dim() != 5:
            raise DataError("meta_loss takes a sequence of tasks, or one batch of tasks; here is neither.")
        ways = len(batch.support_labels.unique())
        self.check_ways(ways)
        prepared = self.prepare_tasks(batch, ways=ways)
        return self.over_tasks(self.task_loss)(prepared, batch.query_labels).mean()

    forward = meta_loss

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """The meta-parameters by the paper's letter and by name."""
        letter = {}
        for module in self.modules():
            for part in module.parameters(recurse=isinstance(module, (FiLM, LossNetwork))):
                if isinstance(module, FiLM):
                    letter[part] = "psi"
                elif isinstance(module, LossNetwork):
                    letter.setdefault(part, "phi")
                elif isinstance(module, Warp):
                    letter[part] = "omega"
        groups: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
        for name, parameter in self.named_parameters():
            groups[letter.get(parameter, "theta")][name] = parameter
        return groups

    def take_pretrained(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a pre-trained encoder; the rule's own parts keep their start."""
        state = self.network.state_dict()
        own = {name for name, part in self.network.named_modules() if isinstance(part, (FiLM, Warp))}
        missing = [n for n in state if n not in tensors and not any(n.startswith(part + ".") for part in own)]
        wrong = [n for n in state if n in tensors and state[n].shape != tensors[n].shape]
        if missing or wrong:
            raise RunError(
                f"The pre-trained encoder does not fit this network: {', '.join((missing + wrong)[:3])}."
            )
        self.network.load_state_dict({n: tensors.get(n, value) for n, value in state.items()})

    def see(self, images: Tensor) -> Tensor:
        """Images as the network takes them: bytes are normalised, floats are taken to be so already."""
        if images.is_floating_point():
            return images
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.deviation

    def over_tasks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of one task as a function of a batch of tasks."""
        return torch.vmap(function) if self.together else partial(_one_by_one, function)

    @torch.no_grad()
    def prepare(
        self, ways: int, task: Task, features: Tensor | None = None, final_batch: str | None = None
    ) -> Prepared:
        """The frozen work of one task. No gradient flows through it.

        `features` are the stem's of support and query, for a stem whose items do not see each other.
        """
        settings, stem = self.settings.inner, self.network.stem
        support, query = self.see(task.support_images), self.see(task.query_images)
        joint = torch.cat([support, query])
        parts = {"joint": slice(None), "support": slice(len(support)), "query": slice(len(support), None)}
        inner, final = (
            stem(joint[part]) if features is None else features[part]
            for part in (parts[settings.batch], parts[final_batch or settings.final_batch])
        )
        if self.relation is None:
            scores = query.new_zeros(len(query), 0)
        else:
            scores = self.relation(support, task.support_labels, query, ways)
        labels = one_hot(task.support_labels, ways, inner.dtype)
        return Prepared(inner, final, labels, scores)

    def prepare_tasks(self, tasks: Task, features: Tensor | None = None, ways: int | None = None) -> Prepared:
        """The frozen work of a batch of tasks, of the learner's own number of ways if none is given."""
        prepare = partial(self.prepare, ways or self.settings.ways)
        given = (tasks,) if features is None else (tasks, features)
        # On a CPU vmap would only add copies to convolutions that need no gradient.
        on_cpu = tasks.support_images.device.type == "cpu"
        return _stacked(each_in_a_thread(prepare, _split(given))) if on_cpu else self.over_tasks(prepare)(*given)

    def logits(self, prepared: Prepared) -> Tensor:
        """Query logits of one task, from its frozen work."""
        fixed = self._modulations(prepared)
        final = self._forward(self._adapt(prepared, fixed), prepared.final, fixed)
        return final[len(final) - len(prepared.scores) :]

    def task_loss(self, prepared: Prepared, query_labels: Tensor) -> Tensor:
        """L_meta of one task."""
        return F.cross_entropy(self.logits(prepared), query_labels)

    def start(self, ways: int) -> Parameters:
        """theta_0 of a task."""
        tail = dict(self.network.tail.named_parameters())
        theta: Parameters = {TAIL + name: tail[name] for name in self._adapted}
        theta["head.weight"], theta["head.bias"] = self.head.start(ways)
        return theta

    def inner_terms(self, theta: Parameters, prepared: Prepared) -> dict[str, Tensor]:
        """The terms of the learned loss M at `theta`."""
        logits = self._forward(theta, prepared.inner, self._modulations(prepared))
        support = len(prepared.labels)
        return self.loss.terms(logits[:support], prepared.labels, logits[support:], prepared.scores, theta)

    def _adapt(self, prepared: Prepared, fixed: dict[Any, Any] | None) -> Parameters:
        support, ways = prepared.labels.shape

        def inner_loss(theta: Parameters) -> Tensor:
            logits = self._forward(theta, prepared.inner, fixed)
            return self.loss(logits[:support], prepared.labels, logits[support:], prepared.scores, theta)

        return descend(inner_loss, self.start(ways), self.settings.inner)

    def _forward(self, theta: Parameters, features: Tensor, fixed: dict[Any, Any] | None) -> Tensor:
        """Logits of stem features at theta: f = h o z (Equation 10)."""
        tail = {name.removeprefix(TAIL): value for name, value in theta.items() if name.startswith(TAIL)}
        embeddings = functional_call(self.network.tail, tail, (features, fixed))
        return F.linear(embeddings, theta["head.weight"], theta["head.bias"])

    def _modulations(self, prepared: Prepared) -> dict[Any, Any] | None:
        """Where modulations are kept for a whole task, those of theta_0 on the inner batch."""
        if self.settings.film.refresh == "pass" or not self.settings.film.enabled:
            return None
        fixed: dict[Any, Any] = {}
        self._forward(self.start(prepared.labels.shape[1]), prepared.inner, fixed)
        return fixed

    def _adapts(self, name: str) -> bool:
        tail = self.network.tail
        owner = tail.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Warp):
            return False
        in_film = any(isinstance(tail.get_submodule(prefix), FiLM) for prefix in _prefixes(name))
        return self.settings.film.adapt if in_film else True

    def _check_task(self, task: Task) -> int:
        """The number of ways of a single task, or an error that says what is wrong with it."""
        if task.support_images.dim() != 4 or task.query_images.dim() != 4 or not len(task.query_images):
            raise DataError(
                "A task has images of shape [items, channels, height, width], not "
                f"{list(task.support_images.shape)} and {list(task.query_images.shape)}."
            )
        for images, labels in ((task.support_images, task.support_labels), (task.query_images, task.query_labels)):
            if len(images) != len(labels):
                raise DataError(
                    f"A task has a label for each image, not {len(labels)} labels for {len(images)} images."
                )
        labels = task.support_labels.unique().tolist()
        ways = len(labels)
        if labels != list(range(ways)):
            raise DataError(f"The support labels of a task are 0 to ways - 1, not {labels}.")
        self.check_ways(ways)
        return ways

    def check_ways(self, ways: int) -> None:
        """Refuse a number of classes that this learner's rule cannot take."""
        fixed = self.settings.loss.fixes_ways or self.settings.head.kind == "linear"
        if fixed and ways != self.settings.ways:
            part = "learned loss" if self.settings.loss.fixes_ways else "linear head"
            raise DataError(
                f"This learner's {part} has a slot for each of {self.settings.ways} classes; the task has {ways}. "
                f"Give it {self.settings.ways} classes, or train a learner with ways={ways}."
            )
        if ways < 2:
            raise DataError(f"A task needs at least 2 classes; this one has {ways}.")


def encoder(settings: LearnerSettings, channels: int, with_film: bool = True, with_warp: bool = True) -> Network:
    """The network z with the rule's parts in its last block."""
    film: Callable[[int, int], FiLM] | None = None
    if with_film and settings.film.enabled:
        film = partial(FiLM, conditioning=settings.film.conditioning)
    warp: Callable[[int], Warp] | None = None
    if with_warp and settings.warp.kind != "none":
        warp = partial(Warp, kernel=settings.warp.kernel, norm=settings.warp.norm, film=film)
    position: WarpPosition = WARP_POSITIONS[settings.backbone][0]
    if settings.warp.position != "auto":
        position = settings.warp.position
    return build_network(
        settings.backbone, channels, settings.net, film, settings.film.shortcut, warp, warp_position=position
    )


def freeze_fixed_parts(network: Network, settings: LearnerSettings) -> None:
    """Freeze what meta-learning does not touch, and set the batch-norm modes."""
    freeze(network.stem)
    for part in network.tail.modules():
        if isinstance(part, Norm):
            freeze(part)
        elif isinstance(part, Warp) and settings.warp.kind == "fixed":
            omega = part.omega.detach()
            del part.omega
            part.register_buffer("omega", omega)
    set_norm(network.stem, settings.net.stem_norm)
    set_norm(network.tail, settings.net.tail_norm)


def stack_tasks(tasks: Sequence[Task]) -> Task:
    """Tasks of equal size as one batched task."""
    try:
        return Task(*(torch.stack(parts) for parts in zip(*tasks, strict=True)))
    except RuntimeError as error:
        raise DataError(f"Tasks that run together must have the same size: {error}") from None


def _one_by_one(function: Callable[..., Any], *batched: Any) -> Any:
    return _stacked([function(*task) for task in _split(batched)])


def _split(batched: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A tree of tensors with a leading tasks dimension as one tree for each task."""
    count = len(tree_leaves(batched)[0])
    return [tree_map(lambda tensor, i=index: tensor[i], batched) for index in range(count)]


def _stacked(results: list[Any]) -> Any:
    return tree_map(lambda *tensors: torch.stack(tensors), *results)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
