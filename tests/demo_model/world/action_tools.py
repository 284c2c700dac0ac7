"""Tools that do something: send messages, set timers and lights, plan meetings and book tables."""

from tests.demo_model.world.draws import Draws
from tests.demo_model.world.prose import filler
from tests.demo_model.world.tool import (
    Arguments,
    Call,
    Result,
    Tool,
    acknowledge,
    make_parameter,
    make_schema,
)
from tests.demo_model.world.words import DAYS, FOODS, NAMES, TOPICS


def make_message(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that sends a message to a person."""
    choice = draws.choice
    name = choice(["send_email", "send_message", "send_mail", "message"])
    recipient = choice(["to", "recipient", "name"])
    body = choice(["body", "text", "message", "content"])

    def ask() -> Call:
        person = choice(NAMES)
        texts = [
            filler(draws)[:-1],
            f"the meeting is at {draws.clock()}",
            f"{choice(FOODS)} is ready",
            f"call me on {choice(DAYS)}",
        ]
        text = choice(texts)
        wordings = ("Send a message to {}: {}", "Write to {}: {}", "Tell {}: {}")
        return Call(choice(wordings).format(person, text), {recipient: person, body: text})

    parameters = {recipient: make_parameter("string"), body: make_parameter("string")}
    run = acknowledge(draws, ["ok", "sent", '{"status": "sent"}'], "I sent the message to {}.")
    return Tool(make_schema(name, "Send a message to a person", parameters), ask, run)


def make_timer(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that sets a timer."""
    name = draws.choice(["set_timer", "start_timer", "timer"])
    parameter = draws.choice(["minutes", "duration", "mins"])

    def ask() -> Call:
        minutes = draws.randint(1, 120)
        wordings = ("Set a timer for {} minutes.", "Start a {} minute timer.", "Remind me in {} minutes.")
        return Call(draws.choice(wordings).format(minutes), {parameter: minutes})

    parameters = {parameter: make_parameter("integer", "Minutes" if is_described else None)}
    run = acknowledge(draws, ["ok", "started", '{"status": "ok"}'], "The timer is set for {} minutes.")
    return Tool(make_schema(name, "Start a timer in minutes", parameters), ask, run)


def make_light(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that switches a light."""
    name = draws.choice(["turn_on", "switch_light", "set_light", "light_control"])
    place = draws.choice(["room", "place", "area"])
    state = draws.choice(["state", "on", "status"])

    def ask() -> Call:
        room = draws.choice(["kitchen", "bedroom", "office", "garden", "hall", "attic", "cellar"])
        wanted = draws.choice(["on", "off"])
        wordings = (
            "Turn {1} the light in the {0}.",
            "Switch the {0} light {1}.",
            "Light {1} in the {0}, please.",
        )
        return Call(draws.choice(wordings).format(room, wanted), {place: room, state: wanted})

    parameters = {place: make_parameter("string"), state: make_parameter("string", values=["on", "off"])}
    run = acknowledge(draws, ["ok", "done", '{"ok": true}'], "The light in the {} is {}.")
    return Tool(make_schema(name, "Turn a light on or off", parameters), ask, run)


def make_event(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that plans a meeting."""
    name = draws.choice(["create_event", "add_event", "add_meeting", "schedule"])
    names = draws.choice([("title", "day", "time"), ("topic", "date", "hour"), ("name", "day", "at")])

    def ask() -> Call:
        values = draws.choice(TOPICS), draws.choice(DAYS), draws.clock()
        wordings = (
            "Plan a {} meeting on {} at {}.",
            "Add a meeting about {} on {} at {}.",
            "Schedule {} for {} at {}.",
        )
        return Call(draws.choice(wordings).format(*values), dict(zip(names, values, strict=True)))

    def run(arguments: Arguments) -> Result:
        content = draws.choice(["ok", "created", f'{{"id": {draws.randint(1, 99)}}}'])
        return Result(content, "I added {} on {} at {}.".format(*arguments.values()))

    parameters = {parameter: make_parameter("string") for parameter in names}
    return Tool(make_schema(name, "Add an event to the calendar", parameters), ask, run)


def make_booking(draws: Draws, is_described: bool) -> Tool:
    """Return a tool that books a table."""
    name = draws.choice(["book_table", "reserve", "book_hotel", "make_booking"])
    place, guests = draws.choice([("name", "people"), ("place", "guests"), ("where", "count")])

    def ask() -> Call:
        where, count = draws.rare(True), draws.randint(1, 12)
        wordings = ("Book {} for {} people.", "Reserve {} for {}.", "Make a booking at {} for {} people.")
        return Call(draws.choice(wordings).format(where, count), {place: where, guests: count})

    parameters = {place: make_parameter("string"), guests: make_parameter("integer")}
    run = acknowledge(draws, ["ok", "booked"], "I booked {} for {} people.")
    return Tool(make_schema(name, "Make a booking", parameters), ask, run)
