"""Verification in Triton against `speculation.verify` and `step_state.advance`, padded.

With synthetic acceptance the reference has the same rates.

On a CPU the kernels run under Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from peagle.kernels.step_state import NO_TOKEN, Finish, StepLimits, StepRecord, StepState
from tests.kernels.devices import DEVICES
from tests.kernels.verify_cases import Case, check, expected, make_case, run, verify_triton

# The interpreter computes as numpy does: integers of one element warn when they wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REAL = 151_936


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_seqs", "k", "vocab_size"), [(1, 0, 5), (4, 3, 997), (9, 5, 2500)])
def test_greedy(num_seqs: int, k: int, vocab_size: int, device: str) -> None:
    for seed in range(3):
        case = make_case(num_seqs, k, vocab_size, seed=seed, greedy=True)
        assert check(case, device) == 0
        # Many ties: the first index counts, as for torch.
        case.logits_RV = case.logits_RV.round()
        assert check(case, device, torch.float16) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_seqs", "k", "vocab_size"), [(1, 0, 7), (3, 2, 97), (6, 3, 2311)])
@pytest.mark.parametrize("kind", ["plain", "cuts", "min_p", "all"])
def test_argmax_drafts(num_seqs: int, k: int, vocab_size: int, kind: str, device: str) -> None:
    for seed in range(2):
        case = make_case(
            num_seqs,
            k,
            vocab_size,
            seed=seed,
            cuts=kind in ("cuts", "all"),
            min_p=kind in ("min_p", "all"),
            scale=3.0,
        )
        assert check(case, device) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab_size", "draft_vocab"), [(97, 97), (97, 40), (2311, 700)])
@pytest.mark.parametrize("cuts", [False, True])
def test_probabilistic_drafts(vocab_size: int, draft_vocab: int, cuts: bool, device: str) -> None:
    for seed in range(2):
        case = make_case(6, 3, vocab_size, seed=seed, draft_vocab=draft_vocab, cuts=cuts, scale=2.0)
        assert check(case, device) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_of_nan_ends_its_sequence_alone(greedy: bool, value: float, device: str) -> None:
    case = make_case(6, 3, 997, seed=2, greedy=greedy, cuts=not greedy)
    case.state.finish_B.zero_()
    case.active_B.fill_(True)
    clean, clean_state = run(case, device)
    broken = 4
    rows = slice(*case.batch.query_start_loc[broken : broken + 2].tolist())
    case.logits_RV[rows] = value
    out, state = run(case, device)
    accepted = int(out.num_accepted_B[broken])
    assert int(out.emitted_BJ[broken, accepted]) == NO_TOKEN
    assert int(out.next_tokens_B[broken]) == int(state.last_tokens_B[broken]) == 0
    assert int(state.finish_B[broken]) == Finish.LENGTH and not int(state.num_drafts_B[broken])
    others = [b for b in range(6) if b != broken]
    for found, wanted in ((out, clean), (state, clean_state)):
        for one in fields(found):
            assert torch.equal(getattr(found, one.name)[others], getattr(wanted, one.name)[others])


# ---- synthetic acceptance -------------------------------------------------------------------

KINDS = pytest.mark.parametrize(
    "kind", ["greedy", "argmax drafts", "drawn drafts", "drawn from fewer tokens"]
)


def synthetic(kind: str, seed: int, rates: list[float]) -> Case:
    draft_vocab = {"drawn drafts": 97, "drawn from fewer tokens": 40}.get(kind, 0)
    greedy = kind == "greedy"
    options = {"greedy": greedy, "cuts": not greedy, "draft_vocab": draft_vocab}
    case = make_case(7, 3, 97, seed=seed, scale=2.0, **options)
    case.rates_K = torch.tensor(rates)
    return case


@pytest.mark.parametrize("device", DEVICES)
@KINDS
@pytest.mark.parametrize(
    ("rates", "share"),
    [([1.0] * 3, 1), ([0.9, 0.6, 0.3], None), ([0.5, 0.5, 0.0], None), ([0.0] * 3, 0)],
    ids=str,
)
def test_synthetic_acceptance(
    kind: str, rates: list[float], share: int | None, device: str
) -> None:
    case = synthetic(kind, 1, rates)
    assert check(case, device) == 0
    if share is not None:  # of k drafts, which differ from sequence to sequence
        accepted = run(case, device)[0].num_accepted_B.cpu()
        assert accepted.tolist() == (case.state.num_drafts_B * share).tolist()


@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_rates_beyond_the_drafts_are_not_read(kind: str, device: str) -> None:
    short, long = (synthetic(kind, 1, [0.9, 0.6, 0.3, *more]) for more in ([], [0.3, 0.2]))
    found, wanted = run(long, device)[0], run(short, device)[0]
    for f in fields(StepRecord):
        assert torch.equal(getattr(found, f.name), getattr(wanted, f.name)), f.name


def test_fewer_rates_than_drafts_are_refused() -> None:
    case = synthetic("greedy", 1, [1.0, 1.0])
    with pytest.raises(AssertionError, match="a rate for every draft"):
        run(case, "cpu")


# ---- the draw -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_left_over(device: str) -> None:
    # q = p: every draft is accepted but for rounding, and rounding must not break the draw.
    case = make_case(8, 2, 33, draft_vocab=33, seed=3)
    case.sampling.temperature_B.fill_(1.0)
    for b in range(8):
        first = int(case.batch.query_start_loc[b])
        for j in range(int(case.state.num_drafts_B[b])):
            assert case.probs_BKD is not None
            case.probs_BKD[b, j] = torch.softmax(case.logits_RV[first + j], 0)
    assert check(case, device) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("draft_vocab", [0, 6])
def test_first_token_is_distributed_as_the_target(draft_vocab: int, device: str) -> None:
    # The batch of one test: equal logits and q, other seeds. The first emitted token counts.
    count, vocab_size = (120, 6) if device == "cpu" else (1000, 6)
    totals = torch.zeros(vocab_size)
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))
    for seed in range(1 if device == "cpu" else 20):
        case = make_case(count, 1, vocab_size, seed=seed, draft_vocab=draft_vocab)
        case.logits_RV = row.expand(len(case.logits_RV), -1).contiguous()
        case.state.finish_B.zero_()
        case.sampling.temperature_B.fill_(1.0)
        if draft_vocab:
            assert case.probs_BKD is not None
            # q once for all, and drafts drawn from it.
            case.probs_BKD[:] = torch.softmax(torch.arange(6) * 0.3, 0)
            case.drafts_BK[:] = torch.multinomial(case.probs_BKD[0, 0], count, True).unsqueeze(1)
        else:
            case.drafts_BK.fill_(2)
        first = run(case, device)[0].emitted_BJ[:, 0].cpu()
        totals += torch.bincount(first[case.active_B], minlength=vocab_size)
    wanted = torch.softmax(row, 0) * totals.sum()
    # The chi-square of five degrees of freedom is above 20.5 once in a thousand.
    assert float(((totals - wanted) ** 2 / wanted).sum()) < 20.5


@pytest.mark.gpu
@pytest.mark.parametrize("draft_vocab", [0, 32_000])
@pytest.mark.parametrize("cuts", [False, True])
def test_real_sizes(draft_vocab: int, cuts: bool) -> None:
    different = 0
    for seed in range(3):
        case = make_case(
            24, 7, REAL, seed=seed, draft_vocab=draft_vocab, cuts=cuts, min_p=cuts, scale=3.0
        )
        different += check(case, "cuda")
    # Near-ties of the float32 softmax: neighbours on the CDF, or of a top-p cut.
    print("decided otherwise:", different, "of", 3 * 24)
    assert different <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [True, False])
def test_real_synthetic_acceptance(greedy: bool) -> None:
    for seed in range(2):
        case = make_case(24, 7, REAL, seed=seed, greedy=greedy, scale=3.0)
        case.rates_K = 0.8 ** torch.arange(1, 8)
        # One near-tie of the float32 softmax may fall otherwise, as without rates.
        assert check(case, "cuda") <= (0 if greedy else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_greedy(dtype: torch.dtype) -> None:
    for seed in range(3):
        case = make_case(64, 7, REAL, seed=seed, greedy=True)
        case.logits_RV = case.logits_RV.to(dtype).float()
        assert check(case, "cuda", dtype) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [True, False])
def test_can_be_captured(greedy: bool) -> None:
    """A replay over new inputs in the captured buffers gives what a plain run gives."""
    cases = [make_case(8, 3, 5003, seed=seed, greedy=greedy, cuts=True) for seed in range(3)]

    def inputs(case: Case) -> list[Tensor]:
        tensors = [getattr(case.state, f.name) for f in fields(StepState)]
        tensors += [case.batch.sequences_T, case.batch.query_start_loc, case.drafts_BK]
        tensors += [case.active_B, case.logits_RV, case.sampling.temperature_B]
        tensors += [case.sampling.top_k_B, case.sampling.top_p_B, case.sampling.seeds_B]
        limits = case.limits
        tensors += [limits.stop_ids_BE, limits.min_tokens_B, limits.max_tokens_B]
        return [*tensors, limits.num_speculative_B]

    held = [tensor.cuda() for tensor in inputs(cases[0])]
    state = StepState(*held[:5])
    limits = StepLimits(*held[14:18], max_model_len=60, max_draft_len=50)
    sampling = verify_triton.SequenceSampling(*held[10:14])
    out = StepRecord.allocate(8, 3, "cuda")
    scratch = verify_triton.VerifyScratch.allocate(8, 32, 5003, "cuda")
    arguments = held[9], held[5], held[6], held[7], held[8]

    def step() -> None:
        if greedy:
            verify_triton.verify_greedy(*arguments, state, limits, scratch, out)
        else:
            verify_triton.verify_sampled(*arguments, sampling, state, limits, scratch, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in cases:
        for tensor, value in zip(held, inputs(case), strict=True):
            tensor.copy_(value)
        graph.replay()
        wanted, wanted_state = expected(case)
        for f in fields(StepRecord):
            assert getattr(out, f.name).tolist() == getattr(wanted, f.name).tolist(), f.name
        for f in fields(StepState):
            assert getattr(state, f.name).tolist() == getattr(wanted_state, f.name).tolist()
