"""Second-order MAML, all of 4-CONV adapted, by npbml and by its peers on the same network and tasks:

    python benchmarks/maml.py

Peers are `higher`, `torchopt` and `learn2learn`, used as in their own examples; one that cannot be imported is
left out and named. First it is checked that all find the same meta-gradient, against the first peer in single and
in double precision; then all are timed in turns. The optimiser's step is in all of them.

The meta-gradient of a whole network of this size is uncertain in single precision, in every library, since it
jumps where activations cross a kink: so npbml and the first peer are compared in double precision too, where
"images nudged" shows how far it jumps.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    WAYS,
    Engine,
    Variant,
    about,
    begin,
    double_errors,
    draw_bars,
    first_steps,
    flat,
    in_double,
    make_learner,
    nudged,
    parser,
    print_double,
    print_remarks,
    print_table,
    random_tasks,
    relative_error,
    save,
    seen_by,
    time_in_turns,
    try_import,
)
from plain import MamlClassifier, take
from torch import Tensor, nn

from npbml.learner.learner import Learner
from npbml.stages.metatrain import as_given
from npbml.tasks import Task


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--filters", type=int, default=32)
    made.add_argument("--size", type=int, default=84)
    made.add_argument("--shots", type=int, default=1)
    made.add_argument("--steps", type=int, default=5, help="inner steps")
    made.add_argument("--lr", type=float, default=0.01, help="the inner learning rate")
    made.add_argument("--meta-batch", type=int, default=4)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--skip", default="", help="words, such as compiled: npbml's variants that are left out")
    made.add_argument("--only", default="", help="words that those of npbml's variants have which are not")
    options = made.parse_args()
    device = begin(options)
    # Batch norm's scale and shift adapt as well: learn2learn and torchopt adapt all of a module or nothing.
    inner = {"steps": options.steps, "test_steps": None, "lr": options.lr}
    own = {"net": {"affine": "inner"}, "inner": inner}
    learner = make_learner("maml", "conv4", options.shots, options.size, device, options.filters, **own)
    tasks = random_tasks(options.meta_batch, options.shots, options.size, device)

    notes: list[str] = []
    left_out: dict[str, str] = {}
    ready = learner.prepare_batch(tasks), tasks.query_labels
    mine = Engine(learner, notes, options.skip, options.only).variants(as_given, (ready,))
    peers, double = peer_variants(learner, seen_by(learner, tasks), left_out)
    exact = copy.deepcopy(learner).double()
    ready = exact.prepare_batch(in_double(tasks)), tasks.query_labels
    double += Engine(exact, notes).eager(as_given, (ready,), "double")
    print("first steps and gradients")
    first_steps([*double, *peers, *mine], device)
    left_out |= {variant.name: variant.failure for variant in [*double, *peers, *mine] if variant.failure}
    print("timing, in turns")
    time_in_turns([*peers, *mine], device, options.rounds)

    title = (
        f"second-order MAML, 4-CONV({options.filters}), {options.size}x{options.size}, 5-way {options.shots}-shot"
    )
    title += f", 15 queries, {options.steps} inner steps, meta-batch {options.meta_batch}"
    result = about(device, options, title=title, notes=notes, left_out=left_out)
    fastest = min((peer.ms for peer in peers if peer.seconds), default=math.nan)
    result["double"] = double_errors(double)
    references = [next((p.found for p in found if p.found is not None), None) for found in (peers, double)]
    result["rows"] = [
        variant.record()
        | {"times_the_fastest_peer": fastest / variant.ms}
        | dict(zip(("error", "error_double"), (relative_error(variant.found, r) for r in references), strict=True))
        for variant in [*peers, *mine]
    ]
    print(f"\n{title}\non {result['device']}; times are medians of a whole meta-step with the optimiser's")
    print(
        "x: as many times as fast as the fastest peer; error: of the whole meta-gradient, against the first row\n"
    )
    keys = ("name", "ms", "times_the_fastest_peer", "peak_mib", "first_s", "error", "error_double")
    headings = ["", "ms", "x", "peak MiB", "first s", "error", "error to double"]
    print_table(headings, [[row[key] for key in keys] for row in result["rows"]])
    print_double(result["double"], double[0].name)
    print_remarks(notes, left_out)
    bars = [(variant.name, variant.ms) for variant in [*peers, *mine]]
    save(
        options.out,
        f"maml-{device.type}",
        result,
        lambda figure: draw_bars(figure, bars, f"{title}\n{result['device']}"),
    )


TaskLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # a task -> its query loss after adaptation


def by_higher(higher: ModuleType, net: nn.Module, lr: float, steps: int) -> TaskLoss:
    sgd = torch.optim.SGD(net.parameters(), lr=lr)

    def query_loss(support: Tensor, labels: Tensor, query: Tensor, query_labels: Tensor) -> Tensor:
        with higher.innerloop_ctx(net, sgd, copy_initial_weights=False) as (fast, optimizer):
            for _ in range(steps):
                optimizer.step(F.cross_entropy(fast(support), labels))
            return F.cross_entropy(fast(query), query_labels)

    return query_loss


def by_torchopt(torchopt: ModuleType, net: nn.Module, lr: float, steps: int) -> TaskLoss:
    optimizer = torchopt.MetaSGD(net, lr=lr)
    start = [(part, torchopt.extract_state_dict(part, by="reference")) for part in (net, optimizer)]

    def query_loss(support: Tensor, labels: Tensor, query: Tensor, query_labels: Tensor) -> Tensor:
        for _ in range(steps):
            optimizer.step(F.cross_entropy(net(support), labels))
        loss = F.cross_entropy(net(query), query_labels)
        for part, state in start:
            torchopt.recover_state_dict(part, state)
        return loss

    return query_loss


def by_learn2learn(learn2learn: ModuleType, net: nn.Module, lr: float, steps: int) -> TaskLoss:
    maml = learn2learn.algorithms.MAML(net, lr=lr)

    def query_loss(support: Tensor, labels: Tensor, query: Tensor, query_labels: Tensor) -> Tensor:
        fast = maml.clone()
        for _ in range(steps):
            fast.adapt(F.cross_entropy(fast(support), labels))
        return F.cross_entropy(fast(query), query_labels)

    return query_loss


PEERS = {"higher": by_higher, "torchopt": by_torchopt, "learn2learn": by_learn2learn}


class Peer:
    """Meta-steps of a peer on a plain module that has a learner's weights: one task after another."""

    def __init__(self, library: ModuleType, name: str, learner: Learner, tasks: Task) -> None:
        self.tasks, images = tasks, tasks.support_images
        net = MamlClassifier(learner.settings.net.filters, images.shape[-1], WAYS).to(images)
        take(net, learner)
        named = dict(net.named_parameters())
        self.parameters = [named[name] for name, _ in learner.named_parameters()]
        self.adam = torch.optim.Adam(self.parameters, lr=0.0)
        inner = learner.settings.inner
        self.query_loss = PEERS[name](library, net, inner.lr, inner.steps)

    def __call__(self) -> None:
        self.adam.zero_grad()
        for task in zip(*self.tasks, strict=True):
            (self.query_loss(*task) / len(self.tasks.query_labels)).backward()
        self.adam.step()

    def gradient(self) -> Tensor:
        return flat(parameter.grad for parameter in self.parameters)


def peer_variants(learner: Learner, tasks: Task, left_out: dict[str, str]) -> tuple[list[Variant], list[Variant]]:
    """The peers that are here, and the first of them in double precision."""
    found = {name: try_import(name, left_out) for name in PEERS}
    makers: list[tuple[str, Callable[[Task], Any]]] = [
        (name, partial(Peer, library, name, learner)) for name, library in found.items() if library is not None
    ]

    def variant(words: str, make: Callable[[Task], Any], given: Task, tf32: bool = False) -> Variant:
        step = make(given)
        return Variant(words, step, step.gradient, tf32)

    peers = [variant(name, make, tasks) for name, make in makers]
    if tasks.support_images.is_cuda:
        peers += [variant(f"{name}, tf32", make, tasks, tf32=True) for name, make in makers]
    double = {"double": in_double(tasks), "double, images nudged": nudged(in_double(tasks))}
    first = makers[:1]
    return peers, [variant(f"{n}, {words}", make, given) for n, make in first for words, given in double.items()]


if __name__ == "__main__":
    main()
