"""The LFM2-MoE network in plain torch for fast training, and its conversion to the published checkpoint format.

All experts are computed and masked: at this size that is one small matrix product, far quicker than sorting tokens.
It rounds to bf16 where transformers' bf16 model does, so that training sees the numbers that serving sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocab: int = 2560
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dense_ff: int = 512
    expert_ff: int = 64
    experts: int = 8
    top_k: int = 2
    dense_layers: int = 2
    theta: float = 1e6
    context: int = 4096
    layers: tuple[str, ...] = ("conv", "conv", "attn", "conv", "attn", "conv", "attn", "attn")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight.to(x.dtype) * y.to(x.dtype)


def rope_tables(shape: Shape, length: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inv = 1.0 / shape.theta ** (torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
    angle = torch.arange(length, device=device).float()[:, None] * inv[None, :]
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


# The parts of a layer work on the rows of all sequences, [tokens, hidden]. So one compilation of each serves all layers
# of a kind, and every batch with so many tokens, whatever its sequences' length.
def conv_part(x: Tensor, norm: Tensor, w_in: Tensor, tap: Tensor, w_out: Tensor, back: Tensor) -> Tensor:
    """back [tokens, 2]: 1 where the sequence has a token one and two places before, else 0."""
    gate_b, gate_c, value = linear(rms_norm(x, norm), w_in.flatten(0, 1)).chunk(3, -1)
    u = (gate_b * value).float()
    u1, u2 = u.roll(1, 0) * back[:, :1], u.roll(2, 0) * back[:, 1:]
    tap = tap.to(x.dtype).float()
    z = tap[:, 0] * u2 + tap[:, 1] * u1 + tap[:, 2] * u
    return x + linear(gate_c * z.to(x.dtype), w_out)


def qkv_part(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """cos, sin [tokens, head_dim] -> queries, keys, values [tokens, heads, head_dim]."""
    y, n = rms_norm(x, norm), q_norm.shape[0]
    queries = rotate(rms_norm(linear(y, q).unflatten(-1, (-1, n)), q_norm), cos[:, None], sin[:, None])
    keys = rotate(rms_norm(linear(y, k).unflatten(-1, (-1, n)), k_norm), cos[:, None], sin[:, None])
    return queries, keys, linear(y, v).unflatten(-1, (-1, n))


def dense_part(x: Tensor, norm: Tensor, d1: Tensor, d2: Tensor, d3: Tensor) -> Tensor:
    y = rms_norm(x, norm)
    return x + linear(F.silu(linear(y, d1)) * linear(y, d3), d2)


def expert_part(
    x: Tensor, norm: Tensor, gate: Tensor, bias: Tensor, e1: Tensor, e2: Tensor, e3: Tensor, valid: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """valid [tokens] -> the rows, and how many valid tokens use each expert [experts]."""
    y = rms_norm(x, norm)
    scores = torch.sigmoid(linear(y, gate))
    chosen = (scores.float() + bias).topk(top_k, -1).indices
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    weight = scores * mask
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-6)
    load = (mask.float() * valid[:, None]).sum(0)
    up = F.silu(linear(y, e1.flatten(0, 1))) * linear(y, e3.flatten(0, 1))
    up = (up.unflatten(-1, e1.shape[:2]) * weight[..., None]).flatten(-2)
    return x + linear(up, e2.transpose(0, 1).flatten(1)), load


def loss_part(
    x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor, answer: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The summed weighted cross-entropy of the next tokens, and the sum over those that the model must produce."""
    losses = F.cross_entropy(linear(rms_norm(x, norm), embed).float(), targets, reduction="none")
    return (losses * weight).sum(), (losses * answer).sum().detach()


@dataclass
class Parts:
    """The functions that `forward` calls, as they are or compiled."""

    conv: Callable[..., Tensor] = conv_part
    qkv: Callable[..., tuple[Tensor, Tensor, Tensor]] = qkv_part
    dense: Callable[..., Tensor] = dense_part
    experts: Callable[..., tuple[Tensor, Tensor]] = expert_part
    loss: Callable[..., tuple[Tensor, Tensor]] = loss_part

    def compiled(self) -> Parts:
        """The same, compiled for the number of tokens that they see first."""
        return Parts(**{k: torch.compile(f, dynamic=False, fullgraph=True) for k, f in vars(self).items()})


class Demo(nn.Module):
    """Weights of one kind are stacked over the layers that have them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = s = shape
        self.parts = Parts()
        nc, na = s.layers.count("conv"), s.layers.count("attn")
        nm, nd, h = len(s.layers) - s.dense_layers, s.dense_layers, s.hidden
        qd, kd = s.heads * s.head_dim, s.kv_heads * s.head_dim

        def matrix(*dims: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*dims) * gain / math.sqrt(dims[-1]))

        self.embed = nn.Parameter(torch.randn(s.vocab, h) * 0.03)
        self.final_norm = nn.Parameter(torch.ones(h))
        self.op_norm = nn.Parameter(torch.ones(len(s.layers), h))
        self.ff_norm = nn.Parameter(torch.ones(len(s.layers), h))
        self.conv_in = matrix(nc, 3, h, h)
        self.conv_tap = nn.Parameter(torch.randn(nc, h, 3) * 0.3 + torch.tensor([0.2, 0.3, 0.5]))
        self.conv_out = matrix(nc, h, h, gain=0.3)
        self.q, self.k, self.v = matrix(na, qd, h), matrix(na, kd, h), matrix(na, kd, h)
        self.o = matrix(na, h, qd, gain=0.3)
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(na, s.head_dim)), nn.Parameter(torch.ones(na, s.head_dim))
        self.d1, self.d3, self.d2 = (
            matrix(nd, s.dense_ff, h),
            matrix(nd, s.dense_ff, h),
            matrix(nd, h, s.dense_ff, gain=0.3),
        )
        self.gate = matrix(nm, s.experts, h)
        self.e1, self.e3 = matrix(nm, s.experts, s.expert_ff, h), matrix(nm, s.experts, s.expert_ff, h)
        self.e2 = matrix(nm, s.experts, h, s.expert_ff, gain=0.3)
        self.register_buffer("bias", torch.zeros(nm, s.experts))

    def forward(self, ids: Tensor, valid: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """ids, valid [B, T] -> hidden states before the final norm [B, T, H], expert loads [MoE layers, experts]."""
        s, (b, t) = self.shape, ids.shape
        cos, sin = (x.repeat(b, 1) for x in rope_tables(s, t, ids.device, dtype))
        place = torch.arange(t, device=ids.device).repeat(b)
        back = torch.stack([place >= 1, place >= 2], -1).float()
        x, rows = F.embedding(ids.flatten(), self.embed).to(dtype), valid.flatten()
        op_norm, ff_norm = self.op_norm.unbind(), self.ff_norm.unbind()
        # unbound once, so that each stack's gradient is put together once
        conv = zip(*(w.unbind() for w in (self.conv_in, self.conv_tap, self.conv_out)), strict=True)
        attn = zip(*(w.unbind() for w in (self.q, self.k, self.v, self.q_norm, self.k_norm, self.o)), strict=True)
        dense = zip(*(w.unbind() for w in (self.d1, self.d2, self.d3)), strict=True)
        moe = zip(*(w.unbind() for w in (self.gate, self.bias, self.e1, self.e2, self.e3)), strict=True)
        loads = []
        for n, kind in enumerate(s.layers):
            if kind == "conv":
                x = self.parts.conv(x, op_norm[n], *next(conv), back)
            else:
                *weights, out = next(attn)
                q, k, v = (
                    y.unflatten(0, (b, t)).transpose(1, 2) for y in self.parts.qkv(x, op_norm[n], *weights, cos, sin)
                )
                group = s.heads // s.kv_heads
                y = F.scaled_dot_product_attention(
                    q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
                )
                x = x + linear(y.transpose(1, 2).reshape(b * t, -1), out)
            if n < s.dense_layers:
                x = self.parts.dense(x, ff_norm[n], *next(dense))
            else:
                x, load = self.parts.experts(x, ff_norm[n], *next(moe), rows, s.top_k)
                loads.append(load)
        return x.unflatten(0, (b, t)), torch.stack(loads)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(rms_norm(hidden, self.final_norm), self.embed)


def _places(model: Demo) -> dict[str, Tensor]:
    """Each published tensor name and the view of the stacked weights that holds it."""
    s = model.shape
    out: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.embedding_norm.weight": model.final_norm}
    conv = attn = 0
    for n, kind in enumerate(s.layers):
        at = f"model.layers.{n}."
        out[at + "operator_norm.weight"], out[at + "ffn_norm.weight"] = model.op_norm[n], model.ff_norm[n]
        if kind == "conv":
            out[at + "conv.in_proj.weight"] = model.conv_in[conv].view(3 * s.hidden, s.hidden)
            out[at + "conv.conv.weight"] = model.conv_tap[conv][:, None]
            out[at + "conv.out_proj.weight"] = model.conv_out[conv]
            conv += 1
        else:
            for name, tensor in (
                ("q_proj", model.q),
                ("k_proj", model.k),
                ("v_proj", model.v),
                ("out_proj", model.o),
                ("q_layernorm", model.q_norm),
                ("k_layernorm", model.k_norm),
            ):
                out[f"{at}self_attn.{name}.weight"] = tensor[attn]
            attn += 1
        if n < s.dense_layers:
            for name, tensor in (("w1", model.d1), ("w2", model.d2), ("w3", model.d3)):
                out[f"{at}feed_forward.{name}.weight"] = tensor[n]
            continue
        m = n - s.dense_layers
        out[at + "feed_forward.gate.weight"], out[at + "feed_forward.expert_bias"] = model.gate[m], model.bias[m]
        for e in range(s.experts):
            for name, tensor in (("w1", model.e1), ("w2", model.e2), ("w3", model.e3)):
                out[f"{at}feed_forward.experts.{e}.{name}.weight"] = tensor[m, e]
    return out


def to_published(model: Demo) -> dict[str, Tensor]:
    """The weights under the names of the published checkpoints, bf16 except expert_bias."""
    kinds = {name: torch.float32 if name.endswith("expert_bias") else torch.bfloat16 for name in _places(model)}
    return {
        name: place.detach().cpu().to(kinds[name], copy=True).contiguous() for name, place in _places(model).items()
    }


@torch.no_grad()
def load_published(model: Demo, tensors: dict[str, Tensor]) -> None:
    """Fills the weights from a published checkpoint's tensors."""
    places = _places(model)
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        place.copy_(tensors[name])


def config(shape: Shape, ids: dict[str, int]) -> dict[str, object]:
    """Arguments of transformers' Lfm2MoeConfig."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.dense_ff,
        "moe_intermediate_size": shape.expert_ff,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_dense_layers": shape.dense_layers,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": shape.context,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["conv" if k == "conv" else "full_attention" for k in shape.layers],
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        **ids,
    }
