"""The state of a sequence on the device against the engine's own: Sequence.append."""

import random

import pytest
import torch

from peagle.config import SamplingParams
from peagle.engine.sequence import Sequence
from peagle.kernels.drafts.step_state import DecodeLimits, DecodeState, Finish, advance

REASONS = {None: Finish.RUNNING, "stop": Finish.STOP, "length": Finish.LENGTH}


@pytest.mark.parametrize("seed", range(20))
def test_ends_where_the_engine_ends(seed: int) -> None:
    rng = random.Random(seed)
    k, max_model_len = rng.randrange(6), rng.randrange(12, 40)
    sequences, steps, min_tokens = [], [], []
    for index in range(12):
        prompt = [7] * rng.randrange(1, 10)
        params = SamplingParams(max_tokens=rng.randrange(2, 14))
        stops = frozenset(rng.sample(range(6), rng.randrange(3)))
        sequence = Sequence(index, prompt, params, 0, stops, num_speculative_tokens=k)
        sequence.append([rng.randrange(100, 200)], max_model_len)
        accepted = rng.randrange(k + 1)
        drafts = [rng.randrange(6) for _ in range(k)]
        sequences.append(sequence)
        steps.append((drafts, accepted, rng.randrange(6)))
        min_tokens.append(rng.choice([0, 2, 3]))
    ids = [[*sorted(s.stop_token_ids), -1, -1][:2] for s in sequences]
    state = DecodeState(
        torch.tensor([s.token_ids[-1] for s in sequences]),
        torch.tensor([len(s) - 1 for s in sequences]),
        torch.tensor([s.num_output_tokens for s in sequences]),
        torch.zeros(12, dtype=torch.int64),
        torch.zeros(12, dtype=torch.int64),
    )
    limits = DecodeLimits(
        torch.tensor(ids),
        torch.tensor(min_tokens),
        torch.tensor([s.params.max_tokens for s in sequences]),
        torch.tensor([s.num_speculative_tokens for s in sequences]),
        max_model_len,
        max_draft_len=1000,
    )
    drafts, accepted, next_tokens = zip(*steps, strict=True)
    done = advance(
        state,
        limits,
        torch.ones(12, dtype=torch.bool),
        torch.tensor(drafts, dtype=torch.int64).view(12, k),
        torch.tensor(accepted),
        torch.tensor(next_tokens),
    )
    for b, sequence in enumerate(sequences):
        emitted = [*drafts[b][: accepted[b]], next_tokens[b]]
        assert done.emitted_BJ[b].tolist() == emitted + [-1] * (k + 1 - len(emitted))
        # The engine bans stop ids while the output is short of min_tokens; here they are passed.
        before = sequence.num_output_tokens
        banned = max(0, min_tokens[b] - before)
        shown = [-5 if i < banned else token for i, token in enumerate(emitted)]
        first = len(sequence)
        kept = sequence.append(shown, max_model_len)
        assert done.num_kept_B[b] == len(kept)
        assert state.finish_B[b] == REASONS[sequence.finish_reason]
        assert state.last_tokens_B[b] == emitted[-1]
        assert state.first_positions_B[b] == first + len(emitted) - 1
        assert state.num_outputs_B[b] == before + len(emitted)
        room = 0 if sequence.is_finished else max(0, max_model_len - len(sequence))
        assert state.num_draft_tokens_B[b] == min(k, room)
        assert done.num_mask_slots_B[b] == max(min(k, room) - 1, 0)


def test_inactive_and_finished_sequences_stay() -> None:
    values = torch.tensor([11, 12, 13])
    finish = torch.tensor([0, 1, 0])
    state = DecodeState(values.clone(), values.clone(), values.clone(), values.clone(), finish)
    ones = torch.ones(3, dtype=torch.int64)
    limits = DecodeLimits(-torch.ones(3, 1).long(), ones * 0, ones * 99, ones * 4, 100, 100)
    active = torch.tensor([False, True, True])
    drafts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    done = advance(state, limits, active, drafts, ones, ones * 8)
    assert done.num_accepted_B.tolist() == [0, 1, 1]
    assert done.next_tokens_B.tolist() == [0, 8, 8]
    assert done.num_kept_B.tolist() == [0, 0, 2]
    assert done.emitted_BJ.tolist() == [[-1] * 3, [-1] * 3, [5, 8, -1]]
    assert state.last_tokens_B.tolist() == [11, 12, 8]
    assert state.first_positions_B.tolist() == [11, 12, 15]
    assert state.num_outputs_B.tolist() == [11, 12, 15]
    assert state.num_draft_tokens_B.tolist() == [0, 0, 4]
    assert state.finish_B.tolist() == [0, 1, 0]


def test_drafts_end_with_the_heads_length() -> None:
    # One draft fewer for each token, none once the head's length is reached (len - 2 slots).
    zero = torch.zeros(6, dtype=torch.int64)
    state = DecodeState(zero.clone(), torch.arange(6) + 5, zero.clone(), zero.clone(), zero.clone())
    limits = DecodeLimits(zero.unsqueeze(1) - 1, zero, zero + 99, zero + 3, 100, max_draft_len=9)
    advance(state, limits, zero == 0, zero.unsqueeze(1), zero, zero)
    assert state.num_draft_tokens_B.tolist() == [3, 3, 2, 1, 0, 0]
