"""A learner: a network and a learning rule, ready to adapt to a task (the paper's Equation 6)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from npbml.data.tasks import Task
from npbml.errors import DataError
from npbml.learner.batches import Acts, Prepared, one_by_one, split, stack_tasks, stacked
from npbml.learner.build import own_norms
from npbml.learner.frozen import FrozenWork
from npbml.learner.settings import ImageSpec, LearnerSettings, check_centred, check_learner
from npbml.nets.layers import Norm, initialise
from npbml.randomness import generator
from npbml.rule.descend import Parameters, State, begin, inner_step
from npbml.rule.head import Head
from npbml.rule.loss import BASES, LearnedLoss, one_hot
from npbml.rule.modulate import FiLM
from npbml.rule.objective import Outer, outer_at
from npbml.rule.precondition import Precondition
from npbml.rule.warp import Warp
from npbml.threads import each_in_a_thread

GROUPS = ("theta", "omega", "phi", "psi")
Fixed = dict[Any, Any] | None  # modulations that are kept for a whole task (see FiLM)
TAIL = "network.tail."  # adapted parameters are named as in `named_parameters()`


class Learner(FrozenWork):
    """`adapt`, `predict` and `meta_loss` of one network and rule.

    `parameters()` are the meta-parameters Phi = {theta, omega, phi, psi}; everything that meta-learning keeps
    frozen is a buffer. The images of a task are bytes, or floats normalised by `images.mean` and `images.std`.
    """

    def __init__(self, settings: LearnerSettings, images: ImageSpec, seed: int = 0) -> None:
        check_learner(settings)
        super().__init__(settings, images, seed)
        self.together = True  # all tasks in one vmap; False: one after another
        self.head = Head(self.network.width, settings.outputs, settings.head, settings.warp.head)
        self._adapted = [name for name, _ in self.network.tail.named_parameters() if self._adapts(name)]
        self._by_step = self._names_by_step()
        start, steps = self.start(settings.outputs), settings.inner.steps
        self.loss = LearnedLoss(settings.loss, settings.outputs, len(start), steps, BASES[settings.target])
        shapes = {name: tensor.shape for name, tensor in start.items()}
        self.precondition = Precondition(settings.precondition, shapes, steps, settings.inner.lr)
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
        outputs = self._check_task(task)
        return self.trajectory(self.prepare(outputs, task))[-1]

    def predict(self, task: Task, final_batch: str | None = None) -> Tensor:
        """Query logits [query, ways] after adaptation; `final_batch` overrides inner.final_batch."""
        outputs = self._check_task(task)
        if final_batch is not None:
            check_centred(self.settings, final_batch)
        return self.logits(self.prepare(outputs, task, final_batch=final_batch))

    def meta_loss(self, tasks: Task | Sequence[Task], progress: float = 1.0) -> Tensor:
        """The outer objective of Algorithm 1: the mean query loss over the tasks, after adaptation.

        `tasks` is a sequence of tasks or one batched task with a leading tasks dimension. Where the objective
        changes in the course of meta-training, `progress` in 0..1 says when.
        """
        batch = tasks if isinstance(tasks, Task) else stack_tasks(tasks)
        if not len(batch.support_labels) or batch.support_images.dim() != 5:
            raise DataError("meta_loss takes a sequence of tasks, or one batch of tasks; here is neither.")
        outputs = self._check_labels(batch.support_labels)
        prepared = self.prepare_tasks(batch, outputs=outputs)
        loss = partial(self.task_loss, outer=self.outer(progress))
        return self.over_tasks(loss)(prepared, batch.query_labels).mean()

    def outer(self, progress: float) -> Outer:
        """The outer objective when `progress`, in 0..1, of the meta-steps are done."""
        return outer_at(self.settings.outer, self.settings.inner.steps, progress)

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """The meta-parameters by the paper's letter and by name: theta, what is adapted or starts a task; omega,
        the optimiser's; phi, the loss's; psi, the modulation's."""
        letter: dict[nn.Parameter, str] = {}
        # Modulation is the innermost: it stands in warps and in loss networks too.
        for kind, name in ((FiLM, "psi"), (LearnedLoss, "phi"), (Warp, "omega"), (Precondition, "omega")):
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

    @property
    def depends_on_step(self) -> bool:
        """Whether an inner step differs from another in more than its state."""
        return bool(self._by_step) or self.precondition.per_step or self.loss.adaptive is not None

    def over_tasks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of one task as a function of a batch of tasks."""
        return torch.vmap(function) if self.together else partial(one_by_one, function)

    @torch.no_grad()
    def prepare(
        self,
        outputs: int,
        task: Task,
        known: Mapping[str, Tensor] | None = None,
        final_batch: str | None = None,
    ) -> Prepared:
        """The frozen work of one task. No gradient flows through it.

        `known` is what `alone` makes of support and query, as far as that has been computed.
        """
        final_batch = final_batch or self.settings.inner.final_batch
        inner, final, scores = self.features_and_scores(outputs, task, known or {}, final_batch)
        labels = self._target(task.support_labels, outputs, self.mean.dtype)
        # Without a draw the middle of the range: of random masks, the likelier value.
        noise = self.mean.new_full((self.precondition.noise,), 0.5)
        return Prepared(inner, final, labels, scores, noise)

    def prepare_tasks(
        self, tasks: Task, known: Mapping[str, Tensor] | None = None, outputs: int | None = None
    ) -> Prepared:
        """The frozen work of a batch of tasks, of the learner's own number of ways if none is given.

        `known` is what `alone` has made of their images, [tasks, items, ...].
        """
        prepare = partial(self.prepare, outputs or self.settings.outputs)
        # vmap would only add copies to convolutions that need no gradient, and take memory for all tasks at once.
        given = split((tasks, dict(known or {})))
        return stacked(each_in_a_thread(prepare, given, tasks.support_images.device.type == "cpu"))

    def logits(self, prepared: Prepared) -> Tensor:
        """Query logits of one task after adaptation, from its frozen work."""
        fixed = self._modulations(prepared)
        theta = self.trajectory(prepared, fixed)[-1]
        return self._query_logits(theta, prepared, fixed, self._test_steps - 1)

    def task_loss(self, prepared: Prepared, query_labels: Tensor, outer: Outer | None = None) -> Tensor:
        """L_meta of one task; by the objective at the end of meta-training, if none is given."""
        outer = outer or self.outer(1.0)
        if self.settings.outer.objective == "trajectory":
            return self._on_the_way(prepared, query_labels, outer)
        return self.unrolled(prepared, query_labels, outer)

    def forward(self, *arguments: Any, call: str = "meta_loss", **named: Any) -> Any:
        """`meta_loss`, or another of the methods: it is what torch.func.functional_call calls."""
        return getattr(self, call)(*arguments, **named)

    def start(self, outputs: int) -> Parameters:
        """theta_0 of a task."""
        tail = dict(self.network.tail.named_parameters())
        theta: Parameters = {TAIL + name: tail[name] for name in self._adapted}
        if self.settings.inner.layers != "body":
            theta["head.weight"], theta["head.bias"] = self.head.start(outputs)
        return theta

    def trajectory(
        self, prepared: Prepared, fixed: Fixed = None, steps: int | None = None, order: int = 2
    ) -> list[Parameters]:
        """theta_0 to theta_J, of as many steps as at test if none are given, then those of the critic."""
        fixed = self._modulations(prepared) if fixed is None else fixed
        return self.walk(self.acts(fixed), prepared, steps or self._test_steps, order)

    def acts(self, fixed: Fixed = None) -> Acts:
        """What adaptation is made of, for one task."""
        return Acts(self.begin, partial(self.advance, fixed=fixed), partial(self.query_loss, fixed=fixed))

    def walk(self, acts: Acts, prepared: Prepared, steps: int, order: int = 2) -> list[Parameters]:
        """The points of an adaptation: theta_0 to theta_J, then those of the critic's steps."""
        state = acts.begin(prepared)
        points = [state.theta]
        exact = self.settings.outer.second_order_steps
        for step in range(steps):
            early = exact is not None and step < steps - exact
            state = acts.advance(state, prepared, step, 1 if early else order)
            points.append(state.theta)
        if self.loss.critic is not None:
            state = begin(state.theta, self.settings.inner)
            for step in range(self.settings.loss.critic_steps):
                state = acts.advance(state, prepared, step, order, norm_step=steps - 1)
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
        fixed: Fixed = None,
    ) -> State:
        """One inner step of one task: on the loss M or, with `norm_step`, on the critic, whose predictions are
        made with the batch norm of that step."""

        def loss(theta: Parameters, step: int) -> Tensor:
            if norm_step is None or self.loss.critic is None:
                terms = self._inner_terms(theta, prepared, fixed, step)
                return sum(terms.values(), prepared.labels.new_zeros(()))
            return self.loss.critic(self._query_logits(theta, prepared, fixed, norm_step))

        return inner_step(loss, state, self.settings.inner, self.precondition, prepared.noise, step, order)

    def inner_terms(self, theta: Parameters, prepared: Prepared, step: int = 0) -> dict[str, Tensor]:
        """The terms of the learned loss M at `theta`."""
        return self._inner_terms(theta, prepared, self._modulations(prepared), step)

    def _inner_terms(self, theta: Parameters, prepared: Prepared, fixed: Fixed, step: int) -> dict[str, Tensor]:
        logits = self._forward(theta, prepared.inner, fixed, step)
        labels, scores, support = prepared.labels, prepared.scores, len(prepared.labels)
        return self.loss.terms(logits[:support], labels, logits[support:], scores, theta, step)

    def unrolled(self, prepared: Prepared, query_labels: Tensor, outer: Outer, acts: Acts | None = None) -> Tensor:
        """The query loss at points of the inner trajectory, through which the gradient flows.

        Of one task; or of many, where `acts` are those of many.
        """
        acts, steps = acts or self.acts(self._modulations(prepared)), self.settings.inner.steps
        points = self.walk(acts, prepared, steps, outer.order)
        losses = [
            weight * acts.score(points[place], prepared, query_labels, min(place % len(points), steps) - 1)
            for place, weight in outer.weights.items()
        ]
        return torch.stack(losses).sum(0)

    def _on_the_way(self, prepared: Prepared, query_labels: Tensor, outer: Outer) -> Tensor:
        """WarpGrad: the rule learns one step ahead of every point visited, the initialisation from the end.

            sum_j L_Q(theta_j - P grad M(theta_j)) + lambda L_Q(theta_J(theta_0))

        In the first term theta is held, in the second omega, phi and psi.
        """
        groups = {letter: {n: p.detach() for n, p in part.items()} for letter, part in self.groups().items()}
        rule = {name: p for letter, part in groups.items() if letter != "theta" for name, p in part.items()}
        task = (prepared, query_labels, outer)
        ahead = functional_call(self, groups["theta"], task, {"call": "_look_ahead"})
        end = functional_call(self, rule, task, {"call": "unrolled"})
        return ahead + self.settings.outer.start_weight * end

    def _look_ahead(self, prepared: Prepared, query_labels: Tensor, outer: Outer) -> Tensor:
        """The query loss one step ahead of every point visited, with no gradient along the way."""
        acts, settings = self.acts(self._modulations(prepared)), self.settings
        with torch.no_grad():
            visited = self.walk(acts, prepared, settings.inner.steps)[:-1]
        losses = []
        for step, theta in enumerate(visited):
            there = acts.advance(begin(theta, settings.inner), prepared, step, outer.order).theta
            if settings.outer.hessian_free:
                there = {name: tensor.detach() for name, tensor in there.items()}
            losses.append(acts.score(there, prepared, query_labels, step))
        return torch.stack(losses).sum()

    def query_loss(
        self, theta: Parameters, prepared: Prepared, query_labels: Tensor, step: int, fixed: Fixed = None
    ) -> Tensor:
        """The loss of the final batch's predictions at theta, with the batch norm of a step."""
        logits = self._forward(theta, prepared.final, fixed, step)
        target = self._target(query_labels, prepared.labels.shape[1], logits.dtype)
        if self.settings.outer.items == "all":
            target = torch.cat([prepared.labels, target])
        return self.loss.base(logits[-len(target) :], target).mean()

    def _query_logits(self, theta: Parameters, prepared: Prepared, fixed: Fixed, step: int) -> Tensor:
        return self._forward(theta, prepared.final, fixed, step)[-len(prepared.scores) :]

    def _target(self, labels: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """[n, outputs]: labels [n] one-hot, or values [n] as they are"""
        return one_hot(labels, outputs, dtype) if self.settings.target == "classes" else labels.unsqueeze(-1)

    @property
    def _test_steps(self) -> int:
        return self.settings.inner.test_steps or self.settings.inner.steps

    def _forward(self, theta: Parameters, features: Tensor, fixed: Fixed, step: int = 0) -> Tensor:
        """Logits of stem features at theta: f = h o z (Equation 10).

        The tail computes in the precision of the features, the head in that of the parameters.
        """
        tail = {name.removeprefix(TAIL): value for name, value in theta.items() if name.startswith(TAIL)}
        tail |= {name: attrgetter(name)(self.network.tail)[step] for name in self._by_step}
        if features.dtype != self.head.weight.dtype:
            whole = {
                **dict(self.network.tail.named_parameters()),
                **dict(self.network.tail.named_buffers()),
                **tail,
            }
            tail = {name: self._as_computed(value, features) for name, value in whole.items()}
        embeddings = functional_call(self.network.tail, tail, (features, fixed))
        head = self.head.start(self.settings.outputs)
        if "head.weight" in theta:
            head = theta["head.weight"], theta["head.bias"]
        return self.head(embeddings.to(head[0].dtype), *head)

    def _as_computed(self, value: Tensor, features: Tensor) -> Tensor:
        """A tensor of the tail in the features' precision; filters have channels last where vmap is not about."""
        if self.together or value.dim() != 4:
            return value.to(features.dtype)
        return value.to(features.dtype, memory_format=torch.channels_last)

    def _modulations(self, prepared: Prepared) -> Fixed:
        """Where modulations are kept for a whole task, those of theta_0 on the inner batch."""
        if self.settings.film.refresh == "pass" or not self.settings.film.enabled:
            return None
        fixed: dict[Any, Any] = {}
        self._forward(self.start(prepared.labels.shape[1]), prepared.inner, fixed)
        return fixed

    def _names_by_step(self) -> list[str]:
        """Parameters of the tail that have a row for each inner step."""
        if not self.settings.net.per_step_norm:
            return []
        return [f"{name}.{part}" for name in own_norms(self.network.tail) for part in ("weight", "bias")]

    def _adapts(self, name: str) -> bool:
        """Whether the inner loop changes this parameter of the tail."""
        settings, tail = self.settings, self.network.tail
        place = name.split(".")
        block = int(place[1]) if place[0] == "blocks" else len(tail.blocks)
        if settings.inner.layers == "head" or block < len(tail.blocks) - (
            settings.inner.last_blocks or len(tail.blocks)
        ):
            return False
        owners = [tail.get_submodule(prefix) for prefix in _prefixes(name)]
        if any(isinstance(owner, FiLM) for owner in owners):
            return settings.film.adapt
        if any(isinstance(owner, Warp) for owner in owners):
            return False
        return settings.net.affine == "inner" if isinstance(owners[-1], Norm) else True

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
        return self._check_labels(task.support_labels)

    def _check_labels(self, support_labels: Tensor) -> int:
        """How many outputs tasks with these support labels need."""
        if self.settings.target == "values":
            return self.settings.outputs
        labels = support_labels.unique().tolist()
        ways = len(labels)
        if labels != list(range(ways)):
            raise DataError(f"The support labels of a task are 0 to ways - 1, not {labels}.")
        self.check_ways(ways)
        return ways

    def check_ways(self, ways: int) -> None:
        """Refuse a number of classes that this learner's rule cannot take."""
        slots = {
            "learned loss": self.settings.loss.fixes_ways,
            "linear head": self.settings.head.kind == "linear",
            "warp of the logits": self.settings.warp.head,
            "preconditioner": self.precondition.fixes_ways,
        }
        if any(slots.values()) and ways != self.settings.ways:
            part = next(name for name, there in slots.items() if there)
            raise DataError(
                f"This learner's {part} has a slot for each of {self.settings.ways} classes; the task has {ways}. "
                f"Give it {self.settings.ways} classes, or train a learner with ways={ways}."
            )
        if ways < 2:
            raise DataError(f"A task needs at least 2 classes; this one has {ways}.")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
