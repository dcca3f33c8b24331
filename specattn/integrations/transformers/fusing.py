"""Models of others, fused without a change that they would notice."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from specattn.models import fuse
from specattn.models.fused.block import GATES, HEADS, MIXED, projections_of
from specattn.models.fused.family import FAMILIES
from specattn.models.mixers import mixers_of
from specattn.models.shards import own

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from specattn.models import FusedTarget, HFTarget

log = logging.getLogger(__name__)

# whose modules compute what their classes say
_OWNERS = ("transformers", "torch", "specattn")
_KINDS = {Parameter, DTensor}
# the modules of a layer that share memory once they are packed
_PACKED = HEADS, GATES, tuple(chain.from_iterable(MIXED))


def fused_or_own(target: HFTarget, model: nn.Module) -> HFTarget | FusedTarget:
    """Return a model's fused form; or the target, and log why.

    The model's parameters stay the same objects. The memory of those that are packed is another
    one, which the fused form reads; whoever writes into a parameter writes into both.

    Parameters
    ----------
    target : HFTarget
        The target that the model is.
    model : PreTrainedModel
        The model itself.
    """
    why = next(_reasons(model), None)
    if why is not None:
        log.info("%s is not fused: %s", type(model).__name__, why)
        return target
    return fuse(target)[0]


def unpack(model: nn.Module) -> None:
    """Give weights that were packed memory of their own again."""
    for name, part in model.named_modules():
        read = projections_of(part) if name.rpartition(".")[2].isdigit() else {}
        for names in (HEADS, GATES, *MIXED):
            modules = [read[one] for one in names if one in read]
            for kind in ("weight", "bias"):
                together: list[Any] = [getattr(one, kind, None) for one in modules]
                if len(together) > 1 and _share_all(together):
                    for one in together:
                        one.data = one.detach().clone()


def has_copies(config: Any) -> bool:
    """Return whether a fused form holds some numbers a second time."""
    # sums of norms' weights
    return bool(FAMILIES[config.get_text_config(decoder=True).model_type].norm_offset)


def _reasons(model: nn.Module) -> Iterator[str]:
    """Say what of a model its fused form would pass over."""
    mixers = set(mixers_of(model))
    for name, part in model.named_modules():
        what = f"{name or 'the model'} ({type(part).__name__})"
        if _owner(type(part)) not in _OWNERS:
            yield f"{what} is a module of {_owner(type(part))}"
        # those of mixers were replaced by this library
        if "forward" in vars(part) and part not in mixers:
            yield f"{what} has a forward of its own"
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        if any(_owner(hook) != "transformers" for hook in hooks):
            yield f"{what} has a forward hook"
        kinds = {type(one) for one in part.parameters(recurse=False)}
        yield from (f"{what} has a {one.__name__}" for one in kinds - _KINDS)
        read = projections_of(part) if name.rpartition(".")[2].isdigit() else {}
        for names in _PACKED:
            weights = [own(cast("Tensor", read[one].weight)) for one in names if one in read]
            if not _alone(weights):
                yield f"weights of {name} lie in memory that holds others, too"


def _owner(thing: Any) -> str:
    """Return the package of a class or function."""
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def _share_all(weights: Sequence[Tensor | None]) -> bool:
    """Whether these parameters have one memory, which holds nothing else."""
    held = [one for one in weights if type(one) is Parameter]
    memory = {one.untyped_storage().data_ptr() for one in held}
    return len(memory) == 1 and len(held) == len(weights) and _alone(held)


def _alone(weights: Sequence[Tensor]) -> bool:
    """Whether weights are all that their memory holds.

    A trainer that flattens parameters would lose what is packed elsewhere.
    """
    memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in weights}
    return sum(memory.values()) == sum(one.nbytes for one in weights)
