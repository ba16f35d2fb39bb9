"""The words of a command line, in all the ways in which options are spelt."""

import pytest

from npbml.cli.arguments import Arguments


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--methods gap maml --shots 5", ["gap", "maml"]),
        ("--methods=gap --shots 5 6", ["gap"]),
        ("--shots 5 --methods gap --seed 1 --methods=maml", ["gap", "maml"]),
        ("--methods=gap stray", ["gap"]),
        ("--methods", []),
        ("--methods --shots 5", []),
        ("--methodss gap --method maml", []),
        ("gap --methods-x=3", []),
        ("--methods= --shots 5", [""]),
    ],
)
def test_an_option_has_the_words_that_follow_it(line: str, found: list[str]) -> None:
    given = Arguments(line.split())
    assert given.all("methods") == found
    assert given.get("methods") == (found[0] if found else None)


def test_lists_have_spaces_or_commas_between() -> None:
    assert Arguments(["--methods", "a,", " b", ",c,d"]).listed("methods") == ["a", "b", "c", "d"]
    assert Arguments(["--methods=a,b", "--methods", "c"]).listed("methods") == ["a", "b", "c"]


def test_names_are_spelt_as_those_of_settings() -> None:
    given = Arguments(["--image-size", "8", "--inner.test-steps=3", "-h", "stray", "--run", "a-b"])
    assert given.names == {"image_size", "inner.test_steps", "run"}
    assert given.asks_help and not Arguments(["--helpless"]).asks_help and Arguments(["--help"]).asks_help


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("gap --plugin mine.py", "gap"),
        ("--plugin=mine.py gap", "gap"),
        ("--plugin a.py b.py --shots 5", "--shots 5"),
        ("--shots 5 --plugin=a.py --plugin b.py --seed=3", "--shots 5 --seed=3"),
        ("--plugins 5", "--plugins 5"),
        ("", ""),
    ],
)
def test_an_option_is_left_out_with_what_follows_it(line: str, left: str) -> None:
    assert Arguments(line.split()).without("plugin").words == left.split()


def test_options_get_other_names_however_they_are_spelt() -> None:
    names = {"train.max_old": "train.max_new", "old": "new"}
    given = Arguments(["--train.max-old", "3", "--train.max_old=4", "--old=x=y", "old", "--older", "--run", "--x"])
    expected = ["--train.max-new", "3", "--train.max-new=4", "--new=x=y", "old", "--older", "--run", "--x"]
    assert given.renamed(names, {}).words == expected and given.words[0] == "--train.max-old"


def test_values_get_other_names_where_their_option_has_them() -> None:
    values = {"new.kind": {"one": "first"}, "form": {"ball": "round"}}
    given = Arguments(
        ["one", "--old-kind", "one", "--form=ball", "--form", "flat", "ball", "--x", "ball", "--y=one"]
    )
    found = given.renamed({"old_kind": "new.kind"}, values).words
    assert found == [
        "one",
        "--new.kind",
        "first",
        "--form=round",
        "--form",
        "flat",
        "round",
        "--x",
        "ball",
        "--y=one",
    ]


def test_an_option_of_one_word_leaves_the_words_after_it() -> None:
    found, rest = Arguments(["--plugin", "a.py", "gap", "--x", "1", "--plugin=b.py", "c"]).take_each("plugin")
    assert found == ["a.py", "b.py"] and rest.words == ["gap", "--x", "1", "c"]
    assert Arguments(["--plugin"]).take_each("plugin")[0] == [""]
