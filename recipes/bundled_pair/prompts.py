"""Prompts from the tokenised corpus: for the target's responses, and for held-out evaluation.

    python recipes/bundled_pair/prompts.py --shared ../shared

Writes `response_prompts.npz` in the build folder: `p128`, `p256`, `p448`, uint16 [rows, length],
rows of exactly that length from training packages, most of which stop after a docstring; with
`--positions` where they begin in `train.u16`, int32 [rows]. Writes the evaluation prompt sets and
`heldout_code.jsonl.gz` as `{id, category, turns}` lines.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from corpus import load_prompts
from tokenizer import END_ID, read_documents
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROWS = {448: 20_000, 256: 50_000, 128: 80_000}
SHARES = {"docstring": 0.5, "line": 0.4, "text": 0.1}
# Rows whose last tokens agree would get the same response.
TAIL = 48
SEED = 20_240
HELD_OUT_ROWS = 100
HELD_OUT_TOKENS = (80, 600)


@dataclass(frozen=True)
class Ends:
    """Possible prompt ends [n]: stream position just after, and start of their document."""

    position: np.ndarray
    document: np.ndarray


def _token_strings(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return tokenizer.convert_ids_to_tokens(range(len(tokenizer)))


def find_ends(tokens: np.ndarray, documents: Path, strings: list[str]) -> dict[str, Ends]:
    """Where prompts may stop, by kind: after docstrings, at line ends of code, of plain text.

    The byte-level alphabet writes every byte as one character, so the length of a token's string
    is its length in bytes; "Ċ" is the line feed.
    """
    sizes = np.array([0 if id_ == END_ID else len(s) for id_, s in enumerate(strings)])
    ends_line = np.array([s.endswith("Ċ") for s in strings])
    stops = np.flatnonzero(tokens == END_ID)
    found = defaultdict(lambda: ([], []))
    start = 0
    # Tokens may be of the first documents only.
    for document, stop in zip(islice(read_documents(documents), len(stops)), stops, strict=True):
        ids = tokens[start:stop]
        after = np.cumsum(sizes[ids])
        if after[-1] != len(document["text"].encode()):
            raise ValueError(f"{documents} is not the text of these tokens: run tokenizer.py again")
        kind = "text" if document["kind"] == "text" else "line"
        places = {kind: np.flatnonzero(ends_line[ids])} if document["kind"] != "function" else {}
        wanted = np.array(document["ends"], dtype=np.int64)
        places["docstring"] = np.searchsorted(after, wanted)[: len(wanted)]
        places["docstring"] = places["docstring"][after[places["docstring"]] == wanted]
        for name, index in places.items():
            found[name][0].append(start + index + 1)
            found[name][1].append(np.full(len(index), start))
        start = stop + 1
    return {name: Ends(*map(np.concatenate, pair)) for name, pair in found.items()}


def pick_rows(
    tokens: np.ndarray,
    ends: Ends,
    length: int,
    count: int,
    starts_line: np.ndarray,
    used: set[bytes],
    rng: np.random.Generator,
) -> np.ndarray:
    """Where `count` windows of `length` tokens begin that stop at `ends` inside one document.

    Those that begin with a document or a line go first. Windows with a tail in `used` are
    skipped, and the tails of those returned are added to it.
    """
    begin = ends.position - length
    inside = np.flatnonzero(begin >= ends.document)
    rng.shuffle(inside)
    at_line = starts_line[tokens[begin[inside] - 1]] | (begin[inside] == ends.document[inside])
    chosen = []
    for index in inside[np.argsort(~at_line, kind="stable")]:
        tail = tokens[begin[index] : ends.position[index]][-TAIL:].tobytes()
        if tail not in used:
            used.add(tail)
            chosen.append(begin[index])
        if len(chosen) == count:
            return np.array(chosen)
    raise ValueError(f"{len(chosen)} prompts of {length} tokens, {count} wanted: lower --rows")


def response_positions(
    tokens: np.ndarray, documents: Path, strings: list[str], rows: dict[int, int]
) -> dict[str, np.ndarray]:
    """`{"p128": [rows], ...}`: where the prompts begin, in random order."""
    rng = np.random.default_rng(SEED)
    ends = find_ends(tokens, documents, strings)
    print({kind: len(found.position) for kind, found in ends.items()}, "possible ends")
    starts_line = np.array([s.endswith("Ċ") for s in strings])
    used: set[bytes] = set()
    arrays = {}
    for length, total in rows.items():
        parts = []
        for kind, share in SHARES.items():
            count = round(total * share)
            parts.append(pick_rows(tokens, ends[kind], length, count, starts_line, used, rng))
        arrays[f"p{length}"] = rng.permutation(np.concatenate(parts))
    return arrays


def windows(tokens: np.ndarray, positions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`{"p128": [rows, 128], ...}`: the tokens of the prompts that begin at `positions`."""
    return {
        name: tokens[begin[:, None] + np.arange(int(name.removeprefix("p")))]
        for name, begin in positions.items()
    }


def response_prompts(tokens: np.ndarray, documents: Path, strings: list[str]) -> dict:
    """`{"p128": [rows, 128], ...}`, rows in random order."""
    return windows(tokens, response_positions(tokens, documents, strings, ROWS))


def heldout_prompts(candidates: list[dict], tokenizer: PreTrainedTokenizerFast) -> list[dict]:
    """HELD_OUT_ROWS prompts that stop after a docstring, packages taking turns."""
    by_package = defaultdict(list)
    for candidate in candidates:
        prompt = candidate["text"].encode()[: candidate["ends"][0]].decode()
        # The repository names no package registry, not even in the words of others.
        if "pypi" in prompt.lower():
            continue
        if HELD_OUT_TOKENS[0] <= len(tokenizer.encode(prompt)) <= HELD_OUT_TOKENS[1]:
            by_package[candidate["package"]].append((candidate, prompt))
    chosen = []
    for turn in range(max(map(len, by_package.values()), default=0)):
        chosen += [found[turn] for _, found in sorted(by_package.items()) if turn < len(found)]
    if len(chosen) < HELD_OUT_ROWS:
        raise ValueError(f"{len(chosen)} held-out prompts, {HELD_OUT_ROWS} wanted: hold out more")
    return [
        {
            "id": f"heldout-code/{c['package']}/{c['name']}",
            "category": "heldout-code",
            "turns": [prompt],
        }
        for c, prompt in sorted(chosen[:HELD_OUT_ROWS], key=lambda item: item[0]["package"])
    ]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _rows(text: str) -> dict[int, int]:
    pairs = (part.split(":") for part in text.split(","))
    return {int(length): int(count) for length, count in pairs}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shared", type=Path, required=True, help="holds data/")
    parser.add_argument("--build", type=Path, default=Path("build/pair"))
    parser.add_argument("--prompts", type=Path, default=Path("src/peagle/bundled/prompts"))
    parser.add_argument("--sets", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rows", type=_rows, default=ROWS, help="LENGTH:COUNT,...")
    parser.add_argument("--positions", action="store_true", help="write where prompts begin")
    return parser.parse_args(argv)


def write_sets(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
    """The prompt sets of the package."""
    for name, rows in load_prompts(args.shared / "data").items():
        kept = [{key: row[key] for key in ("id", "category", "turns")} for row in rows]
        # The README's first training reads lines of GSM8K.
        write_jsonl(args.prompts / f"{name}.jsonl{'' if name == 'gsm8k' else '.gz'}", kept)
    candidates = list(read_documents(args.build / "docs" / "heldout_candidates.jsonl"))
    write_jsonl(args.prompts / "heldout_code.jsonl.gz", heldout_prompts(candidates, tokenizer))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.build / "tokenizer")
    if args.sets:
        write_sets(args, tokenizer)
    tokens = np.fromfile(args.build / "train.u16", dtype=np.uint16)
    documents = args.build / "docs" / "train.jsonl"
    arrays = response_positions(tokens, documents, _token_strings(tokenizer), args.rows)
    if args.positions:
        arrays = {name: begin.astype(np.int32) for name, begin in arrays.items()}
    else:
        arrays = windows(tokens, arrays)
    np.savez_compressed(args.build / "response_prompts.npz", **arrays)
    print({name: array.shape for name, array in arrays.items()})


if __name__ == "__main__":
    main()
