"""A learner: a network and a learning rule, ready to adapt to a task (the paper's Equation 6)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from npbml.errors import DataError, SettingError
from npbml.learner.build import (
    adapted_names,
    begin_network,
    encoder,
    freeze_fixed_parts,
    make_scorer,
    per_step_names,
    take_encoder,
)
from npbml.learner.checks import check_images, check_labels, check_values
from npbml.learner.names import from_file_names, to_file_names
from npbml.learner.prepare import (
    Counts,
    Prepared,
    needs_images,
    normalised,
    prepare_tasks,
    stem_features,
    task_shift,
)
from npbml.learner.settings import ImageSpec, LearnerSettings, check_centred, check_learner
from npbml.nets.functional import call_with, sharing_copy
from npbml.nets.layers import Norm, initialise
from npbml.parts import HEADS
from npbml.randomness import generator, own_random_state
from npbml.rule.descend import Parameters, State, begin, inner_step
from npbml.rule.head import Head
from npbml.rule.loss import BASES, LearnedLoss, one_hot
from npbml.rule.modulate import FiLM
from npbml.rule.objective import Outer, outer_at
from npbml.rule.precondition import Precondition
from npbml.rule.warp import Warp
from npbml.scorers.scorer import Scorer
from npbml.tasks import Task, stack_tasks, unstack

GROUPS = ("theta", "omega", "phi", "psi")
Modulations = dict[Any, Any] | None  # those that are kept for a whole task (see FiLM)
SHIFT = "features.shift"  # of adapted parameters: what is subtracted from features (net.task_mean)
TAIL = "network.tail."  # adapted parameters are named as in `named_parameters()`


class Adaptation(NamedTuple):
    """What an adaptation is made of: functions of one task or, as an engine makes them, of many at once."""

    begin: Callable[[Prepared], State]
    step: Callable[..., State]  # state, prepared, number of the step, order, norm_step -> state
    query_loss: Callable[[Parameters, Prepared, Tensor, int], Tensor]  # theta, prepared, labels, step -> loss


class Learner(nn.Module):
    """`adapt`, `predict` and `meta_loss` of one network and rule.

    `parameters()` are the meta-parameters Phi = {theta, omega, phi, psi}; everything that meta-learning keeps
    frozen is a buffer. The images of a task are bytes, or floats in 0 to 1. Calls change nothing in the learner,
    so that several threads can use one.

    Args:
        settings: Everything that makes the learner what it is.
        images: The size, channels and normalisation of the images it takes.
        seed: Fixes the random start.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, settings: LearnerSettings, images: ImageSpec, seed: int = 0) -> None:
        check_learner(settings)
        super().__init__()
        self.settings, self.images = settings, images
        self.vmapped = True  # made for batches of tasks; see `for_single_tasks`
        self.register_buffer("mean", torch.tensor(images.mean)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(images.std)[:, None, None], persistent=False)
        with own_random_state(seed):
            self._make_parts(seed)
        self.register_state_dict_post_hook(to_file_names)
        self.register_load_state_dict_pre_hook(from_file_names)

    def _make_parts(self, seed: int) -> None:
        settings, steps = self.settings, self.settings.inner.steps
        self.network = encoder(settings, self.images)
        begin_network(self.network, settings, generator(seed, "network"))
        freeze_fixed_parts(self.network, settings)
        scored = settings.loss.has("needs_scores")
        self.scorer = make_scorer(settings, self.images, generator(seed, "relation")) if scored else None
        head = HEADS.get(settings.head.kind)
        symmetric, outputs = settings.symmetric, settings.outputs
        self.head: Head = head(
            self.network.width, None if symmetric else outputs, settings.head, settings.warp.head
        )
        self._adapted = adapted_names(self.network.tail, settings)
        self._by_step = per_step_names(self.network.tail) if settings.net.per_step_norm else []
        start = self.start(1 if symmetric else outputs)
        base = BASES[settings.target]
        self.loss = LearnedLoss(settings.loss, outputs, len(start), steps, base, symmetric)
        shapes = {name: tensor.shape for name, tensor in start.items()}
        self.precondition = Precondition(settings.precondition, shapes, steps, settings.inner.lr, symmetric)
        # Whether an inner step differs from another in more than its state.
        self.depends_on_step = bool(self._by_step) or self.precondition.per_step or settings.loss.has("per_step")
        self._begin_rule(generator(seed, "rule"))

    def _begin_rule(self, random: torch.Generator) -> None:
        init = self.settings.init
        for part in self.network.modules():
            if isinstance(part, FiLM):
                initialise(part, init.std, random, init.uniform_bias)
        self.loss.begin(init.std, random, init.uniform_bias)
        with torch.no_grad():
            self.head.weight.normal_(0.0, init.std, generator=random)
            if init.weights == "xavier":
                nn.init.xavier_uniform_(self.head.weight, generator=random)
        self.precondition.begin(init.std, random)

    def adapt(self, task: Task) -> Parameters:
        """theta_J: the parameters adapted to the task, by name (Algorithm 2)."""
        if self.settings.net.task_mean is not None:
            batch = task.map(lambda part: part.unsqueeze(0))
            check_images(batch, self.images, self.settings.target)
            check_labels(batch)
            pool = task.query_images if task.unlabelled_images is None else task.unlabelled_images
            return self.adapt_features(
                self.features(task.support_images), task.support_labels, self.features(pool)
            )
        return self.trajectory(self.scored(self.prepare(task)))[-1]

    def predict(self, task: Task, final_batch: str | None = None) -> Tensor:
        """Query logits [query, ways] after adaptation; `final_batch` overrides inner.final_batch."""
        if final_batch is not None:
            check_centred(self.settings, final_batch)
        return self.logits(self.prepare(task, final_batch))

    def answer(self, theta: Parameters, images: Tensor) -> Tensor:
        """Logits [n, ways] of images at the parameters that `adapt` found, each answered by itself.

        They are not divided by the `temperature` of the task, which these parameters do not tell.

        Args:
            theta: Adapted parameters.
            images: [n, channels, height, width], bytes or floats in 0 to 1.

        Raises:
            SettingError: The learner's answers depend on the images that are predicted together: use `predict`.
        """
        return self.answer_features(theta, self.features(images))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Frozen features [n, ...] of images, each by itself: what adaptation and answers are computed from.

        They can be kept, and given to `adapt_features`, `answer_features` and `embed_features` as often as wanted.

        Args:
            images: [n, channels, height, width], bytes or floats in 0 to 1.

        Raises:
            SettingError: The learner's answers depend on the images that are predicted together: use `predict`.
        """
        if not self.settings.independent or self.settings.film.refresh == "task":
            raise SettingError(
                "The answers of this learner depend on the images that are predicted together: give predict the "
                "whole task. A learner of npbml-any answers each image by itself."
            )
        check_values(images, self.images)
        return stem_features(self, normalised(self, images))

    def adapt_features(self, support: Tensor, labels: Tensor, unlabelled: Tensor) -> Parameters:
        """`adapt`, from the features of labelled and of unlabelled images.

        Args:
            support: Features of the labelled images, [n, ...].
            labels: Their labels [n], 0 to ways - 1, each of them at least once.
            unlabelled: Features of the unlabelled images, [m, ...]; there may be none.
        """
        known = {"features": torch.cat([support, unlabelled]).unsqueeze(0)}
        if needs_images(self, known) and len(unlabelled):
            raise SettingError("What scores unlabelled images in this learner looks at them: use adapt.")
        ways = int(labels.max()) + 1
        self.check_ways(ways)
        counts = Counts(len(support) + len(unlabelled), len(support), len(unlabelled), 0)
        prepared = unstack(prepare_tasks(self, None, labels.unsqueeze(0), counts, ways, known))[0]
        theta = self.trajectory(self.scored(prepared))[-1]
        if self.settings.net.task_mean is None:
            return theta
        return {**theta, SHIFT: task_shift(self, support, prepared.labels)}

    def adapted_shapes(self, ways: int) -> dict[str, torch.Size]:
        """The names and shapes of what `adapt` gives for a task of so many classes."""
        shapes = {name: tensor.shape for name, tensor in self.start(ways).items()}
        if self.settings.net.task_mean is not None:
            shapes[SHIFT] = self.network.stem.blocks[0].centre.shape  # type: ignore[assignment]
        return shapes

    def answer_features(self, theta: Parameters, features: Tensor) -> Tensor:
        """`answer`, from features: logits [n, ways], not divided by the task's `temperature`."""
        return self._forward(theta, self._shifted(theta, features), None, self.test_steps - 1)

    def embed_features(self, theta: Parameters, features: Tensor) -> Tensor:
        """Adapted embeddings [n, width] of features, from which the head computes the logits."""
        return self._embeddings(theta, self._shifted(theta, features), None, self.test_steps - 1)

    @staticmethod
    def _shifted(theta: Parameters, features: Tensor) -> Tensor:
        return features - theta[SHIFT] if SHIFT in theta else features

    def meta_loss(self, tasks: Task | Sequence[Task], progress: float = 1.0) -> Tensor:
        """The outer objective of Algorithm 1: the mean query loss over the tasks, after adaptation.

        Args:
            tasks: A sequence of tasks, or one batched task with a leading tasks dimension.
            progress: In 0 to 1, how much of meta-training is done, where the objective changes in its course.
        """
        batch = tasks if isinstance(tasks, Task) else stack_tasks(tasks)
        if batch.support_images.dim() != 5 or not len(batch.support_labels):
            raise DataError("meta_loss takes a sequence of tasks, or one batch of tasks; here is neither.")
        prepared = self.prepare_batch(batch)
        loss = partial(self.task_loss, outer=self.outer(progress))
        return torch.vmap(loss)(prepared, batch.query_labels).mean()

    def prepare(self, task: Task, final_batch: str | None = None) -> Prepared:
        """The frozen work of one task, which is checked first."""
        batch = task.map(lambda part: part.unsqueeze(0))
        return unstack(self.prepare_batch(batch, final_batch))[0]

    def prepare_batch(self, batch: Task, final_batch: str | None = None) -> Prepared:
        """The frozen work of a batch of tasks, which is checked first."""
        check_images(batch, self.images, self.settings.target)
        outputs = self.settings.outputs
        if self.settings.target == "classes":
            outputs = check_labels(batch)
            self.check_ways(outputs)
        own_pool, queries = batch.unlabelled_images, batch.query_images.shape[1]
        between = [] if own_pool is None else [own_pool]
        images = torch.cat([batch.support_images, *between, batch.query_images], 1)
        pool = queries if own_pool is None else own_pool.shape[1]
        counts = Counts(images.shape[1], batch.support_labels.shape[1], pool, queries)
        return prepare_tasks(self, images, batch.support_labels, counts, outputs, final_batch=final_batch)

    def outer(self, progress: float) -> Outer:
        """The outer objective when `progress`, in 0 to 1, of the meta-steps are done."""
        return outer_at(self.settings.outer, self.settings.inner.steps, progress)

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """The meta-parameters by the paper's letter and by name: theta, what is adapted or starts a task; omega,
        the optimiser's; phi, the loss's and the scorer's; psi, the modulation's."""
        letter: dict[nn.Parameter, str] = {}
        # Modulation is the innermost: it stands in warps and in loss networks too.
        kinds = ((FiLM, "psi"), (LearnedLoss, "phi"), (Scorer, "phi"), (Warp, "omega"), (Precondition, "omega"))
        for kind, name in kinds:
            for part in (
                parameter
                for module in self.modules()
                if isinstance(module, kind)
                for parameter in module.parameters()
            ):
                letter.setdefault(part, name)
        if self.head.warp is not None:
            letter[self.head.warp] = "omega"
        groups: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
        for name, parameter in self.named_parameters():
            groups[letter.get(parameter, "theta")][name] = parameter
        return groups

    def logits(self, prepared: Prepared) -> Tensor:
        """Query logits of one task after adaptation, from its frozen work."""
        prepared = self.scored(prepared)
        fixed = self.modulations(prepared)
        theta = self.trajectory(prepared, fixed)[-1]
        logits = self.query_logits(theta, prepared, fixed, self.test_steps - 1)
        support, ways = prepared.labels.shape
        temperature = self.temperature(ways, support, len(prepared.scores))
        return logits if temperature == 1.0 else logits / temperature

    def temperature(self, ways: int, support: int, pool: int) -> float:
        """By what the logits of a task are divided that has this many classes, labelled and unlabelled items."""
        return self.settings.head.temperature_of(ways, support, pool)

    def scored(self, prepared: Prepared) -> Prepared:
        """The frozen work of one task with the scores of its pool, where the scorer learns with the rule."""
        if self.scorer is None or not self.scorer.learned or not len(prepared.scores):
            return prepared
        support, ways = prepared.labels.shape
        embeddings = self._embeddings(self.start(ways), prepared.inner, self.modulations(prepared))
        scores = self.scorer.scores(embeddings[:support], prepared.labels, embeddings[support:])
        return prepared._replace(scores=scores)

    def task_loss(self, prepared: Prepared, query_labels: Tensor, outer: Outer | None = None) -> Tensor:
        """L_meta of one task; by the objective at the end of meta-training, if none is given."""
        outer = outer or self.outer(1.0)
        if self.settings.outer.objective == "trajectory":
            return self._trajectory_loss(prepared, query_labels, outer)
        return self.unrolled_loss(prepared, query_labels, outer)

    def forward(self, *arguments: Any, call: str = "meta_loss", **named: Any) -> Any:
        """`meta_loss`, or another of the methods, for calls with other tensors (see `call_with`)."""
        return getattr(self, call)(*arguments, **named)

    def start(self, outputs: int) -> Parameters:
        """theta_0 of a task."""
        tail = dict(self.network.tail.named_parameters())
        theta: Parameters = {TAIL + name: tail[name] for name in self._adapted}
        if self.settings.inner.layers != "body":
            theta["head.weight"], theta["head.bias"] = self.head.start(outputs)
        return theta

    def trajectory(
        self, prepared: Prepared, fixed: Modulations = None, steps: int | None = None, order: int = 2
    ) -> list[Parameters]:
        """theta_0 to theta_J, of as many steps as at test if none are given, then those of the critic."""
        fixed = self.modulations(prepared) if fixed is None else fixed
        return self.walk(self.adaptation(fixed), prepared, steps or self.test_steps, order)

    def adaptation(self, fixed: Modulations = None) -> Adaptation:
        """What adaptation is made of, for one task."""
        return Adaptation(self.begin, partial(self.advance, fixed=fixed), partial(self.query_loss, fixed=fixed))

    def walk(self, adaptation: Adaptation, prepared: Prepared, steps: int, order: int = 2) -> list[Parameters]:
        """The points of an adaptation: theta_0 to theta_J, then those of the critic's steps."""
        state = adaptation.begin(prepared)
        points = [state.theta]
        exact = self.settings.outer.second_order_steps
        for step in range(steps):
            early = exact is not None and step < steps - exact
            state = adaptation.step(state, prepared, step, 1 if early else order)
            points.append(state.theta)
        if self.loss.critic is not None and prepared.scores.shape[-2]:
            state = begin(state.theta, self.settings.inner)
            for step in range(self.settings.loss.critic_steps):
                state = adaptation.step(state, prepared, step, order, norm_step=steps - 1)
                points.append(state.theta)
        return points

    def begin(self, prepared: Prepared) -> State:
        """The state of a task before its first step."""
        return begin(self.start(prepared.labels.shape[-1]), self.settings.inner)

    def advance(
        self,
        state: State,
        prepared: Prepared,
        step: int,
        order: int = 2,
        norm_step: int | None = None,
        fixed: Modulations = None,
    ) -> State:
        """One inner step of one task: on the loss M or, with `norm_step`, on the critic, whose predictions are
        made with the batch norm of that step."""

        def loss(theta: Parameters, step: int) -> Tensor:
            if norm_step is None or self.loss.critic is None:
                terms = self.inner_terms(theta, prepared, fixed, step)
                return sum(terms.values(), prepared.labels.new_zeros(()))
            if self.settings.independent and self.settings.inner.batch == "joint":
                logits = self._forward(theta, prepared.inner, fixed, norm_step)
                return self.loss.critic(logits[len(prepared.labels) :])
            return self.loss.critic(self.query_logits(theta, prepared, fixed, norm_step))

        return inner_step(loss, state, self.settings.inner, self.precondition, prepared.noise, step, order)

    def inner_terms(
        self, theta: Parameters, prepared: Prepared, fixed: Modulations = None, step: int = 0
    ) -> dict[str, Tensor]:
        """The terms of the learned loss M at theta."""
        logits = self._forward(theta, prepared.inner, fixed, step)
        labels, scores, support = prepared.labels, prepared.scores, len(prepared.labels)
        return self.loss.terms(logits[:support], labels, logits[support:], scores, theta, step)

    def unrolled_loss(
        self, prepared: Prepared, query_labels: Tensor, outer: Outer, adaptation: Adaptation | None = None
    ) -> Tensor:
        """The query loss at points of the inner trajectory, through which the gradient flows.

        Of one task; or of many that are scored already, where `adaptation` is that of many.
        """
        if adaptation is None:
            prepared = self.scored(prepared)
            adaptation = self.adaptation(self.modulations(prepared))
        steps = self.settings.inner.steps
        points = self.walk(adaptation, prepared, steps, outer.order)
        losses = [
            weight
            * adaptation.query_loss(points[place], prepared, query_labels, min(place % len(points), steps) - 1)
            for place, weight in outer.weights.items()
        ]
        return torch.stack(losses).sum(0)

    def _trajectory_loss(self, prepared: Prepared, query_labels: Tensor, outer: Outer) -> Tensor:
        """WarpGrad: the rule learns one step ahead of every point visited, the initialisation from the end.

            sum_j L_Q(theta_j - P grad M(theta_j)) + L_Q(theta_J(theta_0))

        In the first term theta is held, in the second omega, phi and psi.
        """
        groups = {letter: {n: p.detach() for n, p in part.items()} for letter, part in self.groups().items()}
        rule = {name: p for letter, part in groups.items() if letter != "theta" for name, p in part.items()}
        task = (prepared, query_labels, outer)
        ahead = call_with(self, groups["theta"], *task, call="_look_ahead_loss")
        return ahead + call_with(self, rule, *task, call="unrolled_loss")

    def _look_ahead_loss(self, prepared: Prepared, query_labels: Tensor, outer: Outer) -> Tensor:
        """The query loss one step ahead of every point visited, with no gradient along the way."""
        prepared, settings = self.scored(prepared), self.settings
        adaptation = self.adaptation(self.modulations(prepared))
        with torch.no_grad():
            visited = self.walk(adaptation, prepared, settings.inner.steps)[:-1]
        losses = []
        for step, theta in enumerate(visited):
            ahead = adaptation.step(begin(theta, settings.inner), prepared, step, outer.order).theta
            if settings.outer.hessian_free:
                ahead = {name: tensor.detach() for name, tensor in ahead.items()}
            losses.append(adaptation.query_loss(ahead, prepared, query_labels, step))
        return torch.stack(losses).sum()

    def query_loss(
        self, theta: Parameters, prepared: Prepared, query_labels: Tensor, step: int, fixed: Modulations = None
    ) -> Tensor:
        """The loss of the final batch's predictions at theta, with the batch norm of a step."""
        logits = self._forward(theta, prepared.final, fixed, step)
        target = self.target(query_labels, prepared.labels.shape[1], logits.dtype)
        if self.settings.outer.items == "all":
            target = torch.cat([prepared.labels, target])
        return self.loss.base_loss(logits[-len(target) :], target).mean()

    def query_logits(self, theta: Parameters, prepared: Prepared, fixed: Modulations, step: int) -> Tensor:
        """The query logits at theta, [query, outputs], with the batch norm of a step."""
        logits = self._forward(theta, prepared.final, fixed, step)
        return logits[len(logits) - len(prepared.queries) :]

    def target(self, labels: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """[..., n, outputs]: labels [..., n] one-hot, or values [..., n] as they are"""
        return one_hot(labels, outputs, dtype) if self.settings.target == "classes" else labels.unsqueeze(-1)

    @property
    def test_steps(self) -> int:
        """Inner steps on validation and test tasks."""
        return self.settings.inner.test_steps or self.settings.inner.steps

    def _forward(self, theta: Parameters, features: Tensor, fixed: Modulations, step: int = 0) -> Tensor:
        """Logits of stem features at theta: f = h o z (Equation 10)."""
        embeddings = self._embeddings(theta, features, fixed, step)
        head = self.head.start(self.settings.outputs)
        if "head.weight" in theta:
            head = theta["head.weight"], theta["head.bias"]
        return self.head(embeddings, *head)

    def _embeddings(self, theta: Parameters, features: Tensor, fixed: Modulations, step: int = 0) -> Tensor:
        """z of stem features at theta, computed in their precision, in the precision of the parameters."""
        tail = {name.removeprefix(TAIL): value for name, value in theta.items() if name.startswith(TAIL)}
        tail |= {name: attrgetter(name)(self.network.tail)[step] for name in self._by_step}
        if features.dtype != self.head.weight.dtype:
            whole = {
                **dict(self.network.tail.named_parameters()),
                **dict(self.network.tail.named_buffers()),
                **tail,
            }
            tail = {name: self._as_computed(value, features) for name, value in whole.items()}
        return call_with(self.network.tail, tail, features, fixed).to(self.head.weight.dtype)

    def _as_computed(self, value: Tensor, features: Tensor) -> Tensor:
        """A tensor of the tail in the features' precision; filters have channels last where vmap is not about."""
        if self.vmapped or value.dim() != 4:
            return value.to(features.dtype)
        return value.to(features.dtype, memory_format=torch.channels_last)

    def modulations(self, prepared: Prepared) -> Modulations:
        """Where modulations are kept for a whole task, those of theta_0 on the inner batch."""
        if self.settings.film.refresh == "pass" or not self.settings.film.enabled:
            return None
        fixed: dict[Any, Any] = {}
        self._forward(self.start(prepared.labels.shape[1]), prepared.inner, fixed)
        return fixed

    def for_single_tasks(self) -> "Learner":
        """The same tensors in other modules, made for tasks one at a time instead of in one vmap."""
        other = sharing_copy(self)
        other.vmapped = False
        for part in other.modules():
            if isinstance(part, Norm):
                part.adapts = False  # that is about batches of tasks
        return other

    def take_pretrained(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a pre-trained encoder; the rule's own parts keep their start."""
        take_encoder(self.network, tensors)
        if self.scorer is not None and (tail := self.scorer.tail) is not None:
            tail.load_state_dict({name: tensors[f"tail.{name}"] for name in tail.state_dict()})

    def take_scorer(self, tensors: Mapping[str, Tensor]) -> None:
        """Score by what the scorer's own stage has trained."""
        if self.scorer is not None:
            self.scorer.take_trained(tensors)

    def check_ways(self, ways: int) -> None:
        """Refuse a number of classes that this learner's rule cannot take."""
        slots = {
            "learned loss": self.settings.loss.fixes_ways,
            f"{self.settings.head.kind} head": HEADS.fact(self.settings.head.kind, "fixes_ways"),
            "warp of the logits": self.settings.warp.head,
            "preconditioner": self.precondition.fixes_ways,
        }
        if any(slots.values()) and ways != self.settings.ways and not self.settings.symmetric:
            part = next(name for name, there in slots.items() if there)
            raise DataError(
                f"This learner's {part} has a slot for each of {self.settings.ways} classes; the task has {ways}. "
                f"Give it {self.settings.ways} classes, or train a learner with ways={ways}."
            )
        if ways < 2:
            raise DataError(f"A task needs at least 2 classes; this one has {ways}.")
