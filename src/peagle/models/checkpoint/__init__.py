"""Draft heads on disk, in the vLLM and the speculators style.

`formats` reads and writes config.json; `weights` reads and checks tensors; `stored` reads a
folder; `head` loads and saves; `correction` is the file beside them; `convert` goes from one style
to the other.
"""

from peagle.models.checkpoint.convert import Conversion, compact_head, convert_head
from peagle.models.checkpoint.correction import (
    CORRECTION_NAME,
    blend_back,
    copy_correction,
    find_correction,
    head_identity,
    load_correction,
    load_corrections,
    read_correction,
    read_corrections,
    save_correction,
)
from peagle.models.checkpoint.files import write_json
from peagle.models.checkpoint.formats import (
    FORMATS,
    LENGTH_KEY,
    HeadFormat,
    config_from_json,
    config_to_json,
    format_of,
    trained_length,
)
from peagle.models.checkpoint.head import load_drafter, save_drafter
from peagle.models.checkpoint.stored import ANY_DEPTH, StoredHead, read_head
from peagle.models.checkpoint.weights import split_tensors
