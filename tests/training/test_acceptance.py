"""Simulated acceptance against drafting and verifying token by token."""

import random
from functools import cache

import pytest
import torch

from peagle.training.acceptance import AnchorAcceptance, ServedAcceptance

CPU = torch.device("cpu")
DEPTH = 4
Chains = list[list[list[float]]]


def elements(grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows, anchors, depths and values of what is not NaN in [B, N, K]."""
    which = (~grid.isnan()).nonzero(as_tuple=True)
    return (*which, grid[which])


def test_accuracy_and_unconditional_acceptance_over_all_anchors() -> None:
    """Three chains: 1 1 0 1, 0 1, 1 1 1."""
    grid = torch.full((2, 5, DEPTH), torch.nan)
    grid[0, 1] = torch.tensor([1, 1, 0, 1])
    grid[0, 4, :2] = torch.tensor([0, 1])
    grid[1, 0, :3] = 1
    meter = AnchorAcceptance(DEPTH, CPU)
    for row in (0, 1):  # pooled over calls
        at, anchor, depth, match = elements(grid[row : row + 1])
        meter.add(at, anchor, depth, match.bool(), grid[row : row + 1].shape[:2])
    assert meter.accuracy() == pytest.approx([2 / 3, 1, 1 / 2, 1])
    assert meter.unconditional() == pytest.approx([2 / 3, 2 / 3, 1 / 2, 0])
    assert meter.acceptance_length(2) == pytest.approx(1 + 4 / 3)
    assert meter.acceptance_length(DEPTH) == pytest.approx(1 + 11 / 6)


def walked(chains: Chains, k: int) -> tuple[list[int], int]:
    """Greedy serving, one draft after the other: drafts accepted down to each position, drafts."""
    accepted, num_drafts = [0] * k, 0
    for row in chains:
        anchor = 0
        while anchor < len(row):
            chain = row[anchor]
            if len(chain) < DEPTH:
                break
            num_drafts += 1
            length = 0
            while length < k and chain[length]:
                accepted[length] += 1
                length += 1
            anchor += length + 1
    return accepted, num_drafts


def random_chains(seed: int, rows: int = 6, anchors: int = 30) -> Chains:
    """Matches of every anchor of every row; the last anchors' chains are cut by the row's end."""
    source = random.Random(seed)
    return [
        [
            [
                float(source.random() < 0.75 - 0.1 * depth)
                for depth in range(min(DEPTH, anchors - a))
            ]
            for a in range(anchors)
        ]
        for _ in range(rows)
    ]


def grid_of(chains: Chains, prompt: int = 3) -> torch.Tensor:
    """[B, N, K], NaN where there is no element; the response begins behind a prompt."""
    grid = torch.full((len(chains), prompt + len(chains[0]), DEPTH), torch.nan)
    for row, of_row in enumerate(chains):
        for anchor, chain in enumerate(of_row):
            grid[row, prompt + anchor, : len(chain)] = torch.tensor(chain)
    return grid


def served(grid: torch.Tensor, chances: torch.Tensor | None = None) -> ServedAcceptance:
    meter = ServedAcceptance(DEPTH)
    add(meter, grid, grid if chances is None else chances)
    return meter


def add(meter: ServedAcceptance, follows: torch.Tensor, chances: torch.Tensor) -> None:
    row, anchor, depth, follow = elements(follows)
    order = torch.randperm(len(row))  # segments come in any order
    values = chances[row, anchor, depth]
    row, anchor, depth, follow, values = (x[order] for x in (row, anchor, depth, follow, values))
    meter.add(row, anchor, depth, follow.bool(), values, follows.shape[:2])


@pytest.mark.parametrize("seed", range(4))
def test_the_greedy_walk_is_that_of_serving(seed: int) -> None:
    chains = random_chains(seed)
    meter = served(grid_of(chains))
    for k in range(1, DEPTH + 1):
        accepted, num_drafts = walked(chains, k)
        assert meter.num_drafts(k) == num_drafts > 20
        assert meter.unconditional(k) == pytest.approx([a / num_drafts for a in accepted])
        assert meter.acceptance_length(k) == pytest.approx(1 + sum(accepted) / num_drafts)
        reached = [num_drafts, *accepted]
        conditional = [a / r for a, r in zip(accepted, reached, strict=False)]
        assert meter.conditional(k) == pytest.approx(conditional)
    assert meter.acceptance_lengths() == [meter.acceptance_length(k) for k in range(1, DEPTH + 1)]


def test_batches_do_not_matter() -> None:
    follows = grid_of(random_chains(7))
    chances = torch.rand(follows.shape, generator=torch.Generator().manual_seed(1))
    whole, split = served(follows, chances), ServedAcceptance(DEPTH)
    for rows in ([5, 2], [0], [1, 4, 3]):
        # Another width of the batch, too.
        padded = torch.nn.functional.pad(follows[rows], (0, 0, 0, 9), value=torch.nan)
        add(split, padded, torch.nn.functional.pad(chances[rows], (0, 0, 0, 9)))
    torch.testing.assert_close(whole.counters, split.counters)


def test_positions_that_nobody_reaches_are_unknown() -> None:
    nothing = served(torch.zeros(1, 3, DEPTH))
    assert nothing.conditional(DEPTH) == [0, None, None, None]
    assert nothing.unconditional(DEPTH) == [0, 0, 0, 0] and nothing.acceptance_length(2) == 1
    short = torch.full((1, 3, DEPTH), torch.nan)
    short[:, :, : DEPTH - 1] = 1
    assert served(short).num_drafts(1) == 0 and served(short).acceptance_lengths() == [1] * DEPTH


# A target of three tokens whose next one depends on the last, and a drafter that does not see its
# own drafts: after token x it proposes DRAFTS[x]. A draft that is wrong spoils those behind it.
TARGET = [[0.1, 0.7, 0.2], [0.2, 0.2, 0.6], [0.55, 0.05, 0.4]]
DRAFTS = [[1, 2, 0, 1], [2, 0, 1, 2], [0, 1, 2, 2]]


@cache
def heated(last: int, temperature: float) -> tuple[float, ...]:
    """The target's next token after this one."""
    powers = [p ** (1 / temperature) for p in TARGET[last]]
    return tuple(p / sum(powers) for p in powers)


def speculative_sampling(
    length: int, k: int, temperature: float, seed: int
) -> tuple[list[int], list[float]]:
    """Rejection sampling with one-hot drafts: the tokens, and acceptance down to each position."""
    source, tokens = random.Random(seed), [0]
    accepted, num_drafts = [0] * k, 0
    while len(tokens) < length:
        drafts, num_drafts, rejected = DRAFTS[tokens[-1]][:k], num_drafts + 1, False
        for position, draft in enumerate(drafts):
            target = heated(tokens[-1], temperature)
            rejected = source.random() >= target[draft]
            if rejected:
                rest = [0 if token == draft else p for token, p in enumerate(target)]
                tokens += source.choices(range(3), rest)
                break
            accepted[position] += 1
            tokens.append(draft)
        if not rejected:
            tokens += source.choices(range(3), heated(tokens[-1], temperature))
    return tokens, [a / num_drafts for a in accepted]


@cache
def plain_sampling(length: int, temperature: float, seed: int) -> tuple[int, ...]:
    source, tokens = random.Random(seed), [0]
    while len(tokens) < length:
        tokens += source.choices(range(3), heated(tokens[-1], temperature))
    return tuple(tokens)


@cache
def simulated(
    tokens: tuple[int, ...], temperature: float, *, counted: bool = False
) -> ServedAcceptance:
    """What validation says of that text; `counted`: by the drafts that are the text's tokens."""
    chains: Chains = [[]]
    judged: Chains = [[]]
    for anchor in range(len(tokens) - 1 - DEPTH):
        drafts, text = DRAFTS[tokens[anchor]], tokens[anchor : anchor + DEPTH + 1]
        chains[0].append([float(d == t) for d, t in zip(drafts, text[1:], strict=True)])
        along = zip(drafts, text, strict=False)
        judged[0].append([heated(before, temperature)[draft] for draft, before in along])
    follows, chances = torch.tensor(chains), torch.tensor(judged)
    return served(follows, follows if counted else chances)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, DEPTH])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_text_of_the_temperature_gives_the_acceptance_of_rejection_sampling(
    temperature: float, k: int
) -> None:
    """Within 4 standard errors of some 13,000 drafts; wrong contexts are further away (below)."""
    _, expected = speculative_sampling(30_000, k, temperature, seed=1)
    found = simulated(plain_sampling(30_000, temperature, seed=2), temperature)
    assert found.unconditional(k) == pytest.approx(expected, abs=0.02)
    assert found.acceptance_length(k) == pytest.approx(1 + sum(expected), abs=0.03)
    assert expected[-1] > 0.03


def test_the_chance_alone_would_judge_drafts_in_contexts_that_they_do_not_make() -> None:
    """Accepting by the chance wherever the text goes: what the walk along the drafts avoids."""
    _, expected = speculative_sampling(30_000, DEPTH, 1.0, seed=1)
    tokens = plain_sampling(30_000, 1.0, seed=2)
    conditional = simulated(tokens, 1.0).conditional(DEPTH)
    drawn, source = [[0, 0] for _ in range(DEPTH)], random.Random(3)
    anchor = 0
    while anchor + DEPTH + 1 < len(tokens):
        length = 0
        for depth, draft in enumerate(DRAFTS[tokens[anchor]]):
            drawn[depth][0] += 1
            if source.random() >= TARGET[tokens[anchor + depth]][draft]:
                break
            drawn[depth][1] += 1
            length += 1
        anchor += length + 1
    right = expected[1] / expected[0]
    wrong = drawn[1][1] / drawn[1][0]
    assert conditional[1] == pytest.approx(right, abs=0.02) and abs(wrong - right) > 0.1


@pytest.mark.slow
def test_less_noise_than_by_counting() -> None:
    """The last draft of a chain counts with its chance: of two equal estimates the calmer one."""
    texts = [plain_sampling(400, 1.0, seed) for seed in range(60)]
    chance, count = (
        torch.tensor([simulated(x, 1.0, counted=c).acceptance_length(DEPTH) for x in texts])
        for c in (False, True)
    )
    assert chance.std() < 0.9 * count.std() and abs(chance.mean() - count.mean()) < 0.02
