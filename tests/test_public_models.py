"""Published architectures: with the same weights, the logits of the `transformers` model of that name.

Every model is built from a small config; weights, gains and biases are random. A table pairs names, ours=theirs, each a
parameter, or a module for its weight and the bias that ours has; below a line that ends in a colon, names inside every
block. {q,k,v}: several of theirs, stacked by rows as our fused one. `changes`: what a weight needs on the way, such as
another layout or a factor that they apply outside the weights.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import compose
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from normlab.model import Model, build
from normlab.task import make
from normlab.tensors import count_parameters

VOCAB, BATCH, WIDTH, HEADS, HIDDEN, CONTEXT = 37, 2, 32, 4, 48, 24
SHAPE = f"depth=2 width={WIDTH} heads={HEADS} ffn_width={HIDDEN} context={CONTEXT} scale_embedding=false"
CUT = f"model.context={CONTEXT}"
K = 12  # head width where it is not width / heads


@dataclass(frozen=True)
class Public:
    """A published model, our config for it, and which weight is which."""

    model: type[hf.PreTrainedModel]
    theirs: dict[str, Any]  # their config
    ours: str  # keys of conf/model
    names: str
    changes: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # by the end of our name
    unread: int = 0  # numbers in their parameters that no forward pass reads
    lengths: tuple[int, int] = (CONTEXT - 7, CONTEXT - 4)  # of the tokens and, in an encoder-decoder, the source

    @torch.no_grad()
    def pair(self) -> tuple[Model, hf.PreTrainedModel]:
        """(ours, theirs), with the same random weights."""
        theirs = self.model(self.model.config_class(**self.theirs)).eval()
        theirs.set_attn_implementation("eager")
        for parameter in theirs.parameters():  # gains and biases: about the value that means 1 and 0
            start, std = (parameter, 0.3) if parameter.dim() == 1 else (0.0, 0.2)
            parameter.copy_(start + std * torch.randn_like(parameter))
        overrides = [f"model.{key}" for key in f"{SHAPE} {self.ours}".split()]
        ours = build(compose(*overrides).model, VOCAB).eval()
        self.transfer(theirs, ours)
        return ours, theirs

    def table(self, ours: Model) -> Iterator[tuple[str, str]]:
        """(our name, their name), block by block."""
        prefixes = [("", "")]
        for line in self.names.split():
            mine, their = line.removesuffix(":").split("=")
            if line.endswith(":"):
                prefixes = [(f"{mine}.{i}.", f"{their}.{i}.") for i in range(len(ours.get_submodule(mine)))]
            else:
                yield from ((before + mine, there + their) for before, there in prefixes)

    def transfer(self, theirs: nn.Module, ours: Model) -> None:
        """Fills each of our parameters exactly once, and reads every one of theirs."""
        target, source = dict(ours.named_parameters()), dict(theirs.named_parameters())
        written, read = [], set()
        for mine, their in self.table(ours):
            change = next((f for end, f in self.changes.items() if mine.endswith(end)), lambda w: w)
            for leaf in [""] if mine in target else [leaf for leaf in (".weight", ".bias") if mine + leaf in target]:
                names = [name + leaf for name in expanded(their)]
                value = change(torch.cat([source[name] for name in names]))
                assert value.shape == target[mine + leaf].shape, mine + leaf
                target[mine + leaf].copy_(value)
                written.append(mine + leaf)
                read.update(names)
        assert sorted(written) == sorted(target)
        assert read == set(source)


def expanded(name: str) -> list[str]:
    """'x.{q,k}_proj' -> ['x.q_proj', 'x.k_proj']"""
    braces = re.search(r"\{(.+)\}", name)
    return [name.replace(braces[0], choice) for choice in braces[1].split(",")] if braces else [name]


# GPT-2's linear maps are stored as (in, out), its q, k and v fused as ours.
GPT2 = """
    decoder.embed.token=transformer.wte  decoder.embed.position=transformer.wpe  decoder.final_norm=transformer.ln_f
    decoder.blocks=transformer.h:
        attn_residual.norm=ln_1  attn.w_qkv=attn.c_attn  attn.w_out=attn.c_proj
        ffn_residual.norm=ln_2  ffn.w_in=mlp.c_fc  ffn.w_out=mlp.c_proj
"""
GPT2_CHANGES = dict.fromkeys(("attn.w_qkv", "attn.w_out", "ffn.w_in", "ffn.w_out"), torch.t)

BERT = """
    encoder.embed.token=embeddings.word_embeddings  encoder.embed.position=embeddings.position_embeddings
    encoder.embed.segment=embeddings.token_type_embeddings  encoder.embed.norm=embeddings.LayerNorm
    encoder.blocks=encoder.layer:
        attn.w_qkv=attention.self.{query,key,value}  attn.w_out=attention.output.dense
        attn_residual.norm=attention.output.LayerNorm
        ffn.w_in=intermediate.dense  ffn.w_out=output.dense  ffn_residual.norm=output.LayerNorm
"""
BERT_MLM = f"""
    head.dense=cls.predictions.transform.dense  head.norm=cls.predictions.transform.LayerNorm
    head.out.bias=cls.predictions.bias
    {BERT.replace("=e", "=bert.e")}
"""

TIED = "decoder.embed.token=model.embed_tokens  decoder.final_norm=model.norm"
UNTIED = f"{TIED}  head.out=lm_head"
ATTENTION = "decoder.blocks=model.layers:  attn.w_qkv=self_attn.{q,k,v}_proj  attn.w_out=self_attn.o_proj"
GATED = "ffn.w_gate=mlp.gate_proj  ffn.w_in=mlp.up_proj  ffn.w_out=mlp.down_proj"
# Llama's "post-attention" norm is the FFN's pre-norm; in Gemma 2 and OLMo 2 it comes after the attention.
PRE = "attn_residual.norm=input_layernorm  ffn_residual.norm=post_attention_layernorm"
LLAMA = f"{ATTENTION} {GATED} {PRE}"
GEMMA2 = f"""
    {TIED} {ATTENTION} {GATED}
        attn_residual.norm=input_layernorm  attn_residual.norm_out=post_attention_layernorm
        ffn_residual.norm=pre_feedforward_layernorm  ffn_residual.norm_out=post_feedforward_layernorm
"""
OLMO2 = f"""
    {UNTIED} {ATTENTION} {GATED}
        attn.q_norm=self_attn.q_norm  attn.k_norm=self_attn.k_norm
        attn_residual.norm=post_attention_layernorm  ffn_residual.norm=post_feedforward_layernorm
"""
MIXTRAL = f"""
    {UNTIED} {ATTENTION} {PRE}
        ffn.w_router=mlp.gate  ffn.expert_out=mlp.experts.down_proj
        ffn.expert_gate=mlp.experts.gate_up_proj  ffn.expert_in=mlp.experts.gate_up_proj
"""
MIXTRAL_CHANGES = {"ffn.expert_gate": lambda w: w[:, :HIDDEN], "ffn.expert_in": lambda w: w[:, HIDDEN:]}

# A parallel block has one norm; ours belongs to the FFN, where the sum joins the stream.
GPTJ = """
    decoder.embed.token=transformer.wte  decoder.final_norm=transformer.ln_f  head.out=lm_head
    decoder.blocks=transformer.h:
        ffn_residual.norm=ln_1  attn.w_qkv=attn.{q,k,v}_proj  attn.w_out=attn.out_proj
        ffn.w_in=mlp.fc_in  ffn.w_out=mlp.fc_out
"""
PHI = """
    decoder.embed.token=model.embed_tokens  decoder.final_norm=model.final_layernorm  head.out=lm_head
    decoder.blocks=model.layers:
        ffn_residual.norm=input_layernorm  attn.w_qkv=self_attn.{q,k,v}_proj  attn.w_out=self_attn.dense
        ffn.w_in=mlp.fc1  ffn.w_out=mlp.fc2
"""


def halved_pairs(w_qkv: Tensor, rotated: int = 4) -> Tensor:
    """GPT-J rotates channels (2i, 2i+1), we (i, i+R/2): in each head of q and k the even ones first, then the odd.

    Exact: q . k is a sum over channels, in whatever order q and k have them; v keeps its own.
    """
    heads = w_qkv.unflatten(0, (3 * HEADS, -1)).clone()
    pairs = heads[: 2 * HEADS, :rotated]
    heads[: 2 * HEADS, :rotated] = torch.cat((pairs[:, ::2], pairs[:, 1::2]), dim=1)
    return heads.flatten(0, 1)


BART_BLOCK = """
        attn.w_qkv=self_attn.{q,k,v}_proj  attn.w_out=self_attn.out_proj  attn_residual.norm=self_attn_layer_norm
        ffn.w_in=fc1  ffn.w_out=fc2  ffn_residual.norm=final_layer_norm
"""
BART = f"""
    encoder.embed.token=model.shared
    encoder.embed.position=model.encoder.embed_positions  encoder.embed.norm=model.encoder.layernorm_embedding
    decoder.embed.position=model.decoder.embed_positions  decoder.embed.norm=model.decoder.layernorm_embedding
    encoder.blocks=model.encoder.layers: {BART_BLOCK}
    decoder.blocks=model.decoder.layers: {BART_BLOCK}
        cross.w_q=encoder_attn.q_proj  cross.w_kv=encoder_attn.{{k,v}}_proj  cross.w_out=encoder_attn.out_proj
        cross_residual.norm=encoder_attn_layer_norm
"""
MBART_FINAL = "encoder.final_norm=model.encoder.layer_norm  decoder.final_norm=model.decoder.layer_norm"
# Position t is their row t + 2; the first two rows of either table are never read. Their bias on the logits is a buffer
# of zeros, no parameter, and has no counterpart here.
BART_CHANGES = {"embed.position": lambda w: w[2:]}
BART_UNREAD = 2 * 2 * WIDTH

T5_SELF = """
        attn_residual.norm=layer.0.layer_norm
        attn.w_qkv=layer.0.SelfAttention.{q,k,v}  attn.w_out=layer.0.SelfAttention.o
"""
T5 = f"""
    encoder.embed.token=shared
    encoder.relative.table=encoder.block.0.layer.0.SelfAttention.relative_attention_bias
    decoder.relative.table=decoder.block.0.layer.0.SelfAttention.relative_attention_bias
    encoder.final_norm=encoder.final_layer_norm  decoder.final_norm=decoder.final_layer_norm
    encoder.blocks=encoder.block: {T5_SELF}
        ffn_residual.norm=layer.1.layer_norm
        ffn.w_in=layer.1.DenseReluDense.wi  ffn.w_out=layer.1.DenseReluDense.wo
    decoder.blocks=decoder.block: {T5_SELF}
        cross_residual.norm=layer.1.layer_norm  cross.w_q=layer.1.EncDecAttention.q
        cross.w_kv=layer.1.EncDecAttention.{{k,v}}  cross.w_out=layer.1.EncDecAttention.o
        ffn_residual.norm=layer.2.layer_norm
        ffn.w_in=layer.2.DenseReluDense.wi  ffn.w_out=layer.2.DenseReluDense.wo
"""
# T5 does not divide scores by sqrt(K): our W_q is theirs times sqrt(K). It divides tied logits by sqrt(width): so does
# the gain of our decoder's final norm, the last step before them.
T5_CHANGES = {
    "attn.w_qkv": lambda w: torch.cat((math.sqrt(K) * w[: HEADS * K], w[HEADS * K :])),
    "cross.w_q": lambda w: math.sqrt(K) * w,
    "decoder.final_norm": lambda w: w / math.sqrt(WIDTH),
}

CONFIG = {
    **{"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2},
    **{"num_attention_heads": HEADS, "max_position_embeddings": CONTEXT, "eos_token_id": None},
}
GQA = {**CONFIG, "num_key_value_heads": 2}
GPT_CONFIG = {
    **{"vocab_size": VOCAB, "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": 2, "n_head": HEADS},
    **{"n_positions": CONTEXT, "bos_token_id": None, "eos_token_id": None},
}
BART_CONFIG = {
    **{"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 3, "decoder_layers": 2},
    **{"encoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN},
    **{"decoder_attention_heads": HEADS, "decoder_ffn_dim": HIDDEN, "max_position_embeddings": CONTEXT},
}
T5_CONFIG = {
    **{"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": K, "d_ff": HIDDEN, "num_heads": HEADS},
    **{"num_layers": 3, "num_decoder_layers": 2},
}
BERT_OURS = "arch=encoder placement=post embed_norm=true segments=2 norm_eps=1e-12"
ROTARY = "position=rotary bias=false kv_heads=2 norm=rmsnorm activation=swiglu"
GEMMA = f"position=rotary bias=false head_width={K} norm=rmsnorm_offset activation=geglu_tanh scale_embedding=true"
PARALLEL = "placement=parallel position=rotary rotary_fraction=0.5 activation=gelu_tanh head_bias=true tie=false"


def rope(base: float, share: float = 1.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}}


PUBLIC = {
    "gpt2": Public(hf.GPT2LMHeadModel, GPT_CONFIG, "activation=gelu_tanh", GPT2, GPT2_CHANGES),
    "bert": Public(hf.BertForMaskedLM, CONFIG, f"{BERT_OURS} head=mlm", BERT_MLM),
    "bert_pooler": Public(hf.BertModel, CONFIG, f"{BERT_OURS} head=pooler", "head.dense=pooler.dense" + BERT),
    "llama": Public(
        hf.LlamaForCausalLM,
        GQA | rope(5e5),
        f"{ROTARY} rotary_base=500000 norm_eps=1e-6 tie=false",
        f"{UNTIED} {LLAMA}",
    ),
    "gemma": Public(
        hf.GemmaForCausalLM,
        CONFIG | {"head_dim": K, "num_key_value_heads": 1},
        f"{GEMMA} kv_heads=1",
        f"{TIED} {LLAMA}",
    ),
    # Every other block of Gemma 2 attends within a sliding window, which we do not have: here it holds all tokens.
    "gemma2": Public(
        hf.Gemma2ForCausalLM,
        GQA
        | {"head_dim": K, "query_pre_attn_scalar": K, "sliding_window": CONTEXT}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
        f"{GEMMA} kv_heads=2 placement=sandwich attn_softcap=1.5 logit_softcap=2.5",
        GEMMA2,
    ),
    "olmo2": Public(
        hf.Olmo2ForCausalLM,
        GQA | rope(5e5) | {"rms_norm_eps": 1e-6},
        f"{ROTARY} rotary_base=500000 norm_eps=1e-6 placement=reordered qk_norm=joint tie=false",
        OLMO2,
    ),
    "qwen2": Public(
        hf.Qwen2ForCausalLM,
        GQA | rope(1e6) | {"tie_word_embeddings": True},
        f"{ROTARY.replace('bias=false', 'bias=qkv')} rotary_base=1000000 norm_eps=1e-6",
        f"{TIED} {LLAMA}",
    ),
    "mixtral": Public(
        hf.MixtralForCausalLM,
        GQA | rope(1e6) | {"num_local_experts": 6, "num_experts_per_tok": 2},
        f"{ROTARY} rotary_base=1000000 ffn=moe experts=6 experts_per_token=2 tie=false",
        MIXTRAL,
        MIXTRAL_CHANGES,
    ),
    "gptj": Public(
        hf.GPTJForCausalLM, GPT_CONFIG | {"rotary_dim": 4}, f"{PARALLEL} bias=ffn", GPTJ, {"attn.w_qkv": halved_pairs}
    ),
    "phi": Public(hf.PhiForCausalLM, CONFIG | rope(1e4, share=0.5), PARALLEL, PHI),
    "bart": Public(
        hf.BartForConditionalGeneration,
        BART_CONFIG,
        "arch=encoder_decoder encoder_depth=3 placement=post embed_norm=true",
        BART,
        BART_CHANGES,
        BART_UNREAD,
    ),
    "mbart": Public(
        hf.MBartForConditionalGeneration,
        BART_CONFIG | {"scale_embedding": True},
        "arch=encoder_decoder encoder_depth=3 embed_norm=true scale_embedding=true",
        MBART_FINAL + BART,
        BART_CHANGES,
        BART_UNREAD,
    ),
    "t5": Public(
        hf.T5ForConditionalGeneration,
        T5_CONFIG,
        f"arch=encoder_decoder encoder_depth=3 position=relative bias=false norm=rmsnorm norm_eps=1e-6 activation=relu "
        f"head_width={K} context=160",
        T5,
        T5_CHANGES,
        lengths=(140, 150),  # over 128: every bucket
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PUBLIC)
def test_same_weights_give_the_published_model_s_logits(name):
    public = PUBLIC[name]
    ours, theirs = public.pair()
    assert count_parameters(ours) == count_parameters(theirs) - public.unread
    tokens, source = (torch.randint(VOCAB, (BATCH, length)) for length in public.lengths)
    if len(ours.stacks) == 2:
        got, expected = ours((source, tokens)), theirs(input_ids=source, decoder_input_ids=tokens).logits
    elif "encoder" in ours.stacks:
        segments = torch.randint(2, tokens.shape)
        out = theirs(input_ids=tokens, token_type_ids=segments)
        got, expected = ours(tokens, segments), out.pooler_output if name == "bert_pooler" else out.logits
    else:
        got, expected = ours(tokens), theirs(input_ids=tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masked_language_model_loss_is_bert_s(smoothing):
    """The same weights, masks and tokens: loss of the 15 %, from our masking and from all segments of kind 0."""
    ours, theirs = PUBLIC["bert"].pair()
    learned = make(compose("model.arch=encoder", "objective=mlm", "data=markov", f"data.vocab={VOCAB - 1}", CUT))
    for step in range(3):
        tokens, labels = learned.batch(0, step)
        expected = theirs(input_ids=tokens, labels=labels).loss
        descended, loss = ours.objective(tokens, labels, smoothing)
        assert expected > 1
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        assert (descended == loss) == (smoothing == 0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bart", "mbart", "t5"])
def test_masked_padding_gives_the_published_model_s_logits(name):
    """Sources of three lengths, padded: our mask against their attention_mask."""
    public = PUBLIC[name]
    ours, theirs = public.pair()
    tokens, source = (torch.randint(1, VOCAB, (3, length)) for length in public.lengths)
    present = torch.arange(source.shape[1]) < torch.tensor([[4], [source.shape[1]], [source.shape[1] - 3]])
    got = ours((source.where(present, 0), tokens, present))
    given = {"input_ids": source.where(present, 1), "attention_mask": present.long(), "decoder_input_ids": tokens}
    torch.testing.assert_close(got, theirs(**given).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_load_balance_loss_is_mixtral_s():
    """Block by block. Of several, Mixtral pools the tokens before the product, `objective` takes the blocks' mean."""
    ours, theirs = PUBLIC["mixtral"].pair()
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT))
    ours(tokens)
    router_logits = theirs(input_ids=tokens, output_router_logits=True).router_logits
    for block, logits in zip(ours.decoder.blocks, router_logits, strict=True):
        expected = load_balancing_loss_func((logits,), num_experts=6, top_k=2)
        torch.testing.assert_close(block.ffn.balance, expected)
        assert abs(expected.item() - 2) > 0.01  # not what an even router has
