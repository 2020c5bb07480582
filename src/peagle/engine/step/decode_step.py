"""One decode step on the device: target, verification, new state, drafter, next drafts.

All data that changes from step to step lies in buffers, so that CUDA graphs can hold the parts of
a step: no size depends on data, and the host reads nothing. All steps work on the first rows of the
same buffers, whatever their size.

Shapes: B rows of a step, one a sequence (some may be empty), K most drafts of a sequence (for trees
the mean number of nodes that a step verifies of each), J = K + 1, T target rows (B * J, or some
more), S drafter slots, M blocks a sequence, E stop ids a sequence, F fields of a row, N rows that
the host writes.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peagle.attention import Passes
from peagle.attention.triton_backend import TritonAttention
from peagle.config import CandidateTrees
from peagle.engine.features import NO_SLOT
from peagle.engine.model_runner import target_passes
from peagle.engine.sequence import Sequence
from peagle.engine.step.decode_rows import DecodeRows
from peagle.engine.step.drawn_drafts import DrawnDrafts
from peagle.engine.step.lookup import DecodeLookup, LookupSizes
from peagle.engine.step.rules import DecodeRules, PendingLogprobs
from peagle.engine.step.tree_growth import BeamGrowth, TreeGrowth
from peagle.engine.step.trees import DecodeTrees
from peagle.kernels.drafts.batches import (
    DraftBatch,
    PackedBatch,
    TargetBatch,
    count_draft_slots,
)
from peagle.kernels.drafts.batches_triton import (
    build_target_batch,
    expand_draft_batch,
    gather_features,
)
from peagle.kernels.drafts.choice_triton import (
    ChainBuffers,
    ChoiceScratch,
    choose_drafts,
    plan_chain,
)
from peagle.kernels.drafts.correction_triton import WalkScratch, correct_logits, walk_chains
from peagle.kernels.drafts.draw_triton import DrawScratch, draw_drafts
from peagle.kernels.drafts.step_state import DecodeLimits, DecodeResult, DecodeState, Stamp
from peagle.kernels.drafts.step_state_triton import NUM_STAMPS, begin_step, report_step, stamp
from peagle.kernels.sampling.rejection_triton import reject_drafts
from peagle.kernels.sampling.verify_triton import (
    SequenceSampling,
    SyntheticAcceptance,
    VerifyScratch,
    match_drafts,
    own_tokens,
)
from peagle.kernels.trees.beams import Beam, BeamPlan, GrowingTrees
from peagle.kernels.trees.copies import NO_COPY, SEARCHED_ROWS, longest_path
from peagle.kernels.trees.copies_triton import CopyScratch, append_emitted
from peagle.kernels.trees.survival import MIN_SCORE, SCORE_UNIT
from peagle.kernels.upload import host_ints, upload, upload_ints, upload_together
from peagle.models.target import TargetModel
from peagle.speculation.proposers import HeadProposer

# Fields of one integer, or one float, a row; the first five are those of `DecodeState`.
_INTS = (
    "last_tokens",
    "first_positions",
    "num_outputs",
    "num_draft_tokens",
    "finish",
    "min_tokens",
    "max_tokens",
    "num_speculative_tokens",  # K of the sequence
    "k",  # num_speculative_tokens, or K of the step if it is less
    "top_k",
    "seeds",
    "active",
    "context_starts",
    "feature_slots",
    "draws_chain",  # 1 where drawn chains lead trees
    "has_copies",  # 1 where copies of the text may be drafts
    "num_predicted",  # tokens of the prediction
    "correction",  # number of the one that drafts have
)
_FLOATS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Sizes of the buffers; lengths as in `DecodeLimits`, the rest as in `SpeculativeConfig`.

    With `lookup`, prompt lookup without a head, steps that verify fewer drafts or none make K too,
    so that the host learns where the text has some.
    """

    num_seqs: int  # rows of the largest step
    num_rows: int  # T of the largest step
    table_width: int  # M
    num_stop_ids: int  # E
    block_size: int
    max_model_len: int
    max_draft_len: int
    synthetic_rates: tuple[float, ...] | None = None
    trees: CandidateTrees | None = None
    has_copies: bool = False
    lookup: LookupSizes | None = None

    @property
    def node_fields(self) -> int:
        """Return the numbers of a node: parent and score, with copies worth and cell too."""
        return 4 if self.has_copies else 2

    @property
    def max_path(self) -> int:
        """Return the most nodes on a path of a tree."""
        assert self.trees is not None, "drafts are trees"
        depth = self.trees.prediction_depth
        return longest_path(depth, self.trees.max_nodes, has_copies=self.has_copies)

    def max_drafts(self, k: int) -> int:
        """Return the most drafts that a sequence has in steps of K drafts."""
        if self.trees is not None and k:
            return self.trees.max_nodes  # a tree stays whole, however many nodes steps verify
        return k

    def num_columns(self, k: int) -> int:
        """Return the number of draft columns in a step of K drafts, at least one."""
        return self.lookup.k if self.lookup else max(self.max_drafts(k), 1)

    def depth(self, k: int) -> int:
        """Return the most drafts on a path that steps of K drafts make."""
        if self.lookup is not None:
            return self.lookup.k
        return k if self.trees is None else self.trees.depth(k)

    def num_drawn(self, k: int) -> int:
        """Return the most drafts of a sequence that steps of K drafts draw, where they draw."""
        return k if self.trees is None else self.trees.num_drawn(k)


class DecodeBuffers:
    """State on the device of the decoding sequences, a row each, and data passed between parts.

    Steps of different K have draft buffers of their own; `switch` copies the drafts.

    Args:
        drawn: q of drawn drafts; None if drafts are not drawn.

    Attributes:
        k: K of the steps that run now.
    """

    def __init__(
        self, sizes: BufferSizes, device: torch.device, drawn: DrawnDrafts | None = None
    ) -> None:
        self.sizes = sizes
        self.drawn = drawn
        self.k = 0
        self._device = device
        batch, types = sizes.num_seqs, {"dtype": torch.int64, "device": device}
        self._ints_FB = torch.zeros(len(_INTS), batch, **types)
        self._floats_FB = torch.zeros(len(_FLOATS), batch, dtype=torch.float32, device=device)
        self._stop_ids_BE = torch.full((batch, sizes.num_stop_ids), -1, **types)
        self._tables_BM = torch.zeros(batch, sizes.table_width, **types)
        self._drafts: dict[int, Tensor] = {}
        num_nodes = sizes.trees.max_nodes if sizes.trees else 1
        self._nodes_BX = torch.zeros(batch, sizes.node_fields * num_nodes, **types)
        self._text_BL: Tensor | None = None
        self._copy_scratch: CopyScratch | None = None
        if sizes.has_copies or sizes.lookup:
            shape = batch, sizes.max_model_len
            self._text_BL = torch.zeros(shape, dtype=torch.int32, device=device)
            num_rows = min(SEARCHED_ROWS, num_nodes + 1)
            self._copy_scratch = CopyScratch.allocate(batch, num_nodes, num_rows, device)
        self._outputs: tuple[Tensor, ...] = ()
        self._rates_K: Tensor | None = None
        if (rates := sizes.synthetic_rates) is not None:
            self._rates_K = torch.tensor(rates, dtype=torch.float32, device=device)

    @property
    def trees(self) -> CandidateTrees | None:
        """Return the shape of the drafted trees; None if drafts are chains."""
        return self.sizes.trees

    def rows(self, num_seqs: int, k: int) -> DecodeRows:
        """Return the first B rows, for steps of K drafts."""
        ints = dict(zip(_INTS, self._ints_FB[:, :num_seqs], strict=True))
        floats = dict(zip(_FLOATS, self._floats_FB[:, :num_seqs], strict=True))
        sizes, seeds_B, rates_K = self.sizes, ints["seeds"], self._rates_K
        drawn = self.drawn if k else None
        return DecodeRows(
            state=DecodeState(*(ints[name] for name in _INTS[:5])),
            limits=DecodeLimits(
                stop_ids_BE=self._stop_ids_BE[:num_seqs],
                min_tokens_B=ints["min_tokens"],
                max_tokens_B=ints["max_tokens"],
                k_B=ints["k"],
                max_model_len=sizes.max_model_len,
                max_draft_len=sizes.max_draft_len,
            ),
            sampling=SequenceSampling(
                temperature_B=floats["temperature"],
                top_k_B=ints["top_k"],
                top_p_B=floats["top_p"],
                seeds_B=seeds_B,
                min_p_B=floats["min_p"],
            ),
            synthetic=rates_K if rates_K is None else SyntheticAcceptance(rates_K, seeds_B),
            drafts_BK=self._drafts_of(k)[:num_seqs],
            nodes_BX=self._nodes_BX[:num_seqs],
            node_fields=sizes.node_fields,
            text_BL=None if self._text_BL is None else self._text_BL[:num_seqs],
            copy_scratch=self._copy_scratch and self._copy_scratch.first(num_seqs),
            draft_probs=None if drawn is None else drawn.rows(num_seqs),
            block_tables_BM=self._tables_BM[:num_seqs],
            active_B=ints["active"],
            context_starts_B=ints["context_starts"],
            feature_slots_B=ints["feature_slots"],
            draws_chain_B=ints["draws_chain"],
            has_copies_B=ints["has_copies"],
            num_predicted_B=ints["num_predicted"],
            which_B=ints["correction"],
        )

    def _drafts_of(self, k: int) -> Tensor:
        columns = self.sizes.num_columns(k)
        if columns not in self._drafts:
            shape = self.sizes.num_seqs, columns
            self._drafts[columns] = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return self._drafts[columns]

    def _int(self, name: str) -> Tensor:
        return self._ints_FB[_INTS.index(name)]

    @torch.inference_mode()
    def switch(self, k: int) -> None:
        """Prepare the buffers for steps that verify and make up to `k` drafts."""
        before, after = self._drafts_of(self.k), self._drafts_of(k)
        both, depth = 0, self.sizes.depth(k)
        if depth and self.sizes.depth(self.k):
            both = min(before.shape[1], after.shape[1])
        if after is not before:
            after[:, :both] = before[:, :both]
        self.k = k
        self._int("num_draft_tokens").clamp_(max=both)
        torch.clamp(self._int("num_speculative_tokens"), max=depth, out=self._int("k"))

    @torch.inference_mode()
    def write(self, rows: Mapping[int, Sequence | None], vocab_size: int) -> None:
        """Write the host's state of sequences into rows; None empties a row.

        `add_blocks` writes the block tables.
        """
        values = [self._values(sequence, vocab_size) for sequence in rows.values()]
        ints, floats = [list(column) for column in zip(*values, strict=True)]
        texts = dict[int, list[int]]()
        if self._text_BL is not None:
            texts = {row: s.token_ids for row, s in rows.items() if s is not None and s.has_copies}
        longest = max(map(len, texts.values()), default=0)
        texts_NL = np.zeros((len(texts), longest), dtype=np.int32)
        for own_L, tokens in zip(texts_NL, texts.values(), strict=True):
            own_L[: len(tokens)] = tokens
        parts = host_ints(list(rows)), host_ints(ints), torch.tensor(floats, dtype=torch.float32)
        parts += host_ints(list(texts)), torch.from_numpy(texts_NL)
        rows_N, ints_NF, floats_NF, texts_N, tokens_NL = upload_together(parts, self._device)
        columns = self.sizes.num_columns(self.k)
        widths = len(_INTS), self.sizes.num_stop_ids, columns, self._nodes_BX.shape[1]
        fields_NF, stop_ids_NE, drafts_NK, nodes_NX = ints_NF.split(widths, dim=1)
        self._ints_FB[:, rows_N] = fields_NF.T
        self._stop_ids_BE[rows_N] = stop_ids_NE
        self._drafts_of(self.k)[rows_N] = drafts_NK
        self._nodes_BX[rows_N] = nodes_NX
        self._floats_FB[:, rows_N] = floats_NF.T
        self._write_drawn(rows_N, rows)
        if self._text_BL is not None and texts:
            self._text_BL[texts_N, :longest] = tokens_NL
            self._write_predictions(self._text_BL, rows)

    def _write_predictions(self, text_BL: Tensor, rows: Mapping[int, Sequence | None]) -> None:
        """Write predictions at the ends of rows; the text has overwritten what does not fit."""
        for row, sequence in rows.items():
            if sequence is not None and sequence.has_copies and sequence.prediction:
                left = min(len(sequence.prediction), self.sizes.max_model_len - len(sequence))
                if left > 0:
                    tokens_T = torch.tensor(sequence.prediction[-left:], dtype=torch.int32)
                    text_BL[row, -left:] = upload(tokens_T, self._device)

    def _write_drawn(self, rows_N: Tensor, rows: Mapping[int, Sequence | None]) -> None:
        """Write the q of the rows; of trees for sequences that draw alone: no other row has any."""
        if self.drawn is None:
            return
        if self.trees is not None:
            rows = {row: s for row, s in rows.items() if s is not None and s.draws_chain}
            rows_N = upload_ints(list(rows), self._device) if rows else rows_N
        if rows:
            self.drawn.write(rows_N, rows)

    def _values(self, sequence: Sequence | None, vocab_size: int) -> tuple[list[int], list[float]]:
        """Return a row's integers (fields, stop ids, drafts, nodes) and its other numbers."""
        num_stop_ids, fields_of_node = self.sizes.num_stop_ids, self.sizes.node_fields
        num_nodes = self._nodes_BX.shape[1] // fields_of_node
        columns, depth = (f(self.k) for f in (self.sizes.num_columns, self.sizes.depth))
        if sequence is None:
            empty = [0] * len(_INTS) + [-1] * num_stop_ids
            empty += [0] * (columns + fields_of_node * num_nodes)
            return empty, [0.0] * len(_FLOATS)
        params, ring = sequence.params, sequence.pending_features
        drafts = sequence.drafts[: columns if depth else 0]
        parents = sequence.draft_parents
        if parents is None and self.sizes.trees is not None:
            parents = list(range(len(drafts)))
        parents = (parents or [])[: len(drafts)]
        scores = (sequence.draft_scores or [])[: len(drafts)]
        stop_ids = sorted(sequence.stop_token_ids)
        fields = {
            "last_tokens": sequence.token_ids[-1],
            "first_positions": len(sequence) - 1,
            "num_outputs": sequence.num_output_tokens,
            "num_draft_tokens": len(drafts),
            "finish": 0,
            "min_tokens": params.min_tokens,
            "max_tokens": params.max_tokens,
            "num_speculative_tokens": sequence.num_speculative_tokens,
            "k": min(sequence.num_speculative_tokens, depth),
            "top_k": min(params.top_k, vocab_size),
            "seeds": sequence.seed,
            "active": 1,
            "context_starts": sequence.drafter_start,
            "feature_slots": NO_SLOT if ring is None else ring.slot,
            "draws_chain": int(sequence.draws_chain),
            "has_copies": int(sequence.has_copies),
            "num_predicted": len(sequence.prediction),
            "correction": sequence.correction,
        }
        ints = [fields[name] for name in _INTS]
        ints += stop_ids + [-1] * (num_stop_ids - len(stop_ids))
        ints += drafts + [0] * (columns - len(drafts))
        ints += parents + [0] * (num_nodes - len(parents))
        ints += [round(max(score, MIN_SCORE) / SCORE_UNIT) for score in scores]
        ints += [0] * (num_nodes - len(scores))
        if self.sizes.has_copies:
            worths = (sequence.draft_worths or [1.0] * len(drafts))[: len(drafts)]
            cells = (sequence.draft_cells or [NO_COPY] * len(drafts))[: len(drafts)]
            ints += [round(worth / SCORE_UNIT) for worth in worths]
            ints += [0] * (num_nodes - len(worths))
            ints += cells + [NO_COPY] * (num_nodes - len(cells))
        return ints, [getattr(params, name) for name in _FLOATS]

    @torch.inference_mode()
    def add_blocks(self, entries: SequenceOf[tuple[int, int, int]]) -> None:
        """Write (row, index, block) into the tables."""
        rows_N, indices_N, blocks_N = upload_ints(entries, self._device).unbind(1)
        self._tables_BM[rows_N, indices_N] = blocks_N

    @torch.inference_mode()
    def move(self, moves: Mapping[int, int], *, draws: bool = True) -> None:
        """Copy rows to others, from: to; the old row stays unchanged.

        Args:
            draws: whether drafts of some of these rows may be drawn.
        """
        from_N, to_N = upload_ints(list(moves.items()), self._device).unbind(1)
        for fields_FB in (self._ints_FB, self._floats_FB):
            fields_FB[:, to_N] = fields_FB[:, from_N]
        drafts_BK = self._drafts_of(self.k)
        for rows_BX in (self._stop_ids_BE, self._tables_BM, drafts_BK, self._nodes_BX):
            rows_BX[to_N] = rows_BX[from_N]
        if self._text_BL is not None:
            self._text_BL[to_N] = self._text_BL[from_N]
        if self.drawn is not None and draws:
            self.drawn.move(from_N, to_N)

    def copy_outputs(self, outputs: SequenceOf[Tensor]) -> list[Tensor]:
        """Copy a pass's outputs, T rows each, into the buffers that other parts of the step read.

        Return the copies. The buffers get their widths and types from the first pass.
        """
        if not self._outputs:
            most = self.sizes.num_rows
            self._outputs = tuple(output.new_zeros(most, output.shape[1]) for output in outputs)
        kept = [buffer[: len(outputs[0])] for buffer in self._outputs]
        for buffer, output in zip(kept, outputs, strict=True):
            buffer.copy_(output)
        return kept


class DecodeStep:
    """The parts of a step over the first rows of the buffers, in their order.

    `run_target`, `find_own_tokens`, `verify`, `draft`: each can be captured, unless rules of
    requests change the target's own tokens. A pass over more rows can replace `run_target` if it
    runs between the two halves `build_batch` and `set_outputs`.

    Args:
        target: the target, its KV caches set.
        proposer: the head with its KV caches; None decodes plainly, or by prompt lookup.
        num_seqs, k: B and K; K is 0 without a head.
        num_rows: T, at least B * J. Trees share all rows but those of the newest tokens.
        kept_SCA: `FeatureRings.rows_SCA`, which takes the features for a head that reads them
            later; None keeps none. With rings there is no drafter, and one row a sequence.

    Attributes:
        rows: state of the sequences.
        lookup: looks drafts up; None with a head, and without drafts.
        trees: the trees of the step; None if drafts are chains.
        out: the result of the last step.
        report_RX: that result in one tensor for the host, see `kernels.drafts.step_state_triton`.
        max_accepted, max_drafts: most accepted drafts of a sequence, and most drafts.
    """

    def __init__(
        self,
        target: TargetModel,
        proposer: HeadProposer | None,
        buffers: DecodeBuffers,
        num_seqs: int,
        k: int,
        num_rows: int,
        *,
        kept_SCA: Tensor | None = None,
    ) -> None:
        device = target.device
        self.target = target
        self.buffers = buffers
        self.rows = own = buffers.rows(num_seqs, k)
        self.k = k
        self.kept_SCA = kept_SCA
        self._proposer = proposer
        found = buffers.sizes.lookup
        self.lookup = None if found is None else DecodeLookup(own, found)
        self._passes = target_passes(target, TritonAttention())
        self.max_accepted = self.max_drafts = own.drafts_BK.shape[1]
        self.batch = TargetBatch.allocate(num_seqs, num_rows, device)
        self.scratch = VerifyScratch.allocate(num_rows, target.vocab_size, device)
        self.running_B = torch.zeros_like(own.active_B)
        self._num_drafted_B = torch.zeros_like(own.active_B)
        self._times = torch.zeros(NUM_STAMPS, dtype=torch.int64, device=device)
        self.hidden_TH = self._features_TA = torch.empty(0)
        self.trees, width = None, 4 + 2 * self.max_drafts
        shape = None if proposer is None else proposer.trees
        if shape is not None:
            self.max_accepted = buffers.sizes.max_path
            width = 4 + self.max_accepted + (1 + own.node_fields) * self.max_drafts
        self.out = DecodeResult.allocate(num_seqs, self.max_accepted, device)
        if proposer is not None and shape is not None:
            self.trees = DecodeTrees(
                shape,
                self.batch,
                own,
                self.running_B,
                self.out.num_accepted_B,
                self.target,
                proposer,
                depth=self.max_accepted,
                max_model_len=buffers.sizes.max_model_len,
            )
        self.report_RX = torch.zeros(num_seqs + 1, width, dtype=torch.int64, device=device)
        if proposer is not None:
            self._draft = CapturedDraft(self, proposer)

    @torch.inference_mode()
    def run_target(self) -> None:
        """Run the target over the newest tokens and the drafts."""
        self.build_batch()
        num_rows = len(self.batch.tokens_R)
        self.set_outputs(
            self._passes(
                self.batch,
                self.rows.block_tables_BM,
                max_query_len=min(1 + self.max_drafts, num_rows) if self.k else 1,
                max_seq_len=self.buffers.sizes.max_model_len,
                visible_R=None if self.trees is None else self.trees.visible_T,
            )
        )

    @torch.inference_mode()
    def build_batch(self) -> None:
        """Make the batch of the newest tokens and the drafts."""
        own, batch, sizes = self.rows, self.batch, self.buffers.sizes
        state = own.state
        if self.lookup is not None:
            state.num_draft_tokens_B.clamp_(max=self.k)
        begin_step(own.active_B, state, self.running_B, self._num_drafted_B, self._times)
        if self.trees is not None:
            self.trees.allocate_nodes()
            self._num_drafted_B.copy_(state.num_draft_tokens_B)
        build_target_batch(
            state.last_tokens_B,
            own.drafts_BK,
            state.num_draft_tokens_B,
            state.first_positions_B,
            own.block_tables_BM,
            self.running_B,
            batch,
            block_size=sizes.block_size,
            max_model_len=sizes.max_model_len,
        )
        if self.trees is not None:
            self.trees.place_rows()

    @torch.inference_mode()
    def set_outputs(self, outputs: SequenceOf[Tensor]) -> None:
        """Keep the target's outputs of the batch: hidden states and features, T rows each."""
        self.hidden_TH, self._features_TA = self.buffers.copy_outputs(outputs)
        if self.kept_SCA is not None:
            self._put_features(self._features_TA, self.kept_SCA)
        stamp(self._times, Stamp.TARGET_DONE)

    def _put_features(self, features_TA: Tensor, kept_SCA: Tensor) -> None:
        """Put features into the sequences' rings; padding goes to the last ring."""
        batch, capacity = self.batch, kept_SCA.shape[1]
        slots_T = self.rows.feature_slots_B[batch.sequences_R]
        slots_T = slots_T.masked_fill(batch.sequences_R < 0, NO_SLOT)
        kept_SCA[slots_T, batch.positions_R % capacity] = features_TA

    @property
    def may_draw(self) -> bool:
        """Return whether drafts may be drawn; without trees those of all sequences are then."""
        return self.rows.draft_probs is not None

    @torch.inference_mode()
    def find_own_tokens(
        self, *, greedy: bool, draws: bool, rules: DecodeRules | None = None
    ) -> None:
        """Find the target's own token of each row: the argmax, or also draws.

        Args:
            draws: whether some drafts were drawn: this also rejects these. Not with `greedy`.
            rules: replace the tokens of requests with rules, which cannot be captured; None if no
                request has any.
        """
        assert not (greedy and draws), "only draws leave what the rejection reads"
        logits_TV = self.target.compute_logits(self.hidden_TH)
        own_tokens(
            logits_TV,
            self.batch.sequences_R,
            self.batch.query_start_loc,
            None if greedy else self.rows.sampling,
            self.rows.state.num_outputs_B,
            self.scratch,
            offsets_R=None if self.trees is None else self.trees.depths_T,
        )
        if draws:
            self._reject(logits_TV, self.batch.query_start_loc, self.running_B, self.scratch)
        if rules is not None:
            self._apply(rules, logits_TV, draws=draws)

    def _reject(
        self, logits_RV: Tensor, start_loc: Tensor, active_B: Tensor, scratch: VerifyScratch
    ) -> None:
        """Count the drawn drafts that pass, and replace the own token behind them."""
        own, state = self.rows, self.rows.state
        assert own.draft_probs is not None, "drafts are drawn"
        if self.trees is not None:
            state = replace(state, num_draft_tokens_B=self.trees.num_drawn())
        reject_drafts(
            logits_RV,
            start_loc,
            own.drafts_BK,
            active_B,
            state,
            scratch,
            self.out.num_accepted_B,
            sampling=own.sampling,
            draft_probs=own.draft_probs,
            replaces=own.synthetic is None,
        )

    @torch.inference_mode()
    def sit_out(self, rows: list[int]) -> None:
        """Leave rows unchanged in this step, but drop their drafts."""
        self.running_B[upload_ints(rows, self.running_B.device)] = 0

    def _apply(self, rules: DecodeRules, logits_TV: Tensor, *, draws: bool) -> None:
        own = self.rows
        rules.apply(
            logits_TV,
            self.batch.query_start_loc,
            own.drafts_BK,
            own.state,
            own.sampling,
            self.running_B,
            self.scratch.tokens_R,
            paths_of=None if self.trees is None else self.trees.paths_of,
            reject=self._reject if draws else None,
        )
        if own.synthetic is not None:
            rules.drop_refused(own.state)

    def logprobs(self, rules: DecodeRules) -> PendingLogprobs | None:
        """Pass the emitted tokens to the rules; return the requested log-probabilities of them."""
        rows_X = None if self.trees is None else self.trees.rows_X
        return rules.after(self.out, self.batch.query_start_loc, rows_X)

    @torch.inference_mode()
    def verify(self, *, draws: bool) -> None:
        """Verify the drafts, advance the state, report.

        Args:
            draws: as for `find_own_tokens`.
        """
        own, trees, drafts_BK = self.rows, self.trees, self.rows.drafts_BK
        if trees is not None:
            trees.descend(self.scratch.tokens_R, draws=draws)
            drafts_BK = trees.path_BD
        match_drafts(
            self.scratch.tokens_R,
            self.batch.query_start_loc,
            drafts_BK,
            self.running_B,
            own.state,
            own.limits,
            self.out,
            synthetic=own.synthetic,
            given=draws or trees is not None,
        )
        if own.text_BL is not None:
            append_emitted(own.text_BL, own.state.first_positions_B, self.out.emitted_BJ)
        self._report(Stamp.VERIFIED)

    @torch.inference_mode()
    def draft(self, *, draws: bool) -> None:
        """Draft for the next step, and report again.

        Args:
            draws: whether some sequences draw drafts.
        """
        stamp(self._times, Stamp.DRAFTING)
        if self.lookup is not None:
            self.lookup.draft()
        else:
            assert self._proposer is not None, "K is above 0"
            self._draft.draws = draws
            self._proposer.draft(self._draft, self._features_TA)
        self._report(Stamp.DRAFTED)

    def _report(self, at: Stamp) -> None:
        own = self.rows
        report_step(
            self._num_drafted_B,
            self.out,
            own.state,
            own.drafts_BK,
            self._times,
            self.report_RX,
            None if self.trees is None else own.nodes_BX,
            at=at,
        )


class CapturedDraft:
    """A `DraftExecutor` over the rows of a step, all of one size.

    It makes argmax drafts, drawn ones, or trees, of which drawn chains may lead some.

    Attributes:
        draws: whether some sequences draw drafts.
    """

    def __init__(self, step: DecodeStep, proposer: HeadProposer) -> None:
        drafter, device = proposer.drafter, step.running_B.device
        config, num_seqs, sizes = drafter.config, len(step.running_B), step.buffers.sizes
        self.k = k = sizes.depth(step.k)
        self._max_query_len = 1
        self._drafter, self._step, self._sizes = drafter, step, sizes
        self._passes = Passes(proposer.passes.run, TritonAttention())
        of_step = num_seqs, len(step.batch.tokens_R), step.max_accepted
        num_slots = count_draft_slots(*of_step, k - 1 if config.is_parallel else 0)
        self._max_slots = min(step.max_accepted + k, num_slots)
        self._batch = DraftBatch.allocate(num_seqs, num_slots, k, device)
        self._num_mask_slots_B = step.out.num_mask_slots_B
        self._h_shared_D = torch.zeros_like(drafter.norm.weight)
        if config.is_parallel:
            self._h_shared_D = proposer.h_shared_1D.squeeze(0)
        else:
            self._num_mask_slots_B = torch.zeros_like(self._num_mask_slots_B)
            self._chain = ChainBuffers.allocate(num_seqs, k, device)
            self._beams: BeamPlan | None = None
        self._hidden_SD = self._h_shared_D.new_zeros(num_slots, config.hidden_size)
        all_at_once = config.is_parallel and drafter.correction is None
        columns, vocab_size = sizes.num_drawn(step.k) if all_at_once else 1, config.draft_vocab_size
        self.draws = step.may_draw
        self._chain_BK = step.rows.drafts_BK
        self._walk: WalkScratch | None = None
        has_choice = drafter.correction is not None and drafter.correction.has_choice
        self._which_B = step.rows.which_B if has_choice else None
        if proposer.trees is not None:
            if config.is_parallel:
                self._growth = TreeGrowth(drafter, proposer.trees, num_seqs, k, device)
            else:
                self._beam_growth = BeamGrowth(drafter, proposer.trees, num_seqs, k, device)
            chain = num_seqs, sizes.num_drawn(step.k)
            self._chain_BK = torch.zeros(chain, dtype=torch.int64, device=device)
        if step.may_draw:
            self._draws = DrawScratch.allocate(num_seqs, columns, vocab_size, device)
        elif proposer.trees is None:
            if drafter.correction is not None:
                self._walk = WalkScratch.allocate(num_seqs, drafter.correction.weights)
            else:
                self._choices = ChoiceScratch.allocate(num_seqs * columns, vocab_size, device)
        drafter.reserve_positions(sizes.max_model_len + step.max_accepted + k)

    def first_batch(self) -> DraftBatch:
        step, batch, sizes = self._step, self._batch, self._sizes
        target, tables_BM = step.batch, step.rows.block_tables_BM
        ends = {"block_size": sizes.block_size, "max_model_len": sizes.max_model_len}
        expand_draft_batch(
            target.tokens_R,
            target.positions_R,
            target.query_start_loc,
            step.out.num_accepted_B,
            step.out.next_tokens_B,
            tables_BM,
            step.running_B,
            batch,
            num_mask_slots_B=self._num_mask_slots_B,
            num_draft_tokens_B=step.rows.state.num_draft_tokens_B,
            mask_token_id=self._drafter.config.mask_token_id or 0,
            **ends,
        )
        if step.trees is not None:
            batch.feature_rows_R.copy_(step.trees.rows_X[batch.feature_rows_R])
        self._max_query_len = self._max_slots
        if self._drafter.config.is_parallel:
            return batch
        if step.trees is not None:
            step.trees.limit_depths()
        else:
            place = batch.last_ntp_B, batch.positions_R, tables_BM
            plan_chain(*place, step.running_B, self._chain, **ends)
        return batch

    def gather(self, features_TD: Tensor, batch: DraftBatch) -> Tensor:
        gather_features(features_TD, self._h_shared_D, batch.feature_rows_R, self._hidden_SD)
        return self._hidden_SD

    def next_batch(self, column: int) -> PackedBatch:
        self._max_query_len = 1
        return self._chain.batch(column - 1, self._step.rows.drafts_BK[:, column - 1])

    def beam_batch(self, column: int, tokens_BW: Tensor) -> PackedBatch:
        step, width = self._step, tokens_BW.shape[1]
        if column == 1:
            self._beams = BeamPlan.of(
                self._batch.positions_R[self._batch.last_ntp_B],
                step.rows.block_tables_BM,
                num_passes=self.k - 1,
                beam=width,
                block_size=self._sizes.block_size,
                max_model_len=self._sizes.max_model_len,
                running_B=step.running_B,
            )
        assert self._beams is not None, "passes begin at depth 1"
        self._max_query_len = width
        return self._beams.batch(column - 1, tokens_BW)

    def run(
        self,
        batch: PackedBatch,
        hidden_SD: Tensor,
        visible_R: Tensor | None = None,
        rows_before: int = 0,
    ) -> Tensor:
        own = self._step.rows
        (done_SD,) = self._passes(
            batch,
            own.block_tables_BM,
            hidden_SD,
            max_query_len=self._max_query_len,
            max_seq_len=self._sizes.max_model_len,
            context_starts_B=own.context_starts_B,
            visible_R=visible_R,
            rows_before=rows_before,
        )
        return done_SD

    def beam_trees(self, beam: int, max_nodes: int) -> GrowingTrees:
        return self._beam_growth

    def allow(self, logits_NJV: Tensor, beam: Beam | None) -> Tensor:
        return logits_NJV  # grammars run between the graphs: verification applies them

    def set_trees(self, trees: GrowingTrees) -> None:
        assert self._step.trees is not None, "the head drafts chains"
        depths_B = self._step.rows.state.num_draft_tokens_B
        tokens_BN, parents_BN, scores_BN = trees.best(depths_B)
        tokens_BN = self._drafter.to_target_ids(tokens_BN)
        self._step.trees.write_trees(tokens_BN, parents_BN, scores_BN)

    def choose(self, hidden_NJD: Tensor, first: int) -> None:
        drafter, num_columns = self._drafter, hidden_NJD.shape[1]
        logits_RV = drafter.compute_logits(hidden_NJD.flatten(0, 1))
        correction, states_NJW = drafter.correction, None
        logits_NJV = logits_RV.unflatten(0, (-1, num_columns))
        if correction is not None:
            states_NJW = correction.start(drafter.normed(hidden_NJD), self._which_B)
        if (trees := self._step.trees) is not None:
            depths_N = self._step.rows.state.num_draft_tokens_B
            grown = self._growth(logits_NJV, states_NJW, depths_N, self._which_B)
            if self.draws:
                self._choose_chains(logits_NJV[:, : self._chain_BK.shape[1]], states_NJW, first)
            trees.write_trees(*grown, self._chain_BK if self.draws else None)
        else:
            self._choose_chains(logits_NJV, states_NJW, first)

    def _choose_chains(self, logits_NJV: Tensor, states_NJW: Tensor | None, first: int) -> None:
        """Choose chains; the correction changes the logits in place."""
        correction, num_columns = self._drafter.correction, logits_NJV.shape[1]
        if correction is None or states_NJW is None:
            self._put(logits_NJV.flatten(0, 1), slice(first, first + num_columns))
            return
        if self._walk is not None:
            out_NJ = self._chain_BK[:, first : first + num_columns]
            given = logits_NJV, states_NJW, self._drafter.d2t
            walk_chains(*given, correction.weights, self._walk, out_NJ, self._which_B)
            return
        for j in range(num_columns):
            if j:
                tokens_N = self._chain_BK[:, first + j - 1]
                slot = logits_NJV[:, j], states_NJW[:, j], tokens_N
                correct_logits(*slot, correction.weights, self._which_B)
            self._put(logits_NJV[:, j], slice(first + j, first + j + 1))

    def _put(self, logits_RV: Tensor, columns: slice) -> None:
        """Choose the drafts of some columns from their logits."""
        own, d2t = self._step.rows, self._drafter.d2t
        drafts_BJ = self._chain_BK[:, columns]
        if own.draft_probs is None:
            choose_drafts(logits_RV, d2t, self._choices, drafts_BJ)
            return
        draw_drafts(
            logits_RV,
            d2t,
            own.sampling,
            own.state.num_outputs_B,
            self._draws,
            drafts_BJ,
            own.draft_probs.probs_BKD[:, columns],
            first=columns.start,
        )
