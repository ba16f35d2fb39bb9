"""What the table says of a method comes from its settings, and differs where these do."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console, RenderableType

from npbml.lab.protocols import preset
from npbml.lab.schema import method_config, override
from npbml.learner.settings import LearnerSettings
from npbml.methods import BUILT_IN
from npbml.parts import BACKBONES, DATASETS, HEADS, LOSS_TERMS, METHODS, PRECONDITIONERS, SCORERS
from npbml.registry import Registry
from npbml.report.methods import COLUMNS, method_page, method_words, methods_table, parts_table, shown
from npbml.rule.settings import LossSettings
from npbml.settings import from_dict

NAMES = list(BUILT_IN)
# As their summaries say; the paper's ablations name some systems twice.
TWINS = [{"maml", "npbml-1", "npbml-6"}, {"npbml-3", "npbml-10"}, {"npbml", "npbml-5"}]


def words(name: str) -> dict[str, str]:
    return method_words(method_config(preset("common", method=name), name).learner)


def changed(**changes: Any) -> dict[str, str]:
    """The words of MAML with some settings changed."""
    return method_words(override(method_config(preset("common"), "maml"), changes).learner)


def test_methods_that_differ_are_told_apart() -> None:
    same: dict[tuple[str, ...], set[str]] = {}
    for name in NAMES:
        same.setdefault(tuple(words(name).values()), set()).add(name)
    assert sorted(map(sorted, (group for group in same.values() if len(group) > 1))) == sorted(map(sorted, TWINS))


def test_every_part_has_a_word() -> None:
    built_in = [part for part in PRECONDITIONERS.parts.values() if part.built_in]
    assert all(part.summary for part in built_in) and len({part.summary for part in built_in}) == len(built_in)
    switches = [name for name in LOSS_TERMS if hasattr(LossSettings(), name) and LOSS_TERMS.fact(name, "learned")]
    symbols = [LOSS_TERMS.fact(name, "symbol") for name in switches]
    assert symbols == ["L^S", "L^Q", "R", "L^S_j", "L^Q_j", "L^S_c", "L^Q_c"]


EXPECTED: list[tuple[str, str, str]] = [
    ("maml", "learns", "initialisation"),
    ("maml", "adapts", "tail and head, 5 steps"),
    ("maml", "minimises", "CE(S)"),
    ("maml", "outer", "CE(Q) after last step, 2nd order"),
    ("fomaml", "outer", "CE(Q) after last step, 1st order"),
    ("anil", "adapts", "head, 5 steps"),
    ("boil", "adapts", "tail and norms, 5 steps"),
    ("metasgd", "learns", "initialisation + a rate per weight"),
    ("tnet", "learns", "initialisation + T after each layer and head"),
    ("mtnet", "learns", "initialisation + T after each layer and head + masks of units"),
    ("maml++", "learns", "initialisation + norms per step + rates per tensor and step"),
    ("maml++", "outer", "CE(Q) after every step, 2nd order"),
    ("sca", "adapts", "tail and head, 5 + 1 steps"),
    ("sca", "minimises", "CE(S), then critic(Q)"),
    ("sca", "outer", "CE(Q) before and after the critic, 2nd order"),
    ("warpgrad", "learns", "initialisation + non-linear warp in each block"),
    ("warpgrad", "outer", "CE(Q) one step ahead of every point, 2nd order"),
    ("metal", "minimises", "CE(S) + L^S_j + L^Q_j"),
    ("metal", "outer", "CE(S, Q) after last step, 2nd order"),
    ("npbml", "learns", "initialisation + linear warp + loss networks + FiLM"),
    ("npbml", "minimises", "CE(S) + L^S + L^Q + R"),
    ("npbml-9", "minimises", "CE(S) + R"),
]


@pytest.mark.parametrize(("name", "column", "text"), EXPECTED, ids=lambda value: str(value))
def test_a_method_is_described_as_the_papers_do(name: str, column: str, text: str) -> None:
    assert words(name)[column] == text


@pytest.mark.parametrize(
    ("changes", "column", "text"),
    [
        ({"inner": {"steps": 1, "test_steps": 10}}, "adapts", "tail and head, 1 step, 10 at test"),
        ({"inner": {"steps": 3, "test_steps": 3}}, "adapts", "tail and head, 3 steps"),
        ({"net": {"frozen_blocks": 0}}, "adapts", "network and head, 5 steps"),
        ({"net": {"frozen_blocks": 1}, "inner": {"last_blocks": 2}}, "adapts", "last 2 blocks and head, 5 steps"),
        ({"inner": {"last_blocks": 1, "layers": "body"}}, "adapts", "last block, 5 steps"),
        ({"film": {"enabled": True, "adapt": True}}, "adapts", "tail and FiLM and head, 5 steps"),
        ({"film": {"enabled": True}}, "learns", "initialisation + FiLM of the network"),
        (
            {"loss": {"inductive": True, "film": True}},
            "learns",
            "initialisation + loss networks + FiLM of the loss",
        ),
        ({"loss": {"film": True}}, "learns", "initialisation"),
        ({"net": {"affine": "meta"}}, "learns", "initialisation + norms"),
        ({"head": {"kind": "unicorn"}}, "learns", "initialisation with one head row"),
        ({"loss": {"base": False, "inductive": True}}, "minimises", "L^S"),
        ({"target": "values"}, "minimises", "SE(S)"),
        ({"target": "values"}, "outer", "SE(Q) after last step, 2nd order"),
        (
            {"warp": {"kind": "learned"}, "precondition": {"chain": ["svd", "rates"]}},
            "learns",
            "initialisation + linear warp + a spectrum for the SVD of gradients + rates per tensor and step",
        ),
    ],
)
def test_a_setting_changes_the_words(changes: dict[str, Any], column: str, text: str) -> None:
    assert changed(**changes)[column] == text


def test_a_learner_of_no_recipe_has_words_too() -> None:
    assert set(method_words(from_dict(LearnerSettings, {}, LearnerSettings()))) == set(COLUMNS)


@pytest.fixture
def printed() -> Callable[[RenderableType, int], str]:
    def print_to(what: RenderableType, width: int) -> str:
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(what)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= width and "…" not in text
        return text

    return print_to


@pytest.mark.parametrize(("width", "lines"), [(80, 7), (100, 3), (200, 3)])
def test_the_table_is_whole_in_a_terminal(
    printed: Callable[[RenderableType, int], str], width: int, lines: int
) -> None:
    """Every word of every method, none of them broken, and a method in a few lines."""
    text = printed(methods_table({name: words(name) for name in NAMES}), width)
    blocks = re.split(r"\n(?=\S)", text.partition("\n\n")[0])
    rows = {block.split()[0]: block for block in blocks}
    for name in NAMES:
        assert len(rows[name].splitlines()) <= lines
        assert sorted(rows[name].split()) == sorted([name, *" ".join(words(name).values()).split()])


def test_a_page_has_every_setting_by_its_full_name(printed: Callable[[RenderableType, int], str]) -> None:
    tables = {"rule": {"inner.lr": 0.1, "precondition.chain": ["svd", "rates"]}, "published": {}}
    text = printed(method_page("gap", "a [spectrum]", words("gap"), tables), 80)
    assert text.startswith("gap: a [spectrum]\n")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "inner.lr 0.1" in lines and "precondition.chain svd rates" in lines
    assert lines[lines.index("published") + 1] == "none"
    assert all(f"{COLUMNS[key]} {value}" in " ".join(text.split()) for key, value in words("gap").items())


def test_values_are_written_as_the_command_line_takes_them() -> None:
    assert [shown(value) for value in ([1, 2], (), "auto", 0.1, True)] == ["1 2", "none", "auto", "0.1", "True"]


@pytest.mark.parametrize(
    "registry",
    [METHODS, BACKBONES, HEADS, LOSS_TERMS, PRECONDITIONERS, SCORERS, DATASETS],
    ids=lambda registry: registry.kind,
)
def test_the_parts_of_a_kind_have_a_line_each_under_its_name(
    printed: Callable[[RenderableType, int], str], registry: Registry
) -> None:
    heading, *lines = printed(parts_table(registry), 80).splitlines()
    assert heading == f"{registry.kind}s"
    assert [line.split()[0] for line in lines if line[2] != " "] == list(registry)
    text = " ".join(" ".join(lines).split())
    assert all(f"{name} {part.summary}" in text for name, part in registry.parts.items()) and "plugin" not in text


def test_a_users_part_is_marked(printed: Callable[[RenderableType, int], str]) -> None:
    registry = Registry("head")
    registry.built_in("one", "", "the first")
    registry.register("two", object(), "[mine]")
    lines = [line.split() for line in printed(parts_table(registry), 80).splitlines()]
    assert lines == [["heads"], ["one", "the", "first"], ["two", "[mine]", "(plugin)"]]
