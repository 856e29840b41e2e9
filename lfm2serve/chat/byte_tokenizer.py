"""A tokeniser and a chat template for models that come without: one token a byte, ChatML."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tokenizer import ALPHABET, Tokenizer
from lfm2serve.config import ModelConfig
from lfm2serve.errors import CheckpointError

BOS, EOS, PAD, TURN = "<|startoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>"
CHATML = """\
{{- bos_token -}}
{%- if tools -%}
    {{- "<|im_start|>system\nList of tools: " ~ (tools | tojson) ~ "<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" ~ message.role ~ "\n" ~ message.content -}}
    {%- if message.tool_calls is defined -%}
        {{- message.tool_calls | tojson -}}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n" -}}
{%- endif -%}
"""


def byte_tokenizer(config: ModelConfig) -> Tokenizer:
    """Byte-level BPE without merges over the whole vocabulary of a model.

    `<|im_end|>`, `<|startoftext|>` and `<|pad|>` have the ids of the config's eos, bos and pad (where two share one,
    the first named), `<|im_start|>` the free one nearest below eos, the bytes the lowest free ones. The ids left over
    are never encoded and decode to a word each, so that every token of a random model has text.

    CheckpointError: the vocabulary has no room for the bytes.
    """
    eos = next(iter(config.eos_token_ids), None)
    special = {}
    for text, number in ((EOS, eos), (BOS, config.bos_token_id), (PAD, config.pad_token_id)):
        if number is not None and number not in special:
            special[number] = text
    free = [number for number in range(config.vocab_size) if number not in special]
    missing = [text for text in (EOS, TURN) if text not in special.values()]
    if len(free) < len(ALPHABET) + len(missing):
        raise CheckpointError(
            f"config.json: vocab_size={config.vocab_size}: too small for the byte tokenizer; add a tokenizer.json"
        )
    for text in missing:
        below = [number for number in free if eos is not None and number < eos]
        number = below[-1] if below else free[0]
        free.remove(number)
        special[number] = text
    symbols = sorted(map(chr, ALPHABET), key=lambda symbol: ALPHABET[ord(symbol)])
    words = [f"\u0120{number:x}" for number in free[len(symbols) :]]  # U+0120 stands for a space
    vocab = {text: number for number, text in special.items()} | dict(zip([*symbols, *words], free, strict=True))
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special.values()))
    names = {"bos_token": BOS, "add_bos_token": True} if BOS in special.values() else {}
    return Tokenizer(core, "built-in byte tokenizer", names)


def chatml_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Plain ChatML: roles and contents; tools and tool calls as JSON."""
    return ChatTemplate(CHATML, tokenizer, file="built-in chat template")
