"""The limits of training data that is prepared, checked without torch."""

from dataclasses import dataclass

from peagle.errors import UserError

MIN_RESPONSE = 2  # a shorter one has no token to draft


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that samples must keep.

    Attributes:
        vocab_size: vocabulary of the target; ids end before it.
        max_length: most tokens of a sample.
        truncate: cut longer samples there; otherwise they are dropped.
        validation_share: share of the conversations that goes to the validation file; above 0, each
            of the two files gets at least one conversation.
    """

    vocab_size: int
    max_length: int = 8192
    truncate: bool = True
    validation_share: float = 0.0

    def __post_init__(self) -> None:
        check_limits(self.max_length, self.validation_share)


def check_limits(max_length: int, validation_share: float) -> None:
    """Refuse a length limit with no room for a response, and a share of everything or less than 0.

    Raises:
        UserError: naming the value.
    """
    least = MIN_RESPONSE + 1
    if max_length < least:
        raise UserError(f"The length limit is {max_length}; expected at least {least}.")
    if not 0 <= validation_share < 1:
        raise UserError(
            f"The validation share is {validation_share:g}; expected at least 0 and less than 1."
        )
