"""One question, one answer: python examples/single_prompt.py [QUESTION] [MODEL]

MODEL: "demo" (the default), a checkpoint directory, or a hub id such as LiquidAI/LFM2-350M.
"""

import sys

from lfm2serve import LLM, SamplingParams


def main(question: str = "What is the capital of Peru?", model: str = "demo") -> None:
    with LLM(model) as llm:
        [answer] = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=200))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
