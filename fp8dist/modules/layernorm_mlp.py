"""A normalization and the two FP8 linear layers of a feed-forward block, as one module."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ._functional import ACTIVATIONS, NORMALIZATIONS, check_choice, normalize
from ._fused import Layers, fused, supports
from ._split import SplitsBackward, WeightGradients
from .linear import LinearSlots, Notices, Registrar, check_operands, describe, linear


class LayerNormMLP(SplitsBackward):
    """`fc2(activation(fc1(norm(x))))`: norm and activation in float32, both products in FP8.

    Attributes:
        layer_norm_weight: [hidden_size].
        layer_norm_bias: [hidden_size]; None for RMSNorm.
        fc1_weight: [ffn_hidden_size, hidden_size]; twice the rows for swiglu, the gate first.
        fc1_bias: as many as the rows of `fc1_weight`, or None.
        fc2_weight: [hidden_size, ffn_hidden_size].
        fc2_bias: [hidden_size] or None.
        fc1_slots: the three slots of the first layer; None if it computes in high precision.
        fc2_slots: of the second.
    """

    layer_norm_bias: nn.Parameter | None
    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = True,
        *,
        coordinator: Registrar,
        name: str,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        checkpoint: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        sharded: bool = False,
    ) -> None:
        """Create the parameters and declare six slots.

        Args:
            hidden_size: size of the last dimension of input and output.
            ffn_hidden_size: features between activation and second layer.
            bias: add a bias after both products.
            coordinator: declares `<name>.fc1.input`, `.weight`, `.grad_output`, and the same for `fc2`.
            name: global name of this module, the same on every rank that holds it, and in no two places.
            eps: added to the variance.
            normalization: `LayerNorm` or `RMSNorm`.
            activation: `gelu` (its tanh approximation), `relu` or `swiglu` (`silu(gate) * value`).
            checkpoint: in training keep only the input of the norm and the quantized input of `fc2`, and
                compute norm, `fc1` and activation again in backward. The results have the same bits.
            device: of the parameters.
            dtype: of the parameters: float32, bfloat16 or float16.
            return_layernorm_output: make forward return `(output, normalized input)`.
            sharded: ranks hold different parts of both weights under one name.

        Raises:
            ValueError: an unknown normalization or activation; the name is empty or taken.
        """
        super().__init__()
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_choice("activation", activation, tuple(ACTIVATIONS))
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.eps, self.normalization, self.activation = eps, normalization, activation
        self.checkpoint = checkpoint
        self.return_layernorm_output = return_layernorm_output
        fc1_features = ACTIVATIONS[activation].width * ffn_hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.layer_norm_weight = parameter(hidden_size)
        self.layer_norm_bias = parameter(hidden_size) if normalization == "LayerNorm" else None
        self.fc1_weight = parameter(fc1_features, hidden_size)
        self.fc1_bias = parameter(fc1_features) if bias else None
        self.fc2_weight = parameter(hidden_size, ffn_hidden_size)
        self.fc2_bias = parameter(hidden_size) if bias else None
        self.reset_parameters()
        if not name:  # before `.fc1` hides it
            raise ValueError("an FP8 layer needs a name, expected its global FQN but got ''; pass name=")
        self.fc1_slots = LinearSlots.declare(
            coordinator, f"{name}.fc1", self, weight="fc1_weight", sharded=sharded
        )
        self.fc2_slots = LinearSlots.declare(
            coordinator, f"{name}.fc2", self, weight="fc2_weight", sharded=sharded
        )
        self._weight_gradients = (WeightGradients(f"{name}.fc1"), WeightGradients(f"{name}.fc2"))
        self._fc1_notices, self._fc2_notices = Notices(f"{name}.fc1"), Notices(f"{name}.fc2")

    def reset_parameters(self) -> None:
        """Initialize as `nn.LayerNorm` and `nn.Linear` do."""
        nn.init.ones_(self.layer_norm_weight)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        for weight, bias in ((self.fc1_weight, self.fc1_bias), (self.fc2_weight, self.fc2_bias)):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            if bias is not None:
                bound = 1 / math.sqrt(weight.shape[1])
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the block; dtypes and errors as in `modules.linear.linear`.

        Args:
            input: [..., hidden_size].

        Returns:
            [..., hidden_size], or with `return_layernorm_output` a pair of it and the normalized input.
        """
        check_operands(input, self.fc1_weight, autocast=torch.is_autocast_enabled(input.device.type))
        plain = not (self.return_layernorm_output or self.checkpoint)
        if plain and supports(
            input, (self.fc1_weight, self.fc2_weight), (self.fc1_slots, self.fc2_slots), self.wgrad
        ):
            return self._fused(input)
        # In eval mode no guard would notice that the scales moved before the recomputation.
        if self.checkpoint and self.training:
            first_half = self._first_half
            if self.fc1_slots is not None:
                first_half = self.fc1_slots.input.scope.replayable(first_half)
            hidden, normalized = checkpoint(first_half, input, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden, normalized = self._first_half(input)
        output = linear(
            hidden,
            self.fc2_weight,
            self.fc2_bias,
            self.fc2_slots,
            training=self.training,
            notices=self._fc2_notices,
            wgrad=self._weight_gradients[1],
            dtype=input.dtype,
        )
        return output if normalized is None else (output, normalized)

    def _fused(self, input: torch.Tensor) -> torch.Tensor:
        assert self.fc1_slots is not None
        assert self.fc2_slots is not None
        slots = (self.fc1_slots, self.fc2_slots)
        layers = Layers(self.normalization, self.eps, slots, self.activation, self.training)
        parameters = ((self.fc1_weight, self.fc1_bias), (self.fc2_weight, self.fc2_bias))
        return fused(input, self.layer_norm_weight, self.layer_norm_bias, parameters, layers)

    def _first_half(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input of `fc2` in float32, and the normalized input if it is returned."""
        normalized = normalize(
            input, self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        hidden = linear(
            normalized,
            self.fc1_weight,
            self.fc1_bias,
            self.fc1_slots,
            training=self.training,
            notices=self._fc1_notices,
            wgrad=self._weight_gradients[0],
            dtype=input.dtype,
            activation=self.activation,
        )
        return hidden, normalized.to(input.dtype) if self.return_layernorm_output else None

    def extra_repr(self) -> str:
        """Sizes, normalization, activation, and which FP8 formats are in use."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.fc1_bias is not None}, {self.normalization}, eps={self.eps}, {self.activation}, "
            f"checkpoint={self.checkpoint}, fc1: {describe(self.fc1_slots)}, fc2: {describe(self.fc2_slots)}"
        )
