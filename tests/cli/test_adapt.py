"""`peagle adapt`, on traffic that the bundled target wrote, and on mistakes."""

import json
import random
import secrets
import shutil
import signal
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.data.dataset import write_store
from peagle.data.prepare import Collected
from peagle.data.recorded import RecordFolder, line_of, new_record_file, read_cipher
from peagle.data.samples import Sample
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.models.checkpoint import CORRECTION_NAME, blend_back
from peagle.models.fingerprint import identity_of
from peagle.models.target_ends import TargetEnds
from peagle.training.adaptation import Adaptation
from peagle.training.trainer import Trainer
from tests.cli.conftest import Pair, Peagle, Result
from tests.corrections import add_correction

Pairs = Sequence[tuple[list[int], list[int]]]
WORDS = """alpha beta width height color index count total name value start stop size depth offset
label path mode limit score weight price key text line user group owner parent child node edge
source target query result status error message level queue stack buffer cache token date"""
NUM_REQUESTS = 110


def record(folder: Path, target: Path, pairs: Pairs, cipher: Any = None, **facts: Any) -> Path:
    """Record prompts with outputs, one a second, as a server does."""
    made = RecordFolder.create(folder)
    facts = {**identity_of(TargetEnds.load(target)), "temperature": 0.0, **facts}
    with new_record_file(made.path, 1e9).open("wb") as file:
        for number, (prompt, output) in enumerate(pairs):
            ids = {"prompt_token_ids": prompt, "response_token_ids": output}
            file.write(line_of(None, 1e9 + number, facts | ids, cipher))
    return folder


def accessors() -> list[str]:
    """Accessors of a class with a few names, whose last one has no body yet."""
    names = random.Random(0).sample([*permutations(WORDS.split(), 2)], NUM_REQUESTS)
    return [
        f"def get_{a}(self):\n    return self._{a}\n\n\ndef set_{a}(self, {a}):\n"
        f"    self._{a} = {a}\n\n\ndef get_{b}(self):\n"
        for a, b in names
    ]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    """Accessors, as the bundled target goes on with them."""
    texts = accessors()
    llm = LLM("bundled", speculative_config={"model": str(BUNDLED_PEAGLE)})
    outputs = llm.generate(texts, SamplingParams(max_tokens=32, temperature=0.0))
    return [
        (llm.requests.encode(text), one.token_ids) for text, one in zip(texts, outputs, strict=True)
    ]


@pytest.mark.slow
def test_the_correction_gains_on_its_traffic(peagle: Peagle, pairs: Pairs, tmp_path: Path) -> None:
    traffic, new = record(tmp_path / "traffic", BUNDLED_TARGET, pairs), tmp_path / "new"
    options = ["--target", "bundled", "--traffic", traffic, "--output", new, "--steps", 10]
    options += ["--set", "data.batch_tokens=1024"]
    result = peagle("adapt", "bundled", *options, "--format", "json")
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert told["head"] == str(new) and told["refusal"] == "" and told["old"] is None
    assert told["held_out"]["gain_ci"][0] > 0 and "forgetting is not tested" in result.err
    assert told["requests"]["held_out"] == 11
    assert told["own_outputs"]["own"] == told["own_outputs"]["compared"] > 50
    weights, own = "model.safetensors", new / CORRECTION_NAME
    assert (new / weights).read_bytes() == (BUNDLED_PEAGLE / weights).read_bytes()
    assert own.read_bytes() != (BUNDLED_PEAGLE / CORRECTION_NAME).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "traffic"]
    # Serving accepts more of the newest requests.
    prompts = [prompt for prompt, _ in pairs[-11:]]
    lengths = []
    for head in (BUNDLED_PEAGLE, new):
        llm = LLM("bundled", speculative_config={"model": str(head), "num_speculative_tokens": 7})
        outputs = llm.generate(prompts, SamplingParams(max_tokens=32, temperature=0.0))
        stats = SpeculationStats.pooled(one.stats for one in outputs)
        lengths.append(stats.acceptance_length)
    assert lengths[1] > lengths[0] + 0.05
    again = peagle("adapt", "bundled", *options)
    assert again.status == 2 and "is there already; name a new folder" in again.err


@pytest.mark.slow
def test_exchanged_outputs_are_refused(peagle: Peagle, pairs: Pairs, tmp_path: Path) -> None:
    outputs = [output for _, output in pairs]
    random.Random(1).shuffle(outputs)
    swapped = [(prompt, output) for (prompt, _), output in zip(pairs, outputs, strict=True)]
    traffic = record(tmp_path / "traffic", BUNDLED_TARGET, swapped)
    new, report = tmp_path / "new", tmp_path / "made" / "report.json"
    options = ["--target", "bundled", "--traffic", traffic, "--output", new, "--report", report]
    result = peagle("adapt", "bundled", *options)
    assert result.status == 3 and "likelier behind their own prompts" in result.err
    assert not new.exists() and json.loads(report.read_text())["refusal"] in result.err


def some(count: int, length: int = 12) -> Pairs:
    draw = random.Random(2)
    return [([n % 250, n // 250, 7], draw.choices(range(250), k=length)) for n in range(count)]


def on_tiny(peagle: Peagle, pair: Pair, tmp_path: Path, *options: object) -> Result:
    given = ["--target", pair.target, "--traffic", tmp_path / "traffic", "-o", tmp_path / "new"]
    return peagle("adapt", pair.peagle, *given, *options)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the test of outputs, which a random target did not write."""
    monkeypatch.setattr("peagle.evaluation.adaptation._MIN_OWN_SHARE", 0.0)


def old_data(path: Path, count: int) -> Path:
    collected = Collected()
    for prompt, output in some(count):
        collected.add(Sample.answered(prompt, output, str(prompt)))
    write_store(path, collected._dataset(), {})
    return path


@pytest.mark.slow
def test_the_head_is_trained_with_old_data(
    peagle: Peagle, pair: Pair, tmp_path: Path, unchecked: None
) -> None:
    record(tmp_path / "traffic", pair.target, some(110))
    old = old_data(tmp_path / "old.safetensors", 160)
    options = ["--what", "head", "--old", old, "--steps", 2, "--format", "json"]
    result = on_tiny(peagle, pair, tmp_path, *options)
    told = json.loads(result.out)
    assert result.status == 3 and "gain in acceptance length" in result.err, result.err
    assert told["steps"] == {"head": 2, "correction": 2} and told["old"] is not None
    counts = told["requests"]
    share = counts["old_trained_on"] / (counts["old_trained_on"] + counts["trained_on"])
    assert share == pytest.approx(0.5, abs=0.02)  # all samples are of one length
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.safetensors", "traffic"]
    # The same again is the same, but for the time.
    assert json.loads(on_tiny(peagle, pair, tmp_path, *options).out) == told


@pytest.mark.slow
def test_a_trained_head_goes_on_with_its_correction(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    unchecked: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = Path(shutil.copytree(pair.peagle, tmp_path / "head"))
    before = load_file(add_correction(head))
    record(tmp_path / "traffic", pair.target, some(110))
    monkeypatch.setattr("peagle.evaluation.adaptation.refusal", lambda *_: "")
    options = ["--what", "head", "--old-share", 0, "--steps", 1, "-o", tmp_path / "new"]
    options += ["--set", "correction.learning_rate=1e-9"]
    given = ["--target", pair.target, "--traffic", tmp_path / "traffic"]
    result = peagle("adapt", head, *given, *options)
    assert result.status == 0, result.err
    after = load_file(tmp_path / "new" / CORRECTION_NAME)["down.weight"]
    torch.testing.assert_close(after.float(), before["down.weight"].float(), rtol=0.01, atol=0)
    trained = [load_file(folder / "model.safetensors") for folder in (head, tmp_path / "new")]
    assert any(not torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_the_values_that_adapt_sets_give_way_to_the_given_ones(pair: Pair, tmp_path: Path) -> None:
    head = Path(shutil.copytree(pair.peagle, tmp_path / "head"))
    file = add_correction(head)
    given = "head", head, pair.target, torch.device("cpu"), 0, 1.0, None

    def of(*overrides: str, with_correction: bool = True) -> Any:
        return Adaptation(*given, overrides, with_correction).configs(tmp_path / "work", 64)

    def rate(*overrides: str) -> tuple[str, float]:
        optimizer = of(*overrides)["head"].optimizer
        return optimizer.name, optimizer.learning_rate

    assert rate() == ("muon", 3e-4)
    assert rate("optimizer.learning_rate=1e-3") == ("muon", 1e-3)
    assert rate("optimizer.name=adamw") == ("adamw", 1e-4)  # Muon's rate is too high for it
    own = of()["correction"].correction
    with pytest.raises(UserError, match=rf"is {own.rank + 1}, and the .* has {own.rank}; expected"):
        of(f"correction.rank={own.rank + 1}")
    fresh = of(f"correction.rank={own.rank + 1}", "correction.start=fresh")["correction"].correction
    assert (fresh.rank, fresh.width) == (own.rank + 1, own.width)
    file.write_bytes(b"broken")
    assert [*of(with_correction=False)] == ["head"]  # which reads none


@pytest.mark.parametrize("start", ["present", "fresh"])
def test_a_fresh_fit_that_gains_nothing_leaves_no_old_correction(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    head, work = Path(shutil.copytree(pair.peagle, tmp_path / "head")), tmp_path / "work"
    add_correction(head)
    work.mkdir()

    def train(_: Adaptation, what: str, *__: object) -> int:
        if what == "head":
            shutil.copytree(pair.peagle, work / "head")
        return 1

    monkeypatch.setattr(Adaptation, "_train", train)
    collected = Collected()
    collected.add(Sample.answered([1, 2, 3], [4, 5, 6], "one"))
    place = "head", head, pair.target, torch.device("cpu"), 0, 1.0, 1
    adaptation = Adaptation(*place, [f"correction.start={start}"])
    new, steps = adaptation.run(collected, collected, {}, work)
    assert steps == {"head": 1, "correction": 1}
    assert (new / CORRECTION_NAME).exists() == (start == "present")


@pytest.mark.slow
def test_a_fit_that_forgets_is_blended_back(
    peagle: Peagle, pair: Pair, tmp_path: Path, unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "traffic", pair.target, some(110))
    old = old_data(tmp_path / "old.safetensors", 300)
    monkeypatch.setattr("peagle.evaluation.adaptation.refusal", lambda *_: "")
    found = []
    for losses, kept in ([0.009], 1.0), ([0.011, 0.5, 0.0], 0.5):
        loss = property(lambda _, left=losses: left.pop(0))
        monkeypatch.setattr("peagle.evaluation.adaptation.AcceptanceChange.loss", loss)
        options = ["--old", old, "--steps", 1, "--format", "json"]
        options += ["--set", "correction.start=present"]  # as it is without
        told = json.loads(on_tiny(peagle, pair, tmp_path, *options).out)
        assert told["kept_share"] == kept and told["old_validation"] and not losses
        folder = (tmp_path / "new").rename(tmp_path / str(kept))
        found.append((folder, load_file(folder / CORRECTION_NAME)))
    (full, fit), (half, blend) = found
    term = fit.pop("down.weight").float()  # the head had no correction: the term was 0
    close = partial(torch.testing.assert_close, rtol=0.01, atol=0)
    assert term.any()
    close(blend.pop("down.weight").float(), term / 2)
    close(blend, fit)
    assert [*blend_back(half, full)] == [1, 0.75, 0.5, 0.25]
    close(load_file(half / CORRECTION_NAME)["down.weight"].float(), term * 0.875)


MISTAKES = {
    "small": (["--seed", 1], "holds 60 usable requests, whose newest tenth is of 6"),
    "minutes": (["--minutes", 0], "--minutes is 0; expected a finite number above 0"),
    "loss": (["--max-loss", 2], "--max-loss is 2; expected a share"),
    "share": (["--old-share", 1], "--old-share is 1; expected at least 0"),
    "no old": (["--what", "head"], "Name them with --old FILE, or give --old-share 0"),
    "old": (["--old", "x.jsonl"], "expected a .safetensors file that `peagle data prepare`"),
    "seed": (["--seed", 1 << 63], "or equal to 92233"),
    "set": (["--set", "run.sed=1"], "run.sed is not a known key"),
    "key": (["--serve", "http://a"], "needs a key of the server's --admin-key-file"),
    "no server": (["--admin-key-file", "key"], "expected --serve URL with it"),
    "trial": (["--trial-requests", -1], "greater than or equal to 0"),
    "no trial": (
        ["--trial-requests", 500],
        "without --serve; add --serve URL, or leave --trial-requests out",
    ),
    "idle loss": (["--max-loss", 0.02], "--max-loss is 0.02, which has no effect without --old"),
    "idle share": (["--old-share", 0.3], "--old-share is 0.3, which has no effect without --old"),
    "idle minutes": (["--minutes", 5, "--steps", 1], "no effect beside --steps; leave --steps out"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(
    peagle: Peagle, pair: Pair, tmp_path: Path, unchecked: None, name: str
) -> None:
    options, text = MISTAKES[name]
    record(tmp_path / "traffic", pair.target, some(60))
    result = on_tiny(peagle, pair, tmp_path, *options)
    assert result.status == 2 and text in result.err, result.err
    assert [path.name for path in tmp_path.iterdir()] == ["traffic"]


def test_a_report_in_the_output_is_refused(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    result = on_tiny(peagle, pair, tmp_path, "--report", tmp_path / "new" / "report.json")
    assert result.status == 2 and "is in --output" in result.err
    assert list(tmp_path.iterdir()) == []


def test_lengths_and_old_data_that_leave_too_little(
    peagle: Peagle, pair: Pair, tmp_path: Path, unchecked: None
) -> None:
    record(tmp_path / "traffic", pair.target, [([251], [1, 2]), *some(110)])
    result = on_tiny(peagle, pair, tmp_path, "--max-length", 4)
    assert result.status == 2 and "--max-length is 4, within which 1 requests" in result.err
    old = old_data(tmp_path / "old.safetensors", 1)
    result = on_tiny(peagle, pair, tmp_path, "--old", old)
    assert result.status == 2 and "old.safetensors' holds 1 samples, of which 0 test" in result.err


@pytest.mark.slow
def test_an_output_that_is_made_meanwhile_keeps_both(
    peagle: Peagle, pair: Pair, tmp_path: Path, unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "traffic", pair.target, some(110))
    other = tmp_path / "new" / "other"

    def refusal(*_: object) -> str:
        other.mkdir(parents=True)
        return ""

    monkeypatch.setattr("peagle.evaluation.adaptation.refusal", refusal)
    result = on_tiny(peagle, pair, tmp_path, "--steps", 1)
    (head,) = tmp_path.glob("new.*")
    assert result.status == 2 and f"the new head is in {str(head)!r}" in result.err
    assert (head / CORRECTION_NAME).is_file() and other.is_dir()


def test_a_report_that_finds_no_room_hides_no_result(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"head": None, "refusal": "worse", "held_out": None, "old": None}
    monkeypatch.setattr("peagle.cli.adapt.adapted", lambda *_: result)
    shown = on_tiny(peagle, pair, tmp_path, "--report", "/dev/full")
    assert shown.status == 2 and "'/dev/full' cannot be written: No space left" in shown.err
    assert "no head was written" in shown.out


# ---- a server that takes the head ----

ADMIN = "b" * 24


class FakeServer(BaseHTTPRequestHandler):
    """Takes a head from the holder of the key, as `peagle serve` does, unless it has been told."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    refusal = 0

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.answer({"head": {"name": "new", "version": 2}, "trial": body.get("trial")})

    def answer(self, facts: dict[str, Any]) -> None:
        has_key = self.headers["Authorization"] == f"Bearer {ADMIN}"
        status = (self.refusal if facts else 0) or (200 if has_key else 401)
        if self.path != "/admin/head":
            status = 404
        raw = json.dumps(facts if status == 200 else {"error": {"message": "No."}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(FakeServer, "bodies", [])
    monkeypatch.setattr("peagle.evaluation.adaptation.refusal", lambda *_: "")
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [0, 409])
def test_a_server_takes_the_new_head(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    unchecked: None,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    refusal: int,
) -> None:
    record(tmp_path / "traffic", pair.target, some(110))
    monkeypatch.setattr(FakeServer, "refusal", refusal)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text(f"\n# of the administrator\n{ADMIN}\n")
    options = ["--output", "new", "--steps", 1, "--serve", server, "--admin-key-file", "key"]
    result = on_tiny(peagle, pair, tmp_path, *options)
    head = {"head": str(tmp_path / "new")}
    assert FakeServer.bodies == [head | {"trial": {"requests": 500}}]
    assert (tmp_path / "new" / "config.json").is_file()
    if refusal:
        assert result.status == 2 and "refused POST /admin/head (409: No.)" in result.err
        assert "The new head stays in 'new'." in result.err and "serve it:" in result.out
        return
    assert result.status == 0 and "serves it as version 2, on trial for 500" in result.out
    (look,) = (line for line in result.out.splitlines() if line.startswith(f"  curl {server}/"))
    assert "Bearer $(" in look
    shown = subprocess.run(["sh", "-c", look.replace("curl", "echo")], capture_output=True)
    assert shown.stdout.decode().endswith(f"Authorization: Bearer {ADMIN}\n")
    monkeypatch.setenv("PEAGLE_ADMIN_KEY", ADMIN)
    options = ["--steps", 1, "--serve", server, "--trial-requests", 0, "--format", "json"]
    shutil.rmtree(tmp_path / "new")
    result = on_tiny(peagle, pair, tmp_path, *options)
    assert FakeServer.bodies[1:] == [head]
    assert json.loads(result.out)["served"] == {
        "head": {"name": "new", "version": 2},
        "trial": None,
    }


def test_a_server_that_takes_no_head_is_found_before_the_work(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record(tmp_path / "traffic", pair.target, some(110))
    for key, url, text in (
        ("c" * 24, server, "(401: No.). Give another key with --admin-key-file"),
        (ADMIN, server + "/other", "(404: No.). Start it with --admin-key-file and --allow-heads"),
        (ADMIN, "http://127.0.0.1:1", "No server answers"),
        (ADMIN, "ftp://a", "--serve is 'ftp://a'; expected a URL"),
    ):
        monkeypatch.setenv("PEAGLE_ADMIN_KEY", key)
        result = on_tiny(peagle, pair, tmp_path, "--serve", url)
        assert result.status == 2 and text in result.err, result.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_copy_of_the_traffic(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    unchecked: None,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    record(tmp_path / "traffic", pair.target, some(110))
    monkeypatch.setattr(Trainer, "run", lambda _: signal.raise_signal(number))
    before = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        result = on_tiny(peagle, pair, tmp_path, "--steps", 1)
        # A terminal that closes may send SIGHUP again, while the copy is removed.
        assert number != signal.SIGHUP or signal.getsignal(number) == signal.SIG_IGN
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert result.status == 130
    assert [path.name for path in tmp_path.iterdir()] == ["traffic"]


def test_a_read_only_head_is_adapted(
    peagle: Peagle,
    pair: Pair,
    tmp_path: Path,
    unchecked: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = []

    def look(trainer: Trainer) -> None:
        head = Path(str(trainer.config.correction.on))
        modes.extend(path.stat().st_mode & 0o200 for path in (head, *head.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", look)
    record(tmp_path / "traffic", pair.target, some(110))
    head = shutil.copytree(pair.peagle, tmp_path / "head")
    for path in (*head.iterdir(), head):
        path.chmod(0o555)
    assert on_tiny(peagle, Pair(pair.target, head, head), tmp_path, "--steps", 1).status == 130
    assert len(modes) > 2 and all(modes)


def test_other_heads_and_records_are_refused(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    traffic, new, key = tmp_path / "traffic", tmp_path / "new", tmp_path / "key"
    result = on_tiny(peagle, pair, tmp_path)
    assert result.status == 2 and "holds no records" in result.err
    record(traffic, pair.target, some(110))
    options = ["--target", pair.target, "-o", new, "--traffic"]
    result = peagle("adapt", pair.eagle3, *options, traffic)
    assert result.status == 2 and "is an EAGLE-3 head" in result.err
    result = peagle("adapt", BUNDLED_PEAGLE, *options, traffic)
    assert result.status == 2 and "target" in result.err, result.err
    texts = {"tokenizer_sha256": "another tokenizer", "lm_head_sha256": "from another target"}
    for name, text in texts.items():
        other = record(tmp_path / name, pair.target, some(110), **{name: "c" * 64})
        result = peagle("adapt", pair.peagle, *options, other)
        assert result.status == 2 and text in result.err, result.err
    key.write_bytes(b64encode(secrets.token_bytes(32)))
    secret = record(tmp_path / "secret", pair.target, some(20), read_cipher(key))
    result = peagle("adapt", pair.peagle, *options, secret)
    assert result.status == 2 and "with --record-key-file" in result.err
    result = peagle("adapt", pair.peagle, *options, secret, "--record-key-file", key)
    assert "holds 20 usable requests" in result.err
    assert not new.exists()
