"""Tool calls: tool schemas, questions that need one, the tool's result and the answer that uses it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pools as p
from tasks import Turn
from wording import Ways

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


class Use(NamedTuple):
    """One call: its arguments, what the tool returns, the answer, and the fields of the question."""

    args: Args
    result: Any
    answer: str
    fields: dict[str, Any]


class Entry(NamedTuple):
    """A tool, how a use of it is drawn, and the ways to ask for it."""

    schema: dict[str, Any]
    make: Callable[[random.Random, bool], Use]
    ways: Ways


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


def _use(args: Args, result: Any, answer: str, **more: Any) -> Use:
    return Use(args, result, answer, {**args, **more})


def _weather(rng: random.Random, test: bool) -> Use:
    city, t, sky = _town(rng, test), rng.randint(-15, 39), rng.choice(_WEATHER)
    return _use({"city": city}, {"temperature": t, "condition": sky}, f"In {city} it is {sky} and {t} degrees.")


def _time(rng: random.Random, test: bool) -> Use:
    city, t = _town(rng, test), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return _use({"city": city}, {"time": t}, f"In {city} it is {t}.")


def _calc(rng: random.Random, test: bool) -> Use:
    a, b = p.number(rng, test, 21, 9999), p.number(rng, test, 21, 9999)
    return _use({"a": a, "b": b}, {"result": a * b}, f"{a} times {b} is {a * b}.")


def _message(rng: random.Random, test: bool) -> Use:
    to = p.name(rng, test)
    text = rng.choice(_TEXTS) if rng.random() < 0.5 else " ".join(rng.sample(p.WORDS, rng.randint(2, 5)))
    return _use({"to": to, "text": text}, {"status": "sent"}, f"I have sent your message to {to}.")


def _timer(rng: random.Random, test: bool) -> Use:
    m = p.number(rng, test, 2, 999)
    return _use({"minutes": m}, {"status": "started"}, f"The timer is set to {m} minutes.")


def _order(rng: random.Random, test: bool) -> Use:
    n, day = p.number(rng, test, 100, 99999), rng.choice(p.DAYS)
    state = rng.choice(["packed", "sent", "delivered", "delayed"])
    return _use({"order_id": n}, {"status": state, "day": day}, f"Order {n} is {state}, day {day}.")


def _phone(rng: random.Random, test: bool) -> Use:
    who, n = p.name(rng, test), p.number(rng, test, 10000, 9999999)
    return _use({"name": who}, {"phone": n}, f"The phone number of {who} is {n}.")


def _light(rng: random.Random, _test: bool) -> Use:
    room, on = rng.choice(p.PLACES), rng.random() < 0.5
    state = "on" if on else "off"
    return _use({"room": room, "on": on}, {"ok": True}, f"The light in the {room} is now {state}.", onoff=state)


def _table(rng: random.Random, test: bool) -> Use:
    place, n, day, ref = p.name(rng, test), rng.randint(2, 12), rng.choice(p.DAYS), p.number(rng, test, 100, 9999)
    return _use(
        {"restaurant": place, "people": n, "day": day},
        {"booking": ref},
        f"Your table at {place} is booked, number {ref}.",
    )


KNOWN: dict[str, Entry] = {
    "get_weather": Entry(
        schema("get_weather", "Weather of a city", city="string"),
        _weather,
        Ways(
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
                "What's the weather in {city} today?",
                "How's the weather in {city}?",
            ],
            ["Can you check the weather in {city}?", "How warm is it today in {city}?"],
            phrases=[
                "the weather in {city}",
                "the weather of {city}",
                "today's weather in {city}",
                "the temperature in {city}",
                "the weather for {city}",
            ],
        ),
    ),
    "get_time": Entry(
        schema("get_time", "Local time of a city", city="string"),
        _time,
        Ways(
            [
                "What time is it in {city}?",
                "Time in {city}?",
                "Tell me the time in {city}.",
                "What is the time in {city} now?",
                "How late is it in {city}?",
            ],
            ["Can you check the time in {city}?", "What time do they have in {city}?"],
            phrases=[
                "the time in {city}",
                "the local time in {city}",
                "the time of day in {city}",
                "the clock time in {city}",
            ],
        ),
    ),
    "multiply": Entry(
        schema("multiply", "Multiplies two numbers", a="integer", b="integer"),
        _calc,
        Ways(
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
            phrases=[
                "{a} times {b}",
                "the product of {a} and {b}",
                "{a} * {b}",
                "{a} multiplied by {b}",
                "the result of {a} x {b}",
            ],
        ),
    ),
    "send_message": Entry(
        schema("send_message", "Sends a text message", to="string", text="string"),
        _message,
        Ways(
            [
                "Send a message to {to}: {text}",
                "Write to {to}: {text}",
                "Tell {to}: {text}",
                "Text {to} this: {text}",
                "Message for {to}: {text}",
            ],
            ["Please send {to} the message: {text}", "Let {to} know: {text}"],
            orders=[
                "send a message to {to}: {text}",
                "write to {to}: {text}",
                "send {to} this message: {text}",
                "tell {to} this: {text}",
                "text {to}: {text}",
                "send {to} the words: {text}",
            ],
        ),
    ),
    "set_timer": Entry(
        schema("set_timer", "Starts a timer", minutes="integer"),
        _timer,
        Ways(
            [
                "Set a timer for {minutes} minutes.",
                "Start a timer: {minutes} minutes.",
                "Timer, {minutes} minutes.",
                "Wake me in {minutes} minutes.",
            ],
            ["I need a timer of {minutes} minutes.", "I need a timer for {minutes} minutes."],
            orders=[
                "set a timer for {minutes} minutes",
                "start a timer of {minutes} minutes",
                "wake me in {minutes} minutes",
                "set the timer to {minutes} minutes",
                "start the timer with {minutes} minutes",
            ],
        ),
    ),
    "get_order": Entry(
        schema("get_order", "State of an order", order_id="integer"),
        _order,
        Ways(
            [
                "Where is my order {order_id}?",
                "What is the state of order {order_id}?",
                "Check order {order_id}.",
                "Has order {order_id} been sent?",
                "Order {order_id}?",
            ],
            ["Can you look up order {order_id}?", "Please find my order, number {order_id}."],
            phrases=[
                "the state of order {order_id}",
                "the state of my order {order_id}",
                "the status of order number {order_id}",
                "order {order_id}",
                "news about order {order_id}",
            ],
        ),
    ),
    "find_phone": Entry(
        schema("find_phone", "Finds a phone number", name="string"),
        _phone,
        Ways(
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
            phrases=[
                "the phone number of {name}",
                "{name}'s phone number",
                "the number of {name}",
                "the telephone number of {name}",
            ],
        ),
    ),
    "set_light": Entry(
        schema("set_light", "Turns a light on or off", room="string", on="boolean"),
        _light,
        Ways(
            [
                "Turn {onoff} the light in the {room}.",
                "Light {onoff} in the {room}.",
                "Switch {onoff} the light in the {room}.",
                "The light in the {room}: {onoff}, please.",
            ],
            ["Please turn {onoff} the light of the {room}."],
            orders=[
                "turn {onoff} the light in the {room}",
                "switch {onoff} the light of the {room}",
                "turn the light in the {room} {onoff}",
                "switch the light {onoff} in the {room}",
                "turn {onoff} the {room} light",
            ],
        ),
    ),
    "book_table": Entry(
        schema("book_table", "Books a table", restaurant="string", people="integer", day="string"),
        _table,
        Ways(
            [
                "Book a table at {restaurant} for {people} people on {day}.",
                "A table for {people} at {restaurant} on {day}, please.",
                "Reserve a table at {restaurant}, {people} people, {day}.",
            ],
            ["Please reserve a table for {people} people at {restaurant} on {day}."],
            orders=[
                "book a table at {restaurant} for {people} people on {day}",
                "reserve a table for {people} at {restaurant} on {day}",
                "get a table at {restaurant} on {day} for {people} people",
                "on {day}, book a table for {people} people at {restaurant}",
            ],
        ),
    ),
}
# two cities in one question
_TWO = Ways(
    ["What is the {what} in {a} and in {b}?", "Compare the {what} of {a} and {b}."],
    ["What is the {what} of {a} and of {b}?", "Check the {what} in {a} and in {b}."],
)


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

    def __init__(self, rng: random.Random, test: bool, entries: list[Entry]) -> None:
        self.rng, self.test, self.entries = rng, test, entries
        self.schemas = [vary(rng, e.schema) for e in entries]

    def turn(self, entry: Entry | None = None) -> Turn:
        rng, test = self.rng, self.test
        entry = entry or rng.choice(self.entries)
        name = entry.schema["function"]["name"]
        uses = [entry.make(rng, test)]
        if name in ("get_weather", "get_time") and rng.random() < 0.2:
            uses.append(entry.make(rng, test))
            wording = _TWO.draw(rng, test)
            user = wording.format(what=name[4:], a=uses[0].args["city"], b=uses[1].args["city"])
        else:
            wording = entry.ways.draw(rng, test)
            user = wording.format(**uses[0].fields)
        calls = [{"name": name, "arguments": u.args} for u in uses]
        results = [json.dumps(u.result) for u in uses]
        steps: list[dict[str, Any]] = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call} for call in calls],
            }
        ]
        steps += [{"role": "tool", "content": r} for r in results]
        values = [
            str(v)
            for u in uses
            for v in u.result.values()
            if not isinstance(v, bool) and v not in ("sent", "started", "done")
        ]
        check = {"type": "calls", "calls": calls, "results": results, "values": values}
        return Turn(user[:1].upper() + user[1:], " ".join(u.answer for u in uses), check, steps, wording)
