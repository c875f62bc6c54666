"""ModelSpec: one description of the supported decoder families, read from a Hugging Face config or GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import CorruptFileError, UnsupportedModelError
from paceline.models.rope import RopeScaling, RopeSpec
from paceline.models.spec_checks import real, whole

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything about a decoder but its weights."""

    architecture: str  # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # tokens of a sequence at most, rope scaling included
    norm_eps: float
    activation: Activation = "silu"
    ropes: tuple[RopeSpec | None, ...]  # one a layer; None = a layer without positions (NoPE)
    windows: tuple[int | None, ...]  # one a layer: a query sees keys less than this behind it; None = all
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head's q and k before rope
    sandwich_norms: bool = False  # norms after attention and MLP too (Gemma)
    tied_embeddings: bool = False  # the head is the embedding matrix
    embedding_scale: float = 1.0  # multiplies embeddings
    attention_scale: float  # multiplies q.k
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    final_softcap: float | None = None  # the same for logits

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in (*sizes, "context_length"):
            whole(name, getattr(self, name))
        for name in ("norm_eps", "embedding_scale", "attention_scale"):
            real(name, getattr(self, name))
        for name in ("attention_softcap", "final_softcap"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name))
        for window in self.windows:
            if window is not None:
                whole("sliding window", window)
        if self.num_heads % self.num_kv_heads:
            raise CorruptFileError(
                f"num_heads must be a multiple of num_kv_heads; got {self.num_heads} and {self.num_kv_heads}."
            )
        for rope in self.ropes:
            if rope is not None and (rope.dim % 2 or not 0 < rope.dim <= self.head_dim):
                raise CorruptFileError(f"the model's rope must turn an even part of {self.head_dim}; got {rope.dim}.")
        if not len(self.ropes) == len(self.windows) == self.num_layers:
            raise CorruptFileError(f"the model has {self.num_layers} layers but describes {len(self.ropes)} of them.")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From the contents of a config.json, of transformers 5 or older.

        Raises UnsupportedModelError for an architecture or option that is not implemented, CorruptFileError for a
        config that lacks a required key.
        """
        name = _supported(str(config.get("model_type")))
        _refuse_hf_options(config, name)
        family = FAMILIES[name]

        def require(key: str) -> int:
            if key not in config:
                raise CorruptFileError(f"config.json has no {key!r}: download the model again.")
            return whole(key, config[key])

        hidden, heads, layers = require("hidden_size"), require("num_attention_heads"), require("num_hidden_layers")
        max_position = require("max_position_embeddings")
        head_dim = whole("head_dim", config.get("head_dim", family.head_dim) or hidden // heads)
        kinds = _hf_layer_kinds(config, name, layers)
        ropes = {kind: _hf_rope(config, family, kind, head_dim) for kind in set(kinds)}
        has_rope = _hf_has_rope(config, name, layers)
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=name,
            vocab_size=require("vocab_size"),
            hidden_size=hidden,
            intermediate_size=require("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            context_length=_context_length(family, ropes["full" if "full" in ropes else "sliding"], max_position),
            norm_eps=config.get("rms_norm_eps", family.norm_eps),
            activation=_hf_activation(config, family),
            ropes=tuple(ropes[kind] if on else None for kind, on in zip(kinds, has_rope, strict=True)),
            windows=tuple(config.get("sliding_window") if kind == "sliding" else None for kind in kinds),
            qkv_bias=family.qkv_bias or bias,
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sandwich_norms=family.gemma,
            tied_embeddings=config.get("tie_word_embeddings", family.tied_embeddings),
            embedding_scale=hidden**0.5 if family.gemma else 1.0,
            attention_scale=(config.get("query_pre_attn_scalar", 256) if family.gemma else head_dim) ** -0.5,
            attention_softcap=config.get("attn_logit_softcapping", family.attention_softcap),
            final_softcap=config.get("final_logit_softcapping", family.final_softcap),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, tensor_names: Collection[str] | None = None) -> ModelSpec:
        """From the metadata of a GGUF file (raw keys) and the names of its tensors.

        Tensor names tell of biases and of a separate head, which metadata do not; without them the family's usual
        layout is assumed. Raises as from_hf_config does.
        """
        name = _supported(str(metadata.get("general.architecture")))
        family = FAMILIES[name]

        def read(key: str, default: Any = None) -> Any:
            return metadata.get(f"{name}.{key}", default)

        def require(key: str) -> int:
            return whole(f"{name}.{key}", read(key))

        if read("expert_count"):
            raise UnsupportedModelError(f"{name} with experts (MoE) is not supported; {_LISTED}.")
        hidden, heads, layers = require("embedding_length"), require("attention.head_count"), require("block_count")
        head_dim = read("attention.key_length", hidden // heads)
        if read("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(f"{name} with keys and values of different widths is not supported; {_LISTED}.")
        max_position = require("context_length")
        full_rope = _gguf_rope(read, family, name=name, head_dim=head_dim, max_position=max_position)
        sliding_rope = full_rope
        if name == "gemma3":
            sliding_rope = RopeSpec(theta=read("rope.freq_base_swa", family.sliding_theta), dim=full_rope.dim)
        window = read("attention.sliding_window") or None
        sliding = _gguf_sliding_layers(read("attention.sliding_window_pattern"), family, layers, window)
        # The 27B models scale by the model's width per head, which metadata do not tell; llama.cpp goes by depth too.
        wide_scale = (name, layers) in {("gemma2", 46), ("gemma3", 62)}
        names = tensor_names
        qkv_bias = family.qkv_bias if names is None else "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names
        return cls(
            architecture=name,
            vocab_size=read("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ())),
            hidden_size=hidden,
            intermediate_size=require("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read("attention.head_count_kv", heads),
            head_dim=head_dim,
            context_length=_context_length(family, full_rope, max_position),
            norm_eps=read("attention.layer_norm_rms_epsilon", family.norm_eps),
            activation=family.activation,
            ropes=tuple(
                None if name == "smollm3" and (i + 1) % 4 == 0 else sliding_rope if sliding[i] else full_rope
                for i in range(layers)
            ),
            windows=tuple(window if sliding[i] else None for i in range(layers)),
            qkv_bias=qkv_bias,
            output_bias=names is not None and "blk.0.attn_output.bias" in names,
            mlp_bias=names is not None and "blk.0.ffn_down.bias" in names,
            qk_norm=family.qk_norm,
            sandwich_norms=family.gemma,
            tied_embeddings=family.tied_embeddings if names is None else "output.weight" not in names,
            embedding_scale=hidden**0.5 if family.gemma else 1.0,
            attention_scale=(hidden // heads if wide_scale else head_dim) ** -0.5,
            attention_softcap=read("attn_logit_softcapping", family.attention_softcap),
            final_softcap=read("final_logit_softcapping", family.final_softcap),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What distinguishes a family, and what its configs may leave out."""

    theta: float = 10_000.0
    sliding_theta: float = 10_000.0  # of Gemma 3's sliding layers
    head_dim: int | None = None  # None = hidden_size / num_heads
    norm_eps: float = 1e-6
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False  # sandwich norms, scaled embeddings
    tied_embeddings: bool = False
    window_period: int = 1  # every n-th layer sees everything, where the model has windows; 1 = all layers slide
    attention_softcap: float | None = None
    final_softcap: float | None = None
    stretched: bool = False  # max_position_embeddings already counts the rope scaling


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "gemma2": Family(
        head_dim=256, activation="gelu_tanh", gemma=True, tied_embeddings=True, window_period=2,
        attention_softcap=50.0, final_softcap=30.0,
    ),
    "gemma3": Family(
        theta=1_000_000.0, head_dim=256, activation="gelu_tanh", gemma=True, qk_norm=True, tied_embeddings=True,
        window_period=6, stretched=True,
    ),
    "smollm3": Family(theta=2_000_000.0, tied_embeddings=True),
    "phi3": Family(norm_eps=1e-5),
}  # fmt: skip

_LISTED = f"supported are {', '.join(FAMILIES)}"
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip


def _supported(name: str) -> str:
    name = {"gemma3_text": "gemma3"}.get(name, name)
    if name not in FAMILIES:
        raise UnsupportedModelError(f"architecture {name!r} is not supported; {_LISTED}.")
    return name


def _refuse_hf_options(config: Mapping[str, Any], name: str) -> None:
    refused = {
        "experts (MoE)": any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")),
        "an image or audio tower": "vision_config" in config or "audio_config" in config,
        "quantization_config": bool(config.get("quantization_config")),
        "use_bidirectional_attention": bool(config.get("use_bidirectional_attention")),
        "lm_head_bias": bool(config.get("lm_head_bias")),
    }
    for option, present in refused.items():
        if present:
            raise UnsupportedModelError(f"{name} with {option} is not supported; {_LISTED}, text only, unquantised.")
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise CorruptFileError(f"config.json's architectures must be a list of names; got {classes!r:.80}.")
    if classes and not any(c.endswith("ForCausalLM") for c in classes):
        raise UnsupportedModelError(f"{classes[0]} is not a causal language model (...ForCausalLM); {_LISTED}.")


def _hf_activation(config: Mapping[str, Any], family: Family) -> Activation:
    # Gemma's first configs said hidden_act: gelu and meant hidden_activation, the tanh form
    given = config.get("hidden_activation") if family.gemma else config.get("hidden_act")
    if given is None:
        return family.activation
    if given not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {given!r} is not supported; supported are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[given]


def _hf_has_rope(config: Mapping[str, Any], name: str, layers: int) -> list[bool]:
    if name != "smollm3":
        return [True] * layers
    given = config.get("no_rope_layers")  # despite its name, 1 = rope
    if given:
        return [bool(on) for on in given[:layers]]
    interval = config.get("no_rope_layer_interval", 4)
    return [(i + 1) % interval != 0 for i in range(layers)]


def _hf_layer_kinds(config: Mapping[str, Any], name: str, layers: int) -> list[str]:
    """ "full" or "sliding" for each layer."""
    window = config.get("sliding_window")
    optional = name in ("qwen2", "qwen3", "smollm3")  # these have windows only where use_sliding_window says so
    if not window or (optional and not config.get("use_sliding_window", False)):
        return ["full"] * layers
    given = config.get("layer_types")
    if given and name not in ("mistral", "phi3"):  # transformers ignores layer_types for these two
        kinds = [str(kind).removesuffix("_attention") for kind in given]
        unknown = set(kinds) - {"full", "sliding"}
        if unknown:
            raise UnsupportedModelError(f"{name} with {unknown.pop()} layers is not supported; {_LISTED}.")
        return kinds
    if name in ("mistral", "phi3"):
        return ["sliding"] * layers
    if name in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return ["sliding" if i >= first else "full" for i in range(layers)]
    if name == "smollm3":
        return ["full" if on else "sliding" for on in _hf_has_rope(config, name, layers)]
    if name in ("gemma2", "gemma3"):
        period = config.get("sliding_window_pattern", FAMILIES[name].window_period)
        return ["sliding" if (i + 1) % period else "full" for i in range(layers)]
    return ["full"] * layers


def _hf_rope(config: Mapping[str, Any], family: Family, kind: str, head_dim: int) -> RopeSpec:
    name = config["model_type"]
    local = kind == "sliding" and name in ("gemma3", "gemma3_text")  # has its own theta and no scaling
    given = config.get("rope_parameters") or {}
    if "full_attention" in given or "sliding_attention" in given:
        given = given.get(f"{kind}_attention") or {}
    elif not given and not local:
        given = config.get("rope_scaling") or {}
    theta = given.get("rope_theta")
    if theta is None:
        theta = (
            config.get("rope_local_base_freq", family.sliding_theta)
            if local
            else config.get("rope_theta", family.theta)
        )
    scaling = given.get("rope_type") or given.get("type") or "default"
    if scaling == "su" or (name == "phi3" and scaling == "yarn"):
        scaling = "longrope"  # its names in the first Phi-3 configs
    max_position = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = max_position if scaling == "dynamic" or not original else original
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    lists = {key: given.get(key) for key in ("short_factor", "long_factor")}
    options = {
        key: given[key]
        for key in (
            "attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        )
        if given.get(key) is not None
    }  # fmt: skip
    return RopeSpec(
        theta=float(theta),
        dim=int(head_dim * partial),
        scaling=_scaling(scaling),
        factor=float(given.get("factor") or max_position / original),
        original_max_position=original,
        **{key: tuple(value) if value else None for key, value in lists.items()},
        **options,
    )


def _gguf_rope(read: Any, family: Family, *, name: str, head_dim: int, max_position: int) -> RopeSpec:
    original = read("rope.scaling.original_context_length", max_position)
    scaling = read("rope.scaling.type", "linear" if read("rope.scale_linear") else "default")
    attention_factor = read("rope.scaling.attn_factor")
    if name == "phi3" and attention_factor is not None:
        scaling = "longrope"  # its factors are in the weights
    factor = read("rope.scaling.factor") or read("rope.scale_linear") or max_position / original
    return RopeSpec(
        theta=read("rope.freq_base", family.theta),
        dim=read("rope.dimension_count", head_dim),
        scaling=_scaling({"none": "default"}.get(scaling, scaling)),
        factor=float(factor),
        original_max_position=original,
        attention_factor=attention_factor if scaling == "longrope" else None,
        beta_fast=read("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read("rope.scaling.yarn_beta_slow", 1.0),
    )


def _gguf_sliding_layers(pattern: Any, family: Family, layers: int, window: int | None) -> list[bool]:
    if window is None:
        return [False] * layers
    if isinstance(pattern, (list, tuple)):
        return [bool(slides) for slides in pattern]
    period = pattern or family.window_period
    return [period == 1 or (i + 1) % period != 0 for i in range(layers)]


def _scaling(name: str) -> RopeScaling:
    if name not in ("default", "linear", "dynamic", "llama3", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"rope scaling {name!r} is not supported; supported are linear, dynamic, llama3, yarn, longrope."
        )
    return name  # type: ignore[return-value]


def _context_length(family: Family, rope: RopeSpec, max_position: int) -> int:
    if family.stretched:
        return max_position
    if rope.scaling in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.scaling == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
