import pytest

from npbml.data.benchmarks import PUBLISHED
from npbml.data.prepare import LAYOUTS, READERS
from npbml.data.sets import BENCHMARKS
from npbml.data.store import SPLITS

COUNTS = {
    "mini-imagenet": (64, 16, 20),
    "tiered-imagenet": (351, 97, 160),
    "cifar-fs": (64, 16, 20),
    "fc100": (60, 20, 20),
    "omniglot": (1028, 172, 423),
}
SUPERCLASSES = {"tiered-imagenet": (20, 6, 8), "fc100": (12, 4, 4)}


def test_every_benchmark_is_known_everywhere() -> None:
    assert set(BENCHMARKS) == set(PUBLISHED) == set(COUNTS) == set(READERS) == set(LAYOUTS)
    assert all(name == benchmark.name for name, benchmark in PUBLISHED.items())


@pytest.mark.parametrize("name", COUNTS)
def test_the_class_lists_are_those_published(name: str) -> None:
    benchmark = PUBLISHED[name]
    assert tuple(len(benchmark.classes[split]) for split in SPLITS) == COUNTS[name]
    assert len(benchmark.split_of()) == sum(COUNTS[name])  # so that no class is in two splits
    if name in SUPERCLASSES:
        above = [set(benchmark.classes[split].values()) for split in SPLITS]
        assert tuple(map(len, above)) == SUPERCLASSES[name]
        assert len(set().union(*above)) == sum(SUPERCLASSES[name])
    if benchmark.mean is not None:
        assert len(benchmark.mean) == len(benchmark.std or ()) == benchmark.channels


def test_both_splits_of_cifar_are_of_the_same_hundred_classes() -> None:
    first, second = PUBLISHED["cifar-fs"], PUBLISHED["fc100"]
    assert set(first.split_of()) == set(second.split_of())
    superclass = {name: above for split in SPLITS for name, above in first.classes[split].items()}
    assert superclass == {name: above for split in SPLITS for name, above in second.classes[split].items()}
    assert superclass["apple"] == "fruit_and_vegetables"


def test_published_counts() -> None:
    assert PUBLISHED["mini-imagenet"].published("train") == (64, 38_400)
    assert PUBLISHED["omniglot"].published("test") == (4 * 423, 4 * 423 * 20)
    assert sum(PUBLISHED["tiered-imagenet"].published(split)[1] for split in SPLITS) == 779_165
