"""Embedding and lm_head of a frozen target, for training from stored features.

Shapes: N rows, H target width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from peagle.config import require_folder
from peagle.errors import CheckpointError
from peagle.models.architectures import capped, check_architecture, final_softcap
from peagle.models.stored_tensors import StoredTensors
from peagle.models.target_facts import TargetFacts, load_config, model_skeleton, refuse_pickles

_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TargetEnds(TargetFacts):
    """lm_head, embedding rows and facts of a target, as `TargetModel` has them.

    Attributes:
        dtype, device: type and device of lm_head and of every tensor that is read.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        lm_head: tuple[Tensor, Tensor | None],
        embedding: Tensor | _Stored,
    ) -> None:
        self.name = name
        self.text_config = config.get_text_config()
        self._weight_VH, self._bias_V = lm_head
        self.dtype: torch.dtype = self._weight_VH.dtype
        self.device: torch.device = self._weight_VH.device
        self._embedding = embedding
        self._softcap = final_softcap(config)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> TargetEnds:
        """Read lm_head from a folder in Hugging Face format, and only headers of the other tensors.

        A checkpoint with quantised layers will do as long as its ends are stored plainly.

        Args:
            path: the folder.
            dtype: type of the weights; None keeps the stored one.
            device: where they go.

        Raises:
            UserError: the folder is not there.
            CheckpointError: it is not a causal LM that peagle supports, or its ends are missing,
                misshapen, quantised or broken.
        """
        folder = require_folder(path, "The target model")
        config = load_config(folder)
        check_architecture(config)
        refuse_pickles(folder)
        skeleton = model_skeleton(folder, config)
        files = _Checkpoint(folder, config, dtype or getattr(config, "dtype", None), device)
        weight, bias, embedding = _read_ends(skeleton, files)
        return cls(str(path), config, (weight, bias), embedding)

    def compute_logits(self, hidden_NH: Tensor) -> Tensor:
        """Compute the logits [N, V] of final hidden states, which may be of another type."""
        return self._logits(hidden_NH, self._weight_VH, self._bias_V)

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """Make a function that computes the logits of some tokens, from a copy of their rows.

        Args:
            token_ids: int64 [n]; the function gives [N, n] in this order.
        """
        weight_nH = self._weight_VH[token_ids]
        bias_n = None if self._bias_V is None else self._bias_V[token_ids]
        return lambda hidden_NH: self._logits(hidden_NH, weight_nH, bias_n)

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return capped(F.linear(hidden.to(self.dtype), weight, bias), self._softcap)

    def lm_head_weight(self) -> Tensor:
        """Return the output embedding, [V, H]."""
        return self._weight_VH

    def embedding_weight(self) -> Tensor:
        """Return the input embedding, [V, H], read at each call, since one caller needs it once."""
        stored = self._embedding
        return stored.read() if isinstance(stored, _Stored) else stored


# ---- the model's structure ----


def _read_ends(
    skeleton: transformers.PreTrainedModel, files: _Checkpoint
) -> tuple[Tensor, Tensor | None, Tensor | _Stored]:
    """Read lm_head's weight and bias; return the embedding too, or the file that stores it.

    As transformers does it: tied weights that are both stored and differ are not tied, and of tied
    weights either may be stored alone.
    """
    lm_head, embedding = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    if type(lm_head) is not nn.Linear:
        raise CheckpointError(
            f"The target model {str(files.folder)!r} ends in {type(lm_head).__name__}; only a "
            "linear lm_head can be read without the layers. Train with the layers loaded."
        )
    names = {id(module): name for name, module in skeleton.named_modules()}
    head_name, embedding_name = (f"{names[id(m)]}.weight" for m in (lm_head, embedding))
    bias = None
    if lm_head.bias is not None:
        bias = files.get(f"{names[id(lm_head)]}.bias", lm_head.bias.shape).read()
    shape = lm_head.weight.shape
    if head_name not in skeleton.get_expanded_tied_weights_keys(all_submodels=True):
        return files.get(head_name, shape).read(), bias, files.get(embedding_name, shape)
    head, stored = (files.find(name, shape) for name in (head_name, embedding_name))
    if head is None or stored is None:
        weight = (head or stored or files.get(embedding_name, shape)).read()
        return weight, bias, weight
    weight = head.read()
    return weight, bias, weight if torch.equal(weight, stored.read()) else stored


# ---- the checkpoint ----


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a checkpoint, and its type when it is read."""

    tensors: StoredTensors
    name: str
    dtype: torch.dtype | None

    def read(self) -> Tensor:
        tensor = self.tensors.read(self.name)
        assert tensor is not None
        return tensor.to(self.dtype)


class _Checkpoint:
    """The plain tensors of a folder under the names of the model.

    Raises:
        CheckpointError: there are none, or an index that is not readable.
    """

    def __init__(
        self, folder: Path, config: Any, dtype: torch.dtype | None, device: str | torch.device
    ) -> None:
        self.folder, self.dtype = folder, dtype
        self._tensors = StoredTensors(folder, torch.device(device))
        self._mapped = StoredTensors(folder, torch.device("cpu"))  # values are not read yet
        self._quantized = getattr(config, "quantization_config", None) is not None

    def get(self, name: str, shape: Sequence[int]) -> _Stored:
        """Return the tensor that a model calls `name`.

        Raises:
            CheckpointError: it is missing, misshapen or not stored plainly.
        """
        stored = self.find(name, shape)
        if stored is None:
            raise CheckpointError(
                f"The target model {str(self.folder)!r} lacks tensor {name!r}.{self._hint()}"
            )
        return stored

    def find(self, name: str, shape: Sequence[int]) -> _Stored | None:
        """Do the same, but return None where it is missing.

        Raises:
            CheckpointError: it is misshapen or not stored plainly.
        """
        key = self._tensors.find(name)
        if key is None:
            return None
        tensor = self._mapped.read(key)
        assert tensor is not None
        if tensor.dtype not in _PLAIN_DTYPES or list(tensor.shape) != list(shape):
            raise CheckpointError(
                f"{str(self._tensors.file(key))!r} has {key!r} as {tensor.dtype} of shape "
                f"{list(tensor.shape)}; expected plain floating-point numbers of shape "
                f"{list(shape)}.{self._hint()}"
            )
        return _Stored(self._tensors, key, self.dtype)

    def _hint(self) -> str:
        if self._quantized:
            return " It is quantised: use the checkpoint that it was made from."
        return " Its weights are incomplete: copy or convert them again."
