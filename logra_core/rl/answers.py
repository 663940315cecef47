"""Is this answer right? Extraction of the final answer, equality of two math answers, and the scorers of reasoning-gym.

What belongs here: rules, as functions of strings. What does not: data (tasks.py), processes and time limits (grader_pool.py).
`math_equal`, `math_job` and `gym_job` are unbounded in time and memory: for worker processes only. A worker loads this file by its
path, so it imports nothing of the package, and nothing heavy at the top.

Policies (each pinned by a test): one final \\boxed decides; no box, an unterminated last box, or a box in unfinished thinking is no
answer. All parts of a multi-part answer are needed, in any order, and no more. `%`, `$`, degrees and trailing units are dropped on
both sides (28\\% is 28; 0.28 is not); a text command that carries mathematics (`\\mathrm{i}`, `\\text{ + 1}`) is no unit. Rational answers are
compared exactly, other constants to 250 digits, nothing with an absolute tolerance; math-verify parses and takes sets, tuples and relations
apart, gold first. A decimal is right for an irrational gold if all its digits are, six places at least. Text golds
(`\\text{Evelyn}`, `A`) are compared as text, never as products of letters; so is an answer with a text that holds digits, am, pm or
a scale (`6:30\\text{ PM}`, `10\\text{ million}`), which is no unit. White space never joins digits: `3 1/2` is a mixed number, `1 2` is
nothing; the thin space of `11\\,111` does. Over LONGEST characters, an answer is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

# ---------------------------------------------------------------- extraction


def visible(response: str) -> str | None:
    """What follows the thinking; None when the thinking was never closed."""
    tail = response.rsplit("</think>", 1)[-1]
    return None if "<think>" in tail else tail


def boxed_answer(response: str) -> str | None:
    """Content of the last `\\boxed` / `\\fbox` (`\\boxed 2` too); None when there is none, or it is empty or cut off."""
    text = visible(response)
    found = list(re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", text or ""))
    if not found:
        return None
    rest = text[found[-1].end() :]
    if not rest.startswith("{"):
        return (re.match(r"[^\s${}]*", rest).group().rstrip(".,;")) or None
    depth = 0
    for token in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return rest[1 : token.start()].strip() or None
    return None


def final_answer(response: str) -> str | None:
    """What a response to a reasoning-gym question answers, stripped; None if nothing.

    The last complete <answer>...</answer> decides (innermost, if nested). Without one, the whole response is the answer. An opened tag
    that never closes, or unfinished thinking, is no answer.
    """
    text = visible(response)
    if text is None:
        return None
    tags = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    if not tags and "<answer>" in text:
        return None
    return (tags[-1] if tags else text).strip() or None


def bare(answer: str) -> str:
    """Without what surrounds an answer: one \\boxed{}, $, ** or backticks around it, a final full stop."""
    box = re.fullmatch(r"\$*\\boxed\{(.*)\}\$*\.?", answer, re.DOTALL)
    return (box[1] if box else answer).strip().removesuffix(".").strip("$*`").strip().removesuffix(".")


def number(answer: str) -> Decimal | None:
    """Value of the plain number that an answer is, or that it ends in as a statement: after its last `=`, `is` or `:`.

    `19`, `12 + 7 = 19` and `The final answer is 19.` answer 19. `17 18 19`, `The answer is 18 or 19` and `It is 19, I think` answer
    nothing: only what stands last counts, so neither guesses nor a stray right number in a longer text are paid.
    """
    stated = re.split(r"=|:|\bis\b", bare(answer))[-1]
    text = bare(stated.strip()).replace("\N{MINUS SIGN}", "-")
    plain = re.fullmatch(r"([+-]?) ?((?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)", text) if len(text) <= 200 else None
    return Decimal(plain[1] + plain[2].replace(",", "")) if plain else None


def same_number(answer: str, gold: str) -> bool:
    return None is not number(gold) == number(answer)


# ---------------------------------------------------------------- equality

LONGEST = 2000  # characters of an answer, white space collapsed: several rules are quadratic, and run in the trainer's process

_TEXT = r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|rm|textrm)"
_SYMBOLS = {"−": "-", "–": "-", "°": r"^\circ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset "}
_SYMBOLS |= {"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "≤": r"\le ", "≥": r"\ge ", "∈": r"\in ", "±": r"\pm "}
_SYMBOLS |= {"θ": r"\theta ", "\u2009": r"\,", "\u202f": r"\,"}
_FRACTIONS = {c: r"\frac{%s}{%s}" % tuple(unicodedata.normalize("NFKC", c).split("\N{FRACTION SLASH}")) for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_UNICODE = str.maketrans({**_SYMBOLS, **_FRACTIONS})
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SIGN = r"\\(?!frac|sqrt|text|math|left|over|bar)[a-zA-Z]+"  # a command without arguments
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in [
        (r"^\*\*([^*]+(?:\*+[^*]+)*?)\*\*$|^`+([^`]*)`+$", r"\1\2"),
        (r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", r"\1\2"),
        (r"\\(?:left|right|displaystyle|big|Big|bigl|bigr)(?![a-zA-Z])\.?", ""),
        (r"(?<!\\)\\!\s*", ""),
        (r"(?<=\d)(?:\\,\s*|\{,\})(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)(?:\\[,;: ]|~)", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\?\$|\\?%|\s*\bpercent(?:age)?\b|\^\s*\{?\s*\\circ\s*\}?|\\degree", " "),
        (_TEXT + r"\{\s*,?\s*(and|or)\s*\}", r" \1 "),
        (r"√\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
        (r"√", r"\\sqrt "),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\frac\s*(\d|(?<=\s)[a-zA-Z]|" + _SIGN + ")", r"\\frac{\1}"),
        (r"\\frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w|" + _SIGN + ")", r"\\frac\1{\2}"),
        (r"\\(sqrt|overline)\s*(\w)", r"\\\1{\2}"),
        (r"\s+", " "),
    ]
]
_SCALE = r"(?i:\b[ap]\.?\s?m\b|hundred|thousand|[mbt]r?illion|dozen|half|\b(?:and|at least|at most|minus|no|not|or|pi|plus)\b)"
_WORDED = re.compile(_TEXT + r"\{(?=[^{}]*[A-Za-z]{2}|[^{}]*\b[ap]\.)(?=[^{}]*(?:(?<![A-Za-z^])\d|" + _SCALE + "))")  # more than a unit
_LETTER_UNIT = r"[mgshlLNJWVAKCF](?:\s*\^?\s*\{?-?[23]\}?)?"
_UNIT_WORD = (
    r"(?:[ckmn]m|k?g|mg|m[lL]|ft|lbs?|oz|hrs?|mins?|secs?|mph|km/h|m/s|sq\.?|cu\.?|square|cubic|inch(?:es)?|foot|feet|"
    r"(?:yard|mile|(?:centi|kilo|milli)?met(?:er|re)|(?:kilo)?gram|pound|ounce|lit(?:er|re)|gallon|second|minute|hour|day|week|month|year|"
    r"dollar|cent|degree|radian|unit|point)s?)(?:\s*\^\s*\{?[23]\}?)?"
)
_UNIT = re.compile(
    rf"(?<=\S)\s*(?!{_WORDED.pattern})(?:{_TEXT}\{{[^{{}}]*[A-Za-z°]{{2}}[^{{}}]*\}}"
    rf"|\\(?:text|mbox|mathrm)\{{\s*{_LETTER_UNIT}(?:\s*/\s*{_LETTER_UNIT})?\s*\}})\s*(?:\^\s*\{{?\d\}}?)?$"
    rf"|(?:(?<=[\d}}])|(?<=\\pi)(?= ))\s*{_UNIT_WORD}(?:\s+{_UNIT_WORD})*$"
)
_FORMULA = re.compile(_TEXT + r"\{(?![^{}]*[A-Za-z]{2}|[A-Z][+-]\})(?=[^{}]*[\d=+*/^<>-])([^{}]*)\}")  # in a text command, but no text
_BRACKET = re.compile(r"\\begin\{[^{}]*\}|\\end\{[^{}]*\}|\\[{}]|[{}()\[\]]|\\.")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPLIT = re.compile(r"\s*(?:[,;]\s*(?:and\b|or\b)?|\b(?:and|or)\b)\s*")


def _collapse(text: str) -> str:
    text = _SUPERSCRIPT.sub(lambda found: "^{" + unicodedata.normalize("NFKC", found.group()).replace("\N{MINUS SIGN}", "-") + "}", text)
    return " ".join(text.translate(_UNICODE).split())


def _clean(text: str) -> str:
    text = _collapse(text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return text.strip().rstrip(". ")


def _depths(text: str) -> list[int]:
    """Nesting depth before each character; any opening bracket pairs with any closing one, as in (3, 4]."""
    depths, depth, at = [], 0, 0
    for token in _BRACKET.finditer(text):
        depths += [depth] * (token.end() - at)
        name, at = token.group(), token.end()
        if name.startswith(r"\begin") or name in ("{", r"\{", "(", "["):
            depth += 1
        elif name.startswith(r"\end") or name in ("}", r"\}", ")", "]"):
            depth -= 1
    return depths + [depth] * (len(text) - at)


def _parts(answer: str, join: bool = True) -> list[str]:
    """Top-level parts of an answer: `1, 2 and 3`, `\\{1,2\\}` and `1 \\pm 2` have several. join: 58,500 is one number."""
    text = _clean(answer)
    for opening, closing in ((r"\{", r"\}"), ("{", "}")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and min(_depths(inner), default=0) >= 0:
            text = inner.strip()
    for found in reversed(list(_THOUSANDS.finditer(text)) if join else []):
        if _depths(text)[found.start()] == 0:
            text = text[: found.start()] + found.group().replace(",", "") + text[found.end() :]
    depths, cuts = _depths(text), [0]
    for found in _SPLIT.finditer(text):
        if depths[found.start()] == 0:
            cuts += [found.start(), found.end()]
    pieces = [text[a:b].strip() for a, b in zip(cuts[::2], cuts[1::2] + [len(text)])]
    parts: list[str] = []
    for piece in (_FORMULA.sub(r"\1", _UNIT.sub("", p)).strip() for p in pieces):
        plus_minus = re.search(r"\\pm(?![a-zA-Z])", piece)
        for pm, mp in [("+", "-"), ("-", "+")] if plus_minus else [("", "")]:
            signed = re.sub(r"\\mp(?![a-zA-Z])\s*", mp, re.sub(r"\\pm(?![a-zA-Z])\s*", pm, piece))
            parts.append(signed if plus_minus else piece)
    return parts


def _tight(part: str) -> str:
    """Without white space, but for that between digits, which keeps numbers apart."""
    return re.sub(r"(?<![\d.])\s+|\s+(?![\d.])", "", part)


def _key(part: str) -> str:
    """Spelling-free form for string equality."""
    part = re.sub(_TEXT + r"\{([^{}]*)\}", r"\1", part)
    part = re.sub(r"([_^])\{(\w)\}", r"\1\2", part)
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", _tight(part).lstrip("+"))


def _rational(part: str) -> Fraction | None:
    """Exact value of an integer, decimal (periodic too), fraction or mixed number; None for anything else."""
    text = _tight(part) if len(part) <= 200 else ""
    if re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)", text):
        return Fraction(text.rstrip("."))
    if re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}", text):
        return Fraction(text)
    if found := re.fullmatch(r"([+-]?\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}", text):
        sign, places = -1 if text[0] == "-" else 1, 10 ** len(found[2])
        return Fraction(f"{found[1]}.{found[2]}0") + sign * Fraction(int(found[3]), places * (10 ** len(found[3]) - 1))
    found = re.fullmatch(r"([+-]?)(\d*)\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}", text)
    found = found or re.fullmatch(r"([+-]?)(?:(\d+) )?(\d+)/(\d+)", text)
    if not found or int(found[4]) == 0 or (found[2] and "-" in found[3] + found[4]):
        return None
    return (-1 if found[1] == "-" else 1) * (int(found[2] or 0) + Fraction(int(found[3]), int(found[4])))


def _is_text(part: str) -> bool:
    """A gold to compare as text: \\text{...}, a choice letter, or up to four plain words, one of three letters on (or yes, no)."""
    if re.fullmatch(r"\d{4}-\d\d?-\d\d?", part):  # a date, no difference
        return True
    if _WORDED.search(part) or re.fullmatch(_TEXT + r"\{[^{}]*[A-Za-z][^{}]*\}", part) or re.fullmatch(r"\(?[A-H]\)?|(?i:yes|no)", part):
        return True
    return bool(re.fullmatch(r"[A-Za-z'-]+(?: [A-Za-z'-]+){0,3}", part) and re.search(r"[A-Za-z]{3}", part))


def _same_text(gold: str, answer: str) -> bool:
    """Equal letters, digits and operators; a hyphen within a word or beside one, as in x-axis, is layout."""
    hyphen = r"(?<=[a-z]{2})-(?=[a-z])|(?<=[a-z])-(?=[a-z]{2})"
    texts = [re.sub(hyphen, "", _key(p).casefold()) for p in (gold, answer)]
    kept = [re.findall(r"[a-z0-9=+*/^<>-]|(?<=\d)[.:](?=\d)", text) for text in texts]
    return kept[0] == kept[1] != []


def _quick(gold: str, answer: str) -> bool | None:
    """Verdict on one part without sympy; None: sympy must decide."""
    if _key(gold) == _key(answer):
        return bool(_key(gold))
    if _is_text(gold) or _WORDED.search(answer):
        return _same_text(gold, answer)
    values = _rational(gold), _rational(answer)
    if None not in values:
        return values[0] == values[1]
    bases = [re.search(r"\d_\{?(\d+)\}?$", p) for p in (gold, answer)]
    if all(bases) and bases[0][1] != bases[1][1]:
        return False
    # math-verify reads "1 2 4" as a sum: a bare list of numbers is no answer
    return False if re.search(r"[\d.]\s+[\d.]", answer) else None


def _matched(golds: list[str], answers: list[str], equal) -> bool | None:
    """One-to-one matching of parts. False if one gold has no partner; None if `equal` left it open."""
    left, open_ = list(answers), False
    for gold in golds:
        verdicts = [equal(gold, a) for a in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            open_ = True
        else:
            return False
    return None if open_ else True


def _compare(gold: str, answer: str, equal) -> bool | None:
    answer = _collapse(answer)
    if len(answer) > LONGEST:
        return False
    golds = _parts(gold)
    readings = [p for p in (_parts(answer), _parts(answer, join=False)) if len(p) == len(golds)]
    verdicts = [_matched(golds, p, equal) for p in readings]
    return True if True in verdicts else None if None in verdicts else False


def quick_equal(gold: str, answer: str) -> bool | None:
    """Exact, instant verdict where strings, rational numbers and text suffice; None: ask `math_equal` in a worker."""
    return _compare(gold, answer, _quick)


def gold_parses_quickly(gold: str) -> bool:
    """True if every part of the gold is text or a rational number, so it needs no parser."""
    return 0 < len(_clean(gold)) <= LONGEST and all(_is_text(p) or _rational(p) is not None for p in _parts(gold))


_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|omega|sigma"
_NAME = re.compile(rf"(?<![\\A-Za-z])(?:(a(?:rc)?)?(sin|cos|tan)(h?)|(cot|sec|csc|log|ln|exp|pi|{_GREEK}|sqrt))(?![A-Za-z])")


def _braced(text: str, before: str) -> str:
    """`before(...)` as `before{...}`."""
    at = text.find(before + "(")
    while at >= 0:
        start = at + len(before)
        depths = _depths(text[start:] + " ")
        end = next((i for i in range(1, len(depths)) if depths[i] == 0), None)
        if end is None:
            break
        text = f"{text[:start]}{{{text[start + 1 : start + end - 1]}}}{text[start + end :]}"
        at = text.find(before + "(", start)
    return text


def _latex(part: str) -> str:
    """LaTeX of a part that may be written as in a program (2*pi, x**2, sqrt(2)) or with letters in text commands (\\mathrm{e})."""
    part = re.sub(r"\\(?:text|mathrm|mathit|mathbf|textit|textbf|rm)\{\s*([A-Za-z])\s*\}", r"{\1}", part)
    part = re.sub(r"\\log_\s*([a-z])(?![a-z])", r"\\log_{\1}", part.replace(r"\imath", "i"))
    part = re.sub(r"\*\*\s*|\^\s*(?=[(-])", "^", part)
    part = re.sub(r"\^\s*(-?\d+(?:\.\d+)?)", r"^{\1}", part)
    part = re.sub(r"(?<![\^\\{])\*", r"\\cdot ", part)
    part = _NAME.sub(lambda m: "\\" + (("arc" if m[1] else "") + m[2] + m[3] if m[2] else m[4]) + " ", part)
    return _braced(_braced(part.replace(r"\sqrt (", r"\sqrt("), r"\sqrt"), "^")


def _parse(part: str) -> list:
    from math_verify import LatexExtractionConfig, parse
    from sympy import S
    from sympy.logic.boolalg import Boolean

    if re.search(r"""['"]|\\[lc]?dots|\.\.\.""", part):  # math-verify drops them: f'(x) would be f(x)
        return []
    # boxed first: a bare equation would parse to its right side. units: they were dropped above; math-verify would drop the m of 5m, the
    # t of \sqrt{3}t and every trailing text. No timeout inside: the pool keeps the time.
    normal = dataclasses.replace(LatexExtractionConfig().normalization_config, units=False)
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)]
    parsed = parse(r"\boxed{" + _latex(part) + "}", config, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    # 2 < 3 and 1 = 1 are both true, (5, 3] and (5, 2] both empty: they say nothing
    empty = S.EmptySet if "emptyset" not in part else None
    return [p for p in parsed if p is not empty and not (isinstance(p, Boolean) and not p.free_symbols)]


DIGITS = 250  # to which two real constants that are no fractions must agree, from the first one that is not 0
PLACES = 6  # decimal places from which on a decimal counts as an irrational value


def _exact(expression):
    """With decimals as the fractions that they are, and i as the imaginary unit, which latex2sympy reads as a variable."""
    from sympy import Float, I, Rational, Symbol

    if not hasattr(expression, "atoms"):
        return expression
    values = {x: Rational(str(x)) for x in expression.atoms(Float)} | {x: I for x in expression.atoms(Symbol) if x.name == "i"}
    return expression.xreplace(values).doit()


def _decimal_of(decimal, value) -> bool:
    """Is the decimal, a fraction of sympy, the first PLACES or more digits of the value, cut or rounded?"""
    places = next((k for k in range(60) if (decimal * 10**k).is_Integer), 0)
    if places < PLACES or abs(decimal) * 10**places < 10 ** (PLACES - 1) or not value.is_extended_real or value * decimal < 0:
        return False
    rest = (abs(value) - abs(decimal)).evalf(DIGITS) * 10**places
    return bool(-0.5 <= rest < 1)


def _same_value(gold, answer, *_) -> bool:
    """Equality of two expressions or matrices of sympy: exact for fractions, to DIGITS digits for other constants, by simplification else."""
    from sympy import Expr, Float, MatrixBase, nan, simplify, zoo

    values = _exact(gold), _exact(answer)
    if all(isinstance(v, MatrixBase) for v in values):
        same_shape = values[0].shape == values[1].shape
        return same_shape and all(_same_value(g, a) for g, a in zip(_elements(gold, values[0]), _elements(answer, values[1])))
    if not all(isinstance(v, Expr) and not v.has(nan, zoo) for v in values):  # a relation or a set beside a number
        return False
    if all(v.is_Rational for v in values):
        return values[0] == values[1]
    if not any(v.free_symbols for v in values) and all(v.is_number and v.is_finite is not False for v in values):
        for source, decimal, value in ((answer, *values[::-1]), (gold, *values)):
            if decimal.is_Rational and source.atoms(Float) and _decimal_of(decimal, value):
                return True
        precise = [v.evalf(DIGITS) for v in values]
        largest = max(abs(v) for v in precise)
        if largest.is_Float and largest > 0:
            if abs(precise[0] - precise[1]) <= largest * 10 ** (5 - DIGITS):
                return True
            if not any(abs(v) < largest * 10 ** (5 - DIGITS) for v in precise):
                return False
    return bool(simplify(values[0] - values[1]).is_zero)


def _elements(source, value) -> list:
    return list(source.flat() if getattr(source, "shape", None) == value.shape and hasattr(source, "flat") else value.flat())


def _verify(gold: list, answer: list) -> bool:
    """math_verify.verify, whose comparisons of values have absolute tolerances (2^{-99} and 2^{-98} are equal to it), with ours instead."""
    from math_verify import grader
    from sympy import Ne

    if grader.sympy_numeric_eq is not _same_value:
        solve_and_compare, compare_symbols = grader.sympy_solve_and_compare, grader.sympy_compare_symbols
        grader.sympy_numeric_eq, grader.sympy_symbolic_eq = _same_value, lambda g, a: False
        grader.INVERSE_RELATIONS[Ne] = Ne
        # equations without a solution would all be equal
        grader.sympy_solve_and_compare = lambda g, a, *rest: bool(grader.solve(g, g.free_symbols)) and solve_and_compare(g, a, *rest)
        # x is not compared with \frac{2x}{2} otherwise
        grader.sympy_compare_symbols = lambda g, a: compare_symbols(g, a) or _same_value(g, a)
    return grader.verify(gold, answer, timeout_seconds=None, raise_on_error=True)


def math_equal(gold: str, answer: str) -> bool:
    """Full verdict, sympy included. Unbounded time and memory: for worker processes only. Raises what sympy raises."""

    def equal(g: str, a: str) -> bool:
        verdict = _quick(g, a)
        return _verify(_parse(g), _parse(a)) if verdict is None else verdict

    return bool(_compare(gold, answer, equal))


def math_job(gold: str, answer: str | None) -> str:
    """answer None: does the gold parse, and equal itself when both sides go through sympy?"""
    if answer is not None:
        return "correct" if math_equal(gold, answer) else "wrong"
    parsed = [_parse(p) for p in _parts(gold) if not _is_text(p)]
    return "correct" if len(gold) <= LONGEST and all(p and _verify(p, p) for p in parsed) else "wrong"


# ---------------------------------------------------------------- reasoning-gym

# Answers that are plain numbers: equal values are equal answers. Everything else graded here is compared as text. decimal_arithmetic and
# number_format have own scorers, which allow an error that the question does not.
NUMERIC = frozenset(
    "aiw basic_arithmetic binary_alternation chain_sum count_bits count_primes decimal_arithmetic decimal_chain_sum gcd gsm_symbolic "
    "largest_island lcm leg_counting letter_counting maze number_format number_sequence products rotten_oranges simple_equations "
    "simple_geometry".split()
)
TEXT = frozenset(["letter_jumble"])  # its own scorer pays words after the answer
_DATASETS: dict = {}

_CALLS = "Abs|C|E|Integral|a?(?:sin|cos|tan)h?|cot|csc|exp|ln|log|pi|sec|sqrt|[A-Za-z]"
_EXPRESSION = rf"(?:[\d.\s()+*/,-]|(?:{_CALLS})(?![A-Za-z_]))+"
_ROLE = r"\w+\s+is\s+an?\s+\w+"
# What an answer must look like before the dataset's own scorer sees it, as that searches longer texts and evaluates what Python can
# (measured on reasoning-gym 0.1.25: "... or 7" was paid by these, a sign before the answer, or factorials in countdown). Linear patterns.
FORMS = {
    "advanced_geometry": r"-?[\d.]+ ?°?|\(?-?[\d.]+,\s*-?[\d.]+\)?",
    "countdown": r"(?:[\d\s()+-]|\*(?!\*)|/(?!/))+",
    "fraction_simplification": r"\$?\s*(?:\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+)\s*\$?",
    "intermediate_integration": _EXPRESSION,
    "kakurasu": r"[01\s]+",
    "knights_knaves": rf"{_ROLE}(?:[\s,.;]+(?:and\s+)?{_ROLE})*[\s.]*",
    "polynomial_multiplication": _EXPRESSION,
    "quantum_lock": r"[A-Ca-c](?:\s*(?:→|->|,)\s*[A-Ca-c])*",
    "rubiks_cube": r"(?:[BDEFLMRSUxyz][w2']*\s*)+",
    "simple_integration": _EXPRESSION,
    "sokoban": r"[LDUR]+",
    "tower_of_hanoi": r"(?:\s*Move disk \d+ from Peg \d+ to Peg \d+(?:\s*\n|$))+",
}


def oracle_answer(entry: dict) -> str | None:
    names = ("possible_answer", "example_answer", "example_correct_answer")  # of datasets with many right answers
    metadata, found = entry["metadata"], entry["answer"]
    found = next((metadata[k] for k in names if k in metadata), None) if found is None else found
    return found if found is None or isinstance(found, str) else json.dumps(found)


def _numbers(text: str) -> list[Decimal] | None:
    """Those of a list of numbers, quoted or not; None if the text is no such list."""
    items = [re.fullmatch(r"""\s*(['"]?)(-?\d+(?:\.\d+)?)\1\s*""", item) for item in text.strip().removeprefix("[").removesuffix("]").split(",")]
    return [Decimal(item[2]) for item in items] if all(items) else None


def _keys(text: str) -> list | None:
    """The sorted keys of a JSON object, repeated ones too."""
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except ValueError:
        return None
    return sorted(str(pair[0]) for pair in pairs) if isinstance(pairs, list) and all(isinstance(p, tuple) for p in pairs) else None


def well_formed(name: str, answer: str, entry: dict) -> bool:
    """Has the answer the form that the question asks for? True for datasets whose own scorer reads strictly."""
    if name in FORMS:
        return re.fullmatch(FORMS[name], answer) is not None
    if name == "graph_color":  # its scorer ignores vertices which the graph has not, and all but the last of two colours
        return _keys(answer) == _keys(oracle_answer(entry))
    if name == "number_sorting":  # its scorer allows 1 on each number
        return _numbers(answer) == _numbers(oracle_answer(entry))
    if name == "power_function":  # its scorer rounds the answer to the three digits asked for; a longer one must be right as a whole
        gold = Decimal(oracle_answer(entry))
        return number(answer) in (gold, Decimal(f"{gold:.2e}"))
    if name == "word_sorting":  # its scorer looks at as many words as the right answer has
        return [word.strip() for word in answer.split(",")] == [word.strip() for word in oracle_answer(entry).split(",")]
    if name == "time_intervals":  # its scorer reads what comes first, and 12.50 s as 12.050 s
        shape = re.sub(r"(\.)?\d+", lambda m: rf"\.\d{{{len(m[0]) - 1}}}" if m[1] else r"\d+", entry["answer"])
        return re.fullmatch(shape.replace(" days", " ?days?") if "," in shape else shape.replace(" days", "(?: ?days?)?"), answer) is not None
    return True


def gym_job(name: str, options: dict, candidates: list[str], entry: dict) -> str:
    """Verdict of the dataset's own scorer on the first well-formed candidate that it pays. It must pay exactly 1: partial credit pays wrong
    answers."""
    key = repr((name, options))
    if key not in _DATASETS:
        import reasoning_gym

        _DATASETS[key] = reasoning_gym.create_dataset(name, seed=0, **options)
    error = None
    for candidate in candidates:
        try:
            if well_formed(name, candidate, entry) and _DATASETS[key].score_answer(candidate, entry) == 1.0:
                return "correct"
        except Exception as caught:
            error = caught
    return "grader_error" if error else "wrong"


# A first job of each kind, for its imports; unequal equations of two unknowns go through all stages of sympy (0.4 s of a job's time saved).
WARM_UP = {"math": (r"3x-y+\sqrt{2}=0", r"\sin(x)+3y+\frac{2}{\sqrt{2}}=0"), "gym": ("chain_sum", {}, [], {})}
