"""KV blocks against a model that keeps token prefixes and a list: owners, sharing, eviction."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peagle.config import SamplingParams
from peagle.engine.block_manager import BlockManager
from peagle.engine.sequence import Sequence

TOKENS = st.lists(st.sampled_from([0, 0, 1, 2**40]), min_size=1, max_size=14)
WHICH = st.integers(0, 99)


def make_sequence(tokens: list[int] | None = None) -> Sequence:
    return Sequence(0, tokens or [1], SamplingParams(), seed=0, stop_token_ids=frozenset())


@dataclass
class Owner:
    """A sequence, the blocks it should have, and how many of them it has offered to others.

    `read` of these it has offered as read by the drafter.
    """

    sequence: Sequence
    table: list[int]
    offered: int
    start: int  # of what the drafter reads
    held: int  # tokens that fit
    read: int = field(init=False)

    def __post_init__(self) -> None:
        self.read = self.offered


@dataclass
class Model:
    """What a block manager should do, in the plainest way."""

    num_blocks: int
    size: int
    owners: list[Owner] = field(default_factory=list)
    published: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))  # the one to take next comes first

    def key(self, tokens: list[int], index: int) -> tuple[int, ...]:
        """What a block depends on: all tokens up to its end, and the one after it."""
        return tuple(tokens[: (index + 1) * self.size + 1])

    def match(self, tokens: list[int], unread_until: int, fixes_k: bool) -> list[int]:
        found: list[int] = []
        # One token at least is left to compute.
        while (end := (len(found) + 1) * self.size) < len(tokens):
            key = self.key(tokens, len(found))
            kinds = ["read"] + ["in part"] * (not fixes_k) + ["unread"] * (end <= unread_until)
            blocks = [self.published[kind, key] for kind in kinds if (kind, key) in self.published]
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def read_from(self, blocks: list[int]) -> int:
        kind_of = {block: kind for (kind, _), block in self.published.items()}
        kinds = [kind_of[block] for block in blocks]
        if "unread" in kinds:
            return (len(kinds) - kinds[::-1].index("unread")) * self.size
        return kinds.index("in part") * self.size if "in part" in kinds else 0

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        self.published = {p: b for p, b in self.published.items() if b not in taken}
        return taken

    def publish(self, owner: Owner, num_tokens: int, num_read: int) -> None:
        has_read_more = num_read // self.size > owner.read
        first = owner.read if has_read_more else owner.offered
        for index in range(first, num_tokens // self.size):
            key, block = self.key(owner.sequence.token_ids, index), owner.table[index]
            kind = "unread"
            if owner.start <= index * self.size and (index + 1) * self.size <= num_read:
                kind = "in part" if owner.start else "read"
                if self.published.get(("unread", key)) == block:
                    del self.published["unread", key]
            if block not in self.published.values():
                self.published.setdefault((kind, key), block)
            owner.offered = index + 1
        owner.read = max(owner.read, min(num_read // self.size, owner.offered))

    def release(self, owner: Owner) -> None:
        self.owners.remove(owner)
        elsewhere = {block for other in self.owners for block in other.table}
        self.free += [block for block in owner.table[::-1] if block not in elsewhere]


class Blocks(RuleBasedStateMachine):
    """Both side by side."""

    @initialize(num_blocks=st.integers(1, 12), size=st.integers(1, 4))
    def start(self, num_blocks: int, size: int) -> None:
        self.model = Model(num_blocks, size)
        self.blocks = BlockManager(num_blocks, size)

    @rule(
        tokens=TOKENS,
        room=st.integers(0, 5),
        keep=st.integers(0, 3),
        unread_until=st.sampled_from([0, 0, 2, 5, 99]),
        window=st.sampled_from([99, 1, 3]),
        fixes_k=st.booleans(),
    )
    def admit(
        self,
        tokens: list[int],
        room: int,
        keep: int,
        unread_until: int,
        window: int,
        fixes_k: bool,
    ) -> None:
        sequence = make_sequence(tokens)
        sequence.fixes_k = fixes_k
        matched = self.blocks.match(sequence, unread_until=unread_until)
        assert matched == self.model.match(tokens, unread_until, fixes_k)
        start = self.blocks.read_from(matched)
        assert start == self.model.read_from(matched)
        assert not start or unread_until or not fixes_k
        assert len(matched) * self.model.size < len(tokens)
        held = len(tokens) + room
        left = [block for block in self.model.free if block not in matched]
        new = self.model.blocks_for(held) - len(matched)
        fits = new + keep <= len(left)
        assert self.blocks.can_admit(matched, held, num_reserved=keep) == fits
        if fits:
            self.blocks.admit(sequence, matched, held)
            self.model.free = left
            table = matched + self.model.take(new)
            if len(matched) * self.model.size < len(tokens) - window:
                start = len(tokens) - window
            sequence.drafter_start = start
            self.model.owners.append(Owner(sequence, table, len(matched), start, held))

    @precondition(lambda self: self.model.owners)
    @rule(which=WHICH, tokens=TOKENS)
    def grow(self, which: int, tokens: list[int]) -> None:
        owner = self.model.owners[which % len(self.model.owners)]
        held = max(owner.held, len(owner.sequence) + len(tokens))
        new = self.model.blocks_for(held) - len(owner.table)
        fits = new <= len(self.model.free)
        assert self.blocks.extend(owner.sequence, held) == fits
        if fits:
            owner.sequence.token_ids += tokens
            owner.table, owner.held = owner.table + self.model.take(new), held

    @precondition(lambda self: self.model.owners)
    @rule(which=WHICH, unsettled=st.integers(1, 4), unread=st.sampled_from([0, 0, 1, 3, 99]))
    def publish(self, which: int, unsettled: int, unread: int) -> None:
        owner = self.model.owners[which % len(self.model.owners)]
        settled = max(0, len(owner.sequence) - unsettled)
        num_read = max(0, settled - unread)
        self.blocks.publish(owner.sequence, settled, num_read)
        self.model.publish(owner, settled, num_read)

    @precondition(lambda self: self.model.owners)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        owner = self.model.owners[which % len(self.model.owners)]
        self.blocks.free(owner.sequence)
        self.model.release(owner)
        assert owner.sequence.block_table == []
        self.blocks.free(owner.sequence)  # once more changes nothing

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "model"):
            return
        owned = set[int]()
        for owner in self.model.owners:
            assert owner.sequence.block_table == owner.table
            owned |= set(owner.table)
        assert self.blocks.num_free_blocks == len(self.model.free)
        assert sorted([*owned, *self.model.free]) == list(range(self.model.num_blocks))
        self.only_what_is_equal_is_shared()

    def only_what_is_equal_is_shared(self) -> None:
        holders: dict[int, tuple[int, ...]] = {}
        for owner in self.model.owners:
            for index, block in enumerate(owner.table):
                key = self.model.key(owner.sequence.token_ids, index)
                assert holders.setdefault(block, key) == key


Blocks.TestCase.settings = settings(deadline=None, max_examples=200, stateful_step_count=30)
TestAgainstTheModel = Blocks.TestCase


def test_the_block_used_longest_ago_is_taken_first_and_ends_before_beginnings() -> None:
    blocks = BlockManager(6, 2)
    first, second = make_sequence([1, 2, 3, 4, 9]), make_sequence([5, 6, 7, 8, 9])
    for sequence in (first, second):
        blocks.admit(sequence, [], 4)
        blocks.publish(sequence, 4, 4)
    tables = [list(first.block_table), list(second.block_table)]
    blocks.free(second)
    blocks.free(first)
    # Two were never used, then the end and the beginning of the second, then the first's end.
    taker = make_sequence()
    blocks.admit(taker, [], 10)
    assert taker.block_table == [4, 5, *tables[1][::-1], tables[0][1]]
    assert blocks.match(make_sequence([5, 6, 7, 8, 9])) == []
    assert blocks.match(make_sequence([1, 2, 3, 4, 9])) == tables[0][:1]


def test_only_sequences_of_one_salt_share_blocks() -> None:
    blocks, tokens = BlockManager(8, 2), [3, 4, 5, 6, 7]
    salted = [make_sequence(tokens) for _ in range(3)]
    for sequence, salt in zip(salted, (b"a", b"a", b"b"), strict=True):
        sequence.cache_salt = salt
    blocks.admit(salted[0], [], len(tokens))
    blocks.publish(salted[0], 4, 4)
    assert blocks.match(salted[1]) == salted[0].block_table[:2]
    assert blocks.match(salted[2]) == blocks.match(make_sequence(tokens)) == []


def test_without_prefix_caching_nothing_is_shared() -> None:
    blocks, sequence = BlockManager(4, 2, enable_prefix_caching=False), make_sequence([1, 2, 3])
    blocks.admit(sequence, [], 3)
    blocks.publish(sequence, 2, 2)
    assert blocks.match(make_sequence([1, 2, 3])) == []
