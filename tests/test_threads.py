"""Work in threads is the work that one thread does."""

import torch

from npbml.engine.device import in_precision
from npbml.threads import each_in_a_thread, one_core


def test_threads_give_every_result_in_order_and_in_the_precision_around_them() -> None:
    def product(x: torch.Tensor) -> tuple[torch.dtype, int, int]:
        return (x @ x).dtype, int(x[0, 0]), torch.get_num_threads()

    items = [(torch.full((2, 2), float(number)),) for number in range(5)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for precision, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
            with in_precision(precision, torch.device("cpu")):
                assert each_in_a_thread(product, items) == [(dtype, number, 1) for number in range(5)]
                with one_core():
                    assert each_in_a_thread(product, items) == [(dtype, number, 1) for number in range(5)]
        assert each_in_a_thread(product, items, on_cpu=False) == [(torch.float32, n, 2) for n in range(5)]
    finally:
        torch.set_num_threads(before)
