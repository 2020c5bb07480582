"""Prompts for the responses that the correction of the bundled head is fitted on.

    python recipes/bundled_pair/correction.py --shared ../shared

Reads the standard library of the running interpreter (the target's own training text) with the
bundled tokenizer; files that share a 13-gram with an evaluation set are left out. Writes
`response_prompts.npz` of `prompts.py` in the build folder, for `respond.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import corpus
import numpy as np
import prompts
from ngrams import NgramIndex
from sources import stdlib_source
from tokenizer import read_documents, tokenise
from transformers import AutoTokenizer

BUNDLED = Path(__file__).parents[2] / "src" / "peagle" / "bundled"
BYTES = 60_000_000  # more than the library has
TESTS_SHARE = 0.1
ROWS = {128: 2200}
SHARES = {"docstring": 0.6, "line": 0.4}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shared", type=Path, required=True, help="holds data/")
    parser.add_argument("--build", type=Path, default=Path("build/correction"))
    args = parser.parse_args(argv)

    sets = corpus.load_prompts(args.shared / "data")
    sets["heldout_code"] = list(read_documents(BUNDLED / "prompts" / "heldout_code.jsonl.gz"))
    corpus._start({name: NgramIndex(corpus.evaluation_texts(rows)) for name, rows in sets.items()})
    _, documents, dropped = corpus.process((stdlib_source(), BYTES, TESTS_SHARE))
    deduplicator = corpus.Deduplicator()
    documents = sorted(filter(deduplicator.keep, documents), key=corpus._order)
    print(f"{len(documents)} documents; dropped: {dict(dropped)}")

    text, tokens = args.build / "docs" / "train.jsonl", args.build / "train.u16"
    corpus.write_documents(text, documents)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    tokenise(tokenizer, text, tokens)
    prompts.SHARES = SHARES
    flat = np.fromfile(tokens, dtype=np.uint16)
    strings = prompts._token_strings(tokenizer)
    rows = prompts.windows(flat, prompts.response_positions(flat, text, strings, ROWS))
    np.savez_compressed(args.build / "response_prompts.npz", **rows)
    print({name: array.shape for name, array in rows.items()})


if __name__ == "__main__":
    main()
