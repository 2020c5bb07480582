"""A draft head by its definition, straight from the files: no cache, no fused weights."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """One drafter slot: position id, token, hidden state."""

    position: int
    token: int
    hidden: Tensor


class ReferenceHead:
    """A head as reference/peagle.md gives it, in float64 from the files."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.w = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        self.heads: int = self.config["num_attention_heads"]
        self.head_dim: int = self.config["head_dim"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.config["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def combine(self, feature: Tensor) -> Tensor:
        """fc(norm(feature)) with whatever norm precedes fc."""
        if self.config.get("norm_before_fc"):
            feature = self.norm(feature, "input_norm")
        if self.config.get("fc_norm"):
            count = len(self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
            parts = feature.view(count, -1)
            feature = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)])
        return self.linear(feature, "fc")

    def rotate(self, x_Shd: Tensor, positions: list[int]) -> Tensor:
        """RoPE; the angles are float32 numbers, as in transformers."""
        half, rope = self.head_dim // 2, self.config["rope_parameters"]
        place_S = torch.tensor(positions, dtype=torch.float32)
        out = torch.empty_like(x_Shd)
        for i in range(half):
            exponent = torch.tensor(2 * i, dtype=torch.float32) / self.head_dim
            frequency = 1.0 / (torch.tensor(rope["rope_theta"]) ** exponent)
            if rope["rope_type"] == "llama3":
                frequency = llama3_frequency(frequency, rope)
            angle_S1 = (place_S * frequency).unsqueeze(-1)
            cos, sin = angle_S1.cos().double(), angle_S1.sin().double()
            a, b = x_Shd[..., i], x_Shd[..., i + half]
            out[..., i], out[..., i + half] = a * cos - b * sin, b * cos + a * sin
        return out

    def attention(self, x: Tensor, positions: list[int], layer: str) -> Tensor:
        """Causal attention over all slots, or over those in the window of the layer."""

        def heads(name: str) -> Tensor:
            heads = self.linear(x, f"{layer}.self_attn.{name}_proj")
            heads = heads.unflatten(-1, (-1, self.head_dim))
            norm = f"{layer}.self_attn.{name}_norm"
            return self.norm(heads, norm) if f"{norm}.weight" in self.w else heads

        query = self.rotate(heads("q"), positions) / math.sqrt(self.head_dim)
        group = self.heads // heads("k").shape[1]
        key = self.rotate(heads("k"), positions).repeat_interleave(group, dim=1)
        value = heads("v").repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,shd->hqs", query, key)
        place_S = torch.tensor(positions)
        distance_QS = place_S.unsqueeze(1) - place_S
        hidden_QS = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        kinds = self.config.get("layer_types")
        if kinds and kinds[int(layer.rpartition(".")[2])] == "sliding_attention":
            hidden_QS = hidden_QS | (distance_QS >= self.config["sliding_window"])
        weights = scores.masked_fill(hidden_QS, -math.inf).softmax(-1)
        rows = torch.einsum("hqs,shd->qhd", weights, value)
        return self.linear(rows.flatten(1), f"{layer}.self_attn.o_proj")

    def run(self, slots: list[Slot]) -> Tensor:
        """Hidden state of every slot before the final norm."""
        positions = [slot.position for slot in slots]
        hidden = torch.stack([slot.hidden for slot in slots])
        embedding = self.w["embed_tokens.weight"][[slot.token for slot in slots]]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"layers.{index}"
            residual = hidden
            x = self.norm(embedding if index == 0 else hidden, f"{layer}.input_layernorm")
            if index == 0:
                normed = self.norm(hidden, f"{layer}.hidden_norm")
                residual = normed if self.config["norm_before_residual"] else hidden
                x = torch.cat((x, normed), dim=-1)
            hidden = residual + self.attention(x, positions, layer)
            x = self.norm(hidden, f"{layer}.post_attention_layernorm")
            gate, up = (self.linear(x, f"{layer}.mlp.{n}_proj") for n in ("gate", "up"))
            hidden = hidden + self.linear(gate * torch.sigmoid(gate) * up, f"{layer}.mlp.down_proj")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden, "norm"), "lm_head")

    def to_target(self, draft_id: int) -> int:
        return draft_id + int(self.w["d2t"][draft_id]) if "d2t" in self.w else draft_id

    def context(self, tokens: list[int], features: Tensor) -> list[Slot]:
        """NTP slots of x_0..x_n: slot p holds x_{p+1} and the feature of position p."""
        return [Slot(p, tokens[p + 1], self.combine(features[p])) for p in range(len(tokens) - 1)]

    def draft(self, tokens: list[int], features: Tensor, k: int) -> tuple[list[int], Tensor]:
        """`k` drafts after x_0..x_n, given the features of x_0..x_{n-1}: ids and logits [k, DV]."""
        slots = self.context(tokens, features)
        if "mask_hidden" in self.w:
            shared = self.combine(self.w["mask_hidden"].flatten())
            mask = self.config["ptd_token_id"]
            last = slots[-1].position
            slots += [Slot(last + j, mask, shared) for j in range(1, k)]
            logits = self.logits(self.run(slots)[-k:])
            return [self.to_target(int(row.argmax())) for row in logits], logits
        drafts: list[int] = []
        rows: list[Tensor] = []
        for _ in range(k):
            hidden = self.run(slots)[-1]
            rows.append(self.logits(hidden))
            if self.config.get("norm_output"):
                hidden = self.norm(hidden, "norm")
            drafts.append(self.to_target(int(rows[-1].argmax())))
            slots.append(Slot(slots[-1].position + 1, drafts[-1], hidden))
        return drafts, torch.stack(rows)


def llama3_frequency(frequency: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    ratio = rope["original_max_position_embeddings"] / (2 * math.pi / frequency)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = ((ratio - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequency / rope["factor"] + blend * frequency
