"""The chat in a terminal: reads a line, streams the reply, remembers both."""

from __future__ import annotations

import sys
from typing import Any

from lfm2serve.errors import InvalidRequest, Lfm2Error
from lfm2serve.llm import LLM
from lfm2serve.sampling import SamplingParams

HELP = """\
/system TEXT   set the system message (without TEXT: remove it)
/clear         forget the conversation, keep the system message
/exit          end (Ctrl-D does too)
Ctrl-C         stop the reply"""


class ChatLoop:
    """A conversation over standard input and output, in a terminal or through pipes.

    A reply that Ctrl-C stopped stays in the conversation as far as it came. A turn that fails is taken back.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        if not llm.has_chat_template:
            raise InvalidRequest("this checkpoint has no chat template; use: lfm2serve generate", param="model")
        self._llm = llm
        self._params = params
        self._system = system
        self._turns: list[dict[str, Any]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Talk until /exit or the input's end."""
        if self._interactive:
            import readline  # noqa: F401  (gives input() line editing and history)

            print(f"{self._llm.name}: Ctrl-C stops a reply, Ctrl-D ends, /help lists commands")
        while (line := self._read()) is not None:
            if line.startswith("/") and line.split()[0] in ("/help", "/system", "/clear", "/exit"):
                if line == "/exit":
                    return
                self._command(*line.partition(" ")[::2])
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line without its blanks; None at the end. Ctrl-C at the prompt drops what was typed."""
        while True:
            try:
                return input("> " if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    print()
                return None
            except UnicodeDecodeError:
                raise InvalidRequest("standard input isn't valid UTF-8") from None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\n(Ctrl-D or /exit ends)")

    def _command(self, name: str, text: str) -> None:
        if name == "/system":
            self._system = text.strip() or None
        elif name == "/clear":
            self._turns.clear()
        else:
            print(HELP)

    def _answer(self, text: str) -> None:
        """Stream one reply and remember the turn."""
        turns = [*self._turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        reply = thought = ""
        try:
            with self._llm.stream([*system, *turns], self._params) as stream:
                for delta in stream:
                    gap = "\n\n" if delta.text and thought and not reply else ""
                    sys.stdout.write(f"{delta.reasoning}{gap}{delta.text}")
                    sys.stdout.flush()
                    thought += delta.reasoning
                    reply += delta.text
        except KeyboardInterrupt:
            pass  # the reply ends here, the chat goes on
        except Lfm2Error as error:
            print(f"lfm2serve: {error.message}", file=sys.stderr)
            if error.code == "context_length_exceeded":
                print("lfm2serve: the conversation is too long for the context; /clear starts afresh", file=sys.stderr)
            return
        print(flush=True)
        said = {"role": "assistant", "content": reply} | ({"reasoning_content": thought} if thought else {})
        self._turns = [*turns, said]
