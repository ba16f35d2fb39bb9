"""Whether a run can fit into memory: a lower bound of what it needs, and what the machine has.

The bound counts what certainly is in memory at one time: the images of the splits, the parameters with their
gradients and the optimiser's state, and what autograd keeps of a batch for its backward pass. Networks are built
on torch's meta device, which has shapes and no data. Work space, caches and copies come on top and are not
counted, so that nothing is refused that fits.
"""

import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from npbml.engine.distributed import world
from npbml.errors import SettingError
from npbml.lab.schema import Config, method_config, override
from npbml.lab.stages import PRETRAIN, SCORER, needed, scorer_config
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec
from npbml.methods import trains
from npbml.nets.settings import smallest_image
from npbml.parts import BACKBONES, SCORERS
from npbml.settings import leaves, nested
from npbml.shapes import read_shapes
from npbml.stages.pretrain import pretrain_network

FLOAT = 4  # bytes
PROBE = 2  # images by which activations are measured; batch norm needs more than one
# The settings that can ask for too much, in the order in which they are named.
SIZES = (
    *("image_size", "net.filters", "net.widths", "scorer.widths", "loss.hidden", "pretrain.batch_size"),
    *("pretrain.crop_size", "scorer_training.crop_size", "train.meta_batch", "inner.steps", "train.ensemble"),
    *("test.batch_size", "shots", "queries", "ways"),
)


class Images(NamedTuple):
    """The images of a run, as they lie in its data set."""

    items: int  # of all splits
    channels: int
    size: int  # where the run asks for no other


class Need(NamedTuple):
    """Bytes that a run needs at least, and for what."""

    data: int
    work: int  # of the stage that needs most
    stage: str

    @property
    def total(self) -> int:
        """What is needed where data and work lie in one memory."""
        return self.data + self.work


def check_memory(config: Config, images: Images, device: torch.device) -> None:
    """Refuse a run that needs more memory than there is.

    Raises:
        SettingError: What is needed at least, what is there, and the setting that asks for it.
    """
    need = estimate(config, images)
    there = device_memory(device) if device.type == "cuda" else host_memory()
    where = "GPU" if device.type == "cuda" else "machine"
    if need.total <= there:
        return
    usual, name, least = Config(), "", math.inf
    defaults = {leaf.name: leaf.value for leaf in leaves(usual)}
    values = {leaf.name: leaf.value for leaf in leaves(config)}
    for size in SIZES:
        if values[size] != defaults[size]:
            total = estimate(override(config, nested({size: defaults[size]})), images).total
            if total < least:
                name, least = size, total
    asked = values[name] if name else config.dataset
    listed = " ".join(map(str, asked)) if isinstance(asked, tuple) else asked
    what = f"the images of {config.dataset}" if need.data > need.work else need.stage
    raise SettingError(
        f"{name or 'dataset'}={listed} asks for too much: {what} needs at least {in_words(need.total)} of memory, "
        f"and this {where} has {in_words(there)}."
    )


def in_words(count: float) -> str:
    """A number of bytes as a person writes it."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.0f} PiB"


def host_memory() -> int:
    """Bytes of memory that this process may use at most: the machine's with its swap, or a limit set to it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(Path(limit)).strip()
        total = min(total, int(text)) if text.isdigit() else total
    rows = dict(line.partition(":")[::2] for line in _text(Path("/proc/meminfo")).splitlines())
    swap = rows.get("SwapTotal", "0").split()[0]
    total += 1024 * int(swap) if swap.isdigit() else 0
    limit_of_process = resource.getrlimit(resource.RLIMIT_AS)[0]
    return total if limit_of_process == resource.RLIM_INFINITY else min(total, limit_of_process)


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that are free, or kept by torch for this process."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def estimate(config: Config, images: Images) -> Need:
    """What a run needs at least. A backbone that meta tensors cannot pass through counts nothing."""
    size = config.image_size or images.size
    data = images.items * images.channels * size**2
    if BACKBONES.fact(config.learner.backbone, "pretrained"):
        return Need(data, 0, "")  # its features are computed once, a few images at a time
    spec = ImageSpec(images.channels, size, (0.5,) * images.channels, (0.5,) * images.channels)
    methods = list(dict.fromkeys((config.method, *config.baselines)))
    stages = needed(config, methods)
    needs: list[tuple[int, str]] = [(0, "")]
    if PRETRAIN.name in stages:
        needs.append((_possible(lambda: pretraining(config, spec)), "pre-training"))
    if SCORER.name in stages:
        needs.append((_possible(lambda: scorer_training(config, spec)), "the training of the scorer"))
    for name in filter(trains, methods):
        own = method_config(config, name)
        needs.append((_possible(lambda own=own: meta_training(own, spec)), f"meta-training of {name}"))  # type: ignore[misc]
    return Need(data, *max(needs))


def _possible(measure: Callable[[], int]) -> int:
    """What is measured, or nothing where a user's own part cannot be built without data."""
    try:
        return measure()
    except (RuntimeError, NotImplementedError, TypeError):
        return 0


def pretraining(config: Config, spec: ImageSpec) -> int:
    """Of a batch of pre-training, with SGD's momentum."""
    settings, learner = config.pretrain, config.learner
    size = settings.crop_size or spec.size
    if size < smallest_image(learner.backbone, learner.net):
        return 0  # refused elsewhere, with other words
    with torch.device("meta"):
        network = pretrain_network(learner, settings, spec)
        probe = torch.zeros(PROBE, spec.channels, size, size)
    of_probe = kept_by_autograd(network, lambda: network(probe)) // _rounding(config)
    activations = of_probe * settings.batch_size // world()[1] // PROBE
    return parameter_bytes(network) + 2 * trained_bytes(network) + activations


def scorer_training(config: Config, spec: ImageSpec) -> int:
    """Of an episode of one shot and few queries, with Adam's moments; or of a batch of an encoder that scores."""
    scorer = config.learner.scorer
    if scorer.pretrains:
        return pretraining(scorer_config(config), spec)
    ways = config.learner.ways
    with torch.device("meta"):
        module: nn.Module = SCORERS.get(scorer.kind)(spec.channels, scorer)
        support = torch.zeros(ways, spec.channels, spec.size, spec.size)
        query = torch.zeros(PROBE, spec.channels, spec.size, spec.size)
        labels = torch.zeros(ways, dtype=torch.long)
    activations = kept_by_autograd(module, lambda: module(support, labels, query, ways)) // _rounding(config)
    return parameter_bytes(module) + 3 * trained_bytes(module) + activations


def meta_training(config: Config, spec: ImageSpec) -> int:
    """Of a meta-step: the meta-parameters with their optimiser, the states that are kept, and the unrolled tail.

    A second-order unroll keeps the activations of each inner step. One task counts where tasks may be run one by
    one; of the others, their frozen features.
    """
    settings, engine, outer = config.learner, config.engine, config.learner.outer
    with torch.device("meta"):
        learner = Learner(settings, spec, config.seed)
        probe = torch.zeros(PROBE, spec.channels, spec.size, spec.size)
        with torch.no_grad():
            features = learner.network.stem(probe)
    of_probe = kept_by_autograd(learner.network.tail, lambda: learner.network.tail(features))
    of_item = of_probe // _rounding(config) // PROBE
    frozen = features.numel() * FLOAT // 2 // PROBE  # perhaps in half precision
    shapes = read_shapes(settings.shapes)
    support = min((shape.support for shape in shapes), default=settings.ways * config.shots)
    pool = min((shape.pool for shape in shapes), default=settings.outputs * config.queries)
    items = support + (pool if settings.inner.batch == "joint" else 0)
    steps = min(settings.inner.steps, outer.second_order_steps or settings.inner.steps)
    if engine.remat or outer.order == 1 or outer.objective == "trajectory":
        steps = 1
    batch = -(-config.meta_batch // world()[1])
    tasks = min(batch, engine.chunk or batch) if engine.tasks == "vmap" else 1
    kept = min(config.train.ensemble, 1 + config.train.steps // config.train.validate_every)
    moments = 1 if config.train.optimizer == "sgd" else 2
    parameters = parameter_bytes(learner) * (1 + kept) + trained_bytes(learner) * (1 + moments)
    features_of_batch = (batch - tasks) * items * frozen
    return parameters + tasks * steps * items * of_item + features_of_batch


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def trained_bytes(module: nn.Module) -> int:
    """Bytes of what has a gradient."""
    return sum(FLOAT * parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _rounding(config: Config) -> int:
    """By how much activations may be smaller than in single precision."""
    return 2 if config.engine.precision == "bfloat16" else 1


def kept_by_autograd(module: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps of a forward pass for its backward pass, parameters aside."""
    seen: dict[int, Tensor] = {}

    def key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata  # views, and the copies that hooks are given, share it

    def pack(tensor: Tensor) -> Tensor:
        seen[key(tensor)] = tensor  # which keeps its memory from being given to another
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()
    own = {key(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in seen.items() if place not in own)
    del kept
    return found
