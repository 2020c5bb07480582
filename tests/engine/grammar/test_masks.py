"""Masks allow exactly the tokens that the matcher takes, whatever the counts and characters."""

import itertools
import random
import re
from types import ModuleType

import pytest
from transformers import PreTrainedTokenizerFast

from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.characters import character_options, complement, merge
from peagle.engine.grammar.compiler import GrammarCompiler, GrammarState
from peagle.engine.grammar.ebnf import Rules, repeated
from peagle.engine.grammar.regex import translate
from tests.conftest import byte_tokenizer
from tests.engine.grammar.conftest import EOS, allowed, fits

pytest.importorskip("xgrammar")

# The last byte of each code point beyond ASCII is that of an ASCII character, of none, or 0.
LETTERS = 'ab0,-"\\\n\0' + "\u0430\u044f\u0831\ue000\ue041\u00e9\u4e00\U0001f600\U0010ffff"


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Single bytes, and tokens of two and three characters."""
    tokenizer = byte_tokenizer()
    pairs = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
    rng = random.Random(0)
    triples = ["".join(rng.choices(LETTERS, k=3)) for _ in range(400)]
    tokenizer.add_tokens(list(dict.fromkeys(pairs + triples)))
    return tokenizer


@pytest.fixture(scope="module")
def words() -> GrammarCompiler:
    tokenizer = word_tokenizer()
    return GrammarCompiler(tokenizer, len(tokenizer), [EOS])


def accepted(state: GrammarState) -> set[int]:
    """The tokens that the matcher takes, one by one."""
    found = set()
    for token in range(state.vocab_size):
        if state.try_advance(token):
            found.add(token)
            state.rollback(1)
    return found


def walk(compiler: GrammarCompiler, structure: StructuredOutput, seed: int, most: int) -> None:
    """Compare mask and matcher along a random path of at most so many tokens."""
    rng = random.Random(seed)
    state = compiler.start(structure)
    for _ in range(most):
        may_come = allowed(state)
        assert may_come == accepted(state) or state.is_stuck
        # Bytes come to every place of a grammar; longer tokens cross from rule to rule.
        choices = sorted(may_come - {EOS})
        if not choices:
            return
        state.accept([rng.choice(choices[: rng.choice((5, 30, len(choices)))])])


PATTERNS = (
    *(".{1,900}", ".{129}", ".{0,5000}", "[^\\n]{200,5000}", "a.{129,}", "(?:.b){129,200}"),
    *("[а-я]{1,900}", "[\ue000-\uf8ff]{130}", "[ab\u0800-\u0840]{0,300}", "[^а-я]{1,200}"),
    # No large count: a class follows a rule.
    *('0(?:a|b+)[^"]*0', "(?:a|bb+)[а-я]b", "-(?:a|b+)[\u0829-\u0839]+", "0(?:a|b+)[^\u0831]"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_of_expressions(words: GrammarCompiler, pattern: str) -> None:
    for seed in range(2):
        walk(words, StructuredOutput.regex(pattern), seed, 12)


@pytest.mark.parametrize("pattern", ["^[^а-я]{0,300}$", "^.{130,5000}$", "^(?:a|b+)[а-я]*0$"])
def test_masks_of_strings_in_schemas(words: GrammarCompiler, pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    walk(words, StructuredOutput.json_schema({**schema, "required": ["a"]}), 0, 20)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= x{1,900}\nx ::= [^\\n]",
        'root ::= "0" x [a-b\\u0800-\\u0840]* "0"\nx ::= "a" | "b" x',
        'root ::= "0" x [а-я] "0"\nx ::= "a" | "b" x',
        'root ::= "0" x [\\U00000061-\\U00000105а-я]\nx ::= "a" | "b" x',
        'root ::= ([а-я] | "-"){200,5000} r0\nr0 ::= [\\x831]',
    ],
)
def test_masks_of_grammars(words: GrammarCompiler, grammar: str) -> None:
    for seed in range(2):
        walk(words, StructuredOutput.ebnf(grammar), seed, 12)


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_random_structures(
    words: GrammarCompiler, campaign: ModuleType, seed: int
) -> None:
    for structure in campaign.structures(1, seed):
        walk(words, structure, seed, 10)


_PAIR = r"(\\U[0-9A-F]{8}|[A-Za-z0-9])-(\\U[0-9A-F]{8}|[A-Za-z0-9])"


def _point(spelled: str) -> int:
    return int(spelled[2:], 16) if spelled.startswith("\\U") else ord(spelled)


COUNTS = [(0, 0), (0, 1), (1, 1), (3, 3), (0, 128), (0, 129), (129, 129), (1, 160), (32, 161)]
COUNTS += [(200, 200), (0, 1023), (7, 1055), (150, 1056), (0, None), (1, None), (129, None)]


@pytest.mark.parametrize(("least", "most"), COUNTS)
@pytest.mark.parametrize("item", ["a", "(?:ab|b)"])
def test_counts_are_exact(
    compiler: GrammarCompiler, item: str, least: int, most: int | None
) -> None:
    pattern = f"{item}{{{least},{'' if most is None else most}}}"
    structure = StructuredOutput.regex(pattern + ";")
    beside = {least, most or least, least + 31, least + 32, least + 33, 128, 129, 1023, 1024, 1057}
    for count in sorted({max(0, n + d) for n in beside for d in (-1, 0, 1)}):
        text = ("a" if item == "a" else "ab") * count + ";"
        assert fits(compiler, structure, text) == bool(re.fullmatch(pattern + ";", text)), count


@pytest.mark.parametrize(
    ("least", "most"), [(0, 129), (129, 130), (31, 1200), (64, 1025), (1000, 1100)]
)
def test_counts_of_every_size_are_exact(least: int, most: int) -> None:
    """An expression of blocks says how often its item may come: `re` reads it."""
    rules = Rules()
    expression = repeated("a", least, most, rules)
    lines = rules.grammar({"root": expression}).split("\n")
    bodies = dict(line.split(" ::= ") for line in lines)

    def expand(body: str) -> str:
        body = re.sub(r"r\d+", lambda name: f"(?:{expand(bodies[name[0]])})", body)
        return body.replace(" ", "").replace('""', "")

    pattern = re.compile(expand(expression))
    edges = {0, least - 1, least, least + 1, most - 1, most, most + 1, 32, 64, 128, 1024}
    for count in (edges | set(range(0, most, 97))) - {-1}:
        assert bool(pattern.fullmatch("a" * count)) == (least <= count <= most), count


def test_a_large_nested_count_stays_small() -> None:
    pattern = "a"
    for _ in range(12):
        pattern = f"(?:{pattern}b){{200}}"
    rules = Rules()
    assert len(rules.grammar({"root": translate(pattern, rules)})) < 10_000


@pytest.mark.parametrize("seed", range(200))
def test_classes_read_well_by_their_last_bytes(seed: int) -> None:
    """No option takes an ASCII character that it lacks where bounds lose all but 8 bits."""
    rng = random.Random(seed)
    ranges = []
    for _ in range(rng.randint(1, 5)):
        low = rng.choice((rng.randrange(128), rng.randrange(0x500), rng.randrange(0x110000)))
        ranges.append((low, min(low + rng.choice((0, 5, 70, 300, 70_000)), 0x10FFFF)))
    if rng.random() < 0.3:
        ranges = complement(merge(ranges))
    ranges = merge(ranges)
    points = {p for low, high in ranges for p in (low, high, (low + high) // 2)}
    points |= {p + d for p in points for d in (-1, 1)} | set(range(128))
    options = character_options(ranges)
    classes = [option for option in options if option.startswith("[")]
    pairs = [
        [tuple(_point(end) for end in pair) for pair in re.findall(_PAIR, option)]
        for option in classes
    ]
    for point in points:
        is_in = any(low <= point <= high for low, high in ranges)
        literal = any(o.startswith('"') and _point(o[1:-1]) == point for o in options)
        assert is_in == (literal or any(low <= point <= high for p in pairs for low, high in p))
    if len(options) == 1 and pairs:  # more options have rules of their own
        for point in range(128):
            taken = any(low & 0xFF <= point <= high & 0xFF for low, high in pairs[0])
            assert taken == any(low <= point <= high for low, high in ranges)
