"""Two tokenisers: the tiny checkpoint's (thoughts are ordinary text) and one with thought and tool-call tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Core

from lfm2serve.chat.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny-lfm2moe"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|tool_list_start|>",
    "<|tool_list_end|>",
    "<|tool_response_start|>",
    "<|tool_response_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
]
TEXT = """The quick brown fox jumps over the lazy dog. What is the weather in Rome? <b>bold</b> if a < b && b > c:
    return {"city": "Tokyo", "unit": "C"}  # 12345
日本語のテキスト 🎉🎉 ďábelské ódy ∑ naïve"""


def thinking_core(hole: int = 3) -> Core:
    """A byte-level BPE tokeniser whose control tokens have the highest ids, with `hole` unused ids in front of them."""
    core = Core(models.BPE(ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([TEXT] * 20, trainer)
    raw = json.loads(core.to_str())
    start = len(raw["model"]["vocab"]) + hole
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = [*SPECIAL, "<think>", "</think>"]
    raw["model"]["vocab"] |= {name: start + n for n, name in enumerate(names)}
    raw["added_tokens"] = [
        {"id": start + n, "content": name, "special": name in SPECIAL, **plain} for n, name in enumerate(names)
    ]
    core = Core.from_str(json.dumps(raw))
    bos = core.token_to_id("<|startoftext|>")
    core.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", bos)]
    )
    return core


def save(core: Core, folder: Path, **config: object) -> Path:
    """A checkpoint directory that holds this tokeniser."""
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer.from_dir(TINY)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("thinking")
    return Tokenizer.from_dir(save(thinking_core(), folder, bos_token={"content": "<|startoftext|>"}))


@pytest.fixture(scope="session", params=["tiny", "thinking"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen
