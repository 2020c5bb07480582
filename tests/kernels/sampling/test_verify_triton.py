"""Verification in Triton against `speculation.verify` and `step_state.advance`, padded.

With synthetic acceptance the reference has the same rates. On a CPU the kernels run under Triton's
interpreter.
"""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from peagle.kernels.drafts.batches import TargetBatch, build_target_batch
from peagle.kernels.drafts.step_state import (
    NO_TOKEN,
    DecodeLimits,
    DecodeResult,
    DecodeState,
    Finish,
    advance,
)
from peagle.kernels.sampling.logits import apply_probability_filters
from peagle.kernels.sampling.logits_rules import VerificationRows
from peagle.speculation.verification import SamplingTensors, verify
from tests.kernels.devices import DEVICES, INTERPRETED, compile_for_card

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.sampling import verify_triton
from peagle.kernels.sampling.rejection_triton import DraftProbs
from tests.kernels.drawn_verification import verify_drafts

# The interpreter computes as numpy does: integers of one element warn when they wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REAL = 151_936


# ---- batches, the references and the kernels ----


@dataclass
class Case:
    """A padded batch on the CPU: what the target ran, what it found, what may come of it."""

    batch: TargetBatch
    drafts_BK: Tensor
    active_B: Tensor
    logits_RV: Tensor
    state: DecodeState
    limits: DecodeLimits
    sampling: SamplingTensors
    min_p_B: Tensor | None = None
    probs_BKD: Tensor | None = None
    target_ids_D: Tensor | None = None
    rates_K: Tensor | None = None


def make_case(
    num_seqs: int,
    k: int,
    vocab_size: int,
    *,
    seed: int = 0,
    greedy: bool = False,
    cuts: bool = False,
    min_p: bool = False,
    draft_vocab: int = 0,
    scale: float = 1.0,
) -> Case:
    """Random logits; drafts that are often right; a third greedy, a fifth inactive."""
    torch.manual_seed(seed)
    active = torch.rand(num_seqs) < 0.8
    active[0] = True
    num_draft_tokens = torch.randint(k + 1, (num_seqs,)) * active
    state = DecodeState(
        torch.randint(vocab_size, (num_seqs,)),
        torch.randint(5, 60, (num_seqs,)),
        torch.randint(5, (num_seqs,)),
        num_draft_tokens,
        (torch.rand(num_seqs) < 0.1).long(),
    )
    limits = DecodeLimits(
        torch.randint(-1, vocab_size, (num_seqs, 3)),
        torch.randint(6, (num_seqs,)),
        torch.randint(1, 12, (num_seqs,)),
        torch.randint(k + 1, (num_seqs,)),
        max_model_len=60,
        max_draft_len=50,
    )
    num_rows = num_seqs * (k + 1)
    logits = torch.randn(num_rows, vocab_size) * scale
    ids = torch.randperm(vocab_size)[:draft_vocab].sort().values if draft_vocab else None
    probs = None
    of_BJ = torch.nn.functional.pad((num_draft_tokens + 1) * active, (1, 0)).cumsum(0)[:-1, None]
    rows_BK = (of_BJ + torch.arange(k)).clamp_max(num_rows - 1)
    if ids is None:
        drafts = logits[rows_BK].argmax(-1)
        drafts = torch.where(
            torch.rand(num_seqs, k) < 0.7, drafts, torch.randint(vocab_size, (num_seqs, k))
        )
    else:
        noisy = logits[rows_BK][..., ids] + 0.5 * torch.randn(num_seqs, k, draft_vocab)
        probs = torch.softmax(noisy, -1)
        drafts = torch.multinomial(probs.flatten(0, 1), 1).view(num_seqs, k)
        drafts = ids[drafts]
        probs[1::4] = 0  # these were not drawn
    temperature = torch.empty(num_seqs, dtype=torch.float64).uniform_(0.5, 1.5)
    if greedy:
        temperature.zero_()
    else:
        temperature[torch.rand(num_seqs) < 0.3] = 0
    none = torch.zeros(num_seqs, dtype=torch.int64)
    sampling = SamplingTensors(
        temperature,
        torch.randint(30, (num_seqs,)) if cuts else none,
        torch.rand(num_seqs, dtype=torch.float64) if cuts else none + 1.0,
        torch.randint(2**62, (num_seqs,)),
        state.num_outputs_B.clone(),
        greedy,
    )
    return Case(
        build_target_batch(
            state.last_tokens_B,
            drafts,
            num_draft_tokens,
            state.first_positions_B,
            torch.zeros(num_seqs, 100, dtype=torch.int64),
            active,
            num_rows=num_rows,
            block_size=16,
            max_model_len=60,
        ),
        drafts,
        active,
        logits,
        state,
        limits,
        sampling,
        torch.rand(num_seqs, dtype=torch.float64) ** 6 if min_p else None,
        probs,
        ids,
    )


def expected(case: Case) -> tuple[DecodeResult, DecodeState]:
    """The references, on the active sequences alone."""
    active = case.active_B
    num_rows = int(case.batch.query_start_loc[-1])
    logits = case.logits_RV[:num_rows]
    per_sequence = {
        field.name: getattr(case.sampling, field.name)[active]
        for field in fields(SamplingTensors)
        if field.name != "all_greedy"
    }
    sampling = SamplingTensors(**per_sequence, all_greedy=case.sampling.all_greedy)
    rows = VerificationRows(
        case.drafts_BK[active],
        case.state.num_draft_tokens_B[active],
        sampling.num_outputs_B,
        num_rows,
    )
    of_R = rows.sequences_R
    if case.min_p_B is not None:
        temperature_R = sampling.temperature_B[of_R]
        min_p_R = case.min_p_B[active][of_R]
        logits = apply_probability_filters(logits, temperature_R, min_p_R)
    q = None
    if case.probs_BKD is not None:
        assert case.target_ids_D is not None
        q = torch.zeros(len(case.drafts_BK), case.drafts_BK.shape[1], logits.shape[1])
        q[:, :, case.target_ids_D] = case.probs_BKD
        q[case.sampling.temperature_B == 0] = 0
        q = q[active]
    found = verify(logits, rows, sampling, q, case.rates_K)
    accepted, next_tokens = (torch.zeros(len(active), dtype=torch.int64) for _ in range(2))
    accepted[active] = found.num_accepted_B
    next_tokens[active] = found.next_tokens_B
    state = DecodeState(*(getattr(case.state, f.name).clone() for f in fields(DecodeState)))
    return advance(state, case.limits, active, case.drafts_BK, accepted, next_tokens), state


def run(
    case: Case, device: str, dtype: torch.dtype = torch.float32
) -> tuple[DecodeResult, DecodeState]:
    """The kernels, over buffers that hold rubbish."""

    def to(value: Tensor) -> Tensor:
        return value.to(device, copy=True)

    num_seqs, k = case.drafts_BK.shape
    state = DecodeState(*(to(getattr(case.state, f.name)) for f in fields(DecodeState)))
    limits = replace(
        case.limits,
        **{
            f.name: to(value)
            for f in fields(DecodeLimits)
            if isinstance(value := getattr(case.limits, f.name), Tensor)
        },
    )
    num_rows, vocab_size = case.logits_RV.shape
    logits = to(case.logits_RV).to(dtype)
    logits[int(case.batch.query_start_loc[-1]) :] = torch.nan
    out = DecodeResult.allocate(num_seqs, k, device)
    for f in fields(DecodeResult):
        getattr(out, f.name).fill_(-77)
    scratch = verify_triton.VerifyScratch.allocate(num_rows, vocab_size, device)
    batch = to(case.batch.sequences_R), to(case.batch.query_start_loc)
    arguments = (logits, *batch, to(case.drafts_BK), to(case.active_B), state, limits, scratch, out)
    synthetic = None
    if case.rates_K is not None:
        rates, seeds = to(case.rates_K), to(case.sampling.seeds_B)
        synthetic = verify_triton.SyntheticAcceptance(rates, seeds)
    if case.sampling.all_greedy:
        verify_drafts(*arguments, synthetic=synthetic)
        return out, state
    sampling = verify_triton.SequenceSampling(
        to(case.sampling.temperature_B),
        to(case.sampling.top_k_B),
        to(case.sampling.top_p_B),
        to(case.sampling.seeds_B),
        None if case.min_p_B is None else to(case.min_p_B),
    )
    if case.probs_BKD is None:
        verify_drafts(*arguments, sampling=sampling, synthetic=synthetic)
    else:
        assert case.target_ids_D is not None
        index = torch.full((vocab_size,), -1, dtype=torch.int32)
        index[case.target_ids_D] = torch.arange(len(case.target_ids_D), dtype=torch.int32)
        full = len(case.target_ids_D) == vocab_size
        q = DraftProbs(to(case.probs_BKD), None if full else to(index))
        verify_drafts(*arguments, sampling=sampling, draft_probs=q, synthetic=synthetic)
    return out, state


def check(case: Case, device: str, dtype: torch.dtype = torch.float32) -> int:
    """Compare; the number of sequences that decided otherwise."""
    wanted, wanted_state = expected(case)
    found, found_state = run(case, device, dtype)
    same = torch.ones_like(case.active_B)
    for f in fields(DecodeResult):
        here, there = getattr(found, f.name).cpu(), getattr(wanted, f.name)
        same &= (here == there).view(len(same), -1).all(1)
    for f in fields(DecodeState):
        same &= getattr(found_state, f.name).cpu() == getattr(wanted_state, f.name)
    return int((~same).sum())


# ---- real acceptance ----


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


@pytest.mark.slow
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
    assert int(state.finish_B[broken]) == Finish.LENGTH and not int(
        state.num_draft_tokens_B[broken]
    )
    others = [b for b in range(6) if b != broken]
    for found, wanted in ((out, clean), (state, clean_state)):
        for one in fields(found):
            assert torch.equal(getattr(found, one.name)[others], getattr(wanted, one.name)[others])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("greedy", [True, False])
def test_own_tokens_of_all_rows(greedy: bool, device: str) -> None:
    """One for every row; padding keeps what stood there."""
    values = [torch.nan, torch.inf, -torch.inf]
    logits = (
        torch.randn(7, 2311)
        .round(decimals=1)
        .index_put((torch.arange(3),), torch.tensor(values).unsqueeze(1))
    )
    sequences = torch.tensor([0, 0, 1, 1, 1, 2, -1], device=device)
    start_loc = torch.tensor([0, 2, 5, 6], device=device)
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    sampling = verify_triton.SequenceSampling(zeros.double(), zeros, zeros + 1.0, zeros)
    scratch = verify_triton.VerifyScratch.allocate(7, 2311, device)
    scratch.tokens_R.fill_(-77)
    verify_triton.own_tokens(
        logits.to(device), sequences, start_loc, None if greedy else sampling, zeros, scratch
    )
    wanted = [NO_TOKEN] * 3 + logits[3:6].argmax(-1).tolist() + [-77]
    assert scratch.tokens_R.tolist() == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_trees_draw_by_their_depths(device: str) -> None:
    """Of equal logits a row draws what a chain's row of its depth does."""
    torch.manual_seed(0)
    logits = torch.randn(1, 500).expand(7, -1).contiguous().to(device)
    depths = torch.tensor([0, 1, 1, 2, 2, 3, 1], device=device)
    start_loc, sequences = torch.tensor([0, 7], device=device), torch.zeros_like(depths)
    ones = torch.ones(1, device=device)
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    sampling = verify_triton.SequenceSampling(ones, zeros, ones, zeros + 5)
    scratch = verify_triton.VerifyScratch.allocate(7, 500, device)
    found = []
    for offsets in (None, depths):
        batch = logits, sequences, start_loc, sampling, zeros + 3
        verify_triton.own_tokens(*batch, scratch, offsets_R=offsets)
        found.append(scratch.tokens_R.tolist())
    chain, tree = found
    assert tree == [chain[depth] for depth in depths.tolist()] and len(set(chain)) > 3


@pytest.mark.slow
def test_kernels_compile_for_a_card() -> None:
    """The interpreter takes what compilers refuse; no card is needed to see that."""
    assert len(compile_for_card("verification")) == 2 + 2 + 2 + 4 + 4 + 2


# ---- synthetic acceptance ----

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
        assert accepted.tolist() == (case.state.num_draft_tokens_B * share).tolist()


@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_rates_beyond_the_drafts_are_not_read(kind: str, device: str) -> None:
    short, long = (synthetic(kind, 1, [0.9, 0.6, 0.3, *more]) for more in ([], [0.3, 0.2]))
    found, wanted = run(long, device)[0], run(short, device)[0]
    for f in fields(DecodeResult):
        assert torch.equal(getattr(found, f.name), getattr(wanted, f.name)), f.name


def test_fewer_rates_than_drafts_are_refused() -> None:
    case = synthetic("greedy", 1, [1.0, 1.0])
    with pytest.raises(AssertionError, match="a rate for every draft"):
        run(case, "cpu")


# ---- the draw ----


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_left_over(device: str) -> None:
    # q = p: every draft is accepted but for rounding, and rounding must not break the draw.
    case = make_case(8, 2, 33, draft_vocab=33, seed=3)
    case.sampling.temperature_B.fill_(1.0)
    for b in range(8):
        first = int(case.batch.query_start_loc[b])
        for j in range(int(case.state.num_draft_tokens_B[b])):
            assert case.probs_BKD is not None
            case.probs_BKD[b, j] = torch.softmax(case.logits_RV[first + j], 0)
    assert check(case, device) == 0


@pytest.mark.slow
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
        tensors = [getattr(case.state, f.name) for f in fields(DecodeState)]
        tensors += [case.batch.sequences_R, case.batch.query_start_loc, case.drafts_BK]
        tensors += [case.active_B, case.logits_RV, case.sampling.temperature_B]
        tensors += [case.sampling.top_k_B, case.sampling.top_p_B, case.sampling.seeds_B]
        limits = case.limits
        tensors += [limits.stop_ids_BE, limits.min_tokens_B, limits.max_tokens_B]
        return [*tensors, limits.k_B]

    held = [tensor.cuda() for tensor in inputs(cases[0])]
    state = DecodeState(*held[:5])
    limits = DecodeLimits(*held[14:18], max_model_len=60, max_draft_len=50)
    sampling = verify_triton.SequenceSampling(*held[10:14])
    out = DecodeResult.allocate(8, 3, "cuda")
    scratch = verify_triton.VerifyScratch.allocate(32, 5003, "cuda")
    arguments = (held[9], *held[5:9], state, limits, scratch, out)

    def step() -> None:
        verify_drafts(*arguments, sampling=None if greedy else sampling)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in cases:
        for tensor, value in zip(held, inputs(case), strict=True):
            tensor.copy_(value)
        graph.replay()
        wanted, wanted_state = expected(case)
        for f in fields(DecodeResult):
            assert getattr(out, f.name).tolist() == getattr(wanted, f.name).tolist(), f.name
        for f in fields(DecodeState):
            assert getattr(state, f.name).tolist() == getattr(wanted_state, f.name).tolist()
