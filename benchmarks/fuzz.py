"""Give the readers of npbml files that were changed at random, and report what is no sentence of npbml's own.

    python benchmarks/fuzz.py --seconds 600 --seed 0

A whole file of every kind is changed in a few places and read. An error of npbml is what is expected, and so is a
file that can still be read; anything else, and a file that takes longer than ten seconds, is kept in --out.
"""

import argparse
import json
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save

import npbml
from npbml.data.archives import unpack
from npbml.data.pickles import load_pickle
from npbml.errors import NpbmlError
from npbml.json_files import read_json, write_json
from npbml.pictures import picture_bytes
from npbml.settings import from_dict
from npbml.tensor_files import load_tensors

ODD = [
    b"\0",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x7f\xff\xff\xff",
    b"[" * 5000,
    b"-1",
    b"1e999",
    b"NaN",
    b'"',
    b"{}",
    b"(",
]
SLOW = 10  # seconds
Reader = Callable[[Path], object]


def changed(content: bytes, rng: random.Random) -> bytes:
    """The content with one to four changes, half of them near its beginning, where headers are."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        end = len(data) if rng.random() < 0.5 else min(len(data), 400)
        first, other, length = rng.randrange(end + 1), rng.randrange(len(data) + 1), rng.choice([1, 2, 4, 8, 64])
        old, last = data[first : first + length], first + length
        new = [
            bytes([old[0] ^ 1 << rng.randrange(8)]) + old[1:] if old else b"",
            b"",
            old * rng.choice([2, 3, 1000]),
            rng.choice(ODD),
            data[other : other + length],
            rng.randbytes(length),
        ]
        data[first:last] = rng.choice(new)
        if rng.random() < 0.03:
            del data[first:]
    return bytes(data)


def seeds(folder: Path) -> dict[str, tuple[bytes, Reader]]:
    """A whole file of every kind by the ending of its name, and what reads it."""
    made: dict[str, tuple[bytes, Reader]] = {}
    one, rng = folder / "one", np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    table = {"image_data": pixels, "class_dict": {("a", 1): [0, 1], "b": {2, 3}}, "x": np.array([1, "a"], object)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        made[f"{protocol}.pkl"] = pickle.dumps(table, protocol), load_pickle
    write_json(one, {"method": "npbml", "validation": [51.25, {"steps": 3, "ä": None}]})
    made["json"] = one.read_bytes(), read_json

    def keep(ending: str, reader: Reader) -> None:
        """The file as it is, and without its digest, under which it would never be looked at."""
        tensors, about = load_tensors(one)
        made[ending] = one.read_bytes(), reader
        made[f"old.{ending}"] = save(tensors, {"about": json.dumps(about)}), reader

    settings = from_dict(npbml.LearnerSettings, {"net": {"filters": 4}}, npbml.LearnerSettings())
    npbml.save_learner(npbml.Learner(settings, npbml.ImageSpec(3, 16, (0.5,) * 3, (0.25,) * 3)), one)
    keep("safetensors", lambda path: npbml.load(path, device="cpu"))
    npbml.FewShotClassifier("cifar-fs-conv4", device="cpu").fit(list(pixels), ["a", "a", "b", "b"]).save(one)
    keep("npbml", lambda path: npbml.FewShotClassifier.load(path, device="cpu"))
    (folder / "in" / "class").mkdir(parents=True)
    for name in ("one", "two"):
        (folder / "in" / "class" / name).write_bytes(rng.bytes(700))
    for form, ending in (("tar", "tar"), ("gztar", "tar.gz"), ("xztar", "tar.xz"), ("zip", "zip")):
        packed = Path(shutil.make_archive(str(one), form, folder / "in"))
        made[ending] = packed.read_bytes(), lambda path: unpack(path, folder / "room")
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        Image.fromarray(pixels[0]).save(one, kind)
        made[kind] = one.read_bytes(), lambda path: picture_bytes(path, 8, 3)
    return made


def too_slow(*_: Any) -> None:
    raise TimeoutError(f"longer than {SLOW} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description="Read files that were changed at random.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz"))
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, too_slow)
    rng, done, found = random.Random(options.seed), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        files, end = seeds(Path(place)), time.monotonic() + options.seconds
        while time.monotonic() < end:
            ending = rng.choice(list(files))
            content, path = changed(files[ending][0], rng), Path(place) / f"file.{ending}"
            path.write_bytes(content)
            signal.alarm(SLOW)
            try:
                files[ending][1](path)
                done["read"] += 1
            except Exception as error:
                if isinstance(error, NpbmlError) and "\n" not in str(error):
                    done["refused"] += 1
                    continue
                where = f"{ending}: {error!r:.100} at {traceback.extract_tb(error.__traceback__)[-1]}"
                found[where] += 1
                if found[where] == 1:
                    options.out.mkdir(exist_ok=True)
                    (options.out / f"{len(found)}.{ending}").write_bytes(content)
                    print(where, flush=True)
            finally:
                signal.alarm(0)
    sys.exit(f"{dict(done)}, {len(found)} kinds of errors" if found else print(dict(done)))


if __name__ == "__main__":
    main()
