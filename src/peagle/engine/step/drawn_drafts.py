"""The distributions q of the drawn drafts of captured steps, a row a sequence.

A step draws drafts and the next one verifies them by their q, so q stays on the device between
them. Outside captured steps a sequence holds the q of its drafts (`Sequence.draft_probs_KV`): it
brings q along when it joins the captured steps, and takes q away when it leaves.

Shapes: B rows of a step, N of them, K most drafts, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from peagle.engine.sequence import Sequence
from peagle.kernels.sampling.rejection_triton import DraftProbs
from peagle.models.drafter import Drafter


class DrawnDrafts:
    """q of every row, float32 like the draws, in the draft vocabulary.

    Args:
        num_seqs, k: rows of the largest step, and the most drafts of a sequence that are drawn.
    """

    def __init__(self, drafter: Drafter, num_seqs: int, k: int) -> None:
        target_ids_D = drafter.target_ids()
        device, num_ids = target_ids_D.device, len(target_ids_D)
        self._probs_BKD = torch.zeros(num_seqs, k, num_ids, device=device)
        self._target_ids_D = target_ids_D
        self._vocab_size = drafter.config.vocab_size
        self._index_V: Tensor | None = None
        if drafter.config.is_pruned:
            index_V = torch.full((self._vocab_size,), -1, dtype=torch.int32, device=device)
            index_V[target_ids_D] = torch.arange(num_ids, dtype=torch.int32, device=device)
            self._index_V = index_V

    def rows(self, num_seqs: int) -> DraftProbs:
        """Return q of the first rows; steps of fewer drafts use its first columns."""
        return DraftProbs(self._probs_BKD[:num_seqs], self._index_V)

    def write(self, rows_N: Tensor, sequences: Mapping[int, Sequence | None]) -> None:
        """Put the q of sequences into their rows, 0 for drafts that were not drawn.

        Args:
            rows_N: the rows, on the device.
            sequences: by row; None empties a row.
        """
        self._probs_BKD[rows_N] = 0
        for row, sequence in sequences.items():
            if sequence is not None and (probs_KV := sequence.draft_probs_KV) is not None:
                probs_KD = probs_KV[: self._probs_BKD.shape[1], self._target_ids_D]
                self._probs_BKD[row, : len(probs_KD)] = probs_KD

    def move(self, from_N: Tensor, to_N: Tensor) -> None:
        """Copy q from rows to others."""
        self._probs_BKD[to_N] = self._probs_BKD[from_N]

    @torch.inference_mode()
    def read(self, row: int) -> Tensor:
        """Return the q of a row in the target vocabulary, [K, V]."""
        probs_KD = self._probs_BKD[row]
        probs_KV = probs_KD.new_zeros(len(probs_KD), self._vocab_size)
        return probs_KV.index_copy_(1, self._target_ids_D, probs_KD)
