"""A data set of one's own: blobs of colour, a class for each colour."""

import numpy as np

import npbml


@npbml.register_dataset("blobs")
def blobs():
    """noisy squares of one colour"""
    random = np.random.default_rng(0)

    def pictures():
        return np.clip(random.uniform(0, 1, 3) + random.normal(0, 0.1, (8, 16, 16, 3)), 0, 1)

    return {split: {f"{split} {n}": pictures() for n in range(4)} for split in ("train", "val", "test")}
