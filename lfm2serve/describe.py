"""What `lfm2serve info` says: a checkpoint's facts and what fits, without reading a weight."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lfm2serve.config import ModelConfig
from lfm2serve.devices import find_device
from lfm2serve.errors import MemoryPlanError
from lfm2serve.memory.plan import MemoryPlan, make_plan
from lfm2serve.options import EngineOptions
from lfm2serve.sources import find_source, is_shape
from lfm2serve.terminal import human_bytes


@dataclass(frozen=True, slots=True)
class Description:
    """Sizes in bytes. path is None for a built-in shape.

    plan is None where the memory can't be divided as asked; `refused` then says why.
    """

    model: str
    path: Path | None
    config: ModelConfig
    tensors: int
    weight_bytes: int
    kv_bytes_per_token: int
    tokenizer_entries: int
    chat_template: bool
    plan: MemoryPlan | None
    refused: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model,
            "path": None if self.path is None else str(self.path),
            "config": asdict(self.config),
            "parameters": self.config.parameters,
            "active_parameters": self.config.active_parameters,
            "tensors": self.tensors,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "tokenizer_entries": self.tokenizer_entries,
            "chat_template": self.chat_template,
            "memory": None if self.plan is None else self.plan.to_dict(),
            "refused": self.refused,
        }

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"{self.model}: {config.model_type}, {config.parameters:,} parameters, {config.active_parameters:,} active",
            f"  path        {self.path or 'none: a built-in shape'}",
            f"  layers      {config.num_hidden_layers}: {len(config.conv_layers)} conv, {len(config.attention_layers)} "
            f"attention ({', '.join(map(str, config.attention_layers))})",
            f"  width       hidden {config.hidden_size}, {config.num_attention_heads} query and "
            f"{config.num_key_value_heads} K/V heads of {config.head_dim}",
            f"  dense       {config.num_dense_layers} layers, feed-forward {config.intermediate_size}",
        ]
        if config.num_experts:
            layers = config.num_hidden_layers - config.num_dense_layers
            lines.append(
                f"  experts     {layers} layers, {config.num_experts_per_tok} of {config.num_experts} for a token, "
                f"feed-forward {config.moe_intermediate_size}"
            )
        lines += [
            f"  vocabulary  {config.vocab_size} rows, {self.tokenizer_entries} in the tokenizer",
            f"  positions   {config.max_position_embeddings}, rope theta {config.rope_theta:g}",
            f"  chat        {'has a chat template' if self.chat_template else 'no chat template: raw prompts only'}",
            f"  weights     {human_bytes(self.weight_bytes)} in {self.tensors} tensors",
            f"  K/V         {human_bytes(self.kv_bytes_per_token)} a token",
            "memory",
        ]
        if self.plan is None:
            lines.append(f"  doesn't fit: {self.refused}")
        else:
            lines += [f"  {line}" for line in str(self.plan).splitlines()]
        return "\n".join(lines)


def describe(model: str, options: EngineOptions, *, offline: bool = False, dummy_weights: bool = False) -> Description:
    """Look at a checkpoint or a built-in shape; reads JSON files and, without dummy_weights, weight files' headers."""
    target = find_device(options)
    source = find_source(model, offline=offline, progress=True, dummy_weights=dummy_weights or is_shape(model))
    plan, refused = None, None
    try:
        plan = make_plan(source.config, options, source.weight_bytes, target)
    except MemoryPlanError as error:
        refused = error.message
    return Description(
        model=model,
        path=source.path,
        config=source.config,
        tensors=source.tensors,
        weight_bytes=source.weight_bytes,
        kv_bytes_per_token=source.config.kv_bytes_per_token(4 if options.dtype == "float32" else 2),
        tokenizer_entries=source.tokenizer.size,
        chat_template=source.template is not None,
        plan=plan,
        refused=refused,
    )
