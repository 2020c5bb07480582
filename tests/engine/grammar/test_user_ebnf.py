"""Grammars of users: ordinary ones pass and constrain, those with too many readings are refused."""

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.compiler import GrammarCompiler
from peagle.engine.grammar.user_ebnf import user_grammar
from peagle.errors import UserError
from tests.engine.grammar.conftest import fits

pytest.importorskip("xgrammar")

# A grammar, texts that fit it, texts that do not.
ORDINARY = {
    "arithmetic": (
        'root ::= e\ne ::= e [+-] t | t\nt ::= t [*/] f | f\nf ::= "(" e ")" | [0-9]+',
        ["1+2*(3-4)", "7"],
        ["1+", "()"],
    ),
    "prefix operator": ('root ::= e\ne ::= e "+" t | "-" e | t\nt ::= [a-z]', ["-a+b"], ["a-"]),
    "list": ('root ::= "[" (i ("," i)*)? "]"\ni ::= [0-9]+', ["[]", "[1,22]"], ["[1,]"]),
    "right recursion": ('root ::= l\nl ::= [a-z] | [a-z] "," l', ["a,b,c"], ["a,,b"]),
    "blanks": (
        'root ::= ws "{" ws (p (ws "," ws p)*)? ws "}" ws\np ::= k ws ":" ws k\nk ::= [a-z]+\n'
        "ws ::= [ \\t\\n]*",
        ["{ }", " {a : b,\nc:d}"],
        ["{a}", "{a:b,}"],
    ),
    "adjacent blanks": ('root ::= ws ws "x" ws\nws ::= [ ]*', ["  x ", "x"], ["xx"]),
    "brackets": ('root ::= ("(" root ")")*', ["", "(())()"], ["(", ")("]),
    "chess": (
        'root ::= ([1-9] [0-9]? ". " m " " m "\\n")+\nm ::= p? [a-h] [1-8] "+"?\np ::= [NBRQK]',
        ["1. e4 e5\n2. Nf3 Nc6\n"],
        ["1. e9 e5\n"],
    ),
    "date": (
        'root ::= [0-9]{4} "-" [0-1] [0-9] "-" [0-3] [0-9] ("T" [0-9]{2} (":" [0-9]{2}){1,2})?',
        ["2026-11-22", "2026-11-22T10:00"],
        ["2026-1-1"],
    ),
    "csv": ('root ::= (f ("," f)* "\\n"){1,50}\nf ::= [a-z0-9]{0,12}', ["a,b\n,\n"], ["A\n"]),
    "long count": ("root ::= [a-z ]{0,1000}", ["some words"], ["X"]),
    "comment": ('# a comment\nroot ::= "a" # "b"\n', ["a"], ["b"]),
    "statements": (
        's ::= "if (" c ") " b | [a-z] " = " c ";"\nb ::= "{" s* "}"\nc ::= [a-z] | [0-9]+\n'
        "root ::= s+",
        ["if (a) {b = 1;}c = d;"],
        ["if (a) b = 1;"],
    ),
    "escapes": (r'root ::= "\"" [^"\\\x00-\x1f]* "\"" | [\]\-]', ['"a b"', "]", "-"], ['"']),
}
REFUSED = {
    'root ::= ((("a"{0,100}){0,100}){0,100})': "repeats something that may be empty",
    'root ::= ((("a"{1,100}){1,100}){1,100})': "'root' repeats within repeats, 100 x 100 x 100",
    'root ::= x{1,50}\nx ::= y{1,50}\ny ::= "a" | "b"': "'root' repeats within repeats, 50 x 50",
    'root ::= s\ns ::= s s | s s s | "a" | ""': "'s' may stand for itself alone",
    'root ::= s\ns ::= s s | "a"': "'s' may begin and end with itself",
    'root ::= s\ns ::= "a" | s o s\no ::= "+"?': "'s' may begin and end with itself",
    'root ::= s\ns ::= "a" | t\nt ::= s s': "may begin and end with itself",
    'root ::= e\ne ::= e "+" e | [a-z]': "'e' may begin and end with itself",
    'root ::= s\ns ::= s "a" s | "a" s | s "a" | ""': "'s' may begin and end with itself",
    "root ::= " + '"a"? ' * 17: "more than 16 parts in a row that may be empty",
    "root ::= (" + '"a"' + "*)*": "'root' repeats something that may be empty",
    'root ::= x*\nx ::= y\ny ::= "a"?': "'root' repeats something that may be empty",
    'root ::= a | "x"\na ::= b\nb ::= a | "y"': "may stand for itself alone",
    'root ::= root | "x"': "'root' may stand for itself alone",
    'root ::= o root o | "x"\no ::= "y"?': "'root' may stand for itself alone",
    'root ::= "a"+?': "a repeat stands behind another one",
    "root ::= " + "(" * 150 + '"a"' + ")" * 150: "nested deeper than 100",
    "root ::= Token(5)": "Token(...) is not supported",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_grammars_pass_and_constrain(compiler: GrammarCompiler, name: str) -> None:
    grammar, good, bad = ORDINARY[name]
    user_grammar(grammar)
    assert all(fits(compiler, StructuredOutput.ebnf(grammar), text) for text in good)
    assert not any(fits(compiler, StructuredOutput.ebnf(grammar), text) for text in bad)


@pytest.mark.parametrize("grammar", REFUSED)
def test_too_many_readings_are_refused(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(UserError, match=re.escape(REFUSED[grammar])):
        compiler.compile(StructuredOutput.ebnf(grammar))


PIECES = [
    *("root ::= ", "\na ::= ", "a", "b ", '"x"', '""', "[a-c]", "(", ")", "|", "*", "+", "?"),
    *("{2}", "{0,3}", "{1,}", "# c\n", "(=", ".", "[", '"', "::=", "é", " ", "\\"),
]
pieces = st.sampled_from(PIECES)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, max_size=25).map("".join))
def test_any_text_is_checked_or_left_to_the_compiler(source: str) -> None:
    try:
        user_grammar(source)
    except UserError as error:
        assert str(error).endswith((".", "+."))


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | [a-z]" for i in range(2500)),
        "root ::= r0\n" + "\n".join(f'r{i} ::= "a"? r{i + 1}?' for i in range(2500)),
        "root ::= " + " | ".join(['"a" [b-c]*'] * 4000),
        'root ::= "a"' + "?" * 60_000,
        "root ::= " + "(" * 60_000,
        "root ::= " + "[a" * 30_000,
        "root ::= " + '"a ' * 20_000,
    ],
    ids=["chain", "empty chain", "wide", "marks", "open", "classes", "quotes"],
)
def test_large_sources_are_checked_in_good_time(source: str) -> None:
    """Each step of the check is about linear in the source; recursion is bounded."""
    start = time.process_time()
    with contextlib.suppress(UserError):
        user_grammar(source)
    assert time.process_time() - start < 5.0
