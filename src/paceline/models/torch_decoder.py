"""The decoder that all supported families share, in eager torch, shaped for few rows.

A pass over a small model is dominated by the number of operations, so matrices are fused at load (q, k, v in one; gate
and up in one), rows of q and k are reordered so that rotary pairs are neighbours and a rotation is one complex
product, and K and V of a token are one row of the pool. The residual stream, the norms and the rotation are float32
in every weight type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from paceline.errors import CorruptFileError
from paceline.models.architecture import ModelSpec
from paceline.models.rope import RopeSpec, inverse_frequencies
from paceline.models.torch_attention import AttentionPlan

# Private operations of torch: any release may drop them, and F.linear then does their work.
_PACKING_OPERATIONS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
SINGLE_ROW_BYTES = 1 << 30  # float32 models whose layers are smaller than this are held twice, see Linear


class Linear:
    """y = x W^T + b.

    On a CPU the matrix is kept in oneDNN's blocked layout (where torch offers it), in which a few rows cost hardly more
    than one. One row alone is up to a third faster from a plain float32 matrix: `single_row` [in, out] is that, where
    memory allows.
    """

    def __init__(self, weight: torch.Tensor, *, bias: torch.Tensor | None, single_row: torch.Tensor | None) -> None:
        self._packed = _can_pack(weight.dtype, weight.device)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias
        self._single_row = single_row

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._single_row is not None and len(x) == 1:
            y = torch.mm(x, self._single_row)
            return y if self._bias is None else y.add_(self._bias)
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


def _can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in _PACKING_OPERATIONS):
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * gain over the last dimension, in float32."""

    def __init__(self, gain: torch.Tensor, *, eps: float) -> None:
        width = gain.shape[-1]
        self._gain = gain * width**0.5
        self._floor = torch.tensor(width * eps, dtype=torch.float32, device=gain.device).sqrt()

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # hypot(|x|, sqrt(width * eps)) is sqrt(width) times the root: four operations where F.rms_norm takes six
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, torch.hypot(length, self._floor)).mul_(self._gain).to(dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    rope: RopeSpec | None
    window: int | None
    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: Linear
    attention_norm: RMSNorm | None  # after attention, in sandwich layers
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    output_norm: RMSNorm | None  # after the MLP, in sandwich layers


class TorchDecoder:
    """Weights [out, in] under their canonical names, ready to run. Holds no state of any pass.

    Raises CorruptFileError for a tensor that is missing or has another shape.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, np.ndarray],
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        reader = _Reader(spec, weights, dtype=dtype, device=device)
        embedding = reader.matrix("model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self._embedding = embedding
        self._layers = [reader.layer(i) for i in range(spec.num_layers)]
        self._norm = reader.norm("model.norm", spec.hidden_size)
        head = embedding if spec.tied_embeddings else reader.matrix("lm_head", spec.vocab_size, spec.hidden_size)
        self._head = Linear(head, bias=None, single_row=reader.single_row(head, shared=spec.tied_embeddings))
        self._rotations = {
            rope: _Rotation(spec, *inverse_frequencies(rope, max_model_len=max_model_len, weights=weights), device)
            for rope in set(spec.ropes)
            if rope is not None
        }

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        slots: torch.Tensor,
        pools: Sequence[torch.Tensor],
        plans: Mapping[int | None, AttentionPlan],
        rows: torch.Tensor,
        hidden_layers: Sequence[int | str],
        layers: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int | str, torch.Tensor]]:
        """Logits [M, V] float32 of the wanted rows, and hidden states [T, d] float32 by layer.

        token_ids, positions, slots [T]; pools one [slots, 2 * KV * D] a layer; plans by window. Layers that are not
        among `layers` hand on what enters them.
        """
        spec = self._spec
        num_tokens, q_width = len(token_ids), spec.num_heads * spec.head_dim
        turns = {rope: rotation.turns(positions) for rope, rotation in self._rotations.items()}
        hidden: dict[int | str, torch.Tensor] = {}
        h = F.embedding(token_ids, self._embedding).float()
        if spec.embedding_scale != 1.0:
            h.mul_(spec.embedding_scale)
        for i, (layer, pool) in enumerate(zip(self._layers, pools, strict=True)):
            if i in hidden_layers:
                hidden[i] = h.clone()
            if i not in layers:
                continue
            qkv = self._project(layer, h, turns[layer.rope] if layer.rope else None)
            pool.index_copy_(0, slots, qkv[:, q_width:])
            queries = qkv[:, :q_width].view(num_tokens, spec.num_heads, spec.head_dim)
            x = layer.output(plans[layer.window].attend(i, queries))
            h.add_(layer.attention_norm(x, torch.float32) if layer.attention_norm else x)
            x = layer.gate_up(layer.mlp_norm(h, self._dtype))
            gate, up = x.chunk(2, dim=-1)
            activated = F.silu(gate) if spec.activation == "silu" else F.gelu(gate, approximate="tanh")
            x = layer.down(activated.mul_(up))
            h.add_(layer.output_norm(x, torch.float32) if layer.output_norm else x)
        if spec.num_layers in hidden_layers:
            hidden[spec.num_layers] = h
        if "final" in hidden_layers:
            hidden["final"] = self._norm(h, torch.float32)
        return self._logits(h.index_select(0, rows)), hidden

    def _project(self, layer: Layer, h: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        """q, k and v [T, (H + 2 KV) * D], q and k normed and rotated."""
        spec = self._spec
        qkv = layer.qkv(layer.input_norm(h, self._dtype))
        if layer.qk_norm is not None:
            qk = qkv.view(len(h), -1, spec.head_dim)[:, : spec.num_heads + spec.num_kv_heads]
            qk.copy_(layer.qk_norm(qk, torch.float32))
        if turns is not None:
            qkv = qkv.float()
            torch.view_as_complex(qkv.view(len(h), -1, 2)).mul_(turns)
            qkv = qkv.to(self._dtype)
        return qkv

    def _logits(self, h: torch.Tensor) -> torch.Tensor:
        logits = self._head(self._norm(h, self._dtype)).float()
        cap = self._spec.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class _Rotation:
    """Turns positions into complex factors of the pairs of q, k and v; those of what is not rotated are 1."""

    def __init__(self, spec: ModelSpec, inverse_frequencies: np.ndarray, factor: float, device: torch.device) -> None:
        unrotated = spec.head_dim // 2 - len(inverse_frequencies)
        head = np.pad(inverse_frequencies, (0, unrotated))
        scale = np.pad(np.full(len(inverse_frequencies), factor, np.float32), (0, unrotated), constant_values=1)
        rotated, plain = spec.num_heads + spec.num_kv_heads, spec.num_kv_heads * spec.head_dim // 2
        self._angles = torch.from_numpy(np.pad(np.tile(head, rotated), (0, plain))).to(device)
        self._scales = torch.from_numpy(np.pad(np.tile(scale, rotated), (0, plain), constant_values=1)).to(device)

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """[T, (H + 2 KV) * D / 2] complex64."""
        return torch.polar(self._scales, positions.float()[:, None] * self._angles)


class _Reader:
    """Takes weights by name, checks their shapes, fuses and converts them."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, np.ndarray], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec, self._weights, self._dtype, self._device = spec, weights, dtype, device
        attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        layer_bytes = 4 * spec.hidden_size * (attention + 3 * spec.intermediate_size)
        self._held_twice = spec.num_layers * layer_bytes <= SINGLE_ROW_BYTES

    def layer(self, index: int) -> Layer:
        spec = self._spec
        name = f"model.layers.{index}"
        rope = spec.ropes[index]
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k, v = f"{name}.self_attn.q_proj", f"{name}.self_attn.k_proj", f"{name}.self_attn.v_proj"
        gate, up = f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"
        qkv_order = _rows_of_qkv(spec, rope)
        output_order = _rows_of_heads(_query_heads(spec), torch.arange(spec.head_dim))
        before_mlp = "pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"
        after = (
            (
                self.norm(f"{name}.post_attention_layernorm", spec.hidden_size),
                self.norm(f"{name}.post_feedforward_layernorm", spec.hidden_size),
            )
            if spec.sandwich_norms
            else (None, None)
        )
        return Layer(
            rope=rope,
            window=spec.windows[index],
            input_norm=self.norm(f"{name}.input_layernorm", spec.hidden_size),
            qkv=self._linear({q: q_width, k: kv_width, v: kv_width}, spec.hidden_size, spec.qkv_bias, rows=qkv_order),
            qk_norm=self._qk_norm(name, rope) if spec.qk_norm else None,
            output=self._linear(
                {f"{name}.self_attn.o_proj": spec.hidden_size}, q_width, spec.output_bias, columns=output_order
            ),
            attention_norm=after[0],
            mlp_norm=self.norm(f"{name}.{before_mlp}", spec.hidden_size),
            gate_up=self._linear(
                {gate: spec.intermediate_size, up: spec.intermediate_size}, spec.hidden_size, spec.mlp_bias
            ),
            down=self._linear({f"{name}.mlp.down_proj": spec.hidden_size}, spec.intermediate_size, spec.mlp_bias),
            output_norm=after[1],
        )

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._tensor(f"{name}.weight", (rows, columns)).to(self._device, self._dtype)

    def single_row(self, weight: torch.Tensor, *, shared: bool = False) -> torch.Tensor | None:
        """[in, out] of weight [out, in]; a view where its memory is shared with the embedding anyway."""
        if self._dtype != torch.float32 or not _can_pack(self._dtype, self._device):
            return None
        if shared:
            return weight.t()
        return weight.t().contiguous() if self._held_twice else None

    def norm(self, name: str, width: int) -> RMSNorm:
        gain = self._tensor(f"{name}.weight", (width,)).to(self._device, torch.float32)
        return RMSNorm(gain, eps=self._spec.norm_eps)

    def _qk_norm(self, name: str, rope: RopeSpec | None) -> RMSNorm:
        spec = self._spec
        order = _pairs_within_head(spec, rope)
        q, k = (
            self._tensor(f"{name}.self_attn.{x}_norm.weight", (spec.head_dim,)).to(torch.float32)[order] for x in "qk"
        )
        gain = torch.cat([q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)])
        return RMSNorm(gain.to(self._device), eps=spec.norm_eps)

    def _linear(
        self,
        parts: Mapping[str, int],
        width: int,
        has_bias: bool,
        *,
        rows: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> Linear:
        """One matrix of several [out, width] that are stacked, its rows or columns reordered."""
        weight = torch.cat([self._tensor(f"{name}.weight", (out, width)) for name, out in parts.items()])
        bias = torch.cat([self._tensor(f"{name}.bias", (out,)) for name, out in parts.items()]) if has_bias else None
        if rows is not None:
            weight, bias = weight[rows], bias[rows] if bias is not None else None
        if columns is not None:
            weight = weight[:, columns]
        weight = weight.to(self._device, self._dtype)
        bias = None if bias is None else bias.to(self._device, self._dtype)
        return Linear(weight, bias=bias, single_row=self.single_row(weight))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._weights:
            raise CorruptFileError(f"the model has no tensor {name}: download or convert it again.")
        array = self._weights[name]
        if array.shape != shape:
            raise CorruptFileError(
                f"tensor {name} must have shape {shape}; got {array.shape}: download or convert the model again."
            )
        return torch.from_numpy(array if array.flags.writeable else array.copy())


def _pairs_within_head(spec: ModelSpec, rope: RopeSpec | None) -> torch.Tensor:
    """[D] order in which dimensions i and i + dim / 2, which rope rotates together, are neighbours."""
    dim = 0 if rope is None else rope.dim
    return torch.cat([torch.arange(dim).view(2, dim // 2).t().flatten(), torch.arange(dim, spec.head_dim)])


def _query_heads(spec: ModelSpec) -> torch.Tensor:
    """[H] order [G, KV] of query heads that come as [KV, G]."""
    return torch.arange(spec.num_heads).view(spec.num_kv_heads, -1).t().flatten()


def _rows_of_heads(heads: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """[heads * D] rows of the heads in their order, and of `within` [D] in each."""
    return (heads[:, None] * len(within) + within).flatten()


def _rows_of_qkv(spec: ModelSpec, rope: RopeSpec | None) -> torch.Tensor:
    """[(H + 2 KV) * D] order of q, k and v. Scores do not change: q and k are reordered alike."""
    keys = torch.arange(spec.num_heads, spec.num_heads + spec.num_kv_heads)
    pairs = _rows_of_heads(torch.cat([_query_heads(spec), keys]), _pairs_within_head(spec, rope))
    return torch.cat([pairs, torch.arange(len(pairs), len(pairs) + spec.num_kv_heads * spec.head_dim)])
