"""The figures of `lfm2serve bench throughput` from Hugging Face transformers: LFM2-350M's shape, random bf16 weights.

Needs torch and transformers (neither is needed by lfm2serve): python examples/transformers_cpu.py
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

TOKENS = 32


def decode(model: Lfm2ForCausalLM, streams: int) -> float:
    """Tokens a second of all streams together, prompts apart."""
    prompt = torch.randint(10, 60000, (streams, 32))
    times = []
    for count in (1, 1 + TOKENS):
        started = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        times.append(time.perf_counter() - started)
    return streams * TOKENS / (times[1] - times[0])


def prefill(model: Lfm2ForCausalLM, length: int) -> float:
    prompt = torch.randint(10, 60000, (1, length))
    started = time.perf_counter()
    model(prompt, use_cache=True, logits_to_keep=1)
    return length / (time.perf_counter() - started)


@torch.inference_mode()
def main() -> None:
    attention = {2, 5, 8, 10, 12, 14}
    config = Lfm2Config(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=4608,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=["full_attention" if n in attention else "conv" for n in range(16)],
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = Lfm2ForCausalLM(config).to(torch.bfloat16).eval()
    decode(model, 1)
    print(f"decode, 1 stream   {statistics.median(decode(model, 1) for _ in range(3)):8.1f} tok/s")
    print(f"decode, 8 streams  {statistics.median(decode(model, 8) for _ in range(3)):8.1f} tok/s")
    print(f"prompt of 512      {statistics.median(prefill(model, 512) for _ in range(3)):8.1f} tok/s")


if __name__ == "__main__":
    main()
