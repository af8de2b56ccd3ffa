"""How FSDP2 hands over its gradients, and fetches its parameters: collectives that take the place of torch's own.

Every parameter group of the model gets a reduce-scatter, and with `gather=` an all-gather, that encode. torch calls
them where it would call its own, on the stream of its choice, and goes on when they return: on a CPU when it is done,
on CUDA when that stream waits for it. So nothing about streams, prefetching, or when parameters are freed is changed.

- A step is one backward pass that reduces gradients. torch does not say when one begins: it does when a parameter group
  is to be reduced that the step before has reduced already.
- The sum of a shard stays on the rank that owns it, unquantized: error feedback is the sender's alone.
- Gathered parameters are what forward and backward compute with, on every rank alike. The sharded ones, which the
  optimizer and checkpoints see, stay exact. Backward may gather again, and must find what forward found: the codec may
  not round at random.
- What torch does besides is left to it: the all-reduce between the replicas of HSDP, and gathering from the fewer ranks
  of reshard_after_forward=int, go uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.gradients.columns import PieceLayout
from narrowcast.distributed.gradients.compression import GradientCompression, codec_for
from narrowcast.distributed.gradients.feedback import Residuals
from narrowcast.distributed.gradients.fsdp_torch import AllGather, Group, ReduceScatter, groups_of
from narrowcast.distributed.gradients.options import Mode, for_gradients
from narrowcast.distributed.gradients.outcome import Outcome, share
from narrowcast.distributed.gradients.shards import Shard, gather_shards, lay_out_shards, reduce_shards
from narrowcast.distributed.gradients.telemetry import BucketStats
from narrowcast.distributed.launch import Operands, launch, start
from narrowcast.distributed.protocols.encoder import lossless
from narrowcast.distributed.protocols.exchange import Exchange
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Peers, peers_of
from narrowcast.errors import DtypeError, ModelKindError, SpecError

GATHERED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that a codec takes, and gives back without loss where they are exempt."""

LAYOUTS = 1024
"""So many sets of parameters that have a gradient together are remembered."""


def attach(model: nn.Module, state: GradientCompression, gather: AnyCodec | None) -> None:
    """Replace the collectives of all parameter groups in `model`, once all ranks are known to be configured alike."""
    codec = None if gather is None else _for_parameters(as_codec(gather))
    groups = groups_of(model, list(state.numels))
    if not groups:
        raise ModelKindError(f"model: {type(model).__name__} is sharded, but has no parameters.")
    for group in groups:
        _refuse_complex(group)
    engine = Engine(state, codec, groups)
    engine.agree()
    state.clock.handed_over()  # torch waits for each reduction where it asks for it
    for group in groups:
        gathers = None if codec is None else _Gather(engine, group)
        group.replace_collectives(_Reduce(engine, group), gathers)


class Engine:
    """What the collectives of one model have in common."""

    def __init__(self, state: GradientCompression, gather: Codec | None, groups: Sequence[Group]) -> None:
        self.state = state
        self.gather = gather
        self._groups = groups
        self._step: int | None = None
        self._reduced: set[int] = set()
        """The groups that have been reduced in this step."""
        self._outcome = Outcome()
        self._task, self._waiting = -1, -1
        """The pass in which a group was reduced last, and the one whose end is waited for: numbers of autograd's."""
        self._to_tell: dict[dist.ProcessGroup, torch.device] = {}
        """Those who share parameters that were reduced in this pass."""

    def agree(self) -> None:
        """Meet all ranks that share parameters with this one."""
        state = self.state
        for group in self._groups:
            for name, numel in zip(group.names, group.numels, strict=True):
                state.numels[name] = numel  # what this rank sees of it, where tensors are parallel too
        shared = {group.process_group: group for group in self._groups if group.process_group.size() > 1}
        gather = "none" if self.gather is None else self.gather.spec
        for process_group, group in shared.items():
            peers = peers_of(process_group, group.device, "gradients")
            state.meet(peers, group.dtype, f", groups={len(self._groups)}, gather={gather}")
        state.make_residuals = _residuals
        for process_group, group in shared.items():
            state.agree(process_group, torch.empty(0, dtype=group.dtype, device=group.device))

    def step_of(self, group: Group) -> tuple[int, Outcome]:
        """The number of the step in which a group is being reduced, and its outcome."""
        loaded = self._step is not None and self.state.step != self._step + 1
        task = torch._C._current_graph_task_id()
        if self._step is None or loaded or group.index in self._reduced:
            self._step = self.state.step
            self.state.step += 1
            self._reduced.clear()
            if self._outcome.complete or task != self._task:  # else one pass reduces it bit by bit
                self._outcome = Outcome()
        self._reduced.add(group.index)
        self._outcome.complete, self._task = False, task
        return self._step, self._outcome

    def tell_at_the_end(self, group: Group) -> None:
        """When this pass is over, tell all ranks that share this group's parameters whether all is finite here."""
        for process_group in group.process_groups:
            self._to_tell[process_group] = group.device
        if self._task == -1:
            self._tell()
        elif self._task != self._waiting:
            self._waiting = self._task
            torch.autograd.Variable._execution_engine.queue_callback(self._tell)

    def tell_of(self, error: BaseException, here: Peers) -> None:
        """Backward breaks off in a job of `here`: those who wait for this rank to tell them how it went fail, too."""
        told, self._to_tell, self._waiting = self._to_tell, {}, -1
        for process_group, device in told.items():
            peers = peers_of(process_group, device, "gradients")
            if peers is here:
                peers.give_up("gradients", error)
            else:
                peers.refuse("gradients", error)

    def _tell(self) -> None:
        """A verdict reaches all ranks of a mesh when it goes through each of its dimensions, and all others by way of
        the larger group."""
        told, self._to_tell, self._waiting = self._to_tell, {}, -1
        for process_group, device in sorted(told.items(), key=lambda item: item[0].size()):
            share(self._outcome, peers_of(process_group, device, "gradients"), self._step or 0)
        self._outcome.complete = True

    def layout(self, group: Group, which: Sequence[int], peers: Peers, all_exempt: bool) -> list[PieceLayout]:
        """The pieces of a matrix that holds these parameters of a group."""
        state, key = self.state, (group.index, *which, all_exempt, peers.size)
        if key not in state.layouts:
            if len(state.layouts) >= LAYOUTS:  # experts that come and go: residuals move to new layouts
                state.layouts.clear()
            shards = []
            for i in which:
                name, numel = group.names[i], group.numels[i]
                exempt = all_exempt or state.is_exempt(name, numel, peers.size)
                shards.append(Shard(name, numel, group.parts[i], exempt))
            state.layouts[key] = lay_out_shards(shards, peers.size, at_once=peers.nccl)
        return state.layouts[key]


class _Reduce(ReduceScatter):
    """The reduce-scatter of a parameter group's gradients."""

    def __init__(self, engine: Engine, group: Group) -> None:
        self._engine = engine
        self._group = group
        self._own = group.own_reduce_scatter
        """For the memory that torch takes, and for when there is nothing to compress with."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._own.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        engine, state, ranks = self._engine, self._engine.state, group.size()
        step, outcome = engine.step_of(self._group)
        found = BucketStats(self._group.index, input_tensor.numel(), input_tensor.numel())
        found.plain_bytes = arguments.nbytes(input_tensor) * (ranks - 1) // ranks
        if state.idle:
            state.count_idle(found)
            return self._own(output_tensor, input_tensor, group, op, async_op)
        peers = state.agree(group, input_tensor)
        with peers.refusing("gradients"):
            return self._start(peers, output_tensor, input_tensor, op, async_op, found, step, outcome)

    def _start(
        self,
        peers: Peers,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any,
        async_op: bool,
        found: BucketStats,
        step: int,
        outcome: Outcome,
    ) -> dist.Work | None:
        engine, state, ranks, columns = self._engine, self._engine.state, peers.size, output_tensor.numel()
        divisor, factor = _reduction(op, ranks)
        codec, reason = state.codec_at(step)
        layout = engine.layout(self._group, self._group.with_gradients(columns), peers, codec is None)
        found.exempt = sum(piece.exempt_numel for piece in layout) * ranks
        codec = codec_for(found, codec, reason)
        probe, matrix = state.probe_for(found, step), input_tensor.view(ranks, columns)
        words = f"group {found.index}, dtype={matrix.dtype}, numel={found.numel}, exempt={found.exempt}"
        words += f", divisor={divisor}, factor={factor:g}"
        call = Call("gradients", lossless(matrix.dtype) if codec is None else codec, words)

        residuals = state.residuals

        def protocol(exchange: Exchange) -> None:
            if residuals is not None:
                residuals.enter(outcome)
            reduce_shards(exchange, matrix, output_tensor, layout, divisor, residuals, probe)
            if factor != 1:
                output_tensor.mul_(factor)
            if residuals is not None:
                outcome.note(output_tensor)

        def job() -> list[Tensor]:
            try:
                state.perform(peers, call, protocol, found, probe, step, outcome)
            except BaseException as error:
                engine.tell_of(error, peers)
                raise
            return [output_tensor]

        if residuals is not None:
            engine.tell_at_the_end(self._group)
        return start(peers, "gradients", job, [output_tensor, input_tensor], async_op)


class _Gather(AllGather):
    """The all-gather of a parameter group."""

    def __init__(self, engine: Engine, group: Group) -> None:
        self._engine = engine
        self._group = group
        self._own = group.own_all_gather

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._own.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        codec, ranks, columns = self._engine.gather, group.size(), input_tensor.numel()
        counted, plain = self._engine.state.counted, arguments.nbytes(input_tensor) * (ranks - 1)
        reason = self._why_not(output_tensor, columns, ranks)
        if codec is None or reason:
            counted.count_gather(plain, plain, reason)
            return self._own(output_tensor, input_tensor, group, async_op)
        peers = peers_of(group, output_tensor.device, "parameters")
        layout = self._engine.layout(self._group, range(len(self._group.names)), peers, False)
        matrix = output_tensor.view(ranks, columns)

        def protocol(exchange: Exchange) -> None:
            mine = matrix[exchange.rank]
            if mine.data_ptr() != input_tensor.data_ptr():
                mine.copy_(input_tensor)
            gather_shards(exchange, matrix, layout)
            counted.count_gather(plain, exchange.coder.meter.sent_bytes)

        call = Call("parameters", codec, f"group {self._group.index}, dtype={matrix.dtype}, numel={matrix.numel()}")
        operands = Operands(output_tensor)
        operands.read(input_tensor)
        return launch(peers, call, protocol, operands, plain_bytes=plain, async_op=async_op, seed=0)

    def _why_not(self, output: Tensor, columns: int, ranks: int) -> str:
        """Why torch has to gather this one."""
        if ranks != self._group.process_group.size():
            return "resharded to fewer ranks"  # and what comes from there has been quantized in forward
        if output.dtype not in GATHERED:
            several = output.dtype == torch.uint8
            return "parameters of several dtypes" if several else f"parameters gathered as {output.dtype}"
        if columns != sum(self._group.parts):
            return "parameters with an all-gather of their own"
        return ""


def _residuals(mode: Mode, ranks: int, rank: int) -> Residuals:
    # By their numbers among all: with HSDP, several ranks have the same number among those that share parameters.
    return Residuals(mode, dist.get_world_size(), dist.get_rank(), owners=False)


def _refuse_complex(group: Group) -> None:
    for name, parameter in zip(group.names, group.parameters, strict=True):
        if parameter.is_complex() and parameter.requires_grad:
            raise DtypeError(
                f"{name}: its gradient is complex, and codecs take real numbers. Keep the parameter as "
                "torch.view_as_real(x) and compute with torch.view_as_complex of it, or use DistributedDataParallel, "
                "which hands over complex gradients as real ones."
            )


def _for_parameters(codec: Codec) -> Codec:
    if codec.stochastic:
        raise SpecError(
            f"gather={codec.spec!r}: backward gathers parameters again and must find those that forward found, so the "
            "codec may not round at random. Leave out its rounding option."
        )
    return for_gradients(codec)


def _reduction(op: Any, ranks: int) -> tuple[int, float]:
    """What a sum is divided by, and then multiplied with."""
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # how it is pickled; there is no other way to ask
        if isinstance(factor, float):
            return 1, factor
    return arguments.reduction(op, ranks, "compress_gradients")[1], 1.0
