"""Correct functions, composed from predicates, expressions and loop styles, with their statement."""

import re
from dataclasses import dataclass
from random import Random
from typing import Callable, List, Optional, Tuple

VERBS = (
    "count sum pick find keep collect gather total scan check measure score rank filter build make fold merge "
    "trim grade"
).split()
NOUNS = (
    "items values nums marks sizes ages costs hits steps points weights codes levels votes days units rates "
    "tiles coins jobs"
).split()
LISTS = "xs nums items vals data row seq arr ages costs marks sizes".split()
ELEMENTS = "x n v item a e t m w c".split()
ACCUMULATORS = "total acc out res s r best ans cur tot".split()
PARAMETERS = "k lim p q lo base step cap".split()
INDICES = "i j idx pos".split()
TEXTS = "s w text word name".split()


@dataclass
class Function:
    """A correct function: its source lines (helpers first), what it should do, and how to draw arguments."""

    name: str
    lines: List[str]
    statement: str
    draw_arguments: Callable[[Random], tuple]


@dataclass
class Names:
    """The names that one function uses."""

    function: str
    element: str
    list: str
    accumulator: str
    index: str
    parameter: str


def draw_function(rng: Random) -> Function:
    """Draws a function of a random family."""
    names = Names(
        function=f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}",
        element=rng.choice(ELEMENTS),
        list=rng.choice(LISTS),
        accumulator=rng.choice(ACCUMULATORS),
        index=rng.choice(INDICES),
        parameter=rng.choice(PARAMETERS),
    )
    return rng.choice(FAMILIES)(rng, names)


def draw_list(rng: Random, shortest: int = 0, longest: int = 7, low: int = 0, high: int = 12) -> List[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(shortest, longest))]


def draw_predicate(rng: Random, x: str, bound: Optional[str] = None) -> Tuple[str, str]:
    """A condition on `x` in Python and in English; `bound` is the name of a parameter to compare with."""
    k = bound or str(rng.randint(2, 9))
    m = rng.randint(2, 5)
    low = rng.randint(1, 4)
    high = low + rng.randint(2, 6)
    return rng.choice(
        [
            (f"{x} > {k}", f"greater than {k}"),
            (f"{x} < {k}", f"less than {k}"),
            (f"{x} >= {k}", f"at least {k}"),
            (f"{x} <= {k}", f"at most {k}"),
            (f"{x} == {k}", f"equal to {k}"),
            (f"{x} != {k}", f"different from {k}"),
            (f"{x} % 2 == 0", "even"),
            (f"{x} % 2 == 1", "odd"),
            (f"{x} % {m} == 0", f"divisible by {m}"),
            (f"{x} > {low} and {x} < {high}", f"greater than {low} and less than {high}"),
            (f"{x} < {low} or {x} > {high}", f"less than {low} or greater than {high}"),
            (f"{x} > {k} and {x} % 2 == 0", f"greater than {k} and even"),
            (f"{x} % 2 == 1 and {x} < {k}", f"odd and less than {k}"),
            (f"{x} >= {low} and {x} <= {high}", f"at least {low} and at most {high}"),
        ]
    )


def draw_expression(rng: Random, x: str) -> Tuple[str, str]:
    """A number made from `x`, in Python and in English."""
    c = rng.randint(2, 6)
    d = rng.randint(1, 9)
    return rng.choice(
        [
            (x, x),
            (f"{x} * {x}", f"{x} squared"),
            (f"{x} * {c}", f"{c} times {x}"),
            (f"{x} + {d}", f"{x} plus {d}"),
            (f"{x} - {d}", f"{x} minus {d}"),
            (f"{x} * {c} + {d}", f"{c} times {x} plus {d}"),
            (f"{x} // {c}", f"{x} divided by {c}"),
            (f"{x} % {c}", f"{x} modulo {c}"),
        ]
    )


def indent(lines: List[str], levels: int = 1) -> List[str]:
    return ["    " * levels + line for line in lines]


def header(name: str, parameters: List[str]) -> str:
    return f"def {name}({', '.join(parameters)}):"


def loop(rng: Random, names: Names, body: List[str], condition: Optional[str]) -> List[str]:
    """A loop, in one of four styles, that runs `body` for the elements that meet `condition`."""
    x, xs, i = names.element, names.list, names.index
    style = rng.randrange(4)
    if condition is None:
        inner = body
    elif style == 3 and rng.random() < 0.6:
        inner = [f"if not ({condition}):", "    continue"] + body
    else:
        inner = [f"if {condition}:"] + indent(body)
    if style == 1:
        return [f"for {i} in range(len({xs})):", f"    {x} = {xs}[{i}]"] + indent(inner)
    if style == 2:
        return [f"{i} = 0", f"while {i} < len({xs}):", f"    {x} = {xs}[{i}]", f"    {i} += 1"] + indent(inner)
    return [f"for {x} in {xs}:"] + indent(inner)


@dataclass
class Filter:
    """A predicate over list elements that may use a parameter of the function."""

    condition: Optional[str]
    english: Optional[str]
    parameters: List[str]
    draw_arguments: Callable[[Random], tuple]


def draw_filter(rng: Random, names: Names, longest: int = 7, always: bool = True) -> Filter:
    wants_parameter = rng.random() < 0.35
    condition, english = None, None
    if always or rng.random() < 0.85:
        condition, english = draw_predicate(rng, names.element, names.parameter if wants_parameter else None)
    has_parameter = wants_parameter and condition and re.search(rf"\b{names.parameter}\b", condition)
    if has_parameter:
        return Filter(
            condition,
            english,
            [names.list, names.parameter],
            lambda rng: (draw_list(rng, 0, longest), rng.randint(1, 9)),
        )
    return Filter(condition, english, [names.list], lambda rng: (draw_list(rng, 0, longest),))


def filtered_fold(rng: Random, names: Names) -> Function:
    a, x, xs = names.accumulator, names.element, names.list
    only = draw_filter(rng, names, always=False)
    e, english = draw_expression(rng, x)
    those = f" that are {only.english}" if only.english else ""
    over = f" over {x} in {xs}{those}"
    start, step, result = rng.choice(
        [
            (0, f"{a} += {e}", f"the sum of {english}{over}"),
            (0, f"{a} += 1", f"the count of {x} in {xs}{those}"),
            (1, f"{a} *= {e}", f"the product of {english}{over}"),
            (0, f"{a} = max({a}, {e})", f"the largest of 0 and {english}{over}"),
            (50, f"{a} = min({a}, {e})", f"the smallest of 50 and {english}{over}"),
        ]
    )
    lines = [header(names.function, only.parameters), f"    {a} = {start}"]
    lines += indent(loop(rng, names, [step], only.condition)) + [f"    return {a}"]
    return Function(names.function, lines, f"return {result}", only.draw_arguments)


def list_building(rng: Random, names: Names) -> Function:
    a, x, xs = names.accumulator, names.element, names.list
    only = draw_filter(rng, names)
    e, english = draw_expression(rng, x)
    lines = [header(names.function, only.parameters)]
    if rng.random() < 0.35:
        lines += [f"    {a} = [{e} for {x} in {xs} if {only.condition}]"]
    else:
        lines += [f"    {a} = []"] + indent(loop(rng, names, [f"{a}.append({e})"], only.condition))
    lines += [f"    return {a}"]
    statement = f"return the list of {english} for {x} in {xs} that are {only.english}"
    return Function(names.function, lines, statement, only.draw_arguments)


def find_first(rng: Random, names: Names) -> Function:
    x, xs, i = names.element, names.list, names.index
    only = draw_filter(rng, names)
    lines = [header(names.function, only.parameters)]
    if rng.random() < 0.5:
        lines += [
            f"    for {i} in range(len({xs})):",
            f"        {x} = {xs}[{i}]",
            f"        if {only.condition}:",
            f"            return {i}",
            "    return -1",
        ]
        statement = f"return the index of the first {x} in {xs} that is {only.english}, or -1"
    else:
        default = rng.randint(0, 3)
        e, english = draw_expression(rng, x)
        lines += [
            f"    for {x} in {xs}:",
            f"        if {only.condition}:",
            f"            return {e}",
            f"    return {default}",
        ]
        statement = f"return {english} for the first {x} in {xs} that is {only.english}, or {default}"
    return Function(names.function, lines, statement, only.draw_arguments)


def any_or_all(rng: Random, names: Names) -> Function:
    x, xs = names.element, names.list
    only = draw_filter(rng, names, longest=4)
    lines = [header(names.function, only.parameters), f"    for {x} in {xs}:"]
    if rng.random() < 0.5:
        lines += [f"        if not ({only.condition}):", "            return False", "    return True"]
        statement = f"return True if every {x} in {xs} is {only.english}"
    else:
        lines += [f"        if {only.condition}:", "            return True", "    return False"]
        statement = f"return True if any {x} in {xs} is {only.english}"
    return Function(names.function, lines, statement, only.draw_arguments)


def piecewise(rng: Random, names: Names) -> Function:
    n, a = names.element, names.accumulator
    first = rng.randint(2, 5)
    second = first + rng.randint(2, 5)
    (e1, english1), (e2, english2), (e3, english3) = [draw_expression(rng, n) for _ in range(3)]
    sign, word = rng.choice([("<", "less than"), ("<=", "at most")])
    lines = [header(names.function, [n])]
    if rng.random() < 0.5:
        lines += [
            f"    if {n} {sign} {first}:",
            f"        return {e1}",
            f"    if {n} {sign} {second}:",
            f"        return {e2}",
            f"    return {e3}",
        ]
        statement = (
            f"return {english1} if {n} is {word} {first}, {english2} if {n} is {word} {second}, else {english3}"
        )
    else:
        condition, english = draw_predicate(rng, n)
        lines += [f"    if {condition}:", f"        {a} = {e1}", "    else:", f"        {a} = {e2}", f"    return {a}"]
        statement = f"return {english1} if {n} is {english}, else {english2}"
    return Function(names.function, lines, statement, lambda rng: (rng.randint(0, 12),))


def range_fold(rng: Random, names: Names) -> Function:
    a, i, n = names.accumulator, names.index, names.parameter
    low = rng.randint(0, 3)
    e, english = draw_expression(rng, i)
    is_inclusive = rng.random() < 0.5
    is_product = rng.random() < 0.25
    body = [f"{a} {'*=' if is_product else '+='} {e}"]
    those = ""
    if rng.random() < 0.5:
        condition, words = draw_predicate(rng, i)
        body = [f"if {condition}:"] + indent(body)
        those = f" that are {words}"
    end = f"{n} + 1" if is_inclusive else n
    lines = [
        header(names.function, [n]),
        f"    {a} = {1 if is_product else 0}",
        f"    for {i} in range({low}, {end}):",
        *indent(body, 2),
        f"    return {a}",
    ]
    statement = (
        f"return the {'product' if is_product else 'sum'} of {english} over {i} from {low} "
        f"{'to' if is_inclusive else 'up to but not'} {n}{those}"
    )
    return Function(names.function, lines, statement, lambda rng: (rng.randint(0, 10),))


def helper_call(rng: Random, names: Names) -> Function:
    a = names.accumulator
    p, q = rng.sample(PARAMETERS, 2)
    helper, sign, word = rng.choice(
        [
            ("sub", "-", "minus"),
            ("diff", "-", "minus"),
            ("mod", "%", "modulo"),
            ("div", "//", "divided by"),
            ("part", "//", "divided by"),
        ]
    )
    u, v = rng.sample(ELEMENTS, 2)
    first, second = (q, p) if rng.random() < 0.5 else (p, q)
    e, english = draw_expression(rng, a)
    lines = [
        header(helper, [u, v]),
        f"    return {u} {sign} {v}",
        header(names.function, [p, q]),
        f"    {a} = {helper}({first}, {second})",
        f"    return {e}",
    ]
    statement = f"let {a} be {first} {word} {second}; return {english}"
    return Function(names.function, lines, statement, lambda rng: (rng.randint(1, 12), rng.randint(1, 12)))


def adjacent_pairs(rng: Random, names: Names) -> Function:
    a, xs, i = names.accumulator, names.list, names.index
    sign, word = rng.choice(
        [("<", "less than"), (">", "greater than"), ("==", "equal to"), ("<=", "at most"), (">=", "at least")]
    )
    count = (
        "0",
        [f"if {xs}[{i}] {sign} {xs}[{i} + 1]:", f"    {a} += 1"],
        f"the count of {i} where {xs}[{i}] is {word} the next item",
    )
    differences = (
        "[]",
        [f"{a}.append({xs}[{i} + 1] - {xs}[{i}])"],
        f"the list of the next item minus each item of {xs}",
    )
    sums = (
        "[]",
        [f"{a}.append({xs}[{i}] + {xs}[{i} + 1])"],
        f"the list of the sums of each and the next item of {xs}",
    )
    start, body, result = rng.choice([count, count, differences, sums])
    lines = [
        header(names.function, [xs]),
        f"    {a} = {start}",
        f"    for {i} in range(len({xs}) - 1):",
        *indent(body, 2),
        f"    return {a}",
    ]
    return Function(names.function, lines, f"return {result}", lambda rng: (draw_list(rng, 1, 7, 0, 5),))


def two_lists(rng: Random, names: Names) -> Function:
    a = names.accumulator
    u, v = rng.sample(ELEMENTS, 2)
    us, vs = rng.sample(LISTS, 2)
    sign, word = rng.choice([("*", "times"), ("+", "plus"), ("-", "minus")])
    test, english = rng.choice(
        [("<", "less than"), (">", "greater than"), ("==", "equal to"), ("!=", "different from")]
    )
    pairs = f"pairs of {us} and {vs}"
    start, body, result = rng.choice(
        [
            ("0", [f"{a} += {u} {sign} {v}"], f"the sum of {u} {word} {v} over {pairs}"),
            ("0", [f"if {u} {test} {v}:", f"    {a} += 1"], f"the count of {pairs} with {u} {english} {v}"),
            (
                "[]",
                [f"if {u} {test} {v}:", f"    {a}.append({u} {sign} {v})"],
                f"the list of {u} {word} {v} for {pairs} with {u} {english} {v}",
            ),
        ]
    )
    lines = [
        header(names.function, [us, vs]),
        f"    {a} = {start}",
        f"    for {u}, {v} in zip({us}, {vs}):",
        *indent(body, 2),
        f"    return {a}",
    ]

    def draw_arguments(rng: Random) -> tuple:
        length = rng.randint(0, 6)
        return [rng.randint(0, 6) for _ in range(length)], [rng.randint(0, 6) for _ in range(length)]

    return Function(names.function, lines, f"return {result}", draw_arguments)


def text_filter(rng: Random, names: Names) -> Function:
    c = rng.choice(["c", "ch"])
    a = names.accumulator
    s = rng.choice([text for text in TEXTS if text != a])
    letter = rng.choice("abxyz")
    condition, english = rng.choice(
        [
            (f"{c}.isdigit()", "a digit"),
            (f"{c}.isalpha()", "a letter"),
            (f"{c}.isupper()", "upper case"),
            (f"{c}.islower()", "lower case"),
            (f"{c} in 'aeiou'", "a vowel"),
            (f"{c} == '{letter}'", f"'{letter}'"),
            (f"{c} != '{letter}'", f"not '{letter}'"),
        ]
    )
    case = rng.choice(["upper", "lower"])
    those = f"{c} in {s}"
    start, body, result = rng.choice(
        [
            ("0", [f"if {condition}:", f"    {a} += 1"], f"the count of {those} that are {english}"),
            ("''", [f"if {condition}:", f"    {a} += {c}"], f"the text of {those} that are {english}"),
            (
                "''",
                [f"if not ({condition}):", f"    {a} += {c}"],
                f"the text of {those} without those that are {english}",
            ),
            (
                "''",
                [f"if {condition}:", f"    {a} += {c}.{case}()", "else:", f"    {a} += {c}"],
                f"{s} with each {c} that is {english} in {case} case",
            ),
            ("''", [f"if {condition}:", f"    {a} = {c} + {a}"], f"the reversed text of {those} that are {english}"),
        ]
    )
    lines = [
        header(names.function, [s]),
        f"    {a} = {start}",
        f"    for {c} in {s}:",
        *indent(body, 2),
        f"    return {a}",
    ]

    def draw_arguments(rng: Random) -> tuple:
        return ("".join(rng.choice("abexyzuABEX12") for _ in range(rng.randint(0, 7))),)

    return Function(names.function, lines, f"return {result}", draw_arguments)


# Folds and list building count twice.
FAMILIES = [
    filtered_fold,
    filtered_fold,
    list_building,
    list_building,
    find_first,
    any_or_all,
    piecewise,
    range_fold,
    helper_call,
    adjacent_pairs,
    two_lists,
    text_filter,
]
