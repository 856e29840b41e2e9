"""Where a model comes from: a checkpoint, or a configuration alone whose weights are random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfm2serve.backend import ARENA_SLACK, Backend
from lfm2serve.chat.byte_tokenizer import byte_tokenizer, chatml_template
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.checkpoint import ByteProgress, Checkpoint, resolve
from lfm2serve.config import GenerationDefaults, ModelConfig
from lfm2serve.dummy import SHAPES, random_weights, shape, tensor_shapes, weight_bytes
from lfm2serve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Source:
    """A model before its weights are read. path: its directory (None: a built-in shape). checkpoint: None where the
    weights are random. tensors: how many are stored. template: None for base models."""

    path: Path | None
    config: ModelConfig
    checkpoint: Checkpoint | None
    tensors: int
    weight_bytes: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation: GenerationDefaults

    def weights(self, backend: Backend, progress: ByteProgress | None) -> dict[str, Any]:
        """What `Model` takes: the checkpoint's tensors where the backend wants them, or random ones."""
        if self.checkpoint is None:
            return random_weights(self.config, backend)
        with backend.weight_sink(self.weight_bytes + ARENA_SLACK) as sink:
            self.checkpoint.fill(sink, progress)
        return sink.tensors


def is_shape(model: str) -> bool:
    """Whether `model` names a built-in shape; a directory of that name comes first."""
    return model in SHAPES and not Path(model).is_dir()


def find_source(model: str, *, offline: bool = False, progress: bool = False, dummy_weights: bool = False) -> Source:
    """Look a model up. model: "demo", a directory or a hub id; with dummy_weights also a name of SHAPES, and a
    directory needs no more than config.json: what else it has is used, but for weights. progress: show the hub's bars.

    CheckpointError: no such model, or one that can't be loaded.
    """
    if is_shape(model):
        if not dummy_weights:
            raise CheckpointError(f"{model}: a built-in shape without weights; --dummy-weights makes random ones")
        return _dummy(None, shape(model))
    path = resolve(model, offline=offline, progress=progress)
    if dummy_weights:
        return _dummy(path, ModelConfig.from_dir(path))
    checkpoint = Checkpoint(path)
    config, tokenizer = checkpoint.config, Tokenizer.from_dir(path)
    template, generation = ChatTemplate.from_dir(path, tokenizer), GenerationDefaults.from_dir(path)
    count = len(checkpoint.tensors)
    return Source(path, config, checkpoint, count, checkpoint.weight_bytes, tokenizer, template, generation)


def _dummy(path: Path | None, config: ModelConfig) -> Source:
    count, size = len(list(tensor_shapes(config))), weight_bytes(config)
    if path is not None and (path / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_dir(path)
        template = ChatTemplate.from_dir(path, tokenizer)
    else:
        tokenizer = byte_tokenizer(config)
        template = (ChatTemplate.from_dir(path, tokenizer) if path else None) or chatml_template(tokenizer)
    generation = GenerationDefaults.from_dir(path) if path else GenerationDefaults()
    return Source(path, config, None, count, size, tokenizer, template, generation)
