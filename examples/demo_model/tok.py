"""Trains the tokenizer and writes everything of the checkpoint that is not weights.

python tok.py OUT_DIR
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import chats
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 2560
SPECIAL = [
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|fim_pre|>",
    "<|fim_mid|>",
    "<|fim_suf|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|tool_list_start|>",
    "<|tool_list_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_response_start|>",
    "<|tool_response_end|>",
    "<think>",
    "</think>",
]
# The split of Llama 3 with single digits.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(seed: int = 7, rows: int = 12000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    texts = ["".join(text for text, _ in chats.row(rng, 512)) for _ in range(rows)]
    for token in SPECIAL:
        texts = [x.replace(token, "\n") for x in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id("<|startoftext|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|startoftext|> $A",
                pair="<|startoftext|> $A <|startoftext|> $B",
                special_tokens=[("<|startoftext|>", bos)],
            ),
        ]
    )
    return tokenizer


TEMPLATE = """{{- bos_token -}}
{%- set ns = namespace(system="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system = ns.system + ("\\n\\n" if ns.system else "") + "List of tools: [" -%}
    {%- for tool in tools -%}
        {%- set ns.system = ns.system + (tool if tool is string else tool | tojson) + ("" if loop.last else ", ") -%}
    {%- endfor -%}
    {%- set ns.system = ns.system + "]" -%}
{%- endif -%}
{%- if ns.system -%}
    {{- "<|im_start|>system\\n" + ns.system + "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\\n" -}}
    {%- if message.get("tool_calls") -%}
        {{- "<|tool_call_start|>[" -}}
        {%- for call in message["tool_calls"] -%}
            {%- set function = call["function"] if call["function"] is defined else call -%}
            {{- function["name"] + "(" -}}
            {%- for key, value in function["arguments"].items() -%}
                {{- key + "=" -}}
                {%- if value is none or value is boolean -%}
                    {{- value | string -}}
                {%- else -%}
                    {{- value | tojson -}}
                {%- endif -%}
                {{- "" if loop.last else ", " -}}
            {%- endfor -%}
            {{- ")" + ("" if loop.last else ", ") -}}
        {%- endfor -%}
        {{- "]<|tool_call_end|>" -}}
    {%- endif -%}
    {%- if message.get("content") is string -%}
        {{- message["content"] -}}
    {%- elif message.get("content") -%}
        {%- for part in message["content"] -%}
            {%- if part["type"] == "text" -%}{{- part["text"] -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    decoder = {
        str(tokenizer.token_to_id(s)): {
            "content": s,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for s in SPECIAL
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "added_tokens_decoder": decoder,
                **names,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 4096,
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )
    (out / "chat_template.jinja").write_text(TEMPLATE)
    (out / "generation_config.json").write_text(
        json.dumps(
            {
                "bos_token_id": tokenizer.token_to_id("<|startoftext|>"),
                "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
                "pad_token_id": tokenizer.token_to_id("<|pad|>"),
                "do_sample": False,
            },
            indent=2,
        )
        + "\n"
    )
    print("entries", tokenizer.get_vocab_size())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
