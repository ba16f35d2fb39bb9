"""Laws C19 to C22: what a head of identical classes can and cannot learn from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.errors import SettingError
from npbml.learner.learner import Learner
from npbml.parts import HEADS
from npbml.rule.head import UnicornHead
from npbml.rule.settings import HeadSettings
from npbml.tasks import Task

CONV = "network.tail.blocks.0.unit.conv.weight"
RAW: dict[str, Any] = {"regulariser": False}
SOFTMAX: dict[str, Any] = {"regulariser": False, "inputs": "softmax"}


def other_head(learner: Learner, shift: float) -> None:
    with torch.no_grad():
        learner.head.weight.add_(shift * torch.linspace(-1, 2, learner.head.weight.numel(), dtype=torch.float64))
        learner.head.bias.sub_(shift)


def shift_by_the_head(learner: Learner, task: Task) -> float:
    """How far the query softmax moves when another (w, b) is copied to the classes."""
    before = learner.predict(task).softmax(-1)
    other_head(learner, 0.5)
    return (learner.predict(task).softmax(-1) - before).abs().max().item()


def head_gradient(gradient: dict[str, Tensor]) -> float:
    return max(gradient[name].abs().max().item() for name in ("head.weight", "head.bias"))


def first_encoder_step(make_learner: Callable[..., Learner], task: Task, **changes: Any) -> float:
    """How far the first inner step moves the encoder."""
    learner = make_learner(inner={"steps": 1, "weight_decay": 0.0}, **changes)
    return (learner.adapt(task)[CONV] - learner.start(3)[CONV]).abs().max().item()


def relabelled_columns(learner: Learner, task: Task) -> float:
    """How far the logits of a relabelled task are from the permuted logits of the task."""
    permutation = torch.tensor([2, 0, 1])
    other = task._replace(support_labels=permutation[task.support_labels])
    return (learner.predict(other)[:, permutation] - learner.predict(task)).abs().max().item()


def test_c19_under_cross_entropy_the_query_softmax_does_not_see_w_and_b(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], ce_only: dict[str, Any]
) -> None:
    assert shift_by_the_head(make_learner(loss=ce_only), make_task()) < 1e-10


def test_c19_under_cross_entropy_w_and_b_have_no_meta_gradient(
    make_learner: Callable[..., Learner],
    make_task: Callable[..., Task],
    meta_gradient: Callable[..., dict[str, Tensor]],
    ce_only: dict[str, Any],
) -> None:
    gradient = meta_gradient(make_learner(loss=ce_only), [make_task()])
    assert head_gradient(gradient) < 1e-14
    assert gradient[CONV].abs().max() > 1e-4


def test_c20_under_cross_entropy_the_first_step_moves_the_head_alone(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], ce_only: dict[str, Any]
) -> None:
    task = make_task()
    assert first_encoder_step(make_learner, task, loss=ce_only) < 1e-14
    learner = make_learner(loss=ce_only, inner={"steps": 1})
    assert (learner.adapt(task)["head.weight"] - learner.head.weight).abs().max() > 1e-3
    second = make_learner(loss=ce_only, inner={"steps": 2, "weight_decay": 0.0}).adapt(task)
    assert (second[CONV] - learner.start(3)[CONV]).abs().max() > 1e-4


def test_c20_a_linear_head_moves_the_encoder_in_the_first_step(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], ce_only: dict[str, Any]
) -> None:
    assert first_encoder_step(make_learner, make_task(), loss=ce_only, head={"kind": "linear"}) > 1e-4


def test_c21_under_cross_entropy_permuted_labels_permute_the_columns(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], ce_only: dict[str, Any]
) -> None:
    assert relabelled_columns(make_learner(loss=ce_only), make_task()) < 1e-10


def test_c21_a_linear_head_ties_classes_to_their_slots(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task], ce_only: dict[str, Any]
) -> None:
    assert relabelled_columns(make_learner(loss=ce_only, head={"kind": "linear"}), make_task()) > 1e-2


def test_c22_losses_of_raw_logits_break_c19_to_c21(
    make_learner: Callable[..., Learner],
    make_task: Callable[..., Task],
    meta_gradient: Callable[..., dict[str, Tensor]],
) -> None:
    task = make_task()
    assert shift_by_the_head(make_learner(loss=RAW), task) > 1e-4
    assert head_gradient(meta_gradient(make_learner(loss=RAW), [task])) > 1e-4
    assert first_encoder_step(make_learner, task, loss=RAW) > 1e-4
    assert relabelled_columns(make_learner(loss=RAW), task) > 1e-4


def test_c22_losses_of_probabilities_restore_c19_and_c20(
    make_learner: Callable[..., Learner],
    make_task: Callable[..., Task],
    meta_gradient: Callable[..., dict[str, Tensor]],
) -> None:
    task = make_task()
    assert shift_by_the_head(make_learner(loss=SOFTMAX), task) < 1e-10
    assert head_gradient(meta_gradient(make_learner(loss=SOFTMAX), [task])) < 1e-14
    assert first_encoder_step(make_learner, task, loss=SOFTMAX) < 1e-14
    assert relabelled_columns(make_learner(loss=SOFTMAX), task) > 1e-4


@pytest.mark.parametrize(("kind", "rows"), [("unicorn", 1), ("linear", 4)])
def test_every_class_starts_from_the_head(kind: Any, rows: int) -> None:
    head = HEADS.get(kind)(3, 4, HeadSettings(kind))
    assert len(head.weight) == len(head.bias) == rows
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    weight, bias = head.start(4)
    assert weight.shape == (4, 3) and bias.shape == (4,)
    for way in range(4):
        assert torch.equal(weight[way], head.weight[way % rows]) and bias[way] == head.bias[way % rows]


def test_a_value_copy_carries_no_gradient_to_w(
    make_learner: Callable[..., Learner],
    make_task: Callable[..., Task],
    meta_gradient: Callable[..., dict[str, Tensor]],
) -> None:
    task = make_task()
    expand, value = make_learner(), make_learner(head={"copy": "value"})
    assert torch.equal(expand.predict(task), value.predict(task))
    assert head_gradient(meta_gradient(expand, [task])) > 1e-3
    assert head_gradient(meta_gradient(value, [task])) == 0


def test_a_centred_head_does_not_see_what_embeddings_have_in_common() -> None:
    random = torch.Generator().manual_seed(0)
    embeddings, weight, bias = (torch.randn(size, generator=random) for size in ((6, 3), (4, 3), (4,)))
    centred, plain = (UnicornHead(3, 4, HeadSettings(centred=on)) for on in (True, False))
    logits = centred(embeddings, weight, bias)
    assert torch.allclose(centred(embeddings + 7.0, weight, bias), logits, atol=1e-5)
    assert torch.allclose(plain(embeddings - embeddings.mean(0), weight, bias), logits)
    assert not torch.allclose(plain(embeddings, weight, bias), logits, atol=1e-2)


def test_a_centred_head_needs_the_joint_batch(
    make_learner: Callable[..., Learner], make_task: Callable[..., Task]
) -> None:
    with pytest.raises(SettingError, match="it needs inner"):
        make_learner(head={"centred": True})
    learner = make_learner(head={"centred": True}, inner={"final_batch": "joint"})
    with pytest.raises(SettingError, match="it needs inner"):
        learner.predict(make_task(), "query")
