"""What a method learns, adapts and minimises, in words that its settings choose."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from npbml.learner.settings import LearnerSettings
from npbml.nets.settings import frozen_blocks
from npbml.parts import HEADS, LOSS_TERMS, PRECONDITIONERS
from npbml.registry import Registry

COLUMNS = {
    "learns": "learns",
    "adapts": "adapts",
    "minimises": "minimises inside a task",
    "outer": "outer objective",
}
WIDTHS = {"learns": None, "adapts": 14, "minimises": 13, "outer": 20}  # most cells in two lines
LEGEND = (
    "tail: the blocks that are not frozen; norms: batch norms; CE, SE: cross-entropy, squared error; S, Q: "
    "support and query items; L^S, L^Q, R: learned losses of support items, query items and weights, "
    "with _j one for each inner step, with _c of each class; T: a matrix that is fixed inside a task."
)
POINTS = {
    "final": "after last step",
    "multi_step": "after every step",
    "pre_post": "before and after the critic",
    "trajectory": "one step ahead of every point",
}


def method_words(config: LearnerSettings) -> dict[str, str]:
    """What the method with these settings learns, adapts and minimises, and its outer objective."""
    return {
        "learns": " + ".join([_start(config), *_preconditioner(config), *_losses(config), *_modulation(config)]),
        "adapts": f"{_adapted(config)}, {_steps(config)}",
        "minimises": _inner_loss(config),
        "outer": _outer(config),
    }


def _start(config: LearnerSettings) -> str:
    word = "initialisation"
    if config.head.copy == "value":
        word += " but of the head"
    elif HEADS.fact(config.head.kind, "alike") and config.target == "classes":
        word += " with one head row"
    if config.net.per_step_norm:
        return f"{word} + norms per step"
    return f"{word} + norms" if config.net.affine in ("meta", "inner") else word


def _preconditioner(config: LearnerSettings) -> list[str]:
    learned = [kind for kind in config.precondition.chain if PRECONDITIONERS.fact(kind, "learned")]
    words, warp = [PRECONDITIONERS.part(kind).summary or kind for kind in learned], config.warp
    if warp.kind != "learned":
        return words
    name = "linear warp" if warp.activation == "none" else "non-linear warp"
    if warp.position == "pre_norm" and warp.activation == "none":
        name = "T"  # as T-Net calls a matrix right behind each convolution
    if warp.blocks == "all":
        name += " after each layer" if warp.position == "pre_norm" else " in each block"
    return [f"{name} and head" if warp.head else name, *words]


def _losses(config: LearnerSettings) -> list[str]:
    loss, words = config.loss, []
    if loss.share:
        words.append("one loss network for S and Q")
        words += ["R"] if loss.regulariser else []
    elif loss.symmetric_support or loss.symmetric_query:
        words.append("loss networks of pairs")
    elif loss.inductive or loss.transductive or loss.regulariser:
        words.append("loss networks")
    if loss.has("per_step"):
        words.append("loss networks per step")
    words += [name for name in loss.terms if LOSS_TERMS.fact(name, "learned")]
    return words + (["critic"] if loss.critic_steps else [])


def _modulation(config: LearnerSettings) -> list[str]:
    loss = config.loss
    of_loss = loss.film and (loss.inductive or loss.transductive or loss.regulariser)
    if config.film.enabled and of_loss:
        return ["FiLM"]
    return ["FiLM of the network"] if config.film.enabled else ["FiLM of the loss"] if of_loss else []


def _adapted(config: LearnerSettings) -> str:
    inner, head = config.inner, config.inner.layers != "body"
    body = "network" if frozen_blocks(config.backbone, config.net) == 0 else "tail"
    if inner.layers == "head":
        return "head"
    if inner.last_blocks is not None:
        body = "last block" if inner.last_blocks == 1 else f"last {inner.last_blocks} blocks"
    if config.net.affine == "inner":
        body += " and norms"
    if config.film.enabled and config.film.adapt:
        body += " and FiLM"
    return f"{body} and head" if head else body


def _steps(config: LearnerSettings) -> str:
    inner, critic = config.inner, config.loss.critic_steps
    words = f"{inner.steps} + {critic} steps" if critic else _count(inner.steps)
    return f"{words}, {inner.test_steps} at test" if inner.test_steps not in (None, inner.steps) else words


def _count(steps: int) -> str:
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def _inner_loss(config: LearnerSettings) -> str:
    loss = config.loss
    base = "CE(S)" if config.target == "classes" else "SE(S)"
    terms = [base if name == "base" else LOSS_TERMS.fact(name, "symbol") or name for name in loss.active]
    words = " + ".join(terms)
    return f"{words}, then critic(Q)" if loss.critic_steps else words


def _outer(config: LearnerSettings) -> str:
    outer = config.outer
    loss = "CE" if config.target == "classes" else "SE"
    items = "Q" if outer.items == "query" else "S, Q"
    order = "1st order" if outer.order == 1 else "2nd order"
    if outer.objective == "trajectory" and outer.hessian_free:
        order = "Hessian-free"
    return f"{loss}({items}) {POINTS[outer.objective]}, {order}"


def methods_table(words: Mapping[str, Mapping[str, str]]) -> RenderableType:
    """A row for each method, of its words."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("method", overflow="fold")
    for key, heading in COLUMNS.items():
        table.add_column(heading, max_width=WIDTHS[key], overflow="fold")
    for name, row in words.items():
        table.add_row(Text(name), *(Text(row[key]) for key in COLUMNS))
    return Group(table, "", Text(LEGEND))


def parts_table(registry: Registry) -> RenderableType:
    """The parts of a kind, with a line on each; the user's own are marked."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, part in registry.parts.items():
        table.add_row(Text(f"  {name}"), Text(part.summary + ("" if part.built_in else " (plugin)")))
    return Group(Text(f"{registry.kind}s", style="bold"), table)


def method_page(
    name: str,
    summary: str,
    words: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Any]],
) -> RenderableType:
    """One method: its summary, its words, and tables of settings by full name, each under its heading."""
    grid = Table.grid(padding=(0, 2))
    for key, column in COLUMNS.items():
        grid.add_row(Text(f"  {column}", style="bold"), Text(words[key]))
    parts: list[RenderableType] = [Text(f"{name}: {summary}"), "", grid]
    for heading, rows in settings.items():
        table = Table.grid(padding=(0, 2))
        for setting, value in rows.items():
            table.add_row(Text(f"  {setting}"), Text(shown(value)))
        parts += ["", Text(heading, style="bold"), table if rows else Padding("none", (0, 2))]
    return Group(*parts)


def shown(value: Any) -> str:
    """A setting's value as the command line takes it."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value)
