"""Settings are typed data, read strictly and written back as they were."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npbml.config import Config
from npbml.errors import SettingError
from npbml.learner import LearnerSettings
from npbml.rule.descend import InnerSettings
from npbml.settings import check, describe, from_dict, group, setting, to_dict


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


def one(hint: Any, plain: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Every value of a type, its numbers from `plain`."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(one(get_args(hint)[0], plain), max_size=4).map(tuple)
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


@given(values(LearnerSettings))
def test_every_learners_settings_survive_a_file(settings: LearnerSettings) -> None:
    check(settings)
    assert from_dict(LearnerSettings, json.loads(json.dumps(to_dict(settings)))) == settings


def test_the_defaults_of_everything_are_admissible_and_survive_a_file() -> None:
    for kind in (Config, LearnerSettings):
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
        ("rate", 0.0, "rate must be above 0, at most 1, not 0.0."),
        ("rate", 1.01, "rate must be above 0, at most 1, not 1.01."),
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
        "outer": {"objective": "final", "items": "query", "order": 2, "first_order_epochs": 0},
        "init": {"source": "pretrained", "std": 0.01, "uniform_bias": False},
        "relation": {"widths": (64, 128, 256, 512), "pools": 2, "combine": "sum"},
    }
    assert from_dict(LearnerSettings, expected) == settings
