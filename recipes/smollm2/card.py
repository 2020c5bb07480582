"""Write the model card of a head of SmolLM2 that ships, from the record of its training.

python recipes/smollm2/card.py build/smollm2/peagle src/peagle/bundled/smollm2/peagle
python recipes/smollm2/card.py build/more/peagle HEAD --earlier OLD_CARD

The card of a head that goes on from an earlier one also says what that one was trained on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peagle.training.published_head import RECORD_NAME, TrainRecord, answers_text, prompts_text

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "bundled_pair"))

from bundle import card  # noqa: E402

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"


def head_card(record: TrainRecord, earlier: str | None) -> str:
    """Return the card: the target with its licence, the origin of the data, and the training.

    `earlier` is the card of the head that the training began with, if there is one.
    """
    kind = "EAGLE-3" if record.method == "eagle3" else "P-EAGLE"
    lengths = dict(enumerate(record.acceptance_lengths, start=1))
    facts = {
        "target": f"{TARGET} (Apache-2.0), in the weights that the name `smollm2` fetches",
        "prompts": prompts_text(record),
        "answers": answers_text(record),
        "responses trained on": f"{record.responses:,}",
        "steps": f"{record.steps:,} ({record.epochs:.2f} epochs)",
        "depth trained": record.depth,
        "validation loss": f"{record.validation_loss:.4f} ({record.loss})",
        "simulated acceptance length": ", ".join(
            f"{lengths[k]:.3f} at K = {k}" for k in (3, 5, 7) if k in lengths
        ),
        "hardware": f"{record.device}, {record.seconds / 60:.1f} minutes",
        "software": f"torch {record.torch}, transformers {record.transformers}, "
        f"peagle {record.peagle}",
        "commit": record.commit,
    }
    if earlier is not None:
        facts["begins with"] = f"an earlier head of {_training(earlier)}"
    text = (
        "A draft head for SmolLM2-135M-Instruct by HuggingFaceTB, which is under Apache-2.0 and "
        "does not ship: it is fetched. The target wrote the prompts and answered them itself; "
        "near-duplicates of the evaluation prompts of the package were dropped "
        "(`recipes/smollm2`). Acceptance lengths are of the best validation, greedy, on held-out "
        "answers."
    )
    return card(f"{kind} head of SmolLM2-135M-Instruct", TARGET, facts, text)


def _training(card: str) -> str:
    """Return what a card says of the training."""
    cells = [line.strip("| ").split(" | ") for line in card.splitlines()]
    rows = {row[0]: row[1] for row in cells if len(row) == 2}
    steps = rows["steps"].replace(" (", " steps (")
    return f"{rows['responses trained on']} responses: {steps}, {rows['hardware']}"


def main() -> None:
    """Write it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("trained", type=Path, help="output of the training, with train.json")
    options.add_argument("head", type=Path, help="folder that gets README.md")
    options.add_argument("--earlier", type=Path, help="card of the head that it goes on from")
    args = options.parse_args()
    earlier = None if args.earlier is None else args.earlier.read_text(encoding="utf-8")
    record = TrainRecord.read(args.trained / RECORD_NAME)
    if prompts_text(record) is None:
        sys.exit(f"error: {args.trained / RECORD_NAME} does not say who wrote the prompts.")
    (args.head / "README.md").write_text(head_card(record, earlier), encoding="utf-8")


if __name__ == "__main__":
    main()
