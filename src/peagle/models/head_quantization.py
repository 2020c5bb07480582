"""The linear layers of a head that are stored in 8 bits and in 4; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from peagle.errors import UserError

StoredQuantization = Literal["int8", "int4"]
LinearLayer = Literal[
    "fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]
DEFAULT_GROUP = 32
# What reads the weights asks for these: inputs of a scale, and of a layer in INT4.
GROUP_MULTIPLE, _INT4_MULTIPLE = 16, 32


@dataclass(frozen=True, slots=True)
class HeadQuantization:
    """How a head stores its linear layers, fc included.

    Attributes:
        type: of the layers.
        int8_layers: last names of layers that get INT8 in any case ("q_proj").
        group_size: inputs that share a scale.
    """

    type: StoredQuantization
    int8_layers: tuple[str, ...] = ()
    group_size: int = DEFAULT_GROUP

    def types(self, inputs: Mapping[str, int]) -> dict[str, StoredQuantization]:
        """Return the type that each linear layer of a head gets.

        Args:
            inputs: number of inputs of each layer, by its name in the checkpoint.

        Raises:
            UserError: the head has no layer of a name in `int8_layers`; the inputs of a layer do
                not divide into groups that can be read.
        """
        last_names = dict.fromkeys(layer.rpartition(".")[2] for layer in inputs)
        if unknown := [name for name in self.int8_layers if name not in last_names]:
            raise UserError(
                f"The head has no linear layer {unknown[0]!r}; expected names out of "
                f"{', '.join(last_names)}."
            )
        group = self.group_size
        if group % GROUP_MULTIPLE:
            raise UserError(
                f"The group size is {group}; expected a multiple of {GROUP_MULTIPLE} inputs."
            )
        found: dict[str, StoredQuantization] = {}
        for layer, count in inputs.items():
            last_name = layer.rpartition(".")[2]
            found[layer] = "int8" if last_name in self.int8_layers else self.type
            if count % group:
                raise UserError(
                    f"The group size is {group} and {layer!r} has {count} inputs; expected a size "
                    "that divides the inputs of every layer."
                )
            if found[layer] == "int4" and count % _INT4_MULTIPLE:
                raise UserError(
                    f"{layer!r} has {count} inputs; expected a multiple of {_INT4_MULTIPLE} for "
                    f"int4. Name {last_name} among the layers that get int8, or take int8."
                )
        return found

    def __str__(self) -> str:
        text = f"{self.type}, groups of {self.group_size}"
        is_mixed = self.int8_layers and self.type != "int8"
        return f"{text}; int8: {', '.join(self.int8_layers)}" if is_mixed else text
