"""Types and limits of conf/model/: what a model is, what follows from it, and which combinations cannot be said."""

import difflib
from collections.abc import Iterator, Mapping, Set
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from normlab.ffn import ACTIVATIONS, ffn_width
from normlab.norm import NORMS
from normlab.residual import ALIASES, PLACEMENTS, Residual, Where

# init.py's table has these rows; norms, placements and activations are read off their own tables.
InitName = Literal["xavier", "xiong", "gpt2", "small", "torchtitan", "deepnorm", "sub_ln", "completep"]

NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _one_of(names: Set[str] | Mapping[str, Any]) -> BeforeValidator:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in names:  # `off` in a file is False
            close = difflib.get_close_matches(str(value), names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"accepted: {', '.join(names)}{hint}")
        return value

    return BeforeValidator(check)


class Section(BaseModel):
    """A part of the config: immutable, no unknown key, no silent conversion of a value's type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(Section):
    arch: Literal["decoder", "encoder", "encoder_decoder"]
    depth: PositiveInt
    encoder_depth: PositiveInt | None
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt | None
    head_width: PositiveInt | None
    ffn: Literal["dense", "moe", "none"]
    ffn_ratio: PositiveFloat
    ffn_width: PositiveInt | None
    experts: PositiveInt
    experts_per_token: PositiveInt
    balance_loss: NonNegativeFloat
    context: PositiveInt
    vocab: PositiveInt | None
    norm: Annotated[str, _one_of(NORMS)]
    norm_eps: NonNegativeFloat | None
    placement: Annotated[str, _one_of({**PLACEMENTS, **ALIASES}), AfterValidator(lambda name: ALIASES.get(name, name))]
    final_norm: bool | None
    activation: Annotated[str, _one_of(ACTIVATIONS)]
    init: InitName
    init_depth_scale: bool | None
    base_width: PositiveInt
    base_depth: PositiveInt
    base_head_width: PositiveInt
    position: Literal["learned", "sinusoidal", "rotary", "relative", "none"]
    rotary_fraction: Annotated[float, Field(gt=0, le=1)]
    rotary_base: PositiveFloat
    qk_norm: Annotated[Literal[False, True, "head", "joint"], AfterValidator(lambda v: "head" if v is True else v)]
    attn_softcap: PositiveFloat | None
    logit_softcap: PositiveFloat | None
    dropout: Fraction
    bias: Literal[True, False, "qkv", "ffn"]
    head: Literal["lm", "mlm", "pooler"]
    head_bias: bool
    tie: bool
    scale_embedding: bool
    embed_norm: bool
    segments: NonNegativeInt

    @property
    def encoder(self) -> int:
        """Blocks of the encoder; 0 = there is none."""
        return (
            0 if self.arch == "decoder" else self.depth if self.arch == "encoder" else self.encoder_depth or self.depth
        )

    @property
    def decoder(self) -> int:
        """Blocks of the decoder; 0 = there is none."""
        return 0 if self.arch == "encoder" else self.depth

    def blocks(self, stack: str) -> int:
        return self.encoder if stack == "encoder" else self.decoder

    def sites(self, stack: str) -> list[str]:
        """The sublayers of one block, in order."""
        cross = ["cross"] if stack == "decoder" and self.encoder else []
        return ["attn", *cross, *(["ffn"] if self.ffn != "none" else [])]

    def residual_sites(self, stack: str) -> list[str]:
        """The sublayers that join the stream by a sum of their own; joint ones do so together, at the last."""
        return self.sites(stack)[-1:] if PLACEMENTS[self.placement].joint else self.sites(stack)

    def where(self, stack: str, layer: int, site: str, first: Residual | None = None) -> Where:
        joins = self.residual_sites(stack)
        index = joins.index(site) if site in joins else 0
        return Where(self.width, stack, layer, index, len(joins), self.encoder, self.decoder, site, first)

    @property
    def eps(self) -> float:
        return NORMS[self.norm].eps if self.norm_eps is None else self.norm_eps

    @property
    def gated(self) -> bool:
        return ACTIVATIONS[self.activation].gated

    @property
    def hidden(self) -> int:
        """FFN units."""
        return self.ffn_width or ffn_width(self.width, self.ffn_ratio, self.gated)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def rotated(self) -> int:
        """Channels of a head that rotary positions turn."""
        return int(self.rotary_fraction * self.head_size)

    @property
    def qkv_bias(self) -> bool:
        return self.bias in (True, "qkv")

    @property
    def out_bias(self) -> bool:
        return self.bias is True

    @property
    def ffn_bias(self) -> bool:
        return self.bias in (True, "ffn")

    @property
    def width_multiple(self) -> float:
        """muP's width over base width; 1 under other inits."""
        return self.width / self.base_width if self.init == "completep" else 1.0

    @property
    def depth_multiple(self) -> float:
        """CompleteP's depth over base depth, of the deeper stack; 1 under other inits."""
        return max(self.encoder, self.decoder) / self.base_depth if self.init == "completep" else 1.0

    def branch_scale(self, stack: str) -> float:
        """CompleteP's base depth over depth; 1 under other inits."""
        return self.base_depth / self.blocks(stack) if self.init == "completep" else 1.0

    @property
    def logit_scale(self) -> float:
        return 1 / self.width_multiple

    @property
    def score_scale(self) -> float:
        """Of q k^T: K^-1/2; muP's 1/K, equal to it at the base head width."""
        if self.init == "completep":
            return self.base_head_width**0.5 / self.head_size
        return self.head_size**-0.5

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelConfig":
        for refused, why in _refusals(self):
            if refused:
                raise ValueError(why)
        return self


def _refusals(cfg: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Combinations that cannot be said, with the reason."""
    placement, row = cfg.placement, PLACEMENTS[cfg.placement]
    yield (
        cfg.head_width is None and cfg.width % cfg.heads > 0,
        f"model.heads={cfg.heads} must divide model.width={cfg.width}, or model.head_width be set",
    )
    yield cfg.heads % cfg.key_heads > 0, f"model.kv_heads={cfg.kv_heads} must divide model.heads={cfg.heads}"
    yield (
        cfg.position == "rotary" and (cfg.rotated < 2 or cfg.rotated % 2 > 0),
        f"model.position=rotary rotates pairs: the rotated part of the head width, {cfg.rotated} of {cfg.head_size}, "
        f"must be even and at least 2",
    )
    yield (
        bool(cfg.qk_norm) and cfg.norm == "none",
        f"model.qk_norm={cfg.qk_norm} needs a norm: model.norm=none has none to apply",
    )
    yield (
        bool(cfg.qk_norm) and "qkv" in row.inner,
        f"model.qk_norm={cfg.qk_norm}: model.placement={placement} already normalises q, k and v",
    )
    yield (
        row.zero_norms and NORMS[cfg.norm].zero is None,
        f"model.placement={placement} starts its norms' gains at 0: model.norm={cfg.norm} has no gain",
    )
    yield (
        cfg.ffn == "none" and (row.joint or placement in {"b2t", "hybrid_norm"}),
        f"model.ffn=none: model.placement={placement} ends its block in the FFN; accepted: another placement",
    )
    yield (
        cfg.final_norm is not None and placement == "resi_dual",
        f"model.final_norm={cfg.final_norm}: model.placement=resi_dual ends in x + N(d); accepted: null",
    )
    yield (
        cfg.norm == "batchnorm" and cfg.eps == 0,
        "model.norm_eps=0: model.norm=batchnorm divides by the spread of a batch, which may be 0; accepted: above 0",
    )
    yield (
        cfg.ffn_width is None and cfg.hidden < 1,
        f"model.ffn_ratio={cfg.ffn_ratio} leaves no FFN unit at model.width={cfg.width}",
    )
    yield (
        cfg.ffn == "moe" and cfg.experts_per_token > cfg.experts,
        f"model.experts_per_token={cfg.experts_per_token}: accepted: at most model.experts={cfg.experts}",
    )
    yield (
        cfg.encoder_depth is not None and cfg.arch != "encoder_decoder",
        f"model.encoder_depth={cfg.encoder_depth}: model.arch={cfg.arch} has one stack; accepted: null",
    )
    yield (
        cfg.head != "lm" and cfg.arch != "encoder",
        f"model.head={cfg.head} reads both sides of a token: model.arch={cfg.arch}; accepted: lm",
    )
    yield (
        cfg.head != "lm" and cfg.head_bias,
        f"model.head_bias=true: model.head={cfg.head} has its own biases; accepted: false",
    )
