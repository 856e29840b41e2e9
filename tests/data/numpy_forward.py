"""An independent LFM2 forward pass in plain NumPy, with the usual mistakes as switches.

It shares no code with lfm2serve. `make_reference.py` checks it against transformers; the tests use it to show that
the stored references tell every known mistake apart from the right answer.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

MISTAKES = (
    "split as B,x,C",
    "split as x,B,C",
    "B and C swapped",
    "kernel reversed",
    "SiLU after conv",
    "conv not causal",
    "rope interleaved",
    "rope before q/k norm",
    "theta 1e4",
    "theta 5e6",
    "GQA by n % kv",
    "norm with 1+w",
    "no final norm",
    "embedding_norm on the input",
    "w1 and w3 swapped",
    "softmax router",
    "bias left out",
    "bias kept in weights",
    "no renormalisation",
)
MOE_ONLY = ("softmax router", "bias left out", "bias kept in weights", "no renormalisation")


def bf16(x: np.ndarray) -> np.ndarray:
    """Round a float32 array to bf16 (nearest even), keep it as float32."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of `path`/model.safetensors (BF16 or F32), widened to float32."""
    data = (path / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    weights = {}
    for name, info in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        if info["dtype"] == "BF16":
            flat = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(raw, np.float32)
        weights[name] = flat.reshape(info["shape"])
    return weights


class NumpyForward:
    """Logits and residual stream of one token list. `low` rounds to bf16 where torch's eager mode would.

    mistake: one of MISTAKES, made on purpose.
    """

    def __init__(
        self, weights: dict[str, np.ndarray], config: dict[str, Any], low: bool = False, mistake: str | None = None
    ) -> None:
        if mistake is not None and mistake not in MISTAKES:
            raise ValueError(f"unknown mistake {mistake!r}")
        self.w = weights
        self.config = config
        self.mistake = mistake
        self.round = bf16 if low else (lambda a: np.asarray(a, np.float32))
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["hidden_size"] // self.heads

    def __call__(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """logits [T, V]; hidden [L + 1, T, H]: after embedding and layers, the last one after the final norm."""
        h = self.w["model.embed_tokens.weight"][ids]
        if self.mistake == "embedding_norm on the input":
            h = self.norm(h, "model.embedding_norm.weight")
        trace = [h]
        for i, kind in enumerate(self.config["layer_types"]):
            prefix = f"model.layers.{i}."
            x = self.norm(h, prefix + "operator_norm.weight")
            y = self.conv(x, prefix + "conv.") if kind == "conv" else self.attention(x, prefix + "self_attn.")
            h = self.round(h + y)
            x = self.norm(h, prefix + "ffn_norm.weight")
            moe = prefix + "feed_forward.gate.weight" in self.w
            y = self.experts(x, prefix + "feed_forward.") if moe else self.mlp(x, prefix + "feed_forward.")
            h = self.round(h + y)
            trace.append(h)
        if self.mistake not in ("no final norm", "embedding_norm on the input"):
            h = self.norm(h, "model.embedding_norm.weight")
        trace[-1] = h
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self.round(h @ head.T), np.stack(trace)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.round(x.astype(np.float32) @ self.w[name].T)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.w[name] + 1 if self.mistake == "norm with 1+w" else self.w[name]
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["norm_eps"], dtype=np.float32)
        return self.round(weight * self.round(y))

    def silu(self, x: np.ndarray) -> np.ndarray:
        return self.round(x / (1 + np.exp(-x)))

    def mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        gate, up = ("w3", "w1") if self.mistake == "w1 and w3 swapped" else ("w1", "w3")
        inner = self.silu(self.linear(x, f"{prefix}{gate}.weight")) * self.linear(x, f"{prefix}{up}.weight")
        return self.linear(self.round(inner), f"{prefix}w2.weight")

    def conv(self, x: np.ndarray, prefix: str) -> np.ndarray:
        order = {"split as B,x,C": (0, 2, 1), "split as x,B,C": (1, 2, 0), "B and C swapped": (1, 0, 2)}
        parts = np.split(self.linear(x, prefix + "in_proj.weight"), 3, -1)
        b, c, value = (parts[i] for i in order.get(self.mistake or "", (0, 1, 2)))
        u = self.round(b * value)
        taps = self.w[prefix + "conv.weight"][:, 0]  # [H, K]; the last tap meets the current token
        if self.mistake == "kernel reversed":
            taps = taps[:, ::-1]
        width = taps.shape[1]
        before = width // 2 if self.mistake == "conv not causal" else width - 1
        padded = np.pad(u, ((before, width - 1 - before), (0, 0)))
        z = self.round(sum(padded[j : j + len(x)] * taps[:, j] for j in range(width)))
        if self.mistake == "SiLU after conv":
            z = self.silu(z)
        return self.linear(self.round(c * z), prefix + "out_proj.weight")

    def rope(self, x: np.ndarray) -> np.ndarray:
        """x [T, n, D]; dimension i turns with dimension i + D/2."""
        theta = {"theta 1e4": 1e4, "theta 5e6": 5e6}.get(
            self.mistake or "", self.config["rope_parameters"]["rope_theta"]
        )
        inverse = (1.0 / theta ** (np.arange(0, self.dim, 2, dtype=np.float32) / self.dim)).astype(np.float32)
        angle = np.arange(len(x), dtype=np.float32)[:, None] * inverse[None]
        cos, sin = self.round(np.cos(angle))[:, None], self.round(np.sin(angle))[:, None]
        interleaved = self.mistake == "rope interleaved"
        first, second = (
            (slice(0, None, 2), slice(1, None, 2))
            if interleaved
            else (
                slice(0, self.dim // 2),
                slice(self.dim // 2, None),
            )
        )
        a, b = x[..., first], x[..., second]
        out = np.empty_like(x)
        out[..., first] = self.round(self.round(a * cos) + self.round(-b * sin))
        out[..., second] = self.round(self.round(b * cos) + self.round(a * sin))
        return out

    def attention(self, x: np.ndarray, prefix: str) -> np.ndarray:
        t, ratio = len(x), self.heads // self.kv_heads
        q = self.linear(x, prefix + "q_proj.weight").reshape(t, self.heads, self.dim)
        k = self.linear(x, prefix + "k_proj.weight").reshape(t, self.kv_heads, self.dim)
        v = self.linear(x, prefix + "v_proj.weight").reshape(t, self.kv_heads, self.dim)
        if self.mistake == "rope before q/k norm":
            q, k = self.rope(q), self.rope(k)
        q, k = self.norm(q, prefix + "q_layernorm.weight"), self.norm(k, prefix + "k_layernorm.weight")
        if self.mistake != "rope before q/k norm":
            q, k = self.rope(q), self.rope(k)
        out = np.zeros((t, self.heads, self.dim), np.float32)
        for n in range(self.heads):
            m = n % self.kv_heads if self.mistake == "GQA by n % kv" else n // ratio
            scores = self.round(self.round(q[:, n] @ k[:, m].T) * np.float32(self.dim**-0.5))
            scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, n] = self.round(self.round(e / e.sum(-1, keepdims=True)) @ v[:, m])
        return self.linear(out.reshape(t, -1), prefix + "out_proj.weight")

    def experts(self, x: np.ndarray, prefix: str) -> np.ndarray:
        logits = self.linear(x, prefix + "gate.weight")
        if self.mistake == "softmax router":
            e = np.exp(logits - logits.max(-1, keepdims=True))
            scores = self.round(e / e.sum(-1, keepdims=True))
        else:
            scores = self.round(1 / (1 + np.exp(-logits)))
        bias = self.w[prefix + "expert_bias"]
        if self.mistake == "bias left out":
            bias = np.zeros_like(bias)
        y = np.zeros_like(x)
        for t in range(len(x)):
            biased = scores[t] + bias
            chosen = np.argsort(-biased, kind="stable")[: self.config["num_experts_per_tok"]]
            weight = (biased if self.mistake == "bias kept in weights" else scores[t])[chosen]
            if self.mistake != "no renormalisation":
                weight = self.round(weight / self.round(self.round(weight.sum()) + np.float32(1e-6)))
            for w, expert in sorted(zip(weight, chosen, strict=True), key=lambda pair: pair[1]):
                out = self.mlp(x[t : t + 1], f"{prefix}experts.{expert}.")[0]
                y[t] = self.round(y[t] + self.round(out * w))
        return y
