"""`peagle eval --certify --endpoint`: lossless servers pass, planted faults are found."""

import json
import re
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle.client.logprobs import scored_tokens
from peagle.evaluation.certify.options import ServedOptions
from peagle.evaluation.certify.served import fit_tokens, is_near_tie
from peagle.evaluation.endpoint import _pause
from peagle.evaluation.http_client import Reply
from peagle.results import ServedCertificate, read_document
from tests.cli.conftest import Peagle, peagle  # noqa: F401 - a fixture
from tests.evaluation.fake_endpoint import endpoint
from tests.evaluation.toy_server import ToyServer

NAMES = ("sum", "mean", "largest", "length")
TEXTS = [f"{name} of x: def function(x):" for name in NAMES]
SMALL = ("--max-new-tokens", 16, "--samples", 300, "--concurrency", 3, "--tolerance", 0.001)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"id": t.split()[0], "prompt": t}) for t in TEXTS))
    return path


@pytest.fixture
def certify(peagle: Peagle, prompts: Path, tmp_path: Path) -> Any:  # noqa: F811
    """certify(server, options...) -> (status, certificate, standard error)."""

    def call(server: ToyServer, *options: object) -> tuple[int, Any, str]:
        output = tmp_path / "out"
        with endpoint(server.script()) as url:
            result = peagle(
                *("eval", "--certify", "--endpoint", url, "--set", prompts, *SMALL),
                *("--output", output, *options),
            )
        file = output / "certificate.json"
        found = read_document(file, ServedCertificate) if file.exists() else None
        return result.status, found, result.err + result.out

    return call


# ---- lossless servers ----


@pytest.mark.parametrize(
    "server",
    [
        ToyServer(is_ours=True, has_ids=True, has_echo=True),
        ToyServer(has_ids=True),
        ToyServer(tops=5),
    ],
    ids=["switch", "ids", "text"],
)
def test_a_lossless_server_passes(certify: Any, server: ToyServer) -> None:
    status, found, text = certify(server)
    assert status == 0, text
    assert found.passed and found.error == "" and "PASSED" in text
    names = [one.condition for one in found.conditions]
    assert len(names) == len(set(names)) == 10
    assert all(
        one.num_answers == 2 for one in found.conditions if "stop string" not in one.condition
    )
    again = [one.num_asked_again for one in found.conditions if "stop string" not in one.condition]
    assert min(again) > 0
    assert not any(one.num_unjudged for one in found.conditions)
    anew = sum(one.num_scored_anew for one in found.conditions)
    assert (anew > 0) == server.has_echo
    assert len(found.distribution) == 4
    assert found.settings["num_top"] == server.tops
    expected = "without drafts" if server.is_ours else "second answers"
    assert expected in found.settings["compared_with"]


def test_a_certificate_is_no_traffic_to_record(certify: Any) -> None:
    said = set()

    class Listening(ToyServer):
        def complete(self, prompt: Any, body: dict[str, Any], num_top: int) -> dict[str, Any]:
            said.add(body.get("store"))
            return super().complete(prompt, body, num_top)

    certify(Listening(is_ours=True), "--samples", 0)
    assert said == {False}


def test_a_greedy_server_is_asked_for_greedy_answers_alone(certify: Any) -> None:
    status, found, text = certify(ToyServer(has_ids=True, draws=False))
    assert status == 0, text
    assert len(found.conditions) == 10 and not found.distribution
    expected = "refuses temperature 1 (400: temperature is 1.0, expected 0): sampled tokens are"
    assert any(expected in note for note in found.notes) and expected in text.replace("\n", " ")


@pytest.mark.parametrize("models", [[{"id": "m"}], [{"id": "other"}], None])
def test_a_second_server_is_the_reference(certify: Any, models: Any) -> None:
    plain = ToyServer(has_ids=True)
    with endpoint(replace(plain.script(), models=models)) as url:
        options = ("--model", "m", "--reference-endpoint", url)
        status, found, text = certify(ToyServer(has_ids=True), *options)
    assert status == 0, text
    assert found.settings["compared_with"] == url
    assert plain.num_answers >= 11, "3 first tokens and 8 answers"


@pytest.mark.parametrize("shown", ["e", "\ufffd"], ids=["in the text", "nowhere"])
def test_names_that_are_not_the_text_are_no_prompt(certify: Any, shown: str) -> None:
    """The server would read as many tokens, and others."""

    def told(_: int, choice: dict[str, Any]) -> dict[str, Any]:
        named = json.loads(json.dumps(choice["logprobs"]).replace('"e"', '"\ufffd"'))
        return {**choice, "text": choice["text"].replace("e", shown), "logprobs": named}

    status, found, text = certify(ToyServer(tops=5, told=told), "--samples", 0)
    assert (status, found.faults) == (0, []), text


def test_tokens_of_one_name_are_not_tested(certify: Any) -> None:
    """Only the last of them has its log-probability among the likeliest ones."""

    def told(number: int, choice: dict[str, Any]) -> dict[str, Any]:
        tops = [dict(top) for top in choice["logprobs"]["top_logprobs"]]
        for top in (one for one in tops if number > 9 and len(one) > 5):
            _, second, *_ = top
            top[second] = top.popitem()[1]
        return {**choice, "logprobs": {**choice["logprobs"], "top_logprobs": tops}}

    status, found, text = certify(ToyServer(told=told))
    assert (status, found.faults) == (0, []), text
    assert any("some of 20 tokens have one name; it is not" in note for note in found.notes)


@pytest.mark.parametrize("is_chat", [True, False])
def test_accepted_drafts_are_found_or_told_where_names_are_shared(
    certify: Any, is_chat: bool
) -> None:
    """A list has the log-probabilities of all; an object has one of each name, here the least."""

    def told(number: int, choice: dict[str, Any]) -> dict[str, Any]:
        listed = choice["logprobs"]
        if number < 10:  # a probe
            return choice
        values, tops = listed["token_logprobs"], listed["top_logprobs"]
        one = {"token": "\ufffd"}
        several = [
            {**one, "logprob": own, "top_logprobs": [{**one, "logprob": x} for x in top.values()]}
            for own, top in zip(values, tops)
        ]
        least = [{"\ufffd": min(top.values())} if top else {} for top in tops]
        alike = {"tokens": ["\ufffd"] * len(tops), "token_logprobs": values, "top_logprobs": least}
        return {**choice, "logprobs": {"content": several} if is_chat else alike}

    status, found, text = certify(ToyServer(fault="accepts", told=told), "--samples", 0)
    unjudged = sum(case.num_unjudged for case in found.conditions)
    if is_chat:
        assert status == 1 and unjudged == 0
        assert "its own log-probabilities have another of a name (" in text
    else:
        num_tokens = sum(c.num_tokens for c in found.conditions if "stop" not in c.condition)
        assert (status, unjudged) == (0, num_tokens), text
        assert re.search(r"0 near-ties, [1-9]\d* tokens unjudged", text)


def test_a_server_that_gives_fewer_log_probabilities_than_asked(certify: Any) -> None:
    def told(_: int, choice: dict[str, Any]) -> dict[str, Any]:
        tops = [dict([*top.items()][:7]) for top in choice["logprobs"]["top_logprobs"]]
        return {**choice, "logprobs": {**choice["logprobs"], "top_logprobs": tops}}

    status, found, text = certify(ToyServer(told=told))
    assert (status, found.settings["num_top"], len(found.distribution)) == (0, 5, 4), text


def test_an_echo_without_log_probabilities(certify: Any) -> None:
    class Echoing(ToyServer):
        def complete(self, prompt: Any, body: dict[str, Any], num_top: int) -> dict[str, Any]:
            answer = super().complete(prompt, body, num_top)
            if body.get("echo"):
                listed = answer["choices"][0]["logprobs"]
                for name, first in {"tokens": "a", "token_logprobs": None}.items():
                    listed[name] = (*[first] * len(prompt), *listed[name])
                listed["top_logprobs"] = (*[None] * len(prompt), *listed["top_logprobs"])
            return answer

    status, found, text = certify(Echoing(has_ids=True), "--samples", 0)
    assert status == 0, text
    assert any("echoes no prompt" in note for note in found.notes)


# ---- planted faults ----


@pytest.mark.parametrize("switch", ["switch", "reference", "neither"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("accepts", "but its own log-probabilities have"),
        ("past stop", "with the stop string"),
        ("cache", "expected"),
    ],
)
def test_faults_are_found(certify: Any, fault: str, message: str, switch: str) -> None:
    server = ToyServer(is_ours=switch == "switch", has_ids=True, fault=fault)
    with endpoint(ToyServer(has_ids=True).script()) as url:
        more = ("--reference-endpoint", url) if switch == "reference" else ()
        status, found, text = certify(server, "--samples", 0, *more)
    assert status == 1, text
    assert not found.passed and "FAILED" in text
    assert any(message in fault for fault in found.faults)


@pytest.mark.parametrize("has_echo", [True, False])
def test_a_cache_that_is_wrong_from_the_first_request_on(certify: Any, has_echo: bool) -> None:
    """All answers of the server agree; only a prompt that is computed as a whole tells."""
    server = ToyServer(is_ours=True, has_ids=True, has_echo=has_echo, fault="cache from the first")
    status, found, _ = certify(server, "--samples", 0)
    assert status == has_echo
    assert any("computed anew with its whole prompt" in one for one in found.faults) == has_echo


def test_drafts_that_nobody_compares_change_the_distribution(certify: Any) -> None:
    _, found, _ = certify(ToyServer(has_ids=True, fault="accepts"))
    seconds = [one for one in found.distribution if one.prompt.endswith("token 2")]
    firsts = [one for one in found.distribution if one.prompt.endswith("token 1")]
    assert any(not one.passed for one in seconds)
    assert all(one.passed for one in firsts), "the first token is never a draft"


# ---- refusals ----


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        (ToyServer(tops=0), (), "gives no log-probabilities of 'm' (200: an answer); expected"),
        (ToyServer(), ("-k", 3), "decides on its own K"),
        (ToyServer(), ("--top-k", 5), "--top-k is 5; a server's log-probabilities"),
        (ToyServer(), ("--temperature", "0.7"), "--temperature is 0.7"),
        (ToyServer(), ("--tolerance", "0"), "--tolerance is 0; expected a gap"),
        (ToyServer(), ("--dtype", "float32"), "--dtype and --endpoint contradict"),
        (ToyServer(), ("--endpoint", ""), "--endpoint is ''; expected a URL"),
        (ToyServer(), ("--model", "n"), "has no completions of a model 'n'"),
        (ToyServer(), ("--reference-endpoint", "http://127.0.0.1:9"), "No server answers at"),
    ],
)
def test_refusals(certify: Any, server: ToyServer, options: Any, message: str) -> None:
    status, found, text = certify(server, *options)
    assert (status, found) == (2, None)
    assert message in text


def test_another_model_at_the_second_url(certify: Any) -> None:
    with endpoint(ToyServer(model="another", has_ids=True).script()) as url:
        status, found, text = certify(ToyServer(has_ids=True), "--reference-endpoint", url)
    assert status == 2
    assert f"--reference-endpoint {url} serves another model" in text
    assert found.error and not found.conditions


class Refusing(ToyServer):
    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        return 400, {"error": {"message": "no"}}, {}


def no_tokens(number: int, choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "logprobs": None} if number > 5 else choice


def other_form(number: int, choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "logprobs": {"tokens": "a"}} if number > 5 else choice


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Refusing(), "answers neither completions"),
        (ToyServer(tops=0), "gives no log-probabilities"),
        (ToyServer(has_ids=True, told=no_tokens), "with text and no log-probabilities"),
        (ToyServer(has_ids=True, told=other_form), "in OpenAI's form"),
    ],
)
def test_faults_of_the_second_server_name_its_option(
    certify: Any, second: ToyServer, message: str
) -> None:
    with endpoint(second.script()) as url:
        status, _, text = certify(ToyServer(has_ids=True), "--reference-endpoint", url)
    assert status == 2 and url in text and message in text.replace("\n", " ")
    assert "orrect --reference-endpoint" in text and "orrect --endpoint" not in text


def test_a_limited_rate_is_waited_for(certify: Any) -> None:
    status, found, text = certify(ToyServer(has_ids=True, num_limited=3), "--samples", 0)
    assert status == 0, text
    assert found.passed


def test_a_rate_that_stays_limited_is_named(certify: Any) -> None:
    server = ToyServer(num_limited=99, retry_after="121")
    status, found, text = certify(server)
    assert (status, found) == (2, None)
    assert "limits the rate (429: slowly) and asks for a wait of 121 s" in text
    assert "Lower --concurrency" in text


@pytest.mark.parametrize(
    ("text", "message"), [("x", "with text and no log-prob"), ("", "every prompt without a token")]
)
def test_answers_without_tokens_are_named(certify: Any, text: str, message: str) -> None:
    def told(number: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {**choice, "text": text, "logprobs": None} if number > 5 else choice

    status, _, said = certify(ToyServer(has_ids=True, told=told), "--samples", 0)
    assert status == 2 and message in said.replace("\n", " ")


def test_stop_strings_that_no_answer_has_are_not_checked(certify: Any) -> None:
    def told(_: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {**choice, "text": " " * len(choice["text"])}

    status, found, text = certify(ToyServer(has_ids=True, told=told), "--samples", 0)
    assert (status, found.passed) == (0, True), text
    names = [one.condition for one in found.conditions if not one.num_answers]
    assert len(names) == 2 and all("stop string" in name for name in names)
    for name in names:
        assert f"{name}: not checked, no answer has text for a stop string" in found.notes
        assert re.search(rf"  {name} +not checked\n", text)


def test_answers_that_end_before_a_listed_token(certify: Any) -> None:
    """Where the end is not listed, the other answers are no sample of first tokens."""

    def told(_: int, choice: dict[str, Any]) -> dict[str, Any]:
        size = len(choice["text"])
        return {**choice, "logprobs": {name: of[:size] for name, of in choice["logprobs"].items()}}

    _, found, _ = certify(ToyServer(has_ids=True, told=told))
    assert any("answers end before a token" in note for note in found.notes)
    assert all(test.passed for test in found.distribution)


def test_waits_grow_where_a_server_names_none() -> None:
    pauses = [_pause(Reply(headers={"retry-after": of}), 9) for of in ("0", "-5", "nan", "7")]
    assert pauses == [3, 3, 3, 7]


def test_a_server_that_dies_leaves_what_was_found(certify: Any) -> None:
    status, found, text = certify(ToyServer(has_ids=True, dies_after=60))
    assert status == 2
    assert "went away after" in text and "certificate.json" in text
    assert found.conditions and found.error and not found.passed
    assert not found.faults


# ---- statistics ----


@pytest.mark.slow
def test_false_alarms_of_lossless_servers_are_rare() -> None:
    """Two prompts, two tokens each, over many runs: at most 1% have a p-value below its limit."""
    options, runs, alarms = ServedOptions(), 1000, 0
    dice = np.random.default_rng(5)
    significance = options.alpha / (2 * options.sampled_prompts)
    for _ in range(runs):
        lowest = 1.0
        for size in (options.samples, options.samples // 2) * options.sampled_prompts:
            masses = np.sort(dice.dirichlet(np.full(60, dice.choice([0.05, 0.3, 2.0]))))[::-1]
            top = {str(i): log(max(mass, 1e-30)) for i, mass in enumerate(masses[:20])}
            tokens = dice.choice(60, size=size, p=masses / masses.sum())
            test = fit_tokens(top, [str(one) for one in tokens], "", significance)
            lowest = min(lowest, test.p_value / significance)
        alarms += lowest < 1
    assert alarms <= runs // 100


def test_sampled_parts_of_characters_are_no_false_alarm() -> None:
    """Of 300 with that name 100 are the one among the likeliest; 200 are others."""
    top = {"a": log(0.7), "\ufffd": log(0.1)}
    tokens = ["a"] * 700 + ["\ufffd"] * 300
    assert fit_tokens(top, tokens, "", 1e-3).passed
    assert not fit_tokens(top, tokens[300:], "", 1e-3).passed


def test_near_ties() -> None:
    top = {"a": -1.0, "b": -1.1, "c": -3.0}
    assert is_near_tie(top, ["a", "b"], 0.2)
    assert not is_near_tie(top, ["a", "b"], 0.05)
    assert not is_near_tie(top, ["b", "c"], 0.2)
    assert not is_near_tie(top, ["a", "z"], 0.2), "it is less likely than c"
    assert is_near_tie(top, ["a", None], 0.2) and not is_near_tie(top, ["c", None], 0.2)


def test_log_probabilities_of_both_routes() -> None:
    completion = {
        "tokens": ["token_id:7", "b"],
        "token_logprobs": [-0.5, -2],
        "top_logprobs": [{"token_id:7": -0.5, "x": -1}, {"a": -0.2}],
    }
    chat = [{"token": "b", "logprob": -2, "top_logprobs": [{"token": "a", "logprob": -0.2}]}]
    first, second = scored_tokens({"logprobs": completion})
    assert (first.token_id, second.token_id) == (7, None)
    assert second.top == {"a": -0.2, "b": -2.0}
    assert scored_tokens({"logprobs": {"content": chat}}) == [second]
    tops = [{"token": name, "logprob": value} for name, value in (("b", -1), ("a", -2), ("a", -4))]
    chat[0] |= {"token": "a", "logprob": -9, "top_logprobs": tops}
    (third,) = scored_tokens({"logprobs": {"content": chat}})
    assert (third.top, third.best, third.num_listed) == ({"a": -9.0, "b": -1.0}, -1.0, 3)
    assert scored_tokens({"logprobs": None}) == []
    with pytest.raises(ValueError, match="another form"):
        scored_tokens({"logprobs": {"tokens": ["a"], "token_logprobs": []}})


@pytest.mark.parametrize("value", [*map(float, ("nan", "inf", "-inf")), -9999, 9e99, 2, None, "x"])
def test_log_probabilities_of_no_distribution(value: Any) -> None:
    """NaN differs from nothing, so that no comparison of greedy answers finds a fault."""
    with pytest.raises(ValueError, match="of no distribution"):
        scored_tokens({"logprobs": {"content": [{"token": "b", "logprob": value}]}})
