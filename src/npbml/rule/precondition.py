"""Preconditioners that act on the gradient: P of theta_{j+1} = theta_j - P(direction).

The warp (rule/warp.py) bends the gradient from inside the network; the parts here take what comes out of it,
after weight decay and momentum. Each is one published rule, and a chain of them is a rule too.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import initialise
from npbml.parts import PRECONDITIONERS
from npbml.rule.descend import Parameters, Point
from npbml.rule.pairs import mix_classes
from npbml.rule.settings import PreconditionSettings

Shapes = Mapping[str, torch.Size]
HEAD = ("head.weight", "head.bias")  # the tensors with a row for each class
ALFA_DECAY = 5e-4  # what generated weight decay starts from, as a multiple of the learning rate
CONTEXT, PASSES, MIXTURE = 300, 2, 5  # ModGrad: length of z, passes (the first has z = 0), candidates of a vector


class Preconditioner(nn.Module):
    """One link of the chain, (direction, point) -> direction, for the tensors whose shapes it is made with.

    A subclass defines `transform`, where a tensor's direction depends on nothing else, or `forward`. It states
    what is true of it among the attributes below, and draws what starts at random in `begin`.
    """

    learned = True  # it has parameters to meta-learn
    sets_rate = False  # its start is the learning rate
    per_step = False  # it has parameters for each step
    fits_shapes = False  # its parameters grow with the tensors
    of_kernels = False  # it acts on convolutions only
    masks_units = False  # it sets whole rows of a gradient to zero
    noise = 0  # random numbers that a task needs

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        """`shapes` of the adapted tensors by name, inner `steps`, and the learning rate before it."""
        super().__init__()

    def begin(self, std: float, generator: torch.Generator) -> None:
        """Draw what starts at random."""

    def forward(self, direction: Parameters, point: Point) -> Parameters:
        """The direction, tensors by name, and where the step is taken -> the direction after this part."""
        return {name: self.transform(name, g) for name, g in direction.items()}

    def transform(self, name: str, g: Tensor) -> Tensor:
        """What becomes of one tensor's direction, where that depends on nothing else."""
        raise TypeError(f"{type(self).__name__} has neither `transform` nor `forward`: define one of them.")


class Rates(Preconditioner):
    """a_{l,j} g^l: a learning rate for each tensor and step (LSLR, of MAML++)."""

    sets_rate = per_step = True

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        self.names = list(shapes)
        self.rate = nn.Parameter(torch.full((steps, len(shapes)), lr))

    def forward(self, direction: Parameters, point: Point) -> Parameters:
        rate = dict(zip(self.names, self.rate[point.step].unbind(), strict=True))
        return {name: rate[name] * g for name, g in direction.items()}


class Diagonal(Preconditioner):
    """alpha .* g, where alpha has the shape of theta (Meta-SGD)."""

    sets_rate = fits_shapes = True

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        self.uniform = settings.uniform
        self.rate = nn.ParameterDict({key(name): torch.full(shape, lr) for name, shape in shapes.items()})

    def begin(self, std: float, generator: torch.Generator) -> None:
        if self.uniform:
            for rate in self.rate.values():
                nn.init.uniform_(rate, 0.005, 0.1, generator)

    def transform(self, name: str, g: Tensor) -> Tensor:
        return self.rate[key(name)] * g


class Kronecker(Preconditioner):
    """G x_1 M_o x_2 M_i x_3 M_f, so that vec G is multiplied by M_o (x) M_i (x) M_f (Meta-Curvature).

    A kernel [o, i, kh, kw] is G [o, i, kh * kw]; a matrix has M_o and M_i alone, a vector a factor for each entry.
    """

    fits_shapes = True
    modes = ("o", "i", "f")

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        self.factors = nn.ParameterDict()
        for name, shape in shapes.items():
            if len(shape) == 1:
                self.factors[key(name)] = torch.ones(shape)
            else:
                sides = shape if len(shape) == 2 else (*shape[:2], math.prod(shape[2:]))
                for mode, side in zip(self.modes, sides, strict=False):
                    self.factors[key(name, mode)] = torch.eye(side)

    def transform(self, name: str, g: Tensor) -> Tensor:
        if g.dim() == 1:
            return self.factors[key(name)] * g
        product = g if g.dim() == 2 else g.flatten(2)
        for axis in range(product.dim()):
            product = self.multiply(self.factors[key(name, self.modes[axis])], product, axis)
        return product.reshape(g.shape)

    def multiply(self, factor: Tensor, g: Tensor, axis: int) -> Tensor:
        """The product with a factor in one mode."""
        return torch.tensordot(factor, g, ([1], [axis])).movedim(0, axis)


class SymmetricKronecker(Kronecker):
    """The same for any number of classes: the head's M_o = a I + (b / ways) 11^T, and one factor for its bias."""

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        if "head.weight" in shapes:
            self.factors[key("head.weight", "o")] = torch.tensor([1.0, 0.0])

    def multiply(self, factor: Tensor, g: Tensor, axis: int) -> Tensor:
        return mix_classes(factor, g, axis) if factor.dim() == 1 else super().multiply(factor, g, axis)


class Svd(Preconditioner):
    """U diag(s) U^t G for every kernel, where G [o, i * kh * kw] = U S V^t and s = softplus_2(m) (GAP).

    This is U diag(s .* S) V^t: the singular values are scaled. U is held constant, as the derivative of an SVD
    does not exist where singular values meet. Tensors that are no kernels pass.
    """

    of_kernels = True

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        kernels = {name: shape for name, shape in shapes.items() if len(shape) == 4}
        self.m = nn.ParameterDict(
            {key(name): torch.full((min(s[0], math.prod(s[1:])),), 0.928) for name, s in kernels.items()}
        )  # softplus_2(0.928) = 1

    def transform(self, name: str, g: Tensor) -> Tensor:
        if g.dim() != 4:
            return g
        return self.scale(g.flatten(1), F.softplus(self.m[key(name)], beta=2)).reshape(g.shape)

    def scale(self, g: Tensor, s: Tensor) -> Tensor:
        # A gradient that is not finite has no SVD; it is for the meta-step to find, so it must get there.
        u = torch.linalg.svd(g.detach().nan_to_num(0, 0, 0), full_matrices=False).U
        return u @ (s.unsqueeze(1) * (u.mT @ g))


class SvdApprox(Svd):
    """diag(s) G where o <= i * kh * kw, else G diag(s): GAP as if the singular vectors were the axes."""

    def scale(self, g: Tensor, s: Tensor) -> Tensor:
        return s.unsqueeze(1) * g if g.shape[0] <= g.shape[1] else g * s


class UnitMask(Preconditioner):
    """m .* g, where m in {0, 1} is drawn for each output unit with P(m = 1) = sigmoid(zeta) (MT-Net).

    The weight and the bias of a layer share the draws. Forward m is hard; backward it is the soft
    sigmoid(zeta + log u - log(1 - u)), which is a Gumbel-softmax over (zeta, 0) at temperature 1.
    """

    fits_shapes = masks_units = True

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        self.units = {layer(name): shape[0] for name, shape in shapes.items()}
        self.noise = sum(self.units.values())
        self.zeta = nn.Parameter(torch.zeros(self.noise))

    def forward(self, direction: Parameters, point: Point) -> Parameters:
        soft = torch.sigmoid(self.zeta + point.noise.log() - torch.log1p(-point.noise))
        # The bracket is exactly zero, so that the mask is exactly hard.
        mask = (soft >= 0.5).to(soft.dtype) + (soft - soft.detach())
        masks = dict(zip(self.units, mask.split(list(self.units.values())), strict=True))
        return {name: masks[layer(name)].view(-1, *(1,) * (g.dim() - 1)) * g for name, g in direction.items()}


class SymmetricUnitMask(UnitMask):
    """The same for any number of classes: the head passes.

    Its rows would have one mask, and a head that does not move tells no class from another.
    """

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__({name: s for name, s in shapes.items() if name not in HEAD}, steps, lr, settings)

    def forward(self, direction: Parameters, point: Point) -> Parameters:
        masked = super().forward({name: g for name, g in direction.items() if name not in HEAD}, point)
        return {**direction, **masked}


class Mixture(nn.Module):
    """z -> a vector: the softmax-weighted sum of candidates, all from a network with one hidden layer."""

    def __init__(self, context: int, size: int, candidates: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(context, size)
        self.output = nn.Linear(size, candidates * (1 + size))
        self.candidates = candidates

    def begin(self, std: float, generator: torch.Generator) -> None:
        """Give the vector of ones for every z.

        The hidden biases are drawn: were they zero, z = 0 would sit on the kink of every ReLU, where no
        derivative passes, and neither z nor any weight would ever move.
        """
        initialise(self, std, generator, uniform_bias=True)
        nn.init.zeros_(self.output.weight)
        with torch.no_grad():
            self.output.bias[: self.candidates] = 0
            self.output.bias[self.candidates :] = 1

    def forward(self, z: Tensor) -> Tensor:
        """z [context] -> [size]"""
        output = self.output(F.relu(self.hidden(z)))
        weights, candidates = output[: self.candidates].softmax(0), output[self.candidates :]
        return weights @ candidates.unflatten(0, (self.candidates, -1))


class ContextMask(Preconditioner):
    """Psi(z) .* g, a mask of rank one before its ReLU, generated for the task from a context z (ModGrad).

    The mask of the weight [f, c, a, b] is relu(u_{fa} v_{cb}), that of a vector relu(b). z starts at 0 and is
    replaced, in each pass but the last, by -grad_z loss(theta - a Psi(z) .* g).
    """

    fits_shapes = True

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        self.lr = lr
        self.vectors = nn.ModuleDict()
        for name, shape in shapes.items():
            o, i, kh, kw = kernel(shape)
            for vector, size in (("u", o * kh), ("v", i * kw)) if len(shape) > 1 else (("b", o),):
                self.vectors[key(name, vector)] = Mixture(CONTEXT, size, MIXTURE)

    def mask(self, name: str, shape: torch.Size, z: Tensor) -> Tensor:
        if len(shape) == 1:
            return F.relu(self.vectors[key(name, "b")](z))
        _, i, kh, kw = kernel(shape)
        u, v = self.vectors[key(name, "u")](z), self.vectors[key(name, "v")](z)
        # As many rows as u has: one for all of the head's in the class-symmetric form.
        return F.relu(torch.einsum("fa,cb->fcab", u.view(-1, kh), v.view(i, kw))).reshape(-1, *shape[1:])

    def forward(self, direction: Parameters, point: Point) -> Parameters:
        def masked(z: Tensor) -> Parameters:
            return {name: self.mask(name, g.shape, z) * g for name, g in direction.items()}

        def look_ahead(z: Tensor) -> Tensor:
            moved = {name: point.theta[name] - self.lr * g for name, g in masked(z).items()}
            return point.loss({**point.theta, **moved})

        z = next(iter(direction.values())).new_zeros(CONTEXT)
        for _ in range(PASSES - 1):
            z = -torch.func.grad(look_ahead)(z)
        return masked(z)


class Generated(Rates):
    """alpha^l A_{l,j} g^l + beta^l D_{l,j} theta^l, where (alpha, beta) = h(tau) (ALFA).

    tau [2 * tensors] holds the mean of each theta^l, then that of each g^l, which carries no gradient. Subtracted,
    the step is theta^l <- (1 - beta^l D_{l,j}) theta^l - alpha^l A_{l,j} g^l.
    """

    def __init__(self, shapes: Shapes, steps: int, lr: float, settings: PreconditionSettings) -> None:
        super().__init__(shapes, steps, lr, settings)
        width = 2 * len(shapes)
        self.decay = nn.Parameter(torch.full((steps, len(shapes)), lr * ALFA_DECAY))
        self.h = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def begin(self, std: float, generator: torch.Generator) -> None:
        initialise(self.h, std, generator)
        nn.init.ones_(self.h[2].bias)  # type: ignore[arg-type]

    def forward(self, direction: Parameters, point: Point) -> Parameters:
        theta = {name: point.theta[name] for name in self.names}
        means = [t.mean() for t in theta.values()] + [direction[name].mean().detach() for name in self.names]
        alpha, beta = self.h(torch.stack(means)).chunk(2)
        rate, decay = alpha * self.rate[point.step], beta * self.decay[point.step]
        return {name: rate[i] * direction[name] + decay[i] * t for i, (name, t) in enumerate(theta.items())}


class Precondition(nn.Module):
    """P of theta_{j+1} = theta_j - P(direction): the chain of parts, and the learning rate where no part sets it.

    `shapes` are those of all tensors that a direction has, by name. `noise` says how many random numbers a task
    needs, `per_step` that no step from `steps` on can be taken, `fixes_ways` that the head's rows are counted.

    With `symmetric` they are not: parts have their class-symmetric forms, and `shapes` one row for the whole head.
    """

    def __init__(
        self, settings: PreconditionSettings, shapes: Shapes, steps: int, lr: float, symmetric: bool = False
    ) -> None:
        super().__init__()
        self.lr, parts = lr, []
        for kind in settings.chain:
            parts.append(PRECONDITIONERS.get(kind, symmetric)(shapes, steps, self.lr, settings))
            if parts[-1].sets_rate:
                self.lr = 1.0  # for what follows, the direction has its rate already
        self.parts = nn.ModuleList(parts)
        self.noise = sum(part.noise for part in parts)
        self.per_step = any(part.per_step for part in parts)
        counted = not symmetric and not shapes.keys().isdisjoint(HEAD)
        self.fixes_ways = counted and any(part.fits_shapes for part in parts)

    def begin(self, std: float, generator: torch.Generator) -> None:
        """Draw what starts at random: weights of generators ~ N(0, std^2)."""
        for part in self.modules():
            if isinstance(part, Preconditioner | Mixture):
                part.begin(std, generator)

    def forward(self, direction: Parameters, point: Point) -> Parameters:
        """The step that is subtracted from theta, for the names in `direction`."""
        for part in self.parts:
            direction = part(direction, point)
        return {name: self.lr * g for name, g in direction.items()}


def kernel(shape: torch.Size) -> tuple[int, ...]:
    """(o, i, kh, kw): a matrix is a kernel of one pixel, a vector one with a single input besides."""
    return (*shape, 1, 1, 1)[:4]


def layer(name: str) -> str:
    """What a weight and a bias of one layer have in common."""
    return name.rpartition(".")[0]


def key(*words: str) -> str:
    """A name that a dictionary of modules takes: without dots."""
    return "-".join(words).replace(".", "-")
