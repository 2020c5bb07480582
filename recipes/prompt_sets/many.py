"""Prompts by the rules of the prompt sets, of other packages: as many as there are, in one file.

    python recipes/prompt_sets/many.py --packages build/packages --count 16000 --output many.jsonl

The passages are docstrings of the wheels in --packages, but for the packages of the prompt sets,
which measure. A head that is trained on the answers is compared with one that is trained on answers
to prompts that the model wrote itself (docs/lab/smollm2.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from make import PACKAGES, WORDS, as_json, is_fit, is_fit_code, question, summarize, taking_turns
from passages import Passage, docstrings


def passages(wheels: Iterable[Path]) -> Iterator[Passage]:
    """Yield the passages of all packages that measure nothing, each name of a package once."""
    seen: set[str] = set()
    for wheel in wheels:
        if wheel.name.partition("-")[0] in PACKAGES:
            continue
        try:
            found = list(docstrings(wheel, WORDS[1]))
        except (SyntaxError, UnicodeDecodeError) as error:
            print(f"{wheel.name} is left out: {error}", file=sys.stderr)
            continue
        for passage in found:
            key = f"{passage.source}.{passage.name.rpartition('.')[2]}"
            if key not in seen:
                seen.add(key)
                yield passage


def prompts(texts: Iterable[Passage]) -> Iterator[str]:
    """Yield what the rules ask of each passage: one question, since several would repeat it."""
    rules = (summarize, question, as_json)
    for number, passage in enumerate(taking_turns(texts)):
        for rule in (*rules[number % 3 :], *rules[: number % 3]):
            fits = is_fit(passage) if rule is summarize else is_fit_code(passage)
            if fits and (asked := rule(passage, number)) is not None:
                yield asked
                break


def main() -> None:
    """Write the file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--packages", type=Path, required=True, help="folder of wheels")
    options.add_argument("--count", type=int, required=True, help="prompts at most")
    options.add_argument("--output", type=Path, required=True, help="JSONL file")
    args = options.parse_args()
    found = islice(prompts(passages(sorted(args.packages.glob("*.whl")))), args.count)
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in found]
    args.output.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{len(lines)} prompts in {args.output}")


if __name__ == "__main__":
    main()
