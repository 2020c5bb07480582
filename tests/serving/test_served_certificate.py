"""The certificate of a real `peagle serve`, with drafts and without."""

import pytest

from peagle.evaluation.certify.options import ServedOptions
from peagle.evaluation.certify.served import ServedSubject, certify_server
from peagle.evaluation.certify.server import ScoringServer
from peagle.evaluation.endpoint import EndpointBackend
from serving.live import LiveServer

TEXTS = [("sum", "def total(values):\n"), ("read", "import json\n\ndef read(path):\n    with")]


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, 0], ids=["drafts", "no drafts"])
def test_our_server_passes(server: LiveServer, k: int | None) -> None:
    options = ServedOptions(
        prompts=2,
        max_new_tokens=8,
        samples=100,
        sampled_prompts=1,
        concurrency=2,
        tolerance=1e-3,
    )
    scoring = ScoringServer(EndpointBackend(server.url))
    assert scoring.routes == ["completions", "chat"] and scoring.num_top == 20
    subject = ServedSubject(scoring, scoring, 0, options, k)
    longer = [(id, f"# {id}\n" + 6 * text) for id, text in TEXTS]
    found = certify_server(subject, {"short": TEXTS, "long": longer}, {"target": "bundled"})
    assert found.error == "" and found.faults == []
    greedy = [one for one in found.conditions if "stop string" not in one.condition]
    assert len(greedy) == 16
    assert all(one.num_asked_again == 2 for one in greedy), "every position is asked by its ids"
    assert all(one.num_scored_anew == one.num_tokens for one in greedy)
    again = [one.num_cached_tokens for one in greedy if "long" in one.condition][1::2]
    assert min(again) > 0, "the second time the prefix cache is warm"
    assert len(found.distribution) == 2
    if k is None:
        assert (found.num_accepted_tokens or 0) > 20
