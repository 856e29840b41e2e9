"""A tool, and an answer as JSON, through OpenAI's own client: python examples/tool_client.py [BASE_URL]

Start the server first: lfm2serve serve demo   (the JSON needs: pip install 'lfm2serve[structured]')
"""

import json
import sys
from typing import Any

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}},
    "required": ["answer"],
    "additionalProperties": False,
}


def get_weather(city: str) -> dict[str, Any]:
    return {"temperature": 20, "condition": "sunny"}


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Lima?"}]
    while True:
        reply = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], temperature=0)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            print(message.content)
            break
        for call in message.tool_calls:
            print(f"{call.function.name}({call.function.arguments})")
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    reply = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the capital of Peru?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}},
        temperature=0,
    )
    print(json.loads(reply.choices[0].message.content or "null"))


if __name__ == "__main__":
    main(*sys.argv[1:])
