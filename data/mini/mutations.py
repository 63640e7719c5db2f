"""Every bug of one token (or one negation, bound or argument order) in a function's lines."""

import re
from dataclasses import dataclass
from typing import List

TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|'[^']*'|//|[-+*]=|[<>=!]=|[-+*/%<>=()\[\]:,.]|\s+")
NOT_VARIABLES = set(
    "def return for in if else not and or while range len max min append continue True False zip upper lower "
    "isdigit isalpha isupper islower".split()
)
COMPARISONS = ["<", "<=", ">", ">=", "==", "!="]
OPERATORS = ["+", "-", "*", "//", "%"]
ASSIGNMENTS = ["+=", "-=", "*="]
LOGIC = {"and": "or", "or": "and", "True": "False", "False": "True", "max": "min", "min": "max"}
LOGIC.update({"upper": "lower", "lower": "upper"})


@dataclass(frozen=True)
class Mutation:
    """Line `index` becomes `line`."""

    index: int
    line: str
    family: str


def mutations(lines: List[str]) -> List[Mutation]:
    """All mutations of a function, in the order of its tokens."""
    names = variables(lines)
    found = []
    for index, line in enumerate(lines):
        tokens = TOKEN.findall(line)
        if line.lstrip().startswith("def ") or "".join(tokens) != line:
            continue
        for position, token in enumerate(tokens):
            for family, other in replacements(tokens, position, names):
                changed = tokens[:position] + [other] + tokens[position + 1 :]
                found.append(Mutation(index, "".join(changed), family))
        found += [Mutation(index, changed, family) for family, changed in rewritings(line)]
    return found


def variables(lines: List[str]) -> List[str]:
    functions = {name for line in lines for name in re.findall(r"def (\w+)", line)}
    tokens = {token for line in lines for token in TOKEN.findall(line) if re.match(r"[A-Za-z_]", token)}
    return sorted(tokens - NOT_VARIABLES - functions)


def replacements(tokens: List[str], position: int, names: List[str]):
    """(family, other token) for the token at `position`."""
    token = tokens[position]
    if token in COMPARISONS:
        return [("compare", other) for other in COMPARISONS if other != token]
    if token in OPERATORS and not is_sign(tokens, position):
        return [("operator", other) for other in OPERATORS if other != token]
    if token in ASSIGNMENTS:
        return [("operator", other) for other in ASSIGNMENTS if other != token]
    if token.isdigit():
        return [("constant", str(int(token) + step)) for step in (-1, 1, 2) if int(token) + step >= 0]
    if token in LOGIC:
        return [("logic", LOGIC[token])]
    if token in names and not is_target(tokens, position):
        return [("variable", other) for other in names if other != token]
    return []


def is_sign(tokens: List[str], position: int) -> bool:
    """Is the `-` at `position` a sign, as in `return -1`?"""
    before = "".join(tokens[:position]).rstrip()
    return before.endswith(("return", "(", ",", "=", "["))


def is_target(tokens: List[str], position: int) -> bool:
    """Is the name at `position` bound there, by `for` or by an assignment?"""
    before = "".join(tokens[:position]).strip()
    if before.startswith("for ") or before == "for":
        return "in" not in tokens[:position]
    return not before and position + 2 < len(tokens) and tokens[position + 2] in ["="] + ASSIGNMENTS


def rewritings(line: str):
    """(family, other line) for bugs that are more than one token."""
    body = line.strip()
    margin = line[: len(line) - len(line.lstrip())]
    if body.startswith("if not ("):
        yield "negation", f"{margin}if {body[8:-2]}:"
    elif body.startswith("if ") and " and " not in body and " or " not in body:
        yield "negation", f"{margin}if not ({body[3:-1]}):"
    call = re.search(r"(\w+)\((\w+), (\w+)\)", body)
    if call and call.group(1) not in ("range", "max", "min"):
        function, first, second = call.groups()
        yield "argument-swap", margin + body.replace(call.group(0), f"{function}({second}, {first})")
    bounds = re.search(r"range\((.*)\):", body)
    if bounds:
        inner = bounds.group(1)
        if inner.endswith((" + 1", " - 1")):
            yield "off-by-one", margin + body.replace(inner, inner[:-4])
        else:
            yield "off-by-one", margin + body.replace(f"({inner})", f"({inner} - 1)")
            yield "off-by-one", margin + body.replace(f"({inner})", f"({inner} + 1)")
