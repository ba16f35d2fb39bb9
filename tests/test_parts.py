"""What the tables of parts say of a part is what its code says, and every part is there."""

from typing import Any

import pytest

from npbml.methods import METHODS
from npbml.parts import BACKBONES, DATASETS, HEADS, LOSS_TERMS, PRECONDITIONERS, SCORERS
from npbml.registry import Registry

TABLES = {registry.kind: registry for registry in (PRECONDITIONERS, LOSS_TERMS, HEADS)}
EVERY = {**TABLES, **{registry.kind: registry for registry in (BACKBONES, SCORERS, DATASETS, METHODS)}}
TOLD_ONLY_THERE = {"symbol", "excludes", "symmetric"}  # about how a part stands beside others, not about its code


def facts_of(registry: Registry) -> dict[str, Any]:
    return {fact: default for fact, default in registry.defaults.items() if fact not in TOLD_ONLY_THERE}


def built_in(tables: dict[str, Registry]) -> list[tuple[str, str]]:
    return [(kind, name) for kind, table in tables.items() for name, part in table.parts.items() if part.built_in]


@pytest.mark.parametrize(("kind", "name"), built_in(TABLES))
def test_a_built_in_part_has_the_facts_of_its_class(kind: str, name: str) -> None:
    registry = TABLES[kind]
    code = registry.get(name)
    stated = {fact: registry.fact(name, fact) for fact in facts_of(registry)}
    assert stated == {fact: getattr(code, fact, default) for fact, default in facts_of(registry).items()}


@pytest.mark.parametrize("kind", TABLES)
def test_every_fact_is_true_of_some_parts_and_not_of_others(kind: str) -> None:
    """So that the law above says something."""
    registry = TABLES[kind]
    assert facts_of(registry)
    for fact in facts_of(registry):
        stated = {part.facts[fact] for part in registry.parts.values() if part.built_in}
        assert stated == {True, False} or (kind, fact) == ("preconditioner", "learned"), fact  # all of these learn


@pytest.mark.parametrize(("kind", "name"), built_in(EVERY))
def test_the_code_of_a_built_in_part_is_where_the_table_says(kind: str, name: str) -> None:
    part = EVERY[kind].part(name)
    assert EVERY[kind].get(name) is not None
    assert part.summary and "\n" not in part.summary
    assert set(part.facts) == set(EVERY[kind].defaults)
