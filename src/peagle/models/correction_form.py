"""The forms of a correction of drafts (`models.correction` has them); imports no torch."""

from typing import Literal, get_args

CorrectionForm = Literal["markov", "gated", "diagonal", "recurrent"]
CORRECTION_FORMS: tuple[CorrectionForm, ...] = get_args(CorrectionForm)
