import os

import pytest

from npbml.data.glyphs import glyphs
from npbml.data.store import Store


@pytest.fixture(scope="session")
def glyph_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The embedded data, drawn once a session in a folder of its own, which NPBML_DATA names meanwhile."""
    before = os.environ.get("NPBML_DATA")
    os.environ["NPBML_DATA"] = str(tmp_path_factory.mktemp("data"))
    try:
        return glyphs()
    finally:
        if before is None:
            del os.environ["NPBML_DATA"]
        else:
            os.environ["NPBML_DATA"] = before
