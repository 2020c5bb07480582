"""`peagle push`: what it shows, what it sends to a hub, and every way in which that fails."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from peagle.models.checkpoint import convert_head
from peagle.models.loading import resolve_model
from tests.cli.conftest import Pair, Peagle
from tests.corrections import add_correction
from tests.fake_hub import FakeHub, read_folder, serve, used

REPO, TARGET = "org/head", "example/Tiny-Llama"
WEIGHTS = "model.safetensors"
CARD = ("--target", TARGET, "--license", "apache-2.0")
FIELDS = [
    *("hub", "repo", "revision", "private", "message", "kind", "style", "num_layers"),
    *("num_speculative_tokens_trained", "target", "num_parameters", "files", "num_bytes"),
    *("card", "card_made", "notes", "commit"),
]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """An empty hub, and a token that may write to the repositories of org."""
    with serve() as hub, used(hub.url, tmp_path / "home") as patch:
        patch.setenv("HF_TOKEN", hub.token)
        # Large files then go by plain HTTP, not to the hub's other storage.
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        patch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        yield hub


@pytest.fixture
def head(pair: Pair, tmp_path: Path) -> Path:
    """A P-EAGLE head in a folder of the test's own."""
    return Path(shutil.copytree(pair.peagle, tmp_path / "own"))


def contents(hub: FakeHub, repo: str = REPO, revision: str = "main") -> dict[str, bytes]:
    """Files of a repository, less the one that the hub makes."""
    model = hub.models[repo]
    files = dict(model.revisions[model.names[revision]])
    files.pop(".gitattributes", None)
    return files


def writes(hub: FakeHub) -> list[str]:
    """Paths of the requests that changed something, in order."""
    paths = [r.path for r in hub.requests if r.method in ("POST", "PUT")]
    return [path.partition("/api/")[2] for path in paths if "validate-yaml" not in path]


def text_of(files: dict[str, bytes]) -> str:
    return files["README.md"].decode()


# ---- a dry run ----


def test_a_dry_run_shows_everything_and_connects_to_nothing(
    peagle: Peagle, hub: FakeHub, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[object] = []

    def attempt(*arguments: object, **_: object) -> None:
        attempts.append(arguments)
        raise OSError("no connections here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, attempt)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, attempt)
    before = read_folder(head)
    result = peagle("push", head, REPO, *CARD)
    assert result.status == 0, result.err
    assert (attempts, hub.requests) == ([], [])
    assert read_folder(head) == before, "the card is not written into the folder"
    assert f"to     {hub.url}/{REPO}, branch main\n" in result.out
    for name, data in before.items():
        line = f"{len(data):>14,}  sha256 {sha256(data).hexdigest()}"
        assert any(row.split() == [name, *line.split()] for row in result.out.splitlines())
    assert "README.md, made:" in result.out and "  | # head" in result.out.splitlines()
    assert result.out.endswith("Nothing was sent. Upload it with --yes.\n")
    assert hub.token not in result.out + result.err
    # The same patches do see a connection.
    assert peagle("push", head, REPO, *CARD, "--yes").status == 2
    assert attempts


def test_json_has_exactly_the_promised_fields(peagle: Peagle, hub: FakeHub, head: Path) -> None:
    result = peagle("push", head, REPO, *CARD, "--format", "json")
    assert result.status == 0, result.err
    record = json.loads(result.out)
    assert list(record) == FIELDS
    assert (record["hub"], record["kind"], record["target"]) == (hub.url, "P-EAGLE", TARGET)
    assert record["commit"] is None and hub.requests == []
    files = {file.pop("name"): file for file in record["files"]}
    expected = read_folder(head) | {"README.md": record["card"].encode()}
    assert files == {
        name: {"bytes": len(data), "sha256": sha256(data).hexdigest()}
        for name, data in sorted(expected.items())
    }
    assert record["num_bytes"] == sum(map(len, expected.values()))
    pushed = peagle("push", head, REPO, *CARD, "--format", "json", "--yes")
    commit = json.loads(pushed.out)["commit"]
    assert commit == {
        "url": f"{hub.url}/{REPO}/commit/{hub.models[REPO].names['main']}",
        "oid": hub.models[REPO].names["main"],
        "created": True,
        "added": ["README.md", "config.json", WEIGHTS],
        "replaced": [],
        "removed": [],
        "verified": True,
    }


def test_a_correction_is_checked_as_loading_does(peagle: Peagle, head: Path) -> None:
    path = add_correction(head)
    assert peagle("push", head, REPO, *CARD).status == 0
    path.write_bytes(path.read_bytes()[:-20])
    result = peagle("push", head, REPO, *CARD)
    assert result.out == "" and f"{str(path)!r} is not readable" in result.err


# ---- an upload ----


@pytest.mark.parametrize("style", ["vllm", "speculators"])
def test_what_was_pushed_serves_as_the_folder_does(
    peagle: Peagle, hub: FakeHub, pair: Pair, tmp_path: Path, style: Any
) -> None:
    source = tmp_path / "source"
    convert_head(pair.peagle, source, style, target=TARGET)
    result = peagle("push", source, REPO, "--license", "mit", "--yes")
    assert result.status == 0, result.err
    assert result.out.endswith(f"\n{hub.url}/{REPO}/commit/{hub.models[REPO].names['main']}\n")
    files = contents(hub)
    assert set(files) == {"README.md", "config.json", WEIGHTS}
    assert {n: files[n] for n in ("config.json", WEIGHTS)} == read_folder(source)
    assert f"base_model: {TARGET}\n" in text_of(files)
    assert read_folder(resolve_model(REPO, role="draft")) == read_folder(source)
    first, *middle, last = writes(hub)
    assert (first, last) == ("repos/create", f"models/{REPO}/commit/main")
    assert [path for path in middle if "commit" in path] == []
    assert not any("torch" in r.user_agent or "harness" in r.path for r in hub.requests)
    assert hub.token not in result.out + result.err


def test_a_second_push_has_nothing_to_do(peagle: Peagle, hub: FakeHub, head: Path) -> None:
    assert peagle("push", head, REPO, *CARD, "--yes").status == 0
    commit = hub.models[REPO].names["main"]
    hub.requests.clear()
    again = peagle("push", head, REPO, *CARD, "--yes")
    assert again.status == 0, again.err
    assert again.out.endswith(f"all of it is there\n{hub.url}/{REPO}/commit/{commit}\n")
    assert writes(hub) == [] and hub.models[REPO].names["main"] == commit


def test_what_is_there_is_replaced_only_by_force(peagle: Peagle, hub: FakeHub, head: Path) -> None:
    assert peagle("push", head, REPO, *CARD, "--yes").status == 0
    others: dict[str, bytes | None] = {
        "figure.png": b"x",
        "old.safetensors": b"y",
        "original/model.safetensors": b"z",
    }
    hub.models[REPO].change("main", others)
    before, commit = contents(hub), hub.models[REPO].names["main"]
    tensors = load_file(head / WEIGHTS)
    save_file({name: value * 2 for name, value in tensors.items()}, head / WEIGHTS)
    call = ("push", head, REPO, *CARD, "--yes")
    refused = peagle(*call)
    assert refused.status == 2
    assert f"has {WEIGHTS!r} with other contents" in refused.err
    assert "has the weights 'old.safetensors', which are not the head's" in refused.err
    assert "--force" in refused.err and hub.models[REPO].names["main"] == commit
    forced = peagle(*call, "--force")
    assert forced.status == 0, forced.err
    assert f"replaced {WEIGHTS}; removed old.safetensors\n" in forced.out
    after = contents(hub)
    assert after.pop(WEIGHTS) == (head / WEIGHTS).read_bytes()
    del before["old.safetensors"], before[WEIGHTS]
    assert after == before


def test_private(peagle: Peagle, hub: FakeHub, head: Path) -> None:
    assert peagle("push", head, REPO, *CARD, "--private", "--yes").status == 0
    assert hub.models[REPO].private
    assert peagle("push", head, "org/open", *CARD, "--yes").status == 0
    assert not hub.models["org/open"].private
    (head / "LICENSE").write_text("terms")
    refused = peagle("push", head, "org/open", *CARD, "--private", "--yes")
    assert refused.status == 2 and "is public, but --private was given" in refused.err
    assert "LICENSE" not in contents(hub, "org/open")


def test_a_branch_of_its_own(peagle: Peagle, hub: FakeHub, head: Path) -> None:
    assert peagle("push", head, REPO, *CARD, "--yes").status == 0
    main = contents(hub)
    (head / "NOTICE").write_text("a trial")
    call = ("push", head, REPO, *CARD, "--revision", "trial", "--yes")
    refused = peagle(*call)
    assert refused.status == 2 and "has 'README.md' with other contents" in refused.err
    assert "trial" not in hub.models[REPO].names
    assert peagle(*call, "--force").status == 0
    trial = contents(hub, revision="trial")
    assert contents(hub) == main and set(trial) == {*main, "NOTICE"}
    assert f"--draft {REPO}@trial " in text_of(trial)
    hub.requests.clear()
    assert peagle(*call).status == 0 and writes(hub) == []


def test_a_card_of_the_users_is_kept(peagle: Peagle, hub: FakeHub, head: Path) -> None:
    own = "---\nlicense: mit\n---\r\n# Mine\n"
    (head / "README.md").write_bytes(own.encode())
    shown = peagle("push", head, REPO)
    assert shown.status == 0 and "README.md, yours:" in shown.out and "# Mine" in shown.out
    refused = peagle("push", head, REPO, "--license", "mit")
    assert refused.status == 2 and "which is kept as it is" in refused.err
    assert peagle("push", head, REPO, "--yes").status == 0
    assert text_of(contents(hub)) == own
    made = peagle("push", head, REPO, *CARD, "--card", "overwrite", "--force", "--yes")
    assert made.status == 0, made.err
    assert text_of(contents(hub)).startswith(f"---\nbase_model: {TARGET}\n")
    assert (head / "README.md").read_bytes() == own.encode()
    (head / "README.md").write_bytes(b"\xff")
    assert "is not UTF-8 text" in peagle("push", head, REPO).err
    (head / "README.md").write_text("# No metadata\n")
    bare = peagle("push", head, REPO, "--force", "--yes")
    assert bare.status == 2 and "the metadata is missing" in bare.err and "mend them" in bare.err


# ---- failures ----


def hide(hub: FakeHub) -> None:
    hub.hidden.add(REPO)


def move_on(hub: FakeHub) -> None:
    hub.before_commit = lambda: hub.models[REPO].change("main", {"x": b"y"})


def fault(part: str, what: int | str) -> Callable[[FakeHub], None]:
    def make(hub: FakeHub) -> None:
        hub.write_faults[part] = what

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hide, f"has a repository '{REPO}' already, and does not show it to the token"),
        (lambda hub: hub.writable.clear(), "may not write there. Check that 'org' is your"),
        (move_on, "The branch has moved on. Somebody changed the repository meanwhile"),
        (lambda hub: hub.ignored.add(WEIGHTS), f"does not hold {WEIGHTS!r} as it was read here"),
        (lambda hub: setattr(hub, "token", "hf_other"), "does not know the token in use"),
        (lambda hub: setattr(hub, "status", 503), "answers with status 503"),
        (lambda hub: setattr(hub, "status", 418), "answers with status 418"),
        (fault("create", "cut"), f"The commit was not made in '{REPO}'. Check the network"),
        (fault("commit", "cut"), f"The commit is not known to have arrived at '{REPO}'"),
        (fault("storage", "cut"), "Check the network and HF_ENDPOINT"),
        (fault("storage", 403), "may not write there"),
        (fault("commit", 413), "no, says the hub. The hub takes no files of that size"),
        (fault("preupload", 429), "had too many requests"),
        (fault("commit", 500), "no, says the hub"),
    ],
)
def test_failures_of_the_hub(
    peagle: Peagle, hub: FakeHub, head: Path, make: Callable[[FakeHub], None], message: str
) -> None:
    token = hub.token
    make(hub)
    result = peagle("push", head, REPO, *CARD, "--yes")
    assert result.status == 2
    assert message in result.err.partition("peagle: error: ")[2]
    assert "Traceback" not in result.err and token not in result.out + result.err


def test_no_token_no_network(
    peagle: Peagle, hub: FakeHub, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ("push", head, REPO, *CARD, "--yes")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "Unset HF_HUB_OFFLINE" in peagle(*call).err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    assert "There is no token for" in (result := peagle(*call)).err
    assert result.status == 2 and f"{hub.url}/settings/tokens" in result.err
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        result = peagle(*call)
    assert result.status == 2 and "cannot be reached" in result.err


def test_a_commit_that_cannot_be_checked_is_told(peagle: Peagle, hub: FakeHub, head: Path) -> None:
    assert peagle("push", head, REPO, *CARD, "--yes").status == 0
    (head / "NOTICE").write_text("more")

    def go_away() -> None:
        hub.hidden.add(REPO)

    hub.before_commit = go_away
    result = peagle("push", head, REPO, *CARD, "--yes")
    assert result.status == 0, result.err
    assert "added NOTICE\nThe hub could not be asked whether it has all of it." in result.out


def test_mistakes(peagle: Peagle, hub: FakeHub, head: Path, tmp_path: Path) -> None:
    def message(*arguments: object) -> str:
        result = peagle("push", *arguments)
        assert (result.status, result.out) == (2, "")
        return result.err

    assert "expected a hub id of the form OWNER/NAME" in message(head, "name", *CARD)
    assert "expected a hub id" in message(head, "a/b/c", *CARD)
    assert "expected a hub id" in message(head, REPO, "--target", "here", "--license", "mit")
    for branch in ("", "a" * 40, "refs/pr/1", "-x", "a..b", "a/", "a b"):
        assert "expected a branch" in message(head, REPO, *CARD, f"--revision={branch}")
    assert "message of the commit is empty" in message(head, REPO, *CARD, "--message", " ")
    unnamed = message(head, REPO, "--license", "mit")
    assert "knows it as 'target'" in unnamed and "--target Qwen/Qwen3-8B" in unnamed
    assert "name it with --license" in message(head, REPO, "--target", TARGET)
    for license in ("Apache 2.0", "mit\nx: y", ""):
        assert "expected an identifier" in message(head, REPO, *CARD[:2], "--license", license)
    convert_head(head, tmp_path / "named", "vllm", target=TARGET)
    other = message(tmp_path / "named", REPO, "--target", "a/b", "--license", "mit")
    assert f"the head names the target '{TARGET}'" in other and "peagle convert" in other
    convert_head(head, tmp_path / "path", "speculators", target="/home/me/model")
    assert "by the path '/home/me/model'" in message(tmp_path / "path", REPO, *CARD)
    (head / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "is a pickle" in message(head, REPO, *CARD, "--yes")
    assert "is not there" in message("nowhere", REPO, *CARD)
    assert hub.requests == []
