"""Put the tensors of a file into a model so that references to its Parameters stay valid.

An optimizer, DDP and a CUDA graph hold Parameters, or the memory behind them. So a tensor is copied into the memory
that the model has, where dtype, shape and device are the same. Else the Parameter stays and gets other memory
(`.data`). Only a tensor without memory (meta), or of another kind, is replaced: `holders` says who holds the old one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.errors import ModelMismatchError, StateDictError
from narrowcast.nn.modules.base import copy_modules
from narrowcast.nn.state import ASSIGN


class IncompatibleKeys(NamedTuple):
    """The argument that torch gives to hooks after a load."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def put(own: Tensor, tensor: Tensor, device: torch.device | str) -> Tensor:
    """Put the values of `tensor` into a model's tensor `own`, and return it, or a new tensor where that cannot be."""
    plain = type(own) in (Tensor, nn.Parameter) and type(own.data) is Tensor
    if not plain or own.is_meta or own.is_inference() or tensor.is_floating_point() != own.is_floating_point():
        return new_tensor(own, tensor, device)
    place = torch.device(device)
    same = (own.dtype, own.shape) == (tensor.dtype, tensor.shape) and own.device == place
    if same and not any(stride == 0 and size > 1 for size, stride in zip(own.shape, own.stride(), strict=True)):
        with torch.no_grad():
            own.copy_(tensor)
        return own
    if not isinstance(own, nn.Parameter):
        return tensor.to(device)
    # A gradient of another dtype, shape or device does not fit the new memory.
    own.grad = None
    own.data = tensor.to(device)
    return own


def new_tensor(own: Tensor, tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor in the place of `own`, and a Parameter where that is one."""
    moved = tensor.to(device)
    return nn.Parameter(moved, own.requires_grad) if isinstance(own, nn.Parameter) else moved


def load_modules(model: nn.Module, state: dict[str, Tensor]) -> None:
    """What `model.load_state_dict(state, strict=False, assign=True)` does, in linear time.

    torch filters the keys of every child from all keys of its parent: 6,000 tensors of one Sequential take 3 s.
    Modules find their own keys by prefix, so here each gets all keys.
    """
    modules = [*model.named_modules(remove_duplicate=False)]
    if any(type(module).load_state_dict is not nn.Module.load_state_dict for _, module in modules):
        model.load_state_dict(state, strict=False, assign=True)
        return
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    for name, module in modules:
        lists = (missing, unexpected, errors)
        module._load_from_state_dict(state, f"{name}." if name else "", {ASSIGN: True}, False, *lists)
    for _, module in reversed(modules):
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, IncompatibleKeys(missing, unexpected))
    if errors:
        raise StateDictError(f"model: {' '.join(errors)}")


def holders(parameters: Iterable[Tensor]) -> list[str]:
    """The classes of optimizers and of DDP wrappers, anywhere in the process, that hold one of these Parameters."""
    wanted = {id(parameter) for parameter in parameters}
    kinds = (torch.optim.Optimizer, nn.parallel.DistributedDataParallel)
    of_kind: dict[type, bool] = {}
    classes = set()
    for thing in gc.get_objects() if wanted else ():
        kind = type(thing)
        if kind not in of_kind:
            of_kind[kind] = not set(kinds).isdisjoint(kind.__mro__)
        if not of_kind[kind]:
            continue
        groups = getattr(thing, "param_groups", None)
        held = thing.parameters() if groups is None else [own for group in groups for own in group["params"]]
        if any(id(own) in wanted for own in held):
            classes.add(kind.__name__)
    return sorted(classes)


def check_whole_tensors(model: nn.Module) -> None:
    """Refuse a model whose tensors are parts of others."""
    sharded = [name for name, own in model.named_parameters() if _is_called(own, "DTensor")]
    sharded += [name for name, own in model.named_modules() if _is_called(own, "FullyShardedDataParallel")]
    if sharded:
        raise ModelMismatchError(
            f"model: {sharded[0]!r} is sharded (FSDP or tensor parallel), and files hold whole tensors. Call "
            "narrowcast.load before the model is sharded; torch.distributed.checkpoint loads shards. The model is as "
            "it was."
        )


def _is_called(thing: object, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of the modules whose tensors are on meta, tied where the model's are. Attributes are shared."""
    tensors: dict[int, Tensor] = {}
    twin = copy_modules(model)
    for module in twin.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    tensors.setdefault(id(tensor), new_tensor(tensor, tensor.detach(), "meta"))
                    held[name] = tensors[id(tensor)]  # type: ignore[assignment]
    return twin
