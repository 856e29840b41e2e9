"""lfm2serve: LFM2 and LFM2.5 models in pure Python, the same bits for a prompt whatever else runs.

The names below load when first used, so that `import lfm2serve` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lfm2serve.llm import LLM
    from lfm2serve.outputs import CompletionOutput, RequestOutput
    from lfm2serve.sampling import SamplingParams, StructuredOutputsParams

_HOME = {
    "LLM": "llm",
    "SamplingParams": "sampling",
    "StructuredOutputsParams": "sampling",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
