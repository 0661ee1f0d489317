"""A normalization and the FP8 linear layer behind it, as one module."""

from __future__ import annotations

import math

import torch
from torch import nn

from ._functional import NORMALIZATIONS, check_choice, normalize
from ._fused import Layers, fused, supports
from ._split import SplitsBackward, WeightGradients
from .linear import LinearSlots, Notices, Registrar, check_operands, describe, linear


class LayerNormLinear(SplitsBackward):
    """`linear(norm(x))`: the norm in float32, the linear layer in FP8.

    Attributes:
        layer_norm_weight: [in_features].
        layer_norm_bias: [in_features]; None for RMSNorm.
        weight: [out_features, in_features].
        bias: [out_features] or None.
        slots: the linear layer's three slots; None if it computes in high precision.
        wgrad: how the linear layer's weight gradient is computed: "fused", "forked" or "deferred".
    """

    layer_norm_bias: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        coordinator: Registrar,
        name: str,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        sharded: bool = False,
    ) -> None:
        """Create the parameters and declare three slots.

        Args:
            in_features: size of the last dimension of the input, over which it normalizes.
            out_features: size of the last dimension of the output.
            bias: add a bias after the product.
            coordinator: declares the slots `<name>.input`, `<name>.weight` and `<name>.grad_output`.
            name: global name of this layer, the same on every rank that holds it, and in no two places.
            eps: added to the variance.
            normalization: `LayerNorm` or `RMSNorm`.
            device: of the parameters.
            dtype: of the parameters: float32, bfloat16 or float16.
            return_layernorm_output: make forward return `(output, normalized input)`.
            sharded: ranks hold different parts of this weight under one name.

        Raises:
            ValueError: an unknown normalization; the name is empty or taken.
        """
        super().__init__()
        check_choice("normalization", normalization, NORMALIZATIONS)
        self.in_features, self.out_features = in_features, out_features
        self.eps = eps
        self.normalization = normalization
        self.return_layernorm_output = return_layernorm_output

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.layer_norm_weight = parameter(in_features)
        self.layer_norm_bias = parameter(in_features) if normalization == "LayerNorm" else None
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self.reset_parameters()
        self.slots = LinearSlots.declare(coordinator, name, self, sharded=sharded)
        self._notices = Notices(name)
        self._weight_gradients = (WeightGradients(name),)

    def reset_parameters(self) -> None:
        """Initialize as `nn.LayerNorm` and `nn.Linear` do."""
        nn.init.ones_(self.layer_norm_weight)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalize and multiply; dtypes and errors as in `modules.linear.linear`.

        Args:
            input: [..., in_features].

        Returns:
            [..., out_features], or with `return_layernorm_output` a pair of it and the normalized input.
        """
        check_operands(input, self.weight, autocast=torch.is_autocast_enabled(input.device.type))
        if not self.return_layernorm_output and supports(input, (self.weight,), (self.slots,), self.wgrad):
            assert self.slots is not None
            layers = Layers(self.normalization, self.eps, (self.slots,), "", self.training)
            parameters = ((self.weight, self.bias),)
            return fused(input, self.layer_norm_weight, self.layer_norm_bias, parameters, layers)
        normalized = normalize(
            input, self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        output = linear(
            normalized,
            self.weight,
            self.bias,
            self.slots,
            training=self.training,
            notices=self._notices,
            wgrad=self._weight_gradients[0],
            dtype=input.dtype,
        )
        return (output, normalized.to(input.dtype)) if self.return_layernorm_output else output

    def extra_repr(self) -> str:
        """Features, normalization, and which FP8 formats are in use."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.normalization}, eps={self.eps}, {describe(self.slots)}"
        )
