"""Shapes of few-shot tasks: how many classes, labelled, unlabelled and query items (METHODS 19.1).

A shape is written WAYSxSHOTS, then +POOL where there is a pool of unlabelled items, then /QUERIES:

    5x1        5 classes, 1 labelled item of each, no pool
    5x1+75     the same with a pool of 75 items, 15 of each class
    5x1+~75    the pool's class proportions are drawn from Dirichlet(2), its items from these
    5x~3       15 labelled items, at least one of each class, their number different from class to class
    5x1+5/15   a pool of 5 items, and 15 query items of each class beside it

Every item of the pool is predicted and scored, and so are the queries beside it. Where their number is not given
there are none with a pool of at least 5 items for each class, and 15 of each class otherwise.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from npbml.errors import SettingError

DIRICHLET = 2  # the concentration by which unequal proportions are drawn (Veilleux et al., 2021)
QUERIES = 15  # of each class
LARGE_POOL = 5  # items for each class, from which on the pool alone is scored
# By which methods are compared: with and without a pool, balanced or not, few and many classes, small and large
# pools.
USUAL = (
    *("5x1", "5x5", "5x1+75", "5x5+75", "5x1+~75", "5x5+~75"),
    *("2x1+30", "3x1+45", "10x1+150", "16x1+240", "2x5+30", "3x5+45", "10x5+150", "16x5+240"),
    *("5x~3+~75", "5x1+5", "5x1+15", "5x1+300", "5x1+1000"),
)
_FORM = re.compile(r"(\d+)x(~?)(\d+)(?:\+(~?)(\d+))?(?:/(\d+))?")


@dataclass(frozen=True)
class Shape:
    """The shape of a task.

    Attributes:
        ways: Classes.
        shots: Labelled items of each class; their mean where they are unequal.
        pool: Unlabelled items in all, which adaptation may look at. They are predicted too.
        queries: Items of each class that are predicted and not in the pool.
        unequal_shots: The number of labelled items differs between classes; each has at least one.
        unequal_pool: The classes of the pool are drawn from random proportions.
    """

    ways: int
    shots: int
    pool: int = 0
    queries: int = 0
    unequal_shots: bool = False
    unequal_pool: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("classes", self.ways, 2), ("shots", self.shots, 1)):
            if value < least:
                raise SettingError(f"The shape {self} has {value} {name}; a task has at least {least}.")
        if not self.scored:
            raise SettingError(f"The shape {self} has nothing to predict: give it a pool, or queries by /15.")
        if self.pool % self.ways and not self.unequal_pool:
            raise SettingError(
                f"The shape {self} has a pool of {self.pool} items, which cannot be shared equally by {self.ways} "
                f"classes: write +~{self.pool}, or a multiple of {self.ways}."
            )

    def __str__(self) -> str:
        pool = f"+{'~' * self.unequal_pool}{self.pool}" if self.pool else ""
        queries = f"/{self.queries}" if self.queries != usual_queries(self.ways, self.pool) else ""
        return f"{self.ways}x{'~' * self.unequal_shots}{self.shots}{pool}{queries}"

    @property
    def support(self) -> int:
        """Labelled items in all."""
        return self.ways * self.shots

    @property
    def scored(self) -> int:
        """Items that are predicted: the pool, and the queries beside it."""
        return self.pool + self.ways * self.queries

    @property
    def equal(self) -> bool:
        """Whether every class has as many items as every other."""
        return not (self.unequal_shots or self.unequal_pool)

    @property
    def images(self) -> int:
        """The most items that a class can be asked for."""
        support = self.support - self.ways + 1 if self.unequal_shots else self.shots
        pool = self.pool if self.unequal_pool else self.pool // self.ways
        return support + pool + self.queries


def benchmark_shape(ways: int, shots: int, queries: int) -> Shape:
    """The shape of the benchmarks: `queries` items of each class, which are the pool."""
    return Shape(ways, shots, ways * queries)


def read_shape(text: str) -> Shape:
    """The shape that a text such as 5x1+75 stands for."""
    found = _FORM.fullmatch(text.replace(" ", ""))
    if found is None:
        raise SettingError(
            f"{text!r} is not the shape of a task: write WAYSxSHOTS, such as 5x1; with a pool of unlabelled items "
            "5x1+75, or 5x1+~75 where its classes are not balanced."
        )
    ways, unequal_shots, shots, unequal_pool, pool, queries = found.groups()
    unlabelled = int(pool or 0)
    beside = usual_queries(int(ways), unlabelled) if queries is None else int(queries)
    return Shape(int(ways), int(shots), unlabelled, beside, bool(unequal_shots), bool(unequal_pool))


def usual_queries(ways: int, pool: int) -> int:
    """Queries of each class, beside a pool of this size, where their number is not given."""
    return 0 if pool and pool >= LARGE_POOL * ways else QUERIES


def read_shapes(texts: Iterable[str]) -> tuple[Shape, ...]:
    """The shapes of a setting; `usual` stands for those of `USUAL`."""
    words = [word for text in texts for word in (USUAL if text == "usual" else (text,))]
    return tuple(read_shape(word) for word in dict.fromkeys(words))
