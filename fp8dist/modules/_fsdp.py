"""FSDP2 gathers the weights of FP8 layers in FP8, under the scale that is known already.

Life of such a weight::

    ShardedWeight (high precision, what the optimizer steps)
      │ fsdp_pre_all_gather: cast the shard with the slot's scale, send bytes (gloo refuses FP8)
      ▼
    GatheredWeight (FP8, whole) ── used by an FP8 layer: the shard's amax is recorded, if a scope records

No amax has to be reduced before the gather, since a delayed scale is the same on every rank. The exception
is a cold slot (no step was committed yet, or the recipe keeps no state): its shards take the MAX of their
amaxes first, one word, so that they share the scale which the unsharded weight would get.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .._amax import record_amax, tensor_amax
from .._slots import Slot
from ..kernels.quantize import Layout, Quantized, scale_from_amax

aten = torch.ops.aten

# Of these the result is a weight, too; all other ops give plain tensors.
_KEEPS_SHARDED = frozenset(
    {
        aten._pin_memory, aten._to_copy, aten.alias, aten.as_strided, aten.clone, aten.detach, aten.empty_like,
        aten.new_zeros, aten.slice, aten.split, aten.view,
    }
)  # fmt: skip
_KEEPS_GATHERED = frozenset({aten.alias, aten.as_strided, aten.detach, aten.view})

_Metadata = tuple[torch.Tensor, torch.Tensor | None]


def enable_fp8_all_gather(model: nn.Module) -> nn.Module:
    """Let FSDP2 gather the weights of FP8 layers as FP8: half the bytes of bfloat16, a quarter of float32.

    Call it between `convert` and `fully_shard`. Results are those of quantizing the whole weight with the
    same scale. The optimizer, the gradients and the state_dict stay in the parameter's own dtype.

    Args:
        model: its FP8 layers get other parameter objects of equal values; make the optimizer afterwards.

    Returns:
        `model`.

    Raises:
        ValueError: a weight is sharded already, or another layer than an FP8 layer uses it, too.
    """
    new = _new_weights(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter not in new:
                continue
            if name != "weight" or _weight_slot(module) is None:
                raise ValueError(
                    f"parameter {name!r} of a {type(module).__name__} is also the weight of an FP8 layer, and "
                    "could not be used if it were gathered in FP8; untie them, or leave the FP8 layer out with "
                    "convert(..., skip=...)"
                )
    # Only now, so that an error leaves the model as it was.
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight in new:
            module._parameters["weight"] = new[weight]
    return model


def _new_weights(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """What takes the place of each FP8 layer's weight; tied layers have one weight before and after."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        slot = _weight_slot(module)
        if slot is None:
            continue
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if isinstance(weight, DTensor):
            raise ValueError(
                f"expected the weight of slot {slot.name!r} to be a plain tensor but got a DTensor; call "
                "enable_fp8_all_gather before fully_shard (tensor-parallel weights cannot be gathered in FP8)"
            )
        values = weight.detach()
        if not isinstance(values, ShardedWeight):
            new[weight] = nn.Parameter(ShardedWeight(values, slot), requires_grad=weight.requires_grad)
            vars(new[weight]).update(vars(weight))
    return new


def _weight_slot(module: nn.Module) -> Slot | None:
    slot = getattr(getattr(module, "slots", None), "weight", None)
    return slot if isinstance(slot, Slot) else None


class ShardedWeight(torch.Tensor):
    """A weight in high precision, or this rank's rows of it, that knows its slot.

    Attributes:
        plain: the values.
        slot: where the scale of the gather comes from.
    """

    plain: torch.Tensor
    slot: Slot

    @staticmethod
    def __new__(cls, plain: torch.Tensor, slot: Slot) -> ShardedWeight:
        """Wrap `plain`; nothing is copied."""
        return _wrapper(cls, plain, plain.dtype)

    def __init__(self, plain: torch.Tensor, slot: Slot) -> None:
        self.plain, self.slot = plain, slot

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any op on the values."""
        slots: list[Slot] = []

        def unwrap(weight: ShardedWeight) -> torch.Tensor:
            slots.append(weight.slot)
            return weight.plain

        plain_args, plain_kwargs = tree_map_only(ShardedWeight, unwrap, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            return args[0] if args and result is plain_args[0] else result
        if func.overloadpacket not in _KEEPS_SHARDED:
            return result
        return tree_map_only(torch.Tensor, lambda tensor: ShardedWeight(tensor, slots[0]), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor: what is saved can be loaded without this library."""
        return self.plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.plain!r}, slot={self.slot.name!r})"

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor], _Metadata]:
        """Quantize the shard. FSDP2 calls it before every all-gather."""
        shard, slot = self.plain, self.slot
        if shard.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"the FP8 all-gather of {slot.name!r} expected the weight to be sharded by its rows but got "
                f"a shard of {tuple(shard.shape)} of {tuple(outer_size)}; leave fully_shard's shard_placement_fn "
                "at Shard(0) for FP8 layers"
            )
        amax = tensor_amax(shard).reshape(1) if shard.numel() else None
        # Coldness is part of the state that ranks agree on, so all of them take this branch or none.
        warm = bool(slot.warm)
        scale = slot.scale if warm else _scale_of_shards(shard, amax, slot, mesh)
        data, _, scale_inv = torch.ops.fp8dist.quantize(
            shard, scale, torch.ones(1, dtype=torch.bool), torch.empty_like(scale), None, False,
            slot.scaled_max, slot.dtype, Layout.ROWS,
        )  # fmt: skip
        missing = -(-outer_size[0] // mesh.size()) - shard.shape[0]  # FSDP2 gathers shards of equal sizes
        return (F.pad(data.view(torch.uint8), (0, 0, 0, missing)),), (scale_inv, amax)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: _Metadata,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[GatheredWeight, tuple[torch.Tensor, ...]] | None:
        """Make a weight of the gathered bytes, or renew the one that lies over them already (`out`)."""
        scale_inv, amax = metadata
        if out is None:
            return GatheredWeight(outputs[0].view(self.slot.dtype), scale_inv, amax, param_dtype), ()
        assert isinstance(out, GatheredWeight)
        out.scale_inv, out.shard_amax = scale_inv, amax
        return None


class GatheredWeight(torch.Tensor):
    """The whole weight in FP8, for the time that FSDP2 keeps it. Only FP8 layers can use it.

    Attributes:
        fp8: its values, a view of FSDP2's buffer.
        scale_inv: float32 [1], undoes their scaling.
        shard_amax: float32 [1], of this rank's shard; None if that is empty.
    """

    fp8: torch.Tensor
    scale_inv: torch.Tensor
    shard_amax: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        fp8: torch.Tensor,
        scale_inv: torch.Tensor,
        shard_amax: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> GatheredWeight:
        """Wrap `fp8` as a tensor that says it has `dtype`; nothing is copied."""
        return _wrapper(cls, fp8, dtype)

    def __init__(
        self,
        fp8: torch.Tensor,
        scale_inv: torch.Tensor,
        shard_amax: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.fp8, self.scale_inv, self.shard_amax = fp8, scale_inv, shard_amax

    def use(self, slot: Slot, record: bool) -> Quantized:
        """Values and inverse scale; `record` raises the slot's amax by the shard's."""
        if record and self.shard_amax is not None:
            record_amax(slot.amax, self.shard_amax)
        return Quantized(self.fp8, self.scale_inv)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views only: computing with it would silently lose what FP8 does not hold."""
        if func.overloadpacket not in _KEEPS_GATHERED:
            raise NotImplementedError(
                f"{func} expected a tensor in high precision but got a weight that FSDP2 gathered in FP8, "
                "which only its FP8 layer can use; do not call enable_fp8_all_gather on this layer"
            )
        this = args[0]
        return GatheredWeight(
            func(this.fp8, *args[1:], **(kwargs or {})), this.scale_inv, this.shard_amax, this.dtype
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.fp8!r}, scale_inv={self.scale_inv!r})"


def _wrapper(cls: Any, over: torch.Tensor, dtype: torch.dtype) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        cls,
        over.size(),
        strides=over.stride(),
        storage_offset=over.storage_offset(),
        dtype=dtype,
        device=over.device,
        requires_grad=over.requires_grad,
    )


def _scale_of_shards(
    shard: torch.Tensor, amax: torch.Tensor | None, slot: Slot, mesh: DeviceMesh
) -> torch.Tensor:
    """The scale that a cold slot gives the whole weight: from the MAX of the shards' amaxes."""
    whole = torch.zeros(1, device=shard.device) if amax is None else amax.clone()
    # As integers, so that a NaN wins on every backend; the sign bit of a negative one would lose.
    bits = whole.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=mesh.get_group())
    return scale_from_amax(whole, slot.scaled_max)
