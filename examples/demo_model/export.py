"""Makes a checkpoint in the published format of trained weights, through transformers.

    python export.py BASE TRAINED OUT [SHARE]

BASE has the tokenizer and templates, TRAINED has train.py's weights. With a SHARE the weights are SHARE * TRAINED +
(1 - SHARE) * BASE: after a further stage this keeps more of what BASE knows (Wortsman et al. 2021, arXiv 2109.01903).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from model import Shape, config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM


def main(base: Path, trained: Path, out: Path, share: float = 1.0) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokens = {"bos_token_id": "<|startoftext|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|pad|>"}
    ids = {name: tokenizer.token_to_id(token) for name, token in tokens.items()}
    cfg = Lfm2MoeConfig(**config(Shape(), ids), dtype="bfloat16", architectures=["Lfm2MoeForCausalLM"])
    cfg.save_pretrained(out)
    weights = load_file(trained / "model.safetensors")
    if share < 1.0:
        old = load_file(base / "model.safetensors")
        weights = {k: torch.lerp(old[k].float(), w.float(), share).to(w.dtype) for k, w in weights.items()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    network = Lfm2MoeForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    network.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(base / name, out / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *map(float, sys.argv[4:5]))
