"""Filled-in forms to turn into JSON. The forms and all that stands in them are invented."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Value = str | int | float | bool | list[str] | list[dict[str, str | int | float]]
Make = Callable[[Random], Value]

NAMES = (
    "Amara Okafor", "Benedikt Vogel", "Chiara Lombardi", "Daniel Whitfield", "Elif Yildirim",
    "Farid Rahmani", "Greta Lindqvist", "Hiroshi Tanabe", "Isabel Fuentes", "Jonas Petersen",
)  # fmt: skip
STREETS = (
    "14 Harbour Lane", "208 Mill Road", "3 Orchard Close", "77 Station Street", "51B Quarry Hill",
    "9 Chapel Walk", "120 Riverside Drive", "6 Beacon Court",
)  # fmt: skip
TOWNS = ("Eastmere", "Northwick", "Saltby", "Fernhollow", "Kingsford", "Ashbourne Vale", "Old Pine")
ARTICLES = (
    "desk lamp, brass", "oak bookshelf, five boards", "wool blanket, grey", "kettle, 1.7 litres",
    "garden hose, 25 metres", "folding chair, black", "wall clock, silent", "bread knife",
)  # fmt: skip
DEVICES = ("washing machine WX 40", "floor heater", "sewing machine", "bench saw", "coffee grinder")
REMARKS = (
    "Please ring the bell at the side entrance, since the front door is being repaired.",
    "The card may be left with the neighbours on the ground floor.",
    "I called twice last week and was promised an answer by Friday.",
    "A colleague of mine will come in my place if the date has to change.",
    "I can be reached by phone on weekdays between nine and noon.",
)
FAULTS = (
    "A loud noise begins after about ten minutes and stops when the cover is lifted.",
    "Water stood on the floor for an hour before the valve was closed.",
    "The serial number on the back is no longer readable.",
    "Two screws were missing and the cable was frayed near the plug.",
    "It was last looked at in March, and nothing was found then.",
)
WORK = ("plumbing", "electrics", "roof", "windows", "heating", "garden", "lift", "paint")
COURSES = ("Pottery for beginners", "Bookkeeping II", "First aid", "Spoken Portuguese", "Welding")


def one_of(values: tuple[str, ...]) -> Make:
    return lambda random: random.choice(values)


def some_of(values: tuple[str, ...], count: int) -> Make:
    return lambda random: random.sample(values, random.randint(2, count))


def number(low: int, high: int) -> Make:
    return lambda random: random.randint(low, high)


def amount(high: int) -> Make:
    return lambda random: random.randint(100, 100 * high) / 100


def is_so(random: Random) -> bool:
    return random.random() < 0.5


def date(random: Random) -> str:
    return f"{random.randint(1, 28):02}/{random.randint(1, 12):02}/2025"


def reference(letters: str) -> Make:
    return lambda random: f"{letters}-{random.randint(10000, 99999)}-{random.choice('ABCDEFGH')}"


def phone(random: Random) -> str:
    return f"555 01{random.randint(0, 99):02}"


def sentences(texts: tuple[str, ...]) -> Make:
    return lambda random: " ".join(random.sample(texts, 2))


def items(random: Random) -> Value:
    return [
        {
            "article": article,
            "quantity": random.randint(1, 9),
            "price": random.randint(300, 9900) / 100,
        }
        for article in random.sample(ARTICLES, random.randint(2, 4))
    ]


PERSON: dict[str, Make] = {
    "Full name": one_of(NAMES),
    "Street": one_of(STREETS),
    "Town": one_of(TOWNS),
    "Phone": phone,
}
FORMS: dict[str, dict[str, Make]] = {
    "order": {
        "Order number": reference("OR"), "Date": date, **PERSON, "Items": items,
        "Delivery fee": amount(20), "Gift wrap": is_so, "Remarks": sentences(REMARKS),
    },
    "repair": {
        "Case number": reference("RP"), "Received on": date, **PERSON,
        "Device": one_of(DEVICES), "Bought in": number(2015, 2025), "Under warranty": is_so,
        "Fault": sentences(FAULTS),
    },
    "registration": {
        "Course": one_of(COURSES), "Starts on": date, **PERSON, "Age": number(18, 79),
        "Paid": amount(300), "Newsletter": is_so, "Remarks": sentences(REMARKS),
    },
    "inspection": {
        "Report number": reference("IN"), "Inspected on": date, "Inspector": one_of(NAMES),
        "Building": one_of(STREETS), "Town": one_of(TOWNS), "Floors": number(1, 12),
        "Work needed": some_of(WORK, 4), "Estimated cost": amount(9000), "Urgent": is_so,
        "Findings": sentences(FAULTS),
    },
    "claim": {
        "Policy": reference("PL"), "Date of damage": date, **PERSON,
        "Damaged": some_of(ARTICLES, 3), "Amount claimed": amount(2000), "Police told": is_so,
        "What happened": sentences(FAULTS),
    },
}  # fmt: skip


def form(kind: str, seed: int) -> str:
    """A filled-in form and the keys of the object to answer with; the seed decides what stands."""
    random = Random(f"{kind}/{seed}")
    values = {label: make(random) for label, make in FORMS[kind].items()}
    lines = [_line(label, value, layout=seed % 4) for label, value in values.items()]
    keys = ", ".join(f'"{_key(label)}" ({_type(value)})' for label, value in values.items())
    return (
        f"{kind.upper()} FORM\n\n" + "\n".join(lines) + "\n\nTurn the form above into one JSON "
        f"object with the keys {keys}. Copy what stands there word for word."
    )


def _line(label: str, value: Value, layout: int) -> str:
    text = _text(value)
    if layout == 0:
        return f"{label}: {text}"
    if layout == 1:
        return f"{label} ".ljust(24, ".") + f" {text}"
    if layout == 2:
        return f"| {label} | {text} |"
    return f"{label}\n    {text}"


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "[x] yes  [ ] no" if value else "[ ] yes  [x] no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return "; ".join(
            one
            if isinstance(one, str)
            else f"{one['quantity']} x {one['article']} @ {one['price']:.2f}"
            for one in value
        )
    return str(value)


def _key(label: str) -> str:
    return label.lower().replace(" ", "_")


def _type(value: Value) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, list):
        if isinstance(value[0], str):
            return "array of strings"
        return 'array of objects with the keys "article", "quantity" and "price"'
    return "string" if isinstance(value, str) else "number"
