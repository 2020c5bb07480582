"""Train the byte-level BPE of the bundled code model and tokenise its corpus.

    python recipes/bundled_pair/tokenizer.py

Reads `docs/{train,val}.jsonl` of the build folder; writes `tokenizer/`, `{train,val}.u16` (flat
uint16 tokens, every document ended by token 0), `train.u16.xz` and `corpus.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END, MASK = "<|endoftext|>", "<|mask|>"
END_ID = 0
# Words with one leading character, single digits, punctuation with its line ends, blank runs.
# A line end is never merged with the indentation after it: a prompt that stops at the end of
# a line then has the tokens that the same text has inside a document.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BATCH = 512


def read_documents(path: Path) -> Iterator[dict]:
    """The documents of a `.jsonl` or `.jsonl.gz` file, in order."""
    reader = gzip.open if path.suffix == ".gz" else open
    with reader(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int = 2048
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`; ids 0 and 1 are the end-of-text and the mask token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


def check_round_trip(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> int:
    """Number of texts checked; ValueError at the first that decode(encode(x)) changes."""
    checked = 0
    for text in texts:
        if tokenizer.decode(tokenizer.encode(text)) != text:
            raise ValueError(f"tokenizer does not round-trip {text[:80]!r}: check its PATTERN")
        checked += 1
    return checked


def tokenise(
    tokenizer: PreTrainedTokenizerFast, source: Path, target: Path, megabytes: float | None = None
) -> dict:
    """Write the tokens of `source` to `target`; return counts by kind of document.

    `megabytes` stops after the first documents of so much text.
    """
    counts = {kind: Counter() for kind in ("file", "function", "text")}
    documents = read_documents(source)
    with target.open("wb") as out:
        while batch := list(islice(documents, _BATCH)):
            if megabytes and sum(count["bytes"] for count in counts.values()) >= 1e6 * megabytes:
                break
            encoded = tokenizer.backend_tokenizer.encode_batch_fast([d["text"] for d in batch])
            for document, encoding in zip(batch, encoded, strict=True):
                out.write(np.array([*encoding.ids, END_ID], dtype=np.uint16).tobytes())
                size = len(document["text"].encode())
                counts[document["kind"]].update(
                    documents=1, tokens=len(encoding.ids) + 1, bytes=size
                )
    total = sum(counts.values(), Counter())
    by_kind = {kind: dict(count) for kind, count in counts.items() if count}
    return dict(total) | {
        "bytes_per_token": round(total["bytes"] / total["tokens"], 4),
        "by_kind": by_kind,
    }


def compress(path: Path, options: str) -> int:
    """Compress `path` beside itself with xz; return the size in bytes."""
    subprocess.run(["xz", "-T2", options, "--keep", "--force", str(path)], check=True)
    return path.with_name(path.name + ".xz").stat().st_size


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--build", type=Path, default=Path("build/pair"), help="folder of corpus.py"
    )
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--max-length", type=int, default=2048, help="positions of the model")
    parser.add_argument("--sample", type=int, default=8000, help="documents that train the BPE")
    parser.add_argument("--megabytes", type=float, help="of text to train on; all of it")
    parser.add_argument("--xz", default="-6", help="level or filter of xz")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    clock = time.monotonic()
    train = args.build / "docs" / "train.jsonl"
    sample = [d["text"] for d in islice(read_documents(train), args.sample)]
    tokenizer = train_tokenizer(sample, args.vocab_size, args.max_length)
    tokenizer.save_pretrained(args.build / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(args.build / "tokenizer")
    checked = check_round_trip(tokenizer, (text[:4000] for text in sample[:1000]))
    print(f"[{time.monotonic() - clock:.0f} s] vocabulary {len(tokenizer)}, {checked} round trips")

    report = {"format_version": 1, "vocab_size": len(tokenizer)}
    for split in ("train", "val"):
        source = args.build / "docs" / f"{split}.jsonl"
        most = args.megabytes if split == "train" else None
        report[split] = tokenise(tokenizer, source, args.build / f"{split}.u16", most)
        print(f"[{time.monotonic() - clock:.0f} s] {split}: {json.dumps(report[split])}")
    report["train"]["xz_bytes"] = compress(args.build / "train.u16", args.xz)
    (args.build / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"[{time.monotonic() - clock:.0f} s] train.u16.xz: {report['train']['xz_bytes']} bytes")


if __name__ == "__main__":
    main()
