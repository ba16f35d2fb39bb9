"""How a meta-step is executed. None of it changes what is computed, but for rounding."""

from dataclasses import dataclass, replace
from typing import Literal

from npbml.settings import setting

Choice = Literal["auto", "on", "off"]
Tasks = Literal["auto", "vmap", "loop"]


@dataclass(frozen=True)
class EngineSettings:
    """The engine."""

    tasks: Tasks = setting("auto", values={"together": "vmap"})
    """Tasks run batched in one vmap, each by itself on a core or GPU stream (loop), or as is faster."""
    chunk: int | None = setting(None, low=1)
    """Tasks that are unrolled at a time, where memory is short; all of them if not given."""
    compile: Choice = setting("auto")
    """Compile one inner step, with its second-order backward, and use it for all; auto: in long runs on a GPU."""
    cuda_graph: Choice = setting("auto", was="graph")
    """Capture the whole meta-step in a CUDA graph and replay it; auto: on a GPU."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = setting("auto")
    """Of convolutions and products; auto: tf32 on a GPU. Gradients, statistics and loss networks stay float32."""
    remat: bool = setting(False)
    """Keep only the state between inner steps and compute the rest again: less memory, and more time."""
    deterministic: bool = setting(True)
    """On a GPU: algorithms that give the same bits every time, so that a resumed run ends the same."""


def resolved(settings: EngineSettings, device_type: str) -> EngineSettings:
    """The settings with every `auto` but that of the tasks decided."""
    usual = EngineSettings(compile="on", cuda_graph="on", precision="tf32")
    if device_type != "cuda":
        usual = EngineSettings(compile="off", cuda_graph="off", precision="float32")
        settings = replace(settings, cuda_graph="off")
    names = ("compile", "cuda_graph", "precision")
    return replace(settings, **{n: getattr(usual, n) for n in names if getattr(settings, n) == "auto"})
