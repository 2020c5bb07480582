"""A stand-in for vLLM, in an environment of its own: a python that has a package called vllm.

The package is written into a folder by `install`; it has what peagle asks of vLLM, nothing else.
Its server runs the guard that it is given, and counts drafts as vLLM does: in parallel, or one
after another if it was not told, or as the variable FAKE_VLLM says.
"""

import sys
from pathlib import Path

SERVER = '''
import argparse, asyncio, importlib, json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode = os.environ.get("FAKE_VLLM", "")
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("model", "host", "port", "served-model-name", "speculative-config", "middleware",
             "allowed-origins", "load-format", "shutdown-timeout"):
    parser.add_argument("--" + name)
args, _ = parser.parse_known_args()
if mode == "crash":
    print("INFO starting"); print("ValueError: no such architecture"); print("bye " * 9)
    for _ in range(12): print("raise RuntimeError(")
    print("RuntimeError: Engine core initialization failed. See root cause above."); sys.exit(3)
drafting = json.loads(args.speculative_config or "null")
k = drafting["num_speculative_tokens"] if drafting else 0
head = {}
if k and "model" in drafting:
    head = json.load(open(os.path.join(drafting["model"], "config.json")))
told = bool(drafting and drafting.get("parallel_drafting"))
if mode == "not told":
    told = False
if head.get("mask_token_id") is not None and not told and mode != "silent":
    print("WARNING Skipping loading mask_hidden.", flush=True)
counts = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "per_pos": [0] * k}

def draft(num_prompts, length):
    """Counters of vLLM for some prompts: every fourth draft is wrong from its first token on."""
    for _ in range(num_prompts * max(1, length // 2)):
        counts["num_drafts"] += 1
        counts["num_draft_tokens"] += k - (mode == "short")
        right = counts["num_drafts"] % 4 != 0
        accepted = 0 if not right else (k if told and mode != "silent" else 1)
        counts["num_accepted_tokens"] += accepted
        for at in range(accepted):
            counts["per_pos"][at] += 1

class Config: pass

class State: pass

class App:
    state = State()
    state.vllm_config = None
    if mode != "no facts":
        config = state.vllm_config = Config()
        config.use_v2_model_runner = False
        config.speculative_config = None
        if drafting:
            config.speculative_config = Config()
            vars(config.speculative_config).update(drafting, parallel_drafting=told)

    async def __call__(self, scope, receive, send):
        status, body = 200, {}
        if scope["path"] == "/metrics":
            lines = [f'vllm:spec_decode_{n}_total{{engine="0"}} {counts[n]}.0'
                     for n in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}} {n}'
                      for at, n in enumerate(counts["per_pos"])]
            body = "" if mode == "no counters" or not k else "\\n".join(lines)
        elif scope["path"] == "/health":
            status = 200 if time.time() > ready_at else 503
        elif scope["path"] == "/v1/completions":
            asked = json.loads((await receive())["body"])
            if asked.get("holds"):  # until the end was asked for, or for ever
                print("held", flush=True)
                ending.wait()
                threading.Event().wait(None if asked["holds"] == "forever" else 0)
            if mode == "refuses":
                status = 400
            elif k and mode != "no drafts":
                prompts = asked["prompt"]
                draft(len(prompts) if isinstance(prompts, list) else 1, asked["max_tokens"])
            body = {"environment": {n: v for n, v in os.environ.items() if "VLLM" in n}}
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": data})

module, _, name = args.middleware.rpartition(".")
app = App()
guarded = getattr(importlib.import_module(module), name)(app)
busy, ending = threading.Semaphore(100), threading.Event()

class Handler(BaseHTTPRequestHandler):
    def answer(self):
        with busy:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            incoming = [{"type": "http.request", "body": body, "more_body": False}]
            sent = []
            async def receive():
                return incoming.pop() if incoming else {"type": "http.disconnect"}
            async def send(message):
                sent.append(message)
            scope = {"type": "http", "method": self.command, "path": self.path, "app": app,
                     "headers": [(n.lower().encode(), v.encode()) for n, v in self.headers.items()]}
            asyncio.run(guarded(scope, receive, send))
            self.send_response(sent[0]["status"])
            self.end_headers()
            self.wfile.write(b"".join(one.get("body", b"") for one in sent[1:]))
    do_GET = do_POST = do_PUT = answer
    def log_message(self, *args):
        pass

ready_at = time.time() + float(os.environ.get("FAKE_VLLM_LOAD_S", "0"))
server = ThreadingHTTPServer((args.host, int(args.port)), Handler)

def end(*_):
    ending.set()
    print("asked to end", flush=True)
    def drain():
        for _ in range(100):
            busy.acquire()
        try:
            print("ended in order", flush=True)
        finally:
            os._exit(0)
    if mode != "stubborn":
        threading.Thread(target=drain).start()

signal.signal(signal.SIGTERM, end)
if mode == "stubborn":
    import subprocess
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("worker", worker.pid, flush=True)
print("INFO ready", flush=True)
server.serve_forever()
'''


def install(
    folder: Path, version: str = "0.32.0", *, name: str = "vllm", cpu: bool = False
) -> Path:
    """Write the package and the python that has it; that python's path."""
    site = folder / "site"
    files = {
        "vllm/__init__.py": "",
        "vllm/_version.py": f"__version__ = version = '{version}'\n",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": SERVER,
        f"{name.replace('-', '_')}-{version}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        ),
        f"torch-2.11.0{'+cpu' if cpu else ''}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0{'+cpu' if cpu else ''}\n"
        ),
    }
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    # Python takes the first package of a name on its path: this one, not our environment's.
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python
