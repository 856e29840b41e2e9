"""What a request may ask for: the context, the vocabulary, and what the page pool can ever hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lfm2serve.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from lfm2serve.memory.pages import SLACK_ROWS
from lfm2serve.sampling import SamplingParams

AT_ONCE = 4096  # tokens that are looked at in one go


@dataclass(slots=True)
class Limits:
    """context: longest prompt + reply. vocab: entries of the tokenizer. pool_rows: rows that the pool holds for one
    stream. default_max_tokens: reply limit of a request that names none."""

    context: int
    vocab: int
    pool_rows: int
    default_max_tokens: int

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """The reply limit of a request that can be served.

        InvalidRequest: a bad token id, or nothing to do. ContextLengthExceeded, RequestTooLarge: it can never fit.
        """
        count, wanted = len(prompt), params.max_tokens
        if count == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        self.check_tokens(prompt)
        for token in (*params.stop_token_ids, *(params.logit_bias or ())):
            if token >= self.vocab:
                name = "stop_token_ids" if token in params.stop_token_ids else "logit_bias"
                raise InvalidRequest(f"{name}: token id {token} is outside the vocabulary of {self.vocab}", param=name)
        least = 1 if wanted is None else wanted
        if wanted == 0 and params.prompt_logprobs is None:
            raise InvalidRequest("max_tokens=0 gives nothing without prompt_logprobs", param="max_tokens")
        if count + least > self.context:
            asked = f" and a reply of {wanted}" if wanted is not None else ""
            raise ContextLengthExceeded(
                f"the context is {self.context} tokens; the prompt has {count}{asked}: {count + least} at least",
                param="max_tokens" if count < self.context else "prompt",
            )
        room = self.pool_rows - count
        if room < least:
            raise RequestTooLarge(
                f"prompt and reply need {count + least + SLACK_ROWS} rows; "
                f"the pool holds {self.pool_rows + SLACK_ROWS}",
                param="max_tokens" if wanted else "prompt",
            )
        if wanted is not None:
            return wanted
        return max(params.min_tokens, min(self.context - count, self.default_max_tokens, room))

    def check_tokens(self, prompt: Sequence[int]) -> None:
        """InvalidRequest: an id outside the vocabulary."""
        for start in range(0, len(prompt), AT_ONCE):
            part = prompt[start : start + AT_ONCE]
            if min(part) < 0 or max(part) >= self.vocab:
                token = next(token for token in part if not 0 <= token < self.vocab)
                raise InvalidRequest(
                    f"prompt: token id {token} is outside the vocabulary of {self.vocab}", param="prompt"
                )
            if start:
                time.sleep(0)  # a long prompt must not keep the engine's thread from Python
