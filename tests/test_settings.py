"""Settings are typed data, read strictly and written back as they were."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npbml.errors import SettingError
from npbml.lab.schema import Config
from npbml.learner.settings import LearnerSettings
from npbml.registry import PartName, Registry
from npbml.rule.settings import InnerSettings
from npbml.settings import (
    check,
    describe,
    flat,
    from_dict,
    from_old_names,
    group,
    leaves,
    merged,
    nested,
    setting,
    to_dict,
)


@dataclass(frozen=True)
class Small:
    rate: float = setting(0.5, above=0, high=1)
    steps: int = setting(3, low=1)
    kind: Literal["round", "square"] = setting("round")
    order: Literal[1, 2] = setting(2)
    name: str = setting("x")
    on: bool = setting(True)
    widths: tuple[int, ...] = setting((1, 2), low=1)
    limit: int | None = setting(None, low=1)


@dataclass(frozen=True)
class Large:
    small: Small = group(Small)
    seed: int = setting(0)


COLOURS = Registry("colour")
for colour in ("red", "blue", "green"):
    COLOURS.built_in(colour, "", f"the colour {colour}")


class Colour(PartName):
    registry = COLOURS


@dataclass(frozen=True)
class Body:
    colour: Colour = setting(Colour("red"))
    stripes: tuple[Colour, ...] = setting(())
    size: int = setting(1, low=1, was="length")
    form: Literal["round", "flat"] = setting("round", values={"ball": "round"})


@dataclass(frozen=True)
class Whole:
    body: Body = group(Body, inline=True)
    small: Small = group(Small, was="little")
    seed: int = setting(0)


def one(hint: Any, plain: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Every value of a type, its numbers from `plain`."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(one(get_args(hint)[0], plain), max_size=4).map(tuple)
    if isinstance(hint, type) and issubclass(hint, PartName):
        return st.sampled_from(list(hint.registry))
    if hint in plain:
        return plain[hint]
    return st.none() | one(next(option for option in get_args(hint) if option is not type(None)), plain)


def values(kind: type) -> st.SearchStrategy[Any]:
    """Every admissible instance of a dataclass of settings."""
    fields, hints = {}, get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            fields[field.name] = values(hint)
            continue
        low, high, above = (field.metadata.get(key) for key in ("low", "high", "above"))
        least = low if low is not None else above
        whole = st.integers(None if least is None else int(least), None if high is None else int(high))
        if above is not None:
            whole = whole.filter(lambda x, above=above: x > above)
        number = st.floats(least, high, exclude_min=above is not None, allow_nan=False, allow_infinity=False)
        plain = {int: whole, float: number, bool: st.booleans(), str: st.text(max_size=5)}
        fields[field.name] = one(hint, plain)
    return st.builds(kind, **fields)


@given(values(Large))
def test_settings_survive_a_file(settings: Large) -> None:
    check(settings)
    plain = json.loads(json.dumps(to_dict(settings)))
    assert from_dict(Large, plain) == settings


@given(values(Whole))
def test_settings_with_parts_and_an_inline_group_survive_a_file(settings: Whole) -> None:
    check(settings)
    plain = json.loads(json.dumps(to_dict(settings)))
    assert list(plain) == ["colour", "stripes", "size", "form", "small", "seed"]
    assert from_dict(Whole, plain) == settings


@given(values(LearnerSettings))
def test_every_learners_settings_survive_a_file(settings: LearnerSettings) -> None:
    check(settings)
    assert from_dict(LearnerSettings, json.loads(json.dumps(to_dict(settings)))) == settings


def test_the_defaults_of_everything_are_admissible_and_survive_a_file() -> None:
    for kind in (Config, LearnerSettings, Whole):
        settings = kind()
        check(settings)
        assert from_dict(kind, json.loads(json.dumps(to_dict(settings)))) == settings


@given(values(Large), values(Small))
def test_what_is_left_out_is_taken_from_the_default(default: Large, other: Small) -> None:
    assert from_dict(Large, {}, default) == default
    changed = from_dict(Large, {"small": {"steps": other.steps}}, default)
    expected = dataclasses.replace(default, small=dataclasses.replace(default.small, steps=other.steps))
    assert changed == expected


def test_without_a_default_what_is_left_out_is_the_classs_own() -> None:
    assert from_dict(Large, {"small": {"on": False}}) == Large(Small(on=False))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"small": {"stepz": 1}}, "no setting 'small.stepz'. Did you mean 'small.steps'?"),
        ({"sead": 1}, "no setting 'sead'. Did you mean 'seed'?"),
        ({"qqq": 1}, "no setting 'qqq'. The top level takes: small, seed."),
        ({"small": {"qqq": 1}}, "no setting 'small.qqq'. small takes: rate, steps"),
        ({"small": 3}, "small must be a table of settings, not 3."),
        ([1], "the settings must be a table of settings, not [1]."),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(data: Any, message: str) -> None:
    with pytest.raises(SettingError) as error:
        from_dict(Large, data)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 2.0, "steps takes a whole number, not 2.0."),
        ("steps", "2", "steps takes a whole number, not '2'."),
        ("steps", True, "steps takes a whole number, not True."),
        ("steps", None, "steps takes a whole number, not None."),
        ("rate", "fast", "rate takes a number, not 'fast'."),
        ("rate", True, "rate takes a number, not True."),
        ("on", 1, "on takes true or false, not 1."),
        ("on", "true", "on takes true or false, not 'true'."),
        ("name", 3, "name takes text, not 3."),
        ("kind", "oval", "kind takes one of round, square, not 'oval'."),
        ("order", 3, "order takes one of 1, 2, not 3."),
        ("order", "1", "order takes one of 1, 2, not '1'."),
        ("order", True, "order takes one of 1, 2, not True."),
        ("order", 1.0, "order takes one of 1, 2, not 1.0."),
        ("widths", 3, "widths takes a list of: a whole number, not 3."),
        ("widths", [1, "2"], "widths takes a whole number, not '2'."),
        ("limit", "none", "limit takes a whole number, not 'none'."),
    ],
)
def test_wrong_types_are_refused_at_both_doors(name: str, value: Any, message: str) -> None:
    with pytest.raises(SettingError) as error:
        from_dict(Large, {"small": {name: value}})
    assert str(error.value) == "small." + message
    with pytest.raises(SettingError) as error:
        check(Large(dataclasses.replace(Small(), **{name: value})))
    assert str(error.value) == "small." + message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, not 0."),
        ("rate", 0.0, "rate must be above 0, not 0.0."),
        ("rate", 1.01, "rate must be at most 1, not 1.01."),
        ("rate", float("nan"), "rate must be above 0, at most 1, not nan."),
        ("widths", (3, 0), "widths must be at least 1, not 0."),
        ("limit", 0, "limit must be at least 1, not 0."),
    ],
)
def test_values_out_of_range_are_refused_at_both_doors(name: str, value: Any, message: str) -> None:
    with pytest.raises(SettingError) as error:
        from_dict(Large, {"small": {name: value}})
    assert str(error.value) == "small." + message
    with pytest.raises(SettingError) as error:
        check(Large(dataclasses.replace(Small(), **{name: value})))
    assert str(error.value) == "small." + message


def test_the_ends_of_a_range_belong_to_it_unless_they_are_above() -> None:
    assert from_dict(Small, {"rate": 1, "steps": 1, "limit": 1}) == Small(rate=1.0, steps=1, limit=1)
    assert isinstance(from_dict(Small, {"rate": 1}).rate, float)
    assert from_dict(Small, {"limit": None}).limit is None


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        InnerSettings().lr = 1.0  # type: ignore[misc]


def test_describe_lists_every_setting_with_what_it_takes() -> None:
    rows = describe(Large, Large(Small(steps=7)))
    assert [name for name, _, _ in rows] == [
        *(f"small.{field.name}" for field in dataclasses.fields(Small)),
        "seed",
    ]
    assert ("small.rate", "a number above 0, at most 1", 0.5) in rows
    assert ("small.steps", "a whole number at least 1", 7) in rows
    assert ("small.kind", "one of round, square", "round") in rows
    assert ("small.limit", "a whole number or nothing at least 1", None) in rows


def test_the_defaults_are_those_of_methods_18() -> None:
    settings = LearnerSettings()
    expected = {
        "backbone": "conv4",
        "ways": 5,
        "net": {"filters": 128, "widths": None, "frozen_blocks": None, "stem_norm": "batch"},
        "head": {"kind": "unicorn", "copy": "expand"},
        "warp": {"kind": "learned", "kernel": 3, "norm": True, "position": "auto"},
        "film": {
            "enabled": True,
            "conditioning": "item",
            "refresh": "pass",
            "shortcut": False,
            "adapt": False,
        },
        "loss": {
            "hidden": 40,
            "film": True,
            "inputs": "logits",
            "target": "argmax",
            "activation": "identity",
        },
        "inner": {
            "steps": 5,
            "lr": 0.01,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 5e-4,
            "layers": "all",
            "batch": "joint",
            "final_batch": "query",
        },
        "precondition": {"chain": ()},
        "outer": {"objective": "final", "items": "query", "order": 2},
        "init": {"source": "pretrained", "std": 0.01, "uniform_bias": False},
        "scorer": {"kind": "relation-network", "widths": (64, 128, 256, 512), "pools": 2, "combine": "sum"},
    }
    assert from_dict(LearnerSettings, expected) == settings


def test_an_inline_group_has_no_name_of_its_own() -> None:
    assert [leaf.name for leaf in leaves(Whole())][:6] == [
        "colour",
        "stripes",
        "size",
        "form",
        "small.rate",
        "small.steps",
    ]
    changed = from_dict(Whole, {"size": 3, "seed": 2}, Whole(Body(form="flat")))
    assert changed == Whole(Body(size=3, form="flat"), seed=2)
    for data, message in (
        ({"body": {"size": 3}}, "no setting 'body'"),
        ({"sise": 3}, "no setting 'sise'. Did you mean 'size'?"),
        ({"size": 0}, "size must be at least 1, not 0."),
    ):
        with pytest.raises(SettingError) as error:
            from_dict(Whole, data)
        assert message in str(error.value)


def test_a_part_is_named_by_one_of_its_registry() -> None:
    read = from_dict(Whole, {"colour": "blue", "stripes": ["green", "red"]})
    assert read.body == Body(Colour("blue"), (Colour("green"), Colour("red")))
    assert ("colour", "one of red, blue, green", "red") in describe(Whole)
    assert ("stripes", "a list of: one of red, blue, green", ()) in describe(Whole)
    for settings, message in (
        (
            {"colour": "bleu"},
            "colour: There is no colour 'bleu'. Did you mean 'blue'? Choose from red, blue, green.",
        ),
        ({"stripes": ["xyz"]}, "stripes: There is no colour 'xyz'. Choose from red, blue, green."),
        ({"colour": 3}, "colour takes one of red, blue, green, not 3."),
    ):
        with pytest.raises(SettingError) as error:
            from_dict(Whole, settings)
        assert str(error.value) == message
        with pytest.raises(SettingError) as error:
            check(Whole(dataclasses.replace(Body(), **settings)))
        assert str(error.value) == message


@given(values(Whole))
def test_tables_are_flattened_and_nested_again(settings: Whole) -> None:
    tables = to_dict(settings)
    rows = flat(tables)
    assert set(rows) == {leaf.name for leaf in leaves(settings)} and nested(rows) == tables


def test_tables_are_merged_name_by_name() -> None:
    first, second = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}, {"b": {"c": 4, "d": {"f": 5}}, "g": 6}
    assert merged(first, second) == {"a": 1, "b": {"c": 4, "d": {"e": 3, "f": 5}}, "g": 6}
    assert merged(second, first)["b"] == {"c": 2, "d": {"e": 3, "f": 5}}
    assert merged({"a": {"b": 1}}, {"a": 2}, {"a": {"c": 3}}) == {"a": {"c": 3}} and merged() == {}
    assert first == {"a": 1, "b": {"c": 2, "d": {"e": 3}}}, "tables are merged into new ones"


def old(data: dict[str, Any], **removed: Any) -> tuple[dict[str, Any], list[str]]:
    """Tables by today's names, and what was said of them."""
    told: list[str] = []
    return from_old_names(Whole, data, removed, told.append), told


def test_names_and_values_of_version_one_are_read_as_those_of_today() -> None:
    tables, told = old({"length": 3, "form": "ball", "little": {"steps": 2, "widths": [1]}, "seed": 5})
    assert tables == {"size": 3, "form": "round", "small": {"steps": 2, "widths": [1]}, "seed": 5}
    assert told == [
        "The setting length is called size now.",
        "The setting little.steps is called small.steps now.",
        "The setting little.widths is called small.widths now.",
    ]
    assert from_dict(Whole, tables).small.widths == (1,)


def test_names_of_today_and_unknown_ones_stay_as_they_are() -> None:
    data = {"size": 3, "form": "flat", "small": {"steps": 2}, "tail": 7, "little": 5}
    assert old(data) == (data, [])
    with pytest.raises(SettingError, match="no setting 'tail'"):
        from_dict(Whole, old(data)[0])


def test_every_name_of_version_one_leads_to_its_setting() -> None:
    assert {leaf.old_name: leaf.name for leaf in leaves(Whole(Body(size=3)))} == {
        "colour": "colour",
        "stripes": "stripes",
        "length": "size",
        "form": "form",
        **{f"little.{field.name}": f"small.{field.name}" for field in dataclasses.fields(Small)},
        "seed": "seed",
    }
    form = next(leaf for leaf in leaves(Whole()) if leaf.name == "form")
    assert (form.value, form.old_value) == ("round", "ball")
    assert {leaf.name: leaf.old_value for leaf in leaves(Whole(Body(form="flat")))}["form"] == "flat"


def test_a_setting_that_is_gone_is_accepted_at_its_constant_alone() -> None:
    removed = {"little.tail": (1, 2), "eyes": 2}
    tables, told = old({"eyes": 2, "little": {"tail": [1, 2]}}, **removed)
    assert tables == {} and [words.split(" is ")[0] for words in told] == [
        "The setting eyes",
        "The setting little.tail",
    ]
    for data, name in (({"eyes": 3}, "eyes=3"), ({"little": {"tail": [1]}}, r"little\.tail=\[1\]")):
        with pytest.raises(SettingError, match=rf"{name} is from an earlier version.* always"):
            old(data, **removed)
