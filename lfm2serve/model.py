"""The LFM2 network as one short program over a backend.

Mathematics: transformers' Lfm2 / Lfm2Moe. Every operation keeps the law (one row, one value), so this program may be
run over any packing of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba.batch import Batch
from lfm2serve.backend import Array, Backend
from lfm2serve.config import ModelConfig
from lfm2serve.memory.states import StreamStates

Tensors = dict[str, Any]


@dataclass(slots=True)
class _Layer:
    """One layer's weights; `index` counts the layers of its own kind (its place in the K/V pool or the conv rings)."""

    index: int
    attention: bool
    operator_norm: Array
    ffn_norm: Array
    mixer: Tensors
    feed_forward: Tensors
    moe: bool


class Model:
    """Weights of one checkpoint, ready to run on a backend.

    tensors: by the names of `Checkpoint.load`, or (name, tensor) as they come. max_rows: positions 0 .. max_rows - 1
    can be run.
    """

    def __init__(
        self, config: ModelConfig, tensors: Tensors | Iterable[tuple[str, Any]], backend: Backend, *, max_rows: int
    ) -> None:
        self.config = config
        self.backend = backend
        tensors = backend.upload(tensors.items() if isinstance(tensors, dict) else tensors)
        self.vocab_rows = config.vocab_size
        self.embedding = tensors["embed"]
        self.head = tensors.get("lm_head", self.embedding)
        self.final_norm = backend.norm_weight(tensors["final_norm"])
        self.cos, self.sin = backend.rope_tables(config.rope_theta, max_rows)
        self.layers = [self._layer(n, tensors) for n in range(config.num_hidden_layers)]
        self.runs = backend.layer_runs(
            self.layers, config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor,
            config.norm_eps,
        )  # fmt: skip

    def _layer(self, n: int, tensors: Tensors) -> _Layer:
        config, norm = self.config, self.backend.norm_weight
        attention = config.layer_types[n] == "full_attention"
        kind, peers = ("attn", config.attention_layers) if attention else ("conv", config.conv_layers)
        feed = "moe" if config.is_moe(n) else "mlp"

        def group(name: str) -> Tensors:
            prefix = f"layers.{n}.{name}."
            return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}

        mixer = group(kind)
        for name in ("q_norm", "k_norm", "weight"):
            if name in mixer:
                mixer[name] = norm(mixer[name])
        return _Layer(
            index=peers.index(n),
            attention=attention,
            operator_norm=norm(tensors[f"layers.{n}.operator_norm"]),
            ffn_norm=norm(tensors[f"layers.{n}.ffn_norm"]),
            mixer=mixer,
            feed_forward=group(feed),
            moe=feed == "moe",
        )

    def forward(self, batch: Batch, states: StreamStates, tap_rows: NDArray[np.int32] | None = None) -> Array:
        """Run a batch of rows [R]; returns the residual stream [R, H] and leaves the rows' K/V and conv inputs.

        tap_rows [T]: rows whose conv states are copied to states.taps.
        """
        be, eps = self.backend, self.config.norm_eps
        batch = be.begin(batch, tap_rows)
        h = be.embed(batch.tokens, self.embedding)
        qkv, following = None, 0
        for n, layer in enumerate(self.layers):
            if n < following:
                continue  # it was part of a run
            if qkv is None:
                x = be.rms_norm(h, layer.operator_norm, eps)
            if layer.attention:
                y = self._attention(layer, be.linear(x, layer.mixer["qkv"]) if qkv is None else qkv, batch, states)
                qkv = None
                if self.runs is not None and tap_rows is None:
                    done = self.runs.run(be, n, y, h, batch, states.ring)
                    if done is not None:
                        h, qkv, following = done
                        continue
                h = be.linear(y, layer.mixer["out"], residual=h)
            else:
                h = self._conv(layer, x, h, batch, states, tap_rows)
            x = be.rms_norm(h, layer.ffn_norm, eps)
            h = self._experts(layer, x, h) if layer.moe else self._dense(layer, x, h)
        return h

    def _conv(
        self, layer: _Layer, x: Array, h: Array, batch: Batch, states: StreamStates, tap_rows: NDArray[np.int32] | None
    ) -> Array:
        be, w = self.backend, layer.mixer
        bcx = be.linear(x, w["in_proj"])
        if tap_rows is not None:
            be.conv_taps(bcx, states.ring, layer.index, batch, tap_rows, states.taps)
        y = be.short_conv(bcx, w["weight"], states.ring, layer.index, batch)
        return be.linear(y, w["out_proj"], residual=h)

    def _attention(self, layer: _Layer, qkv: Array, batch: Batch, states: StreamStates) -> Array:
        be, w, config = self.backend, layer.mixer, self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q = be.attention_inputs(
            qkv, w["q_norm"], w["k_norm"], config.norm_eps, self.cos, self.sin, states.kv, layer.index, batch, heads,
            kv_heads,
        )  # fmt: skip
        return be.attention(q, states.kv, layer.index, batch, heads, kv_heads)

    def _dense(self, layer: _Layer, x: Array, h: Array) -> Array:
        return self.backend.swiglu(x, layer.feed_forward["w13"], layer.feed_forward["w2"], h)

    def _experts(self, layer: _Layer, x: Array, h: Array) -> Array:
        w, config = layer.feed_forward, self.config
        return self.backend.moe(
            x, w["gate"], w.get("bias"), w["w13"], w["w2"], config.num_experts_per_tok, config.norm_topk_prob,
            config.routed_scaling_factor, h,
        )  # fmt: skip

    def logits(self, h: Array, out: Array | None = None) -> Array:
        """Logits [n, V] of rows [n, H] of the residual stream; in `out` where that is given."""
        be = self.backend
        return be.logits(be.rms_norm(h, self.final_norm, self.config.norm_eps), self.head, out)
