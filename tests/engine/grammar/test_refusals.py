"""Sources and tokenizers that the grammar compiler refuses, always with a UserError."""

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.compiler import GrammarCompiler
from peagle.errors import UserError
from peagle.extras import install_extra
from tests.conftest import VOCAB_SIZE, byte_tokenizer
from tests.engine.grammar.conftest import allowed, byte_compiler

pytest.importorskip("xgrammar")

REGEX = StructuredOutput.regex
EBNF = StructuredOutput.ebnf


def test_compiled_grammars_are_kept_up_to_a_bound():
    compiler = byte_compiler(cache_size=2)
    first = compiler.compile(REGEX("a"))
    assert compiler.compile(REGEX("a")) is first
    compiler.compile(REGEX("b"))
    compiler.compile(REGEX("a"))
    compiler.compile(REGEX("c"))  # b was used longest ago
    assert compiler.compile(REGEX("a")) is first
    assert len(compiler._cache) == 2


def test_without_xgrammar_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UserError, match=re.escape(install_extra("grammar"))):
        byte_compiler()


def test_an_end_of_text_id_is_needed(compiler):
    with pytest.raises(UserError, match="end-of-text id"):
        GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, [])
    with pytest.raises(UserError, match="an id that ends it"):
        compiler.start(REGEX("a"), [])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "does not parse: missing \\)"),
        ("a)", "does not parse: unbalanced"),
        ("[a", "does not parse: unterminated"),
        ("*a", "does not parse: nothing to repeat"),
        ("a{3,2}", "does not parse"),
        ("\\", "does not parse: bad escape"),
        (r"\p{L}", "does not parse: bad escape"),
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "references to groups"),
        (r"\bfoo", "word boundaries"),
        ("a^b", "anchors in the middle"),
        ("a$b", "anchors in the middle"),
        ("(?i)a", "flags"),
        ("(.{0,10}){0,128}", "repeats up to 128 times what may be empty"),
        ("(a?){3,}", "may be empty"),
        ("((a{1,300}){1,300}){1,300}", "multiply to 90000"),
        (".*" * 100, "100 parts of open length in a row"),
        ("(?i:a)", "flags"),
        ("(?>a)b", "atomic_group"),
        (r"\ud800", "character that does not exist"),
        ("a\ud800", "character that does not exist"),
        ("(" * 20_000 + ")" * 20_000, "nested too deeply"),
        ("".join(f"[^{chr(i)}]{{128}};" for i in range(256, 356)), "make 10112 or more rounds"),
        ("".join(f"([a-z]){{9,{i}}};[0-9]{{{i}}}" for i in range(40, 128)), "character classes"),
        ("[a-z]{1,200}" * 17, "17 parts of open length in a row"),
        ("a{1,3}+", "possessive_repeat cannot be enforced"),
        ("a{99999999999999}", "repeats too often"),
        ("x" * 100_000, "100000 characters"),
    ],
)
def test_bad_regular_expressions(compiler, pattern, reason):
    with pytest.raises(UserError, match=reason) as caught:
        compiler.compile(REGEX(pattern))
    assert str(caught.value).startswith(f"regex {pattern[:5]!r}"[:-1])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('foo ::= "a"', 'root rule with name "root" is not found'),
        ("root", "root"),
        ("root ::=", "Expect element"),
        ('root ::= "a', "string literal"),
        ('root ::= ("a"', "Expect \\)"),
        ('root ::= "a")', "Expect"),
        ("root ::= foo", '"foo" is not defined'),
        ('root ::= "a"\nroot ::= "b"', "defined multiple times"),
        ("root ::= [z-a]", "character class"),
        ("root ::= 'a'", "Unexpected character"),
        ('start: "a"', "Unexpected character"),
        ('root ::= "a"{3,2}', "Lower bound"),
        ("root ::= root", "may stand for itself alone"),
        ("root ::= Token(5)", "not supported"),
        ('root ::= Regex("a+")', '"Regex" is not defined'),
        ('root[temperature=0.3] ::= "a"', "more than rules of texts"),
        ('root ::= "0" x "b"\nx ::= "a"+ (="c")', "\\(=...\\) is not supported"),
        ("root ::= [] | [a]", "the character class \\[\\] has no character"),
        (r"root ::= [\ud800-\udfff]", "has no character"),
        ("root ::= TagDispatch()", "not supported"),
        ('root ::= "\x00"', "string literal"),
        ('root ::= "\ud800"', "surrogates"),
        ("root ::= " + "(" * 20_000, "."),
        ("$$$", "Unexpected character"),
    ],
)
def test_bad_grammars(compiler, grammar, reason):
    with pytest.raises(UserError, match=reason) as caught:
        compiler.compile(EBNF(grammar))
    assert str(caught.value).startswith("ebnf ")
    assert ".cc:" not in str(caught.value) and len(str(caught.value)) < 500


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["regex", "ebnf"]),
    text=st.text(st.sampled_from('ab01()[]{}|*+?^$\\.-,:="\n\x00é\ud800'), min_size=1, max_size=12),
)
def test_whatever_the_source_it_compiles_or_is_refused(compiler, kind, text):
    source = f"root ::= {text}" if kind == "ebnf" else text
    try:
        state = compiler.start(StructuredOutput(kind, source))
    except UserError:
        return
    assert allowed(state)
