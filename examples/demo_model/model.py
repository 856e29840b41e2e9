"""The LFM2-MoE network in plain torch for fast training, and its conversion to the published checkpoint format.

All experts are computed and masked: at this size that is one small matrix product, far quicker than sorting tokens.
It rounds to bf16 where transformers' bf16 model does, so that training sees the numbers that serving sees.
"""

from __future__ import annotations

import math
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


class Demo(nn.Module):
    """Weights of one kind are stacked over the layers that have them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = s = shape
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

    def attention(self, i: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (b, n, _) = self.shape, x.shape
        q = F.linear(x, self.q[i].to(x.dtype)).view(b, n, s.heads, s.head_dim)
        k = F.linear(x, self.k[i].to(x.dtype)).view(b, n, s.kv_heads, s.head_dim)
        v = F.linear(x, self.v[i].to(x.dtype)).view(b, n, s.kv_heads, s.head_dim).transpose(1, 2)
        q = rotate(rms_norm(q, self.q_norm[i]).transpose(1, 2), cos, sin)
        k = rotate(rms_norm(k, self.k_norm[i]).transpose(1, 2), cos, sin)
        group = s.heads // s.kv_heads
        y = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
        return F.linear(y.transpose(1, 2).reshape(b, n, -1), self.o[i].to(x.dtype))

    def conv(self, i: int, x: Tensor) -> Tensor:
        n, h = x.shape[1], self.shape.hidden
        gate_b, gate_c, value = F.linear(x, self.conv_in[i].reshape(3 * h, h).to(x.dtype)).chunk(3, -1)
        u = F.pad(gate_b * value, (0, 0, 2, 0)).float()
        tap = self.conv_tap[i].to(x.dtype).float()
        z = tap[:, 0] * u[:, :n] + tap[:, 1] * u[:, 1 : n + 1] + tap[:, 2] * u[:, 2:]
        return F.linear(gate_c * z.to(x.dtype), self.conv_out[i].to(x.dtype))

    def experts(self, i: int, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        s = self.shape
        scores = torch.sigmoid(F.linear(x, self.gate[i].to(x.dtype)))
        chosen = (scores.float() + self.bias[i]).topk(s.top_k, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weight = scores * mask
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-6)
        load = (mask.float() * valid[..., None]).sum((0, 1))
        up = F.silu(F.linear(x, self.e1[i].flatten(0, 1).to(x.dtype))) * F.linear(
            x, self.e3[i].flatten(0, 1).to(x.dtype)
        )
        up = (up.unflatten(-1, (s.experts, s.expert_ff)) * weight[..., None]).flatten(-2)
        return F.linear(up, self.e2[i].transpose(0, 1).flatten(1).to(x.dtype)), load

    def forward(self, ids: Tensor, valid: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """ids, valid [B, T] -> hidden states after the final norm [B, T, H], expert loads [MoE layers, experts]."""
        s = self.shape
        cos, sin = rope_tables(s, ids.shape[1], ids.device, dtype)
        x = F.embedding(ids, self.embed).to(dtype)
        loads = []
        conv = attn = 0
        for n, kind in enumerate(s.layers):
            y = rms_norm(x, self.op_norm[n])
            if kind == "conv":
                x, conv = x + self.conv(conv, y), conv + 1
            else:
                x, attn = x + self.attention(attn, y, cos, sin), attn + 1
            y = rms_norm(x, self.ff_norm[n])
            if n < s.dense_layers:
                up = F.silu(F.linear(y, self.d1[n].to(dtype))) * F.linear(y, self.d3[n].to(dtype))
                x = x + F.linear(up, self.d2[n].to(dtype))
            else:
                out, load = self.experts(n - s.dense_layers, y, valid)
                x = x + out
                loads.append(load)
        return rms_norm(x, self.final_norm), torch.stack(loads)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.to(hidden.dtype))


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
