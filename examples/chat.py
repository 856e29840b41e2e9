"""A chat that remembers, streamed piece by piece: python examples/chat.py [MODEL]"""

import sys

from lfm2serve import LLM, SamplingParams

SAID = ["My name is Ada. Please remember it.", "What is the capital of Japan?", "What is my name?"]


def main(model: str = "demo") -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    messages: list[dict[str, str]] = []
    with LLM(model) as llm:
        for text in SAID:
            print(f"> {text}")
            messages.append({"role": "user", "content": text})
            reply = ""
            for delta in llm.stream(messages, params):
                print(delta.text, end="", flush=True)
                reply += delta.text
            print()
            messages.append({"role": "assistant", "content": reply})


if __name__ == "__main__":
    main(*sys.argv[1:])
