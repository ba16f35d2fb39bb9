"""A draw is named by a seed and a purpose: the same name, the same draw; another name, another."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from npbml.randomness import generator, own_random_state

PURPOSES = st.lists(st.one_of(st.text(max_size=8), st.integers(0, 10**6)), max_size=3)


def first(seed: int, *purpose: str | int) -> float:
    return torch.rand((), generator=generator(seed, *purpose), dtype=torch.float64).item()


@given(st.integers(-(2**63), 2**63), PURPOSES)
def test_the_same_name_gives_the_same_draw(seed: int, purpose: list[str | int]) -> None:
    assert first(seed, *purpose) == first(seed, *purpose)


def test_names_that_look_alike_give_different_draws() -> None:
    names: list[tuple[int, ...] | tuple[int | str, ...]] = [
        (0,),
        (1,),
        (-1,),
        (0, 0),
        (0, 1),
        (0, "1"),
        (0, "train"),
        (1, "train"),
        (0, "train", 0),
        (0, "train", 1),
        (0, "train0"),
        (0, "train", "0"),
        (0, "train, 0"),
        (0, 1, 2),
        (0, 12),
    ]
    for one, other in itertools.combinations(names, 2):
        assert first(*one) != first(*other)  # type: ignore[arg-type]


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    expected = first(0, "train", 7)
    torch.manual_seed(3)
    for step in range(7):
        torch.rand(step + 1, generator=generator(0, "train", step))
    torch.rand(10)
    assert first(0, "train", 7) == expected


def test_a_generator_leaves_torchs_own_alone() -> None:
    before = torch.get_rng_state()
    first(0, "train")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_block_with_a_state_of_its_own_leaves_torchs_as_it_was() -> None:
    before, drawn = torch.get_rng_state(), []
    for seed in (0, 0, 1):
        with own_random_state(seed):
            drawn.append(torch.rand(()).item())
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] != drawn[2]


def test_steps_are_independent() -> None:
    """The draws of successive steps are uniform and uncorrelated, as those of one stream are."""
    draws = torch.tensor([first(0, "train", step) for step in range(4000)], dtype=torch.float64)
    assert abs(draws.mean() - 0.5) < 0.02 and abs(draws.var() - 1 / 12) < 0.005
    assert abs(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]) < 0.05


def test_the_draws_of_a_name_are_pinned() -> None:
    """Published results name their tasks by seed: these numbers may never change."""
    drawn = torch.randint(0, 10**6, (4,), generator=generator(0, "train", 1))
    assert drawn.tolist() == [321365, 181786, 554595, 74841]
