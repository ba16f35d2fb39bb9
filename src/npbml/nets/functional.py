"""Call a module with other tensors in the place of its own, without touching the module."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

Module = TypeVar("Module", bound=nn.Module)


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], *arguments: Any, **named: Any) -> Any:
    """module(*arguments, **named), computed with `tensors` in the place of those of the same names.

    torch's functional_call puts the tensors into the module for the time of the call, so that two threads that
    call one module see each other's. Here the call goes to a copy of the modules that hold them: it is made of
    references, in microseconds, and the module itself is only read. Compiled code has no modules left in it, and
    its compiler knows functional_call.
    """
    if torch.compiler.is_compiling():
        return functional_call(module, dict(tensors), arguments, named)
    return with_tensors(module, tensors)(*arguments, **named)


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The module with `tensors` in the place of those of the same names; what has none of them is shared."""
    mine: dict[str, Tensor] = {}
    below: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        child, dot, rest = name.partition(".")
        if dot:
            below.setdefault(child, {})[rest] = tensor
        else:
            mine[name] = tensor
    copied = shallow_copy(module)
    for name, tensor in mine.items():
        place = copied._parameters if name in copied._parameters else copied._buffers
        if name not in place:
            raise KeyError(f"{type(module).__name__} has no tensor {name!r}")
        place[name] = tensor  # type: ignore[assignment]
    for name, own in below.items():
        inner = copied._modules[name]
        assert inner is not None
        copied._modules[name] = with_tensors(inner, own)
    return copied


def shallow_copy(module: nn.Module) -> nn.Module:
    """Another module object with the same tensors and children, whose places can be filled anew."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__ = module.__dict__.copy()
    for name in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[name] = copied.__dict__[name].copy()
    return copied


def sharing_copy(module: Module) -> Module:
    """Other modules with the same tensors, to be set up in another way; what one changes in place both see."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
