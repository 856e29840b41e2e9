"""Tool calls: tool schemas, questions that need one, the tool's result and the answer that uses it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pools as p
from tasks import Turn
from wording import Wordings, ask, cap, order

_WEATHER = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear"]
_TEXTS = [
    "see you soon",
    "the meeting is at noon",
    "I will be late",
    "please call me",
    "dinner is ready",
    "happy birthday",
    "the train is late",
    "good luck",
    "come to the harbour",
    "bring the keys",
]

Args = dict[str, Any]
Maker = Callable[[random.Random, bool], tuple[Args, Any, str]]


def schema(tool: str, description: str, /, **properties: str) -> dict[str, Any]:
    """An OpenAI-style tool object; every property is required."""
    return {
        "type": "function",
        "function": {
            "name": tool,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {k: {"type": t} for k, t in properties.items()},
                "required": list(properties),
            },
        },
    }


def _town(rng: random.Random, test: bool) -> str:
    if not test and rng.random() < 0.4:
        return p.CAPITALS[rng.choice(p.COUNTRIES)]
    return p.name(rng, test)


def _weather(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    city, t, sky = _town(rng, test), rng.randint(-15, 39), rng.choice(_WEATHER)
    return {"city": city}, {"temperature": t, "condition": sky}, f"In {city} it is {sky} and {t} degrees."


def _time(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    city, t = _town(rng, test), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return {"city": city}, {"time": t}, f"In {city} it is {t}."


def _calc(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    a, b = p.number(rng, test, 21, 9999), p.number(rng, test, 21, 9999)
    return {"a": a, "b": b}, {"result": a * b}, f"{a} times {b} is {a * b}."


def _message(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    to = p.name(rng, test)
    text = rng.choice(_TEXTS) if rng.random() < 0.5 else " ".join(rng.sample(p.WORDS, rng.randint(2, 5)))
    return {"to": to, "text": text}, {"status": "sent"}, f"I have sent your message to {to}."


def _timer(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    m = p.number(rng, test, 2, 999)
    return {"minutes": m}, {"status": "started"}, f"The timer is set to {m} minutes."


def _order(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    n, state, day = (
        p.number(rng, test, 100, 99999),
        rng.choice(["packed", "sent", "delivered", "delayed"]),
        rng.choice(p.DAYS),
    )
    return {"order_id": n}, {"status": state, "day": day}, f"Order {n} is {state}, day {day}."


def _phone(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    who, n = p.name(rng, test), p.number(rng, test, 10000, 9999999)
    return {"name": who}, {"phone": n}, f"The phone number of {who} is {n}."


def _light(rng: random.Random, _test: bool) -> tuple[Args, Any, str]:
    room, on = rng.choice(p.PLACES), rng.random() < 0.5
    return {"room": room, "on": on}, {"ok": True}, f"The light in the {room} is now {'on' if on else 'off'}."


def _table(rng: random.Random, test: bool) -> tuple[Args, Any, str]:
    place, n, day, ref = p.name(rng, test), rng.randint(2, 12), rng.choice(p.DAYS), p.number(rng, test, 100, 9999)
    return (
        {"restaurant": place, "people": n, "day": day},
        {"booking": ref},
        f"Your table at {place} is booked, number {ref}.",
    )


KNOWN: dict[str, tuple[dict[str, Any], Maker, Wordings]] = {
    "get_weather": (
        schema("get_weather", "Weather of a city", city="string"),
        _weather,
        (
            [
                "What is the weather in {city}?",
                "How is the weather in {city}?",
                "Weather in {city}?",
                "Is it cold in {city}?",
                "Tell me the weather in {city}.",
                "What's the weather like in {city}?",
                "Do I need an umbrella in {city}?",
                "How warm is it in {city}?",
                "Is it warm in {city} today?",
                "How cold is it in {city} now?",
                "Does it rain in {city}?",
                "What is it like outside in {city}?",
            ],
            ["Can you check the weather in {city}?", "How warm is it in {city} now?"],
        ),
    ),
    "get_time": (
        schema("get_time", "Local time of a city", city="string"),
        _time,
        (
            [
                "What time is it in {city}?",
                "Time in {city}?",
                "Tell me the time in {city}.",
                "What is the time in {city} now?",
                "How late is it in {city}?",
            ],
            ["Can you check the time in {city}?", "I need the local time in {city}."],
        ),
    ),
    "multiply": (
        schema("multiply", "Multiplies two numbers", a="integer", b="integer"),
        _calc,
        (
            [
                "What is {a} times {b}?",
                "Multiply {a} by {b}.",
                "{a} * {b} = ?",
                "Calculate {a} times {b}.",
                "How much is {a} x {b}?",
                "Multiply {a} and {b}.",
                "Please multiply {a} by {b}.",
                "Can you multiply {a} with {b}?",
                "How much do I get for {a} times {b}?",
            ],
            ["Please multiply {a} and {b}.", "What do I get for {a} times {b}?"],
        ),
    ),
    "send_message": (
        schema("send_message", "Sends a text message", to="string", text="string"),
        _message,
        (
            [
                "Send a message to {to}: {text}",
                "Write to {to}: {text}",
                "Tell {to}: {text}",
                "Text {to} this: {text}",
                "Message for {to}: {text}",
            ],
            ["Please send {to} the message: {text}", "Let {to} know: {text}"],
        ),
    ),
    "set_timer": (
        schema("set_timer", "Starts a timer", minutes="integer"),
        _timer,
        (
            [
                "Set a timer for {minutes} minutes.",
                "Start a timer: {minutes} minutes.",
                "Timer, {minutes} minutes.",
                "Wake me in {minutes} minutes.",
            ],
            ["I need a timer of {minutes} minutes.", "Please set the timer to {minutes} minutes."],
        ),
    ),
    "get_order": (
        schema("get_order", "State of an order", order_id="integer"),
        _order,
        (
            [
                "Where is my order {order_id}?",
                "What is the state of order {order_id}?",
                "Check order {order_id}.",
                "Has order {order_id} been sent?",
                "Order {order_id}?",
            ],
            ["Can you look up order {order_id}?", "Please find my order, number {order_id}."],
        ),
    ),
    "find_phone": (
        schema("find_phone", "Finds a phone number", name="string"),
        _phone,
        (
            [
                "Find the phone number of {name}.",
                "Search for the number of {name}.",
                "Look for {name} in the phone book.",
                "Search {name}'s number in the phone book.",
                "How can I call {name}?",
                "I need {name}'s phone number.",
                "Look up the phone number of {name}.",
                "What number does {name} have? Look it up.",
            ],
            ["Can you find the phone number of {name}?", "Search the phone book for {name}."],
        ),
    ),
    "set_light": (
        schema("set_light", "Turns a light on or off", room="string", on="boolean"),
        _light,
        (
            [
                "Turn {onoff} the light in the {room}.",
                "Light {onoff} in the {room}.",
                "Switch {onoff} the light in the {room}.",
                "The light in the {room}: {onoff}, please.",
            ],
            ["Please turn {onoff} the light of the {room}."],
        ),
    ),
    "book_table": (
        schema("book_table", "Books a table", restaurant="string", people="integer", day="string"),
        _table,
        (
            [
                "Book a table at {restaurant} for {people} people on {day}.",
                "A table for {people} at {restaurant} on {day}, please.",
                "Reserve a table at {restaurant}, {people} people, {day}.",
            ],
            ["Please reserve a table for {people} people at {restaurant} on {day}."],
        ),
    ),
}


PHRASES = {
    "get_weather": [
        "the weather in {city}",
        "the weather of {city}",
        "today's weather in {city}",
        "the temperature in {city}",
        "the weather for {city}",
    ],
    "get_time": [
        "the time in {city}",
        "the local time in {city}",
        "the time of day in {city}",
        "the clock time in {city}",
    ],
    "multiply": [
        "{a} times {b}",
        "the product of {a} and {b}",
        "{a} * {b}",
        "{a} multiplied by {b}",
        "the result of {a} x {b}",
    ],
    "get_order": [
        "the state of order {order_id}",
        "the state of my order {order_id}",
        "the status of order number {order_id}",
        "order {order_id}",
        "news about order {order_id}",
    ],
    "find_phone": [
        "the phone number of {name}",
        "{name}'s phone number",
        "the number of {name}",
        "the telephone number of {name}",
    ],
}
ORDERS = {
    "send_message": [
        "send a message to {to}: {text}",
        "write to {to}: {text}",
        "send {to} this message: {text}",
        "tell {to} this: {text}",
        "text {to}: {text}",
        "send {to} the words: {text}",
    ],
    "set_timer": [
        "set a timer for {minutes} minutes",
        "start a timer of {minutes} minutes",
        "wake me in {minutes} minutes",
        "set the timer to {minutes} minutes",
        "start the timer with {minutes} minutes",
    ],
    "set_light": [
        "turn {onoff} the light in the {room}",
        "switch {onoff} the light of the {room}",
        "turn the light in the {room} {onoff}",
        "switch the light {onoff} in the {room}",
        "turn {onoff} the {room} light",
    ],
    "book_table": [
        "book a table at {restaurant} for {people} people on {day}",
        "reserve a table for {people} at {restaurant} on {day}",
        "get a table at {restaurant} on {day} for {people} people",
        "on {day}, book a table for {people} people at {restaurant}",
    ],
}


def invented(rng: random.Random, test: bool) -> tuple[dict[str, Any], Maker, Wordings]:
    """A tool nobody has seen: its name, its parameters and the question share the same words."""
    noun, prop = rng.sample(p.NOUNS, 2)
    kind = rng.choice(["string", "integer"])
    verb = rng.choice(["get", "find", "read", "check"])
    name = f"{verb}_{noun}_{prop}"

    def make(r: random.Random, t: bool) -> tuple[Args, Any, str]:
        value: Any = p.name(r, t) if kind == "string" else p.number(r, t, 2, 9999)
        result = p.number(r, t, 2, 9999)
        return {noun: value}, {prop: result}, f"The {prop} of {noun} {value} is {result}."

    wordings: Wordings = (
        [
            f"What is the {prop} of {noun} {{{noun}}}?",
            f"{cap(verb)} the {prop} of {noun} {{{noun}}}.",
            f"Tell me the {prop} of {noun} {{{noun}}}.",
        ],
        [f"Can you look up the {prop} of {noun} {{{noun}}}?"],
    )
    return schema(name, f"The {prop} of a {noun}", **{noun: kind}), make, wordings


def literal(value: Any) -> str:
    """A call argument as the chat template writes it."""
    if value is True or value is False or value is None:
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def vary(rng: random.Random, tool: dict[str, Any]) -> dict[str, Any]:
    """The schema with some of the optional parts that clients send."""
    function = dict(tool["function"])
    parameters = dict(function["parameters"])
    r = rng.random()
    if r < 0.15:
        parameters["properties"] = {
            k: {**v, "description": f"The {k.replace('_', ' ')}"} for k, v in parameters["properties"].items()
        }
    elif r < 0.25:
        parameters["additionalProperties"] = False
        function["strict"] = True
    elif r < 0.32:
        del function["description"]
    elif r < 0.4:
        del parameters["required"]
    function["parameters"] = parameters
    return {"type": "function", "function": function}


class Toolbox:
    """The tools of one conversation; `turn` gives a question, its calls, the tool's results and the answer."""

    def __init__(self, rng: random.Random, test: bool) -> None:
        self.rng, self.test = rng, test
        self.entries = [KNOWN[k] for k in rng.sample(list(KNOWN), rng.randint(0 if rng.random() < 0.3 else 1, 3))]
        while not self.entries or rng.random() < 0.3:
            self.entries.append(invented(rng, test))
        rng.shuffle(self.entries)
        self.schemas = [vary(rng, e[0]) for e in self.entries]

    def _wording(self, name: str, special: Wordings, args: list[str]) -> str:
        rng = self.rng
        if name in ORDERS:
            return order(rng, self.test, ORDERS[name], special)
        phrases = PHRASES.get(name)
        if phrases is None:
            _, noun, prop = name.split("_")
            phrases = [
                f"the {prop} of {noun} {{{args[0]}}}",
                f"the {prop} of the {noun} {{{args[0]}}}",
                f"{noun} {{{args[0]}}}'s {prop}",
            ]
        return ask(rng, self.test, phrases, special)

    def turn(self) -> Turn:
        rng = self.rng
        tool, make, wordings = rng.choice(self.entries)
        name = tool["function"]["name"]
        args, result, answer = make(rng, self.test)
        calls, results, answers = [(name, args)], [result], [answer]
        user = self._wording(name, wordings, list(args)).format(**args, onoff="on" if args.get("on") else "off")
        if name in ("get_weather", "get_time") and rng.random() < 0.2:
            what = "weather" if name == "get_weather" else "time"
            args, result, answer = make(rng, self.test)
            calls.append((name, args))
            results.append(result)
            answers.append(answer)
            user = rng.choice(
                [f"What is the {what} in {{a}} and in {{b}}?", f"Compare the {what} of {{a}} and {{b}}."]
            ).format(a=calls[0][1]["city"], b=calls[1][1]["city"])
        steps: list[dict[str, Any]] = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
            }
        ]
        steps += [{"role": "tool", "content": json.dumps(r)} for r in results]
        values = [
            str(v) for r in results for v in r.values() if not isinstance(v, bool) and v not in ("sent", "started")
        ]
        check = {
            "type": "calls",
            "calls": [{"name": n, "arguments": a} for n, a in calls],
            "results": [json.dumps(r) for r in results],
            "values": values,
        }
        return Turn(user, " ".join(answers), check, steps)
