"""What `GradientCompression.state_dict` holds: tensors and plain values, one state per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.registry import codec_in_file
from narrowcast.distributed.gradients.error_feedback.redistribution import redistributed
from narrowcast.distributed.gradients.error_feedback.residuals import Holder, Residuals
from narrowcast.distributed.gradients.layout import sections_of
from narrowcast.distributed.gradients.options import Mode, for_gradients
from narrowcast.distributed.gradients.parameters import Parameters
from narrowcast.errors import StateDictError

VERSION = 1
KEYS = {"version", "step", "seed", "codec", "error_feedback", "ranks", "rank", "sender", "owner"}


def taken(
    step: int,
    seed: int,
    codec: Codec | None,
    mode: Mode,
    residuals: Residuals | None,
    of_momentum: bool,
    orders: Mapping[str, str],
) -> dict[str, Any]:
    """The state of a rank with these residuals."""
    named = {} if residuals is None else residuals.by_name()
    return {
        "version": VERSION,
        "step": step,
        "seed": seed,
        "codec": None if codec is None else codec.spec,
        "error_feedback": mode,
        "momentum": of_momentum,
        **asdict(Holder(0, 0) if residuals is None else residuals.holder),
        "sender": {name: sender for name, (sender, _) in named.items() if sender is not None},
        "owner": {name: owner for name, (_, owner) in named.items() if owner is not None},
        "orders": {name: order for name, order in orders.items() if name in named},
    }


def check(state: Mapping[str, Any]) -> None:
    """Raise unless it is a state, of whatever run."""
    if not isinstance(state, Mapping) or not set(state) >= KEYS:
        raise StateDictError(
            "state: this is not what GradientCompression.state_dict() returns; it lacks "
            f"{sorted(KEYS - set(state)) if isinstance(state, Mapping) else 'everything'}."
        )
    for each in state.get("everyone", ()):
        check(each)
    if state["version"] != VERSION:
        raise StateDictError(f"state: version {state['version']!r}, and this narrowcast knows {VERSION}. Update it.")
    for name, residual in (*state["sender"].items(), *state["owner"].items()):
        if not isinstance(residual, Tensor):
            raise StateDictError(f"state: the residual of {name} is a {type(residual).__name__}, and must be a tensor.")


def of_all(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of all ranks that saved, for one rank. One of several ranks is refused."""
    check_holder(Holder(1, 0), state)
    return list(state.get("everyone", ()))


def check_kind(state: Mapping[str, Any], momentum: bool, meetings: bool, other_ranks: bool) -> None:
    """Raise if residuals are of something else than what travels here, or the state is of no use to another rank."""
    _check_momentum(state, momentum)
    _check_meetings(state, meetings, other_ranks)


def _check_momentum(state: Mapping[str, Any], here: bool) -> None:
    """Raise if residuals are of the momentum, and gradients travel here, or the other way round."""
    there = bool(state.get("momentum", False))  # a state from before the momentum could travel has no such key
    if there != here and (state["sender"] or state["owner"]):
        words = {True: "the momentum", False: "gradients"}
        raise StateDictError(
            f"state: holds residuals of {words[there]}, and {words[here]} travel here. Pass the same momentum= as in "
            'the run that was saved, or start without residuals: load_state_dict(state, residuals="drop").'
        )


def _check_meetings(state: Mapping[str, Any], here: bool, other_ranks: bool) -> None:
    """Raise if parameters of ranks were apart, and this is not the run, or the rank, to go on from there."""
    there = state.get("meetings")
    if (there is not None) != here and (state["sender"] or state["owner"]):
        words = {True: "changes of parameters (sync_every=)", False: "gradients"}
        raise StateDictError(
            f"state: holds residuals of {words[there is not None]}, and here they are of {words[here]}. Pass the same "
            'sync_every= as in the run that was saved, or start without: load_state_dict(state, residuals="drop").'
        )
    if there is not None and there["since"] and (other_ranks or not here):
        raise StateDictError(
            f"state: it was saved {there['since']} steps after a meeting, when each rank has parameters of its own: it "
            "is for the same rank of as many, with sync_every=. Call compression.sync() before you save for others."
        )


def codec_of(state: Mapping[str, Any]) -> Codec | None:
    return None if state["codec"] is None else for_gradients(codec_in_file(state["codec"]))


def check_fits(state: Mapping[str, Any], mode: Mode, residuals: Residuals | None, parameters: Parameters) -> None:
    """Raise unless it is of this rank of as many, with the same feedback, and of a model with the same parameters."""
    for each in state.get("everyone", ()):
        check_fits(each, mode, None, parameters)
    if residuals is not None:
        check_holder(residuals.holder, state)
    if (state["sender"] or state["owner"]) and state["error_feedback"] != mode:
        raise StateDictError(
            f"state: holds residuals (error_feedback={state['error_feedback']!r}), and error_feedback is {mode!r} "
            "here. Pass the same error_feedback as in the run that was saved."
        )
    if not parameters.named:
        return
    strange = _strange(state, parameters.numels | parameters.shares)
    if strange:
        raise StateDictError(
            f"state: residuals for {', '.join(sorted(strange)[:5])}, which this model does not have in that size. "
            "The state is of another model; load the one saved with this one."
        )
    _check_orders(state, parameters.orders)


def _check_orders(state: Mapping[str, Any], here: Mapping[str, str]) -> None:
    """Raise if residuals are in another order than buckets are here: they would be added to other elements."""
    there = state.get("orders")
    if there is None:
        return  # a state from before orders were named
    for name in {*state["sender"], *state["owner"]}:
        one, other = (orders.get(name, "contiguous") for orders in (there, here))
        if one != other:
            raise StateDictError(
                f"state: the residuals of {name} are in another order: {one} there, {other} here. Lay the parameter "
                "out as in the run that was saved (memory_format=, shard_placement_fn=) before the model is wrapped, "
                'or start without residuals: load_state_dict(state, residuals="drop").'
            )


def _strange(state: Mapping[str, Any], numels: Mapping[str, int]) -> set[str]:
    """Parameters with a residual that the model does not have, or has in another size."""
    sender, owner, holder = state["sender"], state["owner"], Holder.of(state)
    strange = {name for name in (*sender, *owner) if name not in numels}
    for name in {*sender, *owner} - strange:
        sent, owned = _numels(name, numels[name], holder)
        if (name in sender and sender[name].numel() != sent) or (name in owner and owner[name].numel() != owned):
            strange.add(name)
    return strange


def _numels(name: str, numel: int, holder: Holder) -> tuple[int, int]:
    """How many elements of a parameter a rank sends, and how many it owns."""
    if not holder.ranks:
        return numel, 0
    if not numel:
        return 0, 0
    section = sections_of(name, numel, holder.hosts if holder.sharded else holder.ranks)[0]
    if holder.hosts and not holder.sharded:
        section = section.share(holder.place, holder.hosts)
    return section.numel, max(0, min(section.part, section.numel - holder.row * section.part))


def check_holder(here: Holder, state: Mapping[str, Any]) -> None:
    there = Holder.of(state)
    if not there.ranks or there == here:
        return
    hosts = (
        "The hosts are others: start as many ranks on each as then. "
        if there.hosts and here.hosts
        else "Reduce over hosts as then: process_group=dist.group.WORLD says that all ranks are equal. "
        if there.hosts != here.hosts
        else ""
    )
    raise StateDictError(
        f"state: taken by {there}, loaded by {here}. {hosts}Residuals belong to a rank: load on each rank what that "
        "rank saved, on as many ranks. On others, load_state_dict(states of all ranks, "
        'residuals="redistribute") re-deals them, and load_state_dict(state, residuals="drop") starts without.'
    )


def load_residuals(residuals: Residuals | None, state: Mapping[str, Any]) -> None:
    """Go on with the residuals of a state: of the same rank of as many, or of all ranks."""
    if residuals is None:
        return
    if "everyone" in state:
        state = redistributed(state["everyone"], residuals.holder)
    check_holder(residuals.holder, state)
    names = {*state["sender"], *state["owner"]}
    residuals.load({name: (state["sender"].get(name), state["owner"].get(name)) for name in names})
