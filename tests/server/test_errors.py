"""Bad requests: OpenAI's error shape, one readable line, the field's name, and nothing left behind."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from lfm2serve.server.options import ServerOptions

from .conftest import Live, serving

USER = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": USER, "max_tokens": 2}
TEXT = {"prompt": "Hi", "max_tokens": 2}


def problem(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, after checking its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"messages": NaN}', b'{"a": "\\ud800"}', b"[" * 5000,
     b'{"prompt": "\xff"}', b'{"prompt": "a"} trailing'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_not_a_json_object(real: Live, path: str, body: bytes) -> None:
    error = problem(real.http.post(path, content=body, headers={"content-type": "application/json"}))
    assert error["type"] == "invalid_request_error" and "JSON" in error["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_taken(real: Live, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    error = problem(real.http.post("/v1/completions", content=json.dumps(TEXT), headers=headers), 415)
    assert "application/json" in error["message"]


def test_json_may_name_its_charset(real: Live) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert real.http.post("/v1/completions", content=json.dumps(TEXT), headers=headers).status_code == 200


def test_unknown_paths_and_methods(real: Live) -> None:
    assert "/v1/nothing" in problem(real.post("/v1/nothing"), 404)["message"]
    wrong = real.http.get("/v1/chat/completions")
    assert "GET" in problem(wrong, 405)["message"] and "POST" in wrong.headers["allow"]
    problem(real.post("/v1/models"), 405)
    with pytest.raises(openai.NotFoundError):
        real.client.models.retrieve("another-model")


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_over_the_limit(real: Live, declared: bool) -> None:
    body = json.dumps(TEXT | {"user": "x" * 10_000}).encode()
    content: Any = body if declared else iter([body[:6000], body[6000:]])
    with serving(real.runtime, options=ServerOptions(max_body_mib=10_000 / 2**20)) as small:
        headers = {"content-type": "application/json"}
        error = problem(small.http.post("/v1/completions", content=content, headers=headers), 413)
        assert "10000" in error["message"]
        assert small.post("/v1/completions", **TEXT).status_code == 200


SHARED_MISTAKES = {
    "temperature": ["1", True, -1, 1e999, [], float("nan")],
    "top_p": [0, 1.1, "x"],
    "top_k": [-2, 1.5, "5", True],
    "min_p": [-0.1, 2, "0"],
    "repetition_penalty": [0, -1, "1"],
    "presence_penalty": [3, "0"],
    "frequency_penalty": [-3, False],
    "seed": ["1", 1.5, 2**64, True],
    "n": [0, -1, 1.5, "2", True, 100_000],
    "max_tokens": [-1, "5", 1.5, True],
    "min_tokens": [-1, 3, "1"],
    "stop": ["", [""], ["a", ""], 5, [5], ["a", None], {"a": 1}, [str(n) for n in range(17)]],
    "stop_token_ids": [[-1], ["1"], [True], [10**6], 5],
    "ignore_eos": [1, "true"],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"999999": 1}, [], {"1" * 5000: 1}],
    "stream": [1, "yes"],
    "return_token_ids": [1],
    "draft": ["no"],
    "prompt_cache": [0],
    "prompt_logprobs": [-1, 21, True],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [2],
    "model": [5, ["a"]],
}
CHAT_MISTAKES = SHARED_MISTAKES | {
    "messages": [[], {}, "Hi", None],
    "max_completion_tokens": [-1, 0, "5"],
    "logprobs": [1, 5, "true"],
    "add_generation_prompt": [1],
}
TEXT_MISTAKES = SHARED_MISTAKES | {
    "prompt": [[], [[]], ["a", 1], [1.5], [True], {}, 5, None, [[1], []], [["a"]], [-1], [10**6], [[1], ["a"]]],
    "logprobs": [True, -1, 21, "1"],
    "echo": [1, "no"],
    "best_of": [2, "1"],
    "add_special_tokens": [0],
}


def cases(mistakes: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in mistakes.items() for value in values]


def send(live: Live, path: str, body: dict[str, Any]) -> httpx.Response:
    """Posts also what JSON proper has no word for (NaN, Infinity)."""
    return live.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize(("name", "value"), cases(CHAT_MISTAKES))
def test_mistakes_in_a_chat_are_named(real: Live, name: str, value: Any) -> None:
    error = problem(send(real, "/v1/chat/completions", CHAT | {name: value}))
    is_json = value == value and value != float("inf")
    assert not is_json or (name in error["message"] and error["param"].startswith(name)), error
    assert len(error["message"]) < 400


@pytest.mark.parametrize(("name", "value"), cases(TEXT_MISTAKES))
def test_mistakes_in_a_completion_are_named(real: Live, name: str, value: Any) -> None:
    error = problem(send(real, "/v1/completions", TEXT | {name: value}))
    is_json = value == value and value != float("inf")
    assert not is_json or (name in error["message"] and error["param"].startswith(name)), error
    assert len(error["message"]) < 400


REFUSED = {
    "store": True, "service_tier": "flex", "use_beam_search": True, "length_penalty": 2.0, "priority": 1, "suffix": "x",
    "functions": [{"name": "f"}], "function_call": {"name": "f"}, "guided_decoding_backend": "x",
    "modalities": ["text", "audio"], "audio": {"voice": "x"}, "prediction": {"type": "content"},
    "reasoning_effort": "low", "verbosity": "low", "web_search_options": {}, "moderation": {"model": "x"},
    "continue_final_message": True, "spaces_between_special_tokens": False, "made_up": 1,
    "bad_words": ["x"], "allowed_token_ids": [1], "chat_template": "x",
    "truncate_prompt_tokens": 5, "documents": [], "stop_sequences": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(real: Live, name: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        for stream in (False, True):
            error = problem(real.post(path, **body, **{name: REFUSED[name], "stream": stream}))
            assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": "f"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
        ("response_format", {"response_format": "text"}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 3, "logprobs": False}),
        ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
        ("top_logprobs", {"top_logprobs": -1, "logprobs": True}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 5, "max_tokens": 6}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.continuous_usage_stats", {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("prompt_logprobs", {"stream": True, "prompt_logprobs": 1}),
        ("echo", {"echo": True}),
        ("best_of", {"best_of": 1}),
        ("prompt", {"prompt": "Hi"}),
        ("add_special_tokens", {"add_special_tokens": True}),
        ("chat_template_kwargs.nothing", {"chat_template_kwargs": {"nothing": 1}}),
        ("chat_template_kwargs.self", {"chat_template_kwargs": {"self": 1}}),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        ("messages[0]", {"messages": ["Hi"]}),
        ("messages[0].role", {"messages": [{"content": "Hi"}]}),
        ("messages[1].content", {"messages": [*USER, {"role": "user", "content": 5}]}),
    ],
)
def test_rules_of_a_chat(real: Live, param: str, fields: dict[str, Any]) -> None:
    error = problem(real.post("/v1/chat/completions", **CHAT | fields))
    assert error["param"] == param and param.rsplit(".")[-1].rstrip("[0]") in error["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 0, "logprobs": 1}),
        ("best_of", {"best_of": 3, "n": 2}),
        ("messages", {"messages": USER}),
        ("max_completion_tokens", {"max_completion_tokens": 3}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("prompt", {"prompt": ["Hi"] * 100, "n": 100}),
    ],
)
def test_rules_of_a_completion(real: Live, param: str, fields: dict[str, Any]) -> None:
    assert problem(real.post("/v1/completions", **TEXT | fields))["param"] == param


def test_required_fields(real: Live) -> None:
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt"), ("/detokenize", "tokens")):
        error = problem(real.post(path, model="m"))
        assert (error["param"], error["message"]) == (name, f"{name} is required")
    problem(real.post("/tokenize"))
    problem(real.post("/tokenize", prompt="a", messages=USER))


def test_the_request_text_is_not_repeated_in_errors(real: Live) -> None:
    secret = "attack at dawn"
    for fields in ({"prompt": {"x": secret}}, {"prompt": [secret, 5]}, {"prompt": "x", "stop_token_ids": [secret]}):
        assert secret not in real.post("/v1/completions", **fields).text
    assert secret not in real.post("/v1/chat/completions", messages=[{"role": "user", "content": {"x": secret}}]).text


def test_context_overflow(real: Live) -> None:
    context = real.engine.context

    def ids(count: int) -> list[int]:
        return [10] * count

    for prompt, more in ((context, {}), (context - 96, {"max_tokens": 500}), (context * 50, {})):
        for stream in (False, True):
            error = problem(real.post("/v1/completions", prompt=ids(prompt), stream=stream, **more))
            assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
            assert str(context) in error["message"] and str(prompt) in error["message"]
            assert "max_tokens" not in more or "500" in error["message"]
    last = real.post("/v1/completions", prompt=ids(context - 1), ignore_eos=True).json()
    assert (last["choices"][0]["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 1)
    with pytest.raises(openai.BadRequestError, match=str(context)) as caught:
        real.chat("word " * context)
    assert caught.value.code == "context_length_exceeded"


def test_one_bad_prompt_of_several_refuses_the_request(real: Live) -> None:
    answer = real.post("/v1/completions", prompt=[[10], [10] * real.engine.context], max_tokens=4)
    assert problem(answer)["code"] == "context_length_exceeded"
