"""The drafts of a head that serving will accept, simulated on responses of the target.

The simulation needs two figures of an element (anchor, depth): `chance`, the probability that the
target accepts its draft, and `follows`, whether the response continues with that draft. Only if it
does is the next element of the chain judged in a context that serving would reach. So

- a chain continues while its drafts follow, and serving's next draft starts at its end: the walk;
- conditional acceptance at position i is the mean chance over the drafts of the walk whose first
  i - 1 tokens follow; unconditional acceptance is the product of the conditional ones down to i.

Greedy: chance and follows are both "the draft is the target's most likely token", and the figures
are counts. They are what serving gives if the response is the greedy one.

At a temperature T: drafts are argmax tokens, which verification accepts with p_T(draft) (their own
distribution is one-hot), over the target's whole vocabulary; the draft follows if it is the
response's token. If the response was drawn from the target at T, the event "draft = token" has
probability p_T(draft) and leaves the very context that an accepted draft leaves: the walk visits
contexts as often as serving does, and the figures are serving's, unbiased. Taking the chance rather
than the event at the last draft of a chain only removes noise, and no random number is needed. If
the response is from another temperature, chances are still exact in their contexts, but these are
visited as the response's temperature would: the figures then tend to lie between the figures of the
two temperatures.

Chains that the response's end cuts short are left out: their length is unknown. Each answer of a
conversation in one row is walked by itself.

Shapes: B rows, N positions, M elements, K depths, D drafts of a walk.
"""

import torch
from torch import Tensor


class AnchorAcceptance:
    """Greedy acceptance over all anchors, pooled over batches; nothing waits for the device.

    Because COD keeps random anchors and whole chains, sampled elements estimate all of them.
    Serving accepts less: it spends most of its steps where little is accepted.

    Args:
        num_depths: K_train.
        device: device of the tensors that are added.

    Attributes:
        counters: float64 [3, K], elements, matches, and elements whose chain matches down to them;
            a sum pools the counters of several processes.
    """

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.num_depths = num_depths
        self.counters = torch.zeros(3, num_depths, dtype=torch.float64, device=device)

    def add(
        self, row_M: Tensor, anchor_M: Tensor, depth_M: Tensor, match_M: Tensor, shape: torch.Size
    ) -> None:
        """Pool elements; a chain's elements come in the same call. `shape` is (B, N)."""
        grid_BNK = match_M.new_zeros((*shape, self.num_depths), dtype=torch.int32)
        grid_BNK[row_M, anchor_M, depth_M] = match_M.int()
        accepted_M = grid_BNK.cumprod(-1)[row_M, anchor_M, depth_M]
        values_3M = torch.stack((torch.ones_like(accepted_M), match_M, accepted_M)).double()
        self.counters.index_add_(1, depth_M, values_3M)

    def accuracy(self) -> list[float]:
        """P(the draft at depth d matches), regardless of the drafts before it."""
        count_K, matched_K, _ = self.counters
        return (matched_K / count_K.clamp_min(1)).tolist()

    def unconditional(self) -> list[float]:
        """P(the drafts at depths 0 to d all match)."""
        count_K, _, accepted_K = self.counters
        return (accepted_K / count_K.clamp_min(1)).tolist()

    def acceptance_length(self, k: int) -> float:
        """1 + the sum of the first k unconditional acceptances."""
        return 1 + sum(self.unconditional()[:k])


class ServedAcceptance:
    """Acceptance along the walk that serving takes through each response, for every K.

    Args:
        num_depths: K_train, the largest K.

    Attributes:
        counters: float64 [K_train, 2, K_train] on the CPU; for every K, of the drafts that serving
            makes: how many reach position i, and the sum of their chances there. A sum pools the
            counters of several processes.
    """

    def __init__(self, num_depths: int) -> None:
        self.num_depths = num_depths
        self.counters = torch.zeros(num_depths, 2, num_depths, dtype=torch.float64)

    def add(
        self,
        row_M: Tensor,
        anchor_M: Tensor,
        depth_M: Tensor,
        follows_M: Tensor,
        chance_M: Tensor,
        shape: torch.Size,
    ) -> None:
        """Pool rows of one sequence each; every element of them comes in the same call.

        `follows_M` says that the chain continues after an element, `chance_M` in [0, 1] how likely
        the target accepts its draft; `shape` is (B, N).
        """
        at, full = (row_M, anchor_M, depth_M), (*shape, self.num_depths)
        # Chances lie in [0, 1]: -1 marks where there is no element.
        chance_BNK = torch.full(full, -1.0, dtype=torch.float64, device=row_M.device)
        chance_BNK[at] = chance_M.double()
        follows_BNK = torch.zeros(full, dtype=torch.int64, device=row_M.device)
        follows_BNK[at] = follows_M.long()
        chance_BNK = chance_BNK.cpu()
        lengths_BN = follows_BNK.cumprod(-1).sum(-1).cpu()
        lengths_BN[(chance_BNK < 0).any(-1)] = -1
        chains = lengths_BN.tolist()
        for k in range(1, self.num_depths + 1):
            walks = [_walk(lengths, k) for lengths in chains]
            rows_D = torch.tensor([row for row, walk in enumerate(walks) for _ in walk])
            drafts = rows_D.long(), torch.tensor([a for walk in walks for a in walk]).long()
            reached_Dk = lengths_BN[drafts].unsqueeze(1) >= torch.arange(k)
            self.counters[k - 1, 0, :k] += reached_Dk.sum(0)
            self.counters[k - 1, 1, :k] += (chance_BNK[drafts][:, :k] * reached_Dk).sum(0)

    def num_drafts(self, k: int) -> int:
        """Return the number of drafts that serving makes at K = k."""
        return round(float(self.counters[k - 1, 0, 0]))

    def conditional(self, k: int) -> list[float | None]:
        """Return P(position i accepted | all before accepted); None where no draft got that far."""
        reached, accepted = self.counters[k - 1, :, :k].tolist()
        return [a / r if r else None for r, a in zip(reached, accepted, strict=True)]

    def unconditional(self, k: int) -> list[float]:
        """P(positions 1 to i all accepted)."""
        values, product = [], 1.0
        for chance in self.conditional(k):
            product *= chance or 0.0
            values.append(product)
        return values

    def acceptance_length(self, k: int) -> float:
        """1 + accepted draft tokens / drafts."""
        return 1 + sum(self.unconditional(k))

    def acceptance_lengths(self) -> list[float]:
        """Return the acceptance lengths at K = 1, 2, ... K_train."""
        return [self.acceptance_length(k) for k in range(1, self.num_depths + 1)]


def _walk(lengths: list[int], k: int) -> list[int]:
    """Return the anchors of the drafts at K = k: each starts behind the last one's accepted tokens.

    `lengths` are the lengths of every anchor's chain, -1 where one is not known in full: such
    anchors stand between two answers, more of them than a step can pass over.
    """
    anchors = []
    anchor = 0
    while anchor < len(lengths):
        if lengths[anchor] < 0:  # on to the next answer, whose first chains are whole
            anchor += 1
            continue
        anchors.append(anchor)
        anchor += min(lengths[anchor], k) + 1
    return anchors
