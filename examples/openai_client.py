"""OpenAI's own client against a running server: python examples/openai_client.py [BASE_URL]

Start the server first: lfm2serve serve demo
"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none")  # the client wants a key, the server asks for none
    chunks = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the capital of Peru?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


if __name__ == "__main__":
    main(*sys.argv[1:])
