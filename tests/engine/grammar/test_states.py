"""The grammar engine against references: `re`, brute force, and states rebuilt from nothing."""

import itertools
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from peagle.bundled import BUNDLED_TARGET
from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.compiler import (
    GrammarCompiler,
    GrammarState,
    to_bools,
    to_mask,
)
from peagle.engine.grammar.drafts import DraftGrammar, prepare_masks, verification_masks
from peagle.errors import UserError
from tests.conftest import VOCAB_SIZE, byte_tokenizer
from tests.engine.grammar.conftest import EOS, allowed, encode
from tests.engine.test_detokenizer import fallback_tokenizer

pytest.importorskip("xgrammar")

REGEX = StructuredOutput.regex
EBNF = StructuredOutput.ebnf
TREE = EBNF('root ::= "(" root* ")" | [a-c]')


@pytest.fixture(scope="module")
def bundled() -> tuple[GrammarCompiler, list[str]]:
    """For the bundled tokenizer, with padding rows, and the text of each token."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_TARGET)
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    return GrammarCompiler(tokenizer, len(tokenizer) + 37, [EOS]), texts


# ---- the language ----

ALPHABET = "ab1"
PATTERNS = [
    "a",
    "|a1",
    "a*b",
    "(a|b)*1",
    "(ab|a)(1|b1)",
    "a{2,3}b?",
    "[^a]{1,2}",
    r"\d+a?",
    r"\w\W?",
    "(a|ab)*",
    "^(?:a|1b)$",
    "a+?b|b(1|a)?",
    "a?a?a?a{2}",
    ".a.|1",
    "(?P<name>a)b",
    "a|^b|1$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_token_is_allowed_iff_a_word_of_the_language_goes_on_with_it(compiler, pattern):
    longest = 5
    language = {
        "".join(word)
        for n in range(longest + 1)
        for word in itertools.product(ALPHABET, repeat=n)
        if re.fullmatch(pattern, "".join(word), re.ASCII)
    }
    prefixes = {word[:i] for word in language for i in range(len(word) + 1)}
    assert language
    for prefix in sorted(prefixes):
        if len(prefix) > 2:  # so near the longest words, brute force misses longer ones
            continue
        state = compiler.start(REGEX(pattern))
        state.accept(encode(prefix))
        assert state.is_complete == (prefix in language)
        found = allowed(state)
        assert (EOS in found) == (prefix in language)
        for letter in ALPHABET:
            assert (encode(letter)[0] in found) == (prefix + letter in prefixes), (prefix, letter)


def test_tokens_of_several_characters_are_allowed_by_their_text(bundled):
    compiler, texts = bundled
    state = compiler.start(REGEX("(return|re|def) x{0,2}"))
    words = [f"{head} {'x' * n}" for head in ("return", "re", "def") for n in range(3)]
    expected = {i for i, t in enumerate(texts) if i > 1 and any(w.startswith(t) for w in words)}
    assert allowed(state) == expected
    assert {len(texts[i]) for i in expected} > {1, 2}


def test_ebnf_of_nested_brackets(compiler):
    state = compiler.start(TREE)
    assert allowed(state) == set(encode("(abc"))
    state.accept(encode("((a"))
    assert allowed(state) == set(encode("()abc"))
    state.accept(encode("))"))
    assert allowed(state) == {EOS}
    assert state.is_complete and not state.is_finished
    state.accept([EOS])
    assert state.is_finished


def test_byte_fallback_tokens_count_as_their_bytes():
    tokenizer = fallback_tokenizer()
    ids = tokenizer.get_vocab()
    compiler = GrammarCompiler(tokenizer, len(ids) + 5, [ids["</s>"]])
    state = compiler.start(REGEX("(ab| a)é"))
    expected = {ids[t] for t in ("a", "ab", "▁", "▁a", "<0x61>", "<0x20>")}
    assert allowed(state) == expected
    state.accept([ids["▁a"]])
    assert allowed(state) == {ids["é"], ids["<0xC3>"]}
    state.accept([ids["<0xC3>"], ids["<0xA9>"]])
    assert allowed(state) == {ids["</s>"]}


def test_special_and_added_tokens():
    """Special tokens are never text; added ones count as what they read."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["aé b"])
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    state = compiler.start(REGEX("aé b|<.*"))
    assert allowed(state) == {*encode("a<"), tokenizer.convert_tokens_to_ids("aé b")}
    state.accept(encode("<"))
    assert not allowed(state) & {1, *range(len(tokenizer), VOCAB_SIZE)}
    assert not state.try_advance(1)
    assert not state.try_advance(VOCAB_SIZE - 1)
    assert not state.try_advance(-1)
    assert not state.try_advance(10**12)


def test_word_piece_is_refused():
    vocab = {t: i for i, t in enumerate(["[UNK]", "[SEP]", "a", "##b", "cd", "b", *'{}[]":,-.125'])}
    core = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[SEP]")
    with pytest.raises(UserError, match="Expected a byte-level or byte-fallback"):
        GrammarCompiler(tokenizer, len(vocab), [1])


# ---- ends ----


def test_only_the_stop_ids_of_the_request_end_it(compiler):
    newline = encode("\n")[0]
    state = compiler.start(REGEX("a+"), [newline])
    state.accept(encode("a"))
    assert allowed(state) == {newline, *encode("a")}
    assert not state.try_advance(EOS)
    assert state.try_advance(newline) and state.is_finished


def test_a_stop_id_is_never_text(compiler):
    newline = encode("\n")[0]
    state = compiler.start(REGEX("a\nb|ac"), [EOS, newline])
    state.accept(encode("a"))
    assert allowed(state) == set(encode("c"))
    assert not state.try_advance(newline)


def test_a_finished_state_allows_all_and_takes_none(compiler):
    state = compiler.start(REGEX("a"))
    state.accept([*encode("a"), EOS])
    assert len(allowed(state)) == VOCAB_SIZE
    assert not state.try_advance(EOS)
    assert not state.try_advance(encode("a")[0])
    state.rollback(2)
    assert allowed(state) == set(encode("a"))


def test_where_nothing_fits_the_output_may_end(compiler):
    state = compiler.start(EBNF('root ::= "a" dead\ndead ::= dead "b"'))
    state.accept(encode("a"))
    assert state.is_stuck and not state.is_complete
    assert allowed(state) == {EOS}
    assert state.try_advance(EOS)
    state.rollback(2)
    assert allowed(state) == set(encode("a"))


def test_bit_31_is_a_token_like_others(compiler):
    token = encode(chr(ord("!") + 29))[0]
    assert token == 31
    state = compiler.start(REGEX("a+"), [token])
    assert token not in allowed(state)
    dead = compiler.start(EBNF('root ::= "a" dead\ndead ::= dead "b"'), [token])
    dead.accept(encode("a"))
    assert allowed(dead) == {token}


# ---- rollback ----


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6),
)
def test_rollback_equals_rebuilding(compiler, seed, steps):
    rng = random.Random(seed)
    state = compiler.start(TREE)
    tokens: list[int] = []
    for forward, back in steps:
        for _ in range(forward):
            if state.is_finished:
                break
            tokens.append(rng.choice(sorted(allowed(state))))
            assert state.try_advance(tokens[-1])
        back = min(back, len(tokens))
        state.rollback(back)
        del tokens[len(tokens) - back :]
        rebuilt = compiler.start(TREE)
        rebuilt.accept(tokens)
        assert allowed(state) == allowed(rebuilt)
        assert state.is_finished == rebuilt.is_finished
        assert state.is_complete == rebuilt.is_complete


def test_rollback_covers_the_longest_draft(compiler):
    state = compiler.start(REGEX("a*"))
    state.accept([*encode("a" * 64), EOS])
    state.rollback(65)
    assert allowed(state) == {EOS, *encode("a")}


# ---- drafts ----


def rebuilt_rows(compiler, outputs, drafts) -> tuple[list[int], list[set[int]]]:
    """The lengths and masks to find, each row from a new state."""
    lens, rows = [], []
    everything = set(range(VOCAB_SIZE))
    for output, tokens in zip(outputs, drafts):
        if output is None:
            lens.append(len(tokens))
            rows += [everything] * (len(tokens) + 1)
            continue
        length = 0
        for j in range(len(tokens) + 1):
            state = compiler.start(TREE)
            state.accept([*output, *tokens[:j]])
            rows.append(allowed(state))
            length = j
            if state.is_finished or j == len(tokens) or tokens[j] not in allowed(state):
                break
        lens.append(length)
    return lens, rows


def states_of(compiler, outputs) -> list[GrammarState | None]:
    states = []
    for output in outputs:
        states.append(None if output is None else compiler.start(TREE))
        if output is not None:
            states[-1].accept(output)
    return states


def row_sets(bitmask) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in to_bools(bitmask, VOCAB_SIZE)]


OUTPUTS = st.sampled_from([None, *map(encode, ["", "(", "((a)", "(a)"])])
DRAFT = st.lists(st.sampled_from([*encode("(()))ab!"), EOS, 1, VOCAB_SIZE - 1]), max_size=7)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(st.tuples(OUTPUTS, DRAFT), min_size=1, max_size=4))
def test_preparing_equals_rebuilding_every_row(compiler, batch):
    outputs, drafts = zip(*batch)
    states = states_of(compiler, outputs)
    before = [None if s is None else allowed(s) for s in states]
    for state, tokens in zip(states, drafts):
        if state is not None:
            prepare_masks([state], [tokens], [None])
    cut = [t if s is None else s.allowed(t) for s, t in zip(states, drafts)]
    bitmask = verification_masks(states, cut, VOCAB_SIZE)
    expected_lens, expected_rows = rebuilt_rows(compiler, outputs, drafts)
    assert [len(tokens) for tokens in cut] == expected_lens
    if bitmask is None:
        assert all(output is None for output in outputs)
    else:
        assert row_sets(bitmask) == expected_rows
    assert [None if s is None else allowed(s) for s in states] == before


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.tuples(OUTPUTS, DRAFT.filter(lambda t: len(t) > 3)), min_size=1, max_size=4),
    pruned=st.booleans(),
)
def test_draft_masks_equal_rebuilding_every_column(compiler, batch, pruned):
    """Chosen as given, allowed or not."""
    outputs = [output for output, _ in batch]
    k = min(len(tokens) for _, tokens in batch)
    drafts = [tokens[:k] for _, tokens in batch]
    vocabulary = encode("(abc") if pruned else None  # no ")", no end of text
    states = states_of(compiler, outputs)
    before = [None if s is None else allowed(s) for s in states]
    grammar = DraftGrammar(states, VOCAB_SIZE, draft_token_ids=vocabulary)
    full_lens, _ = rebuilt_rows(compiler, outputs, drafts)
    over = [False] * len(batch)
    for column in range(k):
        mask = grammar.mask()
        for b, (output, tokens) in enumerate(zip(outputs, drafts)):
            expected = set(range(VOCAB_SIZE))
            if output is not None and not over[b] and full_lens[b] >= column:
                state = compiler.start(TREE)
                state.accept([*output, *tokens[:column]])
                over[b] = state.is_finished or (pruned and not allowed(state) & set(vocabulary))
                expected = expected if over[b] else allowed(state)
                over[b] = over[b] or tokens[column] not in expected
            if mask is not None:
                assert set(mask[b].nonzero().flatten().tolist()) == expected
            else:
                assert len(expected) == VOCAB_SIZE
        grammar.advance([tokens[column] for tokens in drafts])
    if not pruned:
        assert grammar.lens == full_lens
    assert all(have <= full for have, full in zip(grammar.lens, full_lens))
    grammar.restore_states()
    assert [None if s is None else allowed(s) for s in states] == before
    cut = [tokens[:length] for tokens, length in zip(drafts, grammar.lens)]
    # The masks made while drafting are those that verify the drafts, or the first of them.
    for count in (k, k // 2):
        shorter = [tokens[:count] for tokens in cut]
        masks = verification_masks(states, shorter, VOCAB_SIZE)
        if masks is not None:
            assert row_sets(masks) == rebuilt_rows(compiler, outputs, shorter)[1]


def test_pack_and_unpack():
    ids = [0, 31, 32, 63, 70]
    packed = to_mask(ids, 71)
    assert packed.dtype == torch.int32 and packed.shape == (3,)
    unpacked = to_bools(packed.expand(2, 3), 71)
    assert unpacked.shape == (2, 71)
    assert unpacked[1].nonzero().flatten().tolist() == ids
