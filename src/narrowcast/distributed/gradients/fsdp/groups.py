"""What narrowcast knows of the inside of torch's FSDP2: here and nowhere else.

`fully_shard` keeps the parameters that it communicates together in a parameter group. Of each group narrowcast needs
its ranks, its parameters with their names and the size of a rank's share, and which of them have a gradient in a
backward pass: the flat buffer that goes to a reduce-scatter holds these only, and does not say which they are. torch
offers a way to replace the collectives (`set_custom_reduce_scatter`), but none to ask for the rest.

A torch in which something is not where it was in the `KNOWN` ones raises `CollectiveError` when compression is asked
for, not in the middle of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from narrowcast.distributed.entry import uncompiled
from narrowcast.distributed.gradients.options import plain_name
from narrowcast.errors import CollectiveError, ModelKindError

KNOWN = "2.11 to 2.15"
"""The versions of torch whose FSDP2 this file knows."""

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError as error:  # pragma: no cover (a torch to come)
    raise CollectiveError(
        f"torch {torch.__version__} keeps the interfaces of FSDP2's collectives elsewhere, and this narrowcast knows "
        f"torch {KNOWN}: {error}. Update narrowcast, or use one of these."
    ) from error

__all__ = ["AllGather", "ParameterGroup", "ReduceScatter", "groups_of"]

_GROUP = (
    "fsdp_params",
    "mesh_info",
    "device",
    "post_backward",
    "gradient_divide_factor",
    "_reduce_scatter_comm",
    "_all_gather_comm",
    "_all_reduce_hook",
    "reduce_grads",
    "all_reduce_grads",
)
_PARAMETER = (
    "sharded_param",
    "padded_sharded_param_size",
    "unsharded_accumulated_grad",
    "_module_info",
    "_orig_size",
    "fsdp_placement",
)
_BROKEN = (
    "forward: a backward of this model broke off, by an error of its own or of a collective, and FSDP2 does not "
    "recover: from then on it would leave gradients on their rank. Make the model anew, and load a checkpoint."
)
_PRISTINE = ("DefaultReduceScatter", "DefaultAllGather")


class ParameterGroup:
    """A parameter group of FSDP2: what is gathered together, and reduced together."""

    def __init__(self, index: int, inner: Any, owner: FSDPModule, names: Sequence[str]) -> None:
        self.index = index
        """Its number in the model."""
        self.names = names
        self._inner = inner
        self._owner = owner
        self._noted: list[int] = []
        self.left_out: Callable[[], None] = lambda: None
        """Called in a backward pass that would reduce these gradients, but finds none."""
        several = getattr(inner.mesh_info, "replicate_process_group", None)
        self.replicas: dist.ProcessGroup | None = several if several is not None and several.size() > 1 else None
        """The ranks with the same share of the parameters, one of each replica (HSDP)."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share the parameters. With HSDP, those of one replica."""
        return self._inner.mesh_info.shard_process_group  # type: ignore[no-any-return]

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """All that have something of the parameters: one for each dimension of their mesh, with several ranks."""
        meshes = {parameter.sharded_param.device_mesh for parameter in self._inner.fsdp_params}
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        groups += [self.replicas] if self.replicas is not None else []
        return list({group: None for group in groups if group.size() > 1})

    @property
    def _reduces(self) -> bool:
        """Whether the backward pass under way is one that reduces gradients; of replicas, between them too."""
        replicated = hasattr(self._inner.mesh_info, "replicate_process_group")
        return bool(self._inner.reduce_grads and (self._inner.all_reduce_grads or not replicated))

    @property
    def averages(self) -> bool:
        """Whether torch divides by the number of ranks, as it does unless it was given another divisor."""
        return self._inner.gradient_divide_factor is None

    @property
    def device(self) -> torch.device:
        return self._inner.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """In which the parameters are kept."""
        return self._inner.fsdp_params[0].sharded_param.dtype  # type: ignore[no-any-return]

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter.sharded_param for parameter in self._inner.fsdp_params]

    @property
    def numels(self) -> list[int]:
        """The elements of each parameter, of all ranks that share it."""
        return [parameter._orig_size.numel() for parameter in self._inner.fsdp_params]

    @property
    def parts(self) -> list[int]:
        """How many elements of each parameter a rank has, padding included: the same on all ranks."""
        return [parameter.padded_sharded_param_size.numel() for parameter in self._inner.fsdp_params]

    @property
    def sharded_along(self) -> list[int]:
        """The dimension along which each parameter is cut."""
        return [parameter.fsdp_placement.dim for parameter in self._inner.fsdp_params]

    def with_gradients(self, columns: int) -> list[int]:
        """Which parameters have a gradient in this backward pass, of which a rank's share is `columns` elements."""
        parts = self.parts
        trained = [i for i, parameter in enumerate(self.parameters) if parameter.requires_grad]
        for which in (self._noted, trained):
            if sum(parts[i] for i in which) == columns:
                return which
        raise CollectiveError(
            f"torch {torch.__version__} reduces {columns} elements a rank for {', '.join(self.names[:3])}..., and "
            f"parameters with a gradient have {sum(parts[i] for i in self._noted)}. This narrowcast knows torch "
            f"{KNOWN}: update narrowcast, or use one of these."
        )

    @property
    def own_reduce_scatter(self) -> ReduceScatter:
        return self._inner._reduce_scatter_comm  # type: ignore[no-any-return]

    @property
    def own_all_gather(self) -> AllGather:
        return self._inner._all_gather_comm  # type: ignore[no-any-return]

    def refuse_after_a_break(self) -> None:
        """Let forward raise once a backward broke off. torch then leaves parameters gathered, and does not end another
        backward: gradients would stay on their rank, and nothing would say so."""
        state: Any = self._owner._get_fsdp_state()

        @uncompiled
        def before_forward(*unused: Any) -> None:
            # torch's mark that a backward is under way; blocks that are run again in one have a right to see it
            if state._state_ctx.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1:
                raise CollectiveError(_BROKEN)

        owner: Any = self._owner
        owner.register_forward_pre_hook(before_forward, prepend=True)

    def replace_collectives(self, reduce_scatter: ReduceScatter | None, all_gather: AllGather | None) -> None:
        """Put others in the place of torch's own. None leaves it as it is."""
        if reduce_scatter is not None:
            self._note_gradients()
            self._owner.set_custom_reduce_scatter(reduce_scatter)
        if all_gather is not None:
            self._owner.set_custom_all_gather(all_gather)

    def replace_all_reduce(self, all_reduce: Callable[[Tensor], None], lonely: dist.ProcessGroup) -> None:
        """Put another in the place of torch's all-reduce between replicas, which then has `lonely` to do with.

        torch calls a hook where its own all-reduce is over, or would be.
        """
        self._note_gradients()
        if hasattr(self._inner.mesh_info, "replicate_process_group"):
            self._inner.mesh_info = copy.copy(self._inner.mesh_info)  # other parts keep theirs
            self._inner.mesh_info.replicate_process_group = lonely
        self._owner.set_all_reduce_hook(uncompiled(all_reduce))

    def _note_gradients(self) -> None:
        """Before gradients are taken out of the parameters and put into one buffer, note which parameters have one."""
        inner, take = self._inner, self._inner.post_backward

        @uncompiled
        def post_backward(*unused: Any) -> None:
            always = getattr(inner, "reduce_scatter_unused_params", False)  # since 2.13
            self._noted = [i for i, p in enumerate(inner.fsdp_params) if _has_gradient(p, always)]
            if not self._noted and self._reduces:
                self.left_out()
            take(*unused)

        inner.post_backward = post_backward


def _has_gradient(parameter: Any, always: bool) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    if unsharded is None:
        return False
    given = parameter.unsharded_accumulated_grad is not None or unsharded.grad is not None
    return given or (always and unsharded.requires_grad)


def groups_of(model: nn.Module, names: Sequence[str]) -> list[ParameterGroup]:
    """All parameter groups in `model`, whose parameters have these names."""
    paths = {id(module): path for path, module in model.named_modules()}
    groups: list[ParameterGroup] = []
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for inner in _inside(module):
                if id(inner) not in seen:  # fully_shard([a, b]) makes one group for both
                    seen.add(id(inner))
                    groups.append(
                        ParameterGroup(len(groups), inner, module, [_name(p, paths, names) for p in inner.fsdp_params])
                    )
    return groups


def _inside(module: FSDPModule) -> list[Any]:
    """The parameter groups of a module, each as torch has it."""
    state: Any = module._get_fsdp_state()
    inside = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    inside = [inner for inner in inside if inner is not None]
    if len(inside) > 1:
        raise ModelKindError(
            f"model: {type(module).__name__} has parameters on several meshes (shard_placement_fn), and torch takes "
            "collectives of one's own for one mesh only. Give its parameters one mesh, or leave it uncompressed."
        )
    for inner in inside:
        _check(module, inner)
    return inside


def _check(module: FSDPModule, inner: Any) -> None:
    lacks = [name for name in _GROUP if not hasattr(inner, name)]
    context: Any = getattr(module._get_fsdp_state(), "_state_ctx", None)
    lacks += [name for name in ("post_backward_final_callback_queued",) if not hasattr(context, name)]
    lacks += [name for p in inner.fsdp_params[:1] for name in _PARAMETER if not hasattr(p, name)]
    if lacks:
        raise CollectiveError(
            f"torch {torch.__version__} arranges FSDP2 in another way than {KNOWN}, which this narrowcast knows: "
            f"there is no {', '.join(lacks)}. Update narrowcast, or use one of these."
        )
    if not hasattr(inner.mesh_info, "shard_process_group"):
        raise ModelKindError(
            f"model: {type(module).__name__} is replicated, not sharded: it has no reduce-scatter to compress. Use "
            "fully_shard with a mesh that shards, or DistributedDataParallel."
        )
    if inner._all_reduce_hook is not None:
        raise CollectiveError(
            f"model: {type(module).__name__} has an all-reduce hook already, and FSDP2 takes one. Call "
            "compress_gradients once, after fully_shard; it reduces between replicas itself."
        )
    for comm in (inner._reduce_scatter_comm, inner._all_gather_comm):
        if type(comm).__name__ not in _PRISTINE:
            raise CollectiveError(
                f"model: {type(module).__name__} has a collective of its own already ({type(comm).__name__}), and "
                "FSDP2 takes one. Call compress_gradients once, after fully_shard and before set_custom_*, on the root."
            )


def _name(parameter: Any, paths: dict[int, str], names: Sequence[str]) -> str:
    """The name of a parameter; a tied one has several, and one of them is known."""
    info = parameter._module_info
    modules, own = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
    full = [plain_name(f"{paths[id(m)]}.{name}") for m, name in zip(modules, own, strict=True) if id(m) in paths]
    return next((name for name in full if name in names), full[0])
