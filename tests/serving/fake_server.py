"""A server that answers as the contract of `/v1` says, but from a script: no model behind it.

The words in square brackets in a prompt choose what happens ("[hostile]", "[slow]", ...).
"""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import CRITICAL
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

PLAYGROUND = Path(__file__).parents[2] / "src" / "peagle" / "serving" / "playground"
# What the real server sends; the page has to work under it.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DEPTH = 4
# Drafts that each step accepts, again and again, until the tokens are used up.
ACCEPTED = {"peagle": [3, 0, 4, 2], "eagle3": [2, 1, 3, 0], "plain": [0]}
TOKENS = re.findall(
    r" {4,}| ?\w+| ?[^\w\s]+|\n",
    """
    "The n-th number."
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
""",
)
NUM_REASONING = 10  # tokens of "[think]"; with P-EAGLE a step has both reasoning and answer
HOSTILE = ["<img src=x", " onerror=alert(1)>", "<script>", "alert(2)</script>", "</span>", "&amp;"]
WIDE = ["é", "漢字", " 🦅", "🇫🇷", " a", "\u202e", "b"]


@dataclass
class State:
    """What the tests look at."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    disconnects: int = 0
    running: int = 0
    most_at_once: int = 0


@dataclass(frozen=True)
class Step:
    """One step of the script."""

    tokens: list[str]
    num_accepted: int
    rejected: list[str]

    @property
    def num_drafted(self) -> int:
        return self.num_accepted + len(self.rejected)

    @property
    def tree(self) -> list[tuple[str, int, bool]]:
        """The drafts as a tree: the accepted ones a path, the others siblings along it."""
        path = [(text, i, True) for i, text in enumerate(self.tokens[: self.num_accepted])]
        others = enumerate(self.rejected)
        return path + [(text, i % (self.num_accepted + 1), False) for i, text in others]


def script(proposer: str, tokens: list[str], depth: int) -> list[Step]:
    """The steps of an answer: the prompt pass gives the first token, drafts begin after it."""
    steps = [Step(tokens[:1], 0, [])]
    position = 1
    while position < len(tokens):
        pattern = ACCEPTED[proposer]
        left = len(tokens) - position - 1
        accepted = min(pattern[(len(steps) - 1) % len(pattern)], depth, left)
        new = tokens[position : position + accepted + 1]
        steps.append(Step(new, accepted, [f"no{i}" for i in range(accepted, depth)]))
        position += len(new)
    return steps


def totals(steps: list[Step], depth: int, has_copies: bool = False) -> dict[str, Any]:
    """`usage.speculation` of these steps; with copies the last accepted draft is the text's."""
    drafts = [step for step in steps if step.num_drafted]
    accepted = sum(step.num_accepted for step in drafts)
    text = [sum(step.num_accepted == at + 1 for step in drafts) for at in range(depth)]
    copies = {"num_accepted_text_tokens_per_pos": text} if has_copies else {}
    return copies | {
        "num_drafts": len(drafts),
        "num_draft_tokens": depth * len(drafts),
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": [
            sum(step.num_accepted > position for step in drafts) for position in range(depth)
        ],
        "acceptance_length": 1 + accepted / len(drafts) if drafts else 1.0,
    }


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def chunks_of(
    step: Step,
    is_chat: bool,
    finish_reason: str | None,
    num_reasoning: int = 0,
    has_tree: bool = False,
    has_copies: bool = False,
) -> list[dict[str, Any]]:
    """The events of a step whose first `num_reasoning` tokens are reasoning.

    The report comes with the first event only, as from the real server.
    """
    drafted = [[text, i < step.num_accepted] for i, text in enumerate(step.tokens)]
    reasoning = "".join(step.tokens[:num_reasoning])
    text = "".join(step.tokens[num_reasoning:])
    contents: list[dict[str, Any]] = [{"text": text}]
    if is_chat:
        deltas = {"reasoning_content": reasoning, "content": text}
        contents = [{"delta": {name: part}} for name, part in deltas.items() if part]
    chunks: list[dict[str, Any]] = [
        {"id": "x", "choices": [{"index": 0, "finish_reason": None, **content}]}
        for content in contents
    ]
    chunks[-1]["choices"][0]["finish_reason"] = finish_reason
    chunks[0]["speculation"] = {
        "num_drafted": step.num_drafted,
        "num_accepted": step.num_accepted,
        "tokens": drafted,
        "rejected": step.rejected,
    }
    if has_copies and step.num_drafted:
        chunks[0]["speculation"]["text_from"] = max(0, step.num_accepted - 1)
    if has_tree and step.num_drafted:
        chunks[0]["speculation"]["tree"] = step.tree
    return chunks


async def answer(body: dict[str, Any], prompt: str, is_chat: bool) -> AsyncIterator[bytes]:
    """The stream of one request."""
    wanted = body["speculation"]
    depth = wanted["num_speculative_tokens"]
    tokens = HOSTILE if "[hostile]" in prompt else WIDE if "[wide]" in prompt else TOKENS
    if "[slow]" in prompt or "[fast]" in prompt:
        tokens = [f" w{i}" for i in range(2000)]
    if "[differs]" in prompt and wanted["proposer"] == "eagle3":
        tokens = [*tokens[:6], "other", *tokens[7:]]
    has_trees = "[trees]" in prompt and wanted["report"] == "trees"
    has_trees = has_trees and wanted["proposer"] == "peagle"
    has_copies = "[copies]" in prompt and wanted["proposer"] == "peagle"
    num_reasoning = NUM_REASONING if "[think]" in prompt else 0
    delay = {"[slow]": 0.2, "[fast]": 0.002 * 3, "[wide]": 0.002}
    pause = next((s for word, s in delay.items() if word in prompt), 0.02)
    steps = script(wanted["proposer"], tokens, depth)
    for number, step in enumerate(steps):
        if number == 5 and "[broken]" in prompt:
            yield event({"error": {"message": "The engine ran out of memory.", "type": "server"}})
            return
        if number == 5 and "[short]" in prompt:
            return
        if number == 5 and "[cut]" in prompt:
            raise ConnectionAbortedError("as the test wants it")
        reason = "stop" if step is steps[-1] else None
        reasons = reason, max(num_reasoning, 0)
        chunks = chunks_of(step, is_chat, *reasons, has_trees, has_copies)
        data = b"".join(map(event, chunks))
        num_reasoning -= len(step.tokens)
        if "[wide]" in prompt:
            for byte in data:
                yield bytes([byte])
                await asyncio.sleep(0)
        else:
            yield data
        await asyncio.sleep(pause)
    usage = {"prompt_tokens": 3, "completion_tokens": len(tokens)}
    drafts = totals(steps, depth, has_copies)
    yield event({"choices": [], "usage": {**usage, "speculation": drafts}})
    yield b"data: [DONE]\n\n"


def make_app(state: State) -> FastAPI:
    app = FastAPI()
    names = ["peagle", "eagle3", "plain"]
    depths = [DEPTH, DEPTH, 0]
    speculation = {
        "default": "peagle",
        "proposers": [
            {"name": name, "num_speculative_tokens": depth} for name, depth in zip(names, depths)
        ],
    }

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PLAYGROUND / "index.html", headers={"Content-Security-Policy": CSP})

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        return FileResponse(PLAYGROUND / name)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        model = {"id": "tiny-code", "object": "model", "created": 0, "owned_by": "peagle"}
        extra = {"max_model_len": 4096, "chat": True, "speculation": speculation}
        return {"object": "list", "data": [{**model, **extra}]}

    async def reply(request: Request, is_chat: bool) -> Response:
        body = await request.json()
        state.requests.append(body)
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if "[full]" in prompt:
            message = "The queue is full: 64 requests wait."
            return JSONResponse({"error": {"message": message}}, 429, {"Retry-After": "7"})

        async def watched() -> AsyncIterator[bytes]:
            is_whole = False
            state.running += 1
            state.most_at_once = max(state.most_at_once, state.running)
            try:
                async for data in answer(body, prompt, is_chat):
                    yield data
                is_whole = True
            finally:
                state.running -= 1
                state.disconnects += not is_whole

        return StreamingResponse(watched(), media_type="text/event-stream")

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        state.paths.append("/v1/completions")
        return await reply(request, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        state.paths.append("/v1/chat/completions")
        return await reply(request, is_chat=True)

    return app


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serve `app` on a free port of this machine in a thread: the address."""
    # With its protocol named: asyncio sets TCP_NODELAY on connections of such sockets only.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level=CRITICAL + 1, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive(), "the fake server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
