"""The losslessness certificate of a server with OpenAI's API: its greedy and sampled answers.

Greedy answers under every condition are compared with the answer without drafts (or one more
answer), with the log-probabilities beside their own tokens, with the answer of one token to the
prefix of some positions, and with the log-probabilities of the whole answer as a prompt.
"""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp
from typing import Any

from peagle.client.counters import Counters, DraftCounts
from peagle.client.logprobs import ScoredToken
from peagle.errors import UserError
from peagle.evaluation.certify.distribution import Tokens, fit
from peagle.evaluation.certify.options import ServedOptions
from peagle.evaluation.certify.server import ScoringServer, ServedAnswer, ServedPrompt
from peagle.results import Provenance, SampledTest, ServedCase, ServedCertificate

_SHORTEST_LONG = 500  # characters; shorter prompts do not count as long ones
_STOP_CHARACTERS = 3
_MIN_SECOND = 50  # answers that share a first token, in a test of the second one
_LEAST_REST = 1e-6  # log-probabilities are rounded: the other tokens keep this mass
_SAME_MODEL = 4  # times the tolerance, and at least 1: a gap that rounding never makes

_UNFINISHED = "The run did not end."

Prompts = Sequence[ServedPrompt]


@dataclass(slots=True)
class ServedSubject:
    """A server under test, and the answers that its own are compared with.

    `reference` is a second server, or the same one, asked with `reference_k`: 0 turns drafts off.
    `k` is that of the answers under test; None leaves a server's own K. `watch` gets a line before
    each part, `save` the certificate so far after it.
    """

    server: ScoringServer
    reference: ScoringServer
    reference_k: int | None
    options: ServedOptions
    k: int | None = None
    watch: Callable[[str], None] = lambda _: None
    save: Callable[[ServedCertificate], None] = lambda _: None
    notes: list[str] = field(default_factory=list)

    @property
    def compared_with(self) -> str:
        """Return the name of the answers that greedy answers are compared with."""
        if self.reference is not self.server:
            return self.reference.name
        return "its own answers without drafts" if self.reference_k == 0 else "its second answers"


def certify_server(
    subject: ServedSubject,
    prompts: Mapping[str, Sequence[tuple[str, str]]],
    provenance: Mapping[str, Any],
) -> ServedCertificate:
    """Test that the drafts of a server change nothing.

    `prompts` are (id, text) by their kind, "short" and "long". Where the server fails on the way,
    the certificate has an `error` and what was found.
    """
    started, server, options = time.perf_counter(), subject.server, subject.options
    conditions: list[ServedCase] = []
    distribution: list[SampledTest] = []
    before = server.backend.counters()

    def certificate(error: str = "", drafts: DraftCounts | None = None) -> ServedCertificate:
        return ServedCertificate(
            provenance=Provenance(**provenance),
            settings={
                "endpoint": server.name,
                "model": server.backend.model,
                "compared_with": subject.compared_with,
                "num_top": server.num_top,
                **asdict(options),
            },
            conditions=conditions,
            distribution=distribution,
            notes=[*server.notes, *subject.notes],
            error=error,
            seconds=time.perf_counter() - started,
            num_draft_tokens=drafts and max(0, drafts.num_draft_tokens),
            num_accepted_tokens=drafts and max(0, drafts.num_accepted_tokens),
        )

    error, drafts = "", None
    try:
        if subject.reference is not server:
            require_same_model(subject, prompts["short"])
        for route in server.routes:
            for kind, texts in prompts.items():
                if served := _served_prompts(subject, route, kind, texts):
                    for cases in _greedy_conditions(subject, kind, served):
                        conditions += cases
                        subject.save(certificate(_UNFINISHED))
        for test in _sampled_tests(subject, prompts["short"]):
            distribution.append(test)
            subject.save(certificate(_UNFINISHED))
        drafts = _count_drafts(subject, before)
        if not any(one.num_tokens for one in conditions):
            raise UserError(
                f"{server.name} answered every prompt without a token; choose others with --set."
            )
        if not any(one.num_asked_again for one in conditions):
            subject.notes.append("no position could be asked again as a prompt of its own")
    except UserError as one:
        error = str(one)
    found = certificate(error, drafts)
    subject.save(found)
    return found


def long_prompts(texts: Sequence[str], characters: int) -> list[str]:
    """Return a long prompt for each text, each with a beginning of its own."""
    found = []
    for i in range(len(texts)):
        text = "\n\n".join([f"{i + 1}: a long prompt", *texts[i:], *texts[:i]])
        found.append((text * (1 + characters // len(text)))[:characters])
    return found


def _served_prompts(
    subject: ServedSubject, route: str, kind: str, texts: Sequence[tuple[str, str]]
) -> list[ServedPrompt]:
    """Return the prompts of a route; long ones are cut by half until the server takes the first."""

    def served(id: str, text: str) -> ServedPrompt:
        content = [{"role": "user", "content": text}] if route == "chat" else text
        return ServedPrompt(f"{id}, {kind}, {route}", route, content)

    most = max(len(text) for _, text in texts)
    while True:
        # Without its first character, the prompt tried does not bring a later one into the cache.
        first = served("a try", texts[0][1][1:most])
        if kind != "long" or subject.server.takes(first, subject.options.max_new_tokens):
            return [served(id, text[:most]) for id, text in texts]
        most //= 2
        if most < _SHORTEST_LONG:
            subject.notes.append(f"{subject.server.name} takes no long prompts ({route})")
            return []


def require_same_model(subject: ServedSubject, texts: Sequence[tuple[str, str]]) -> None:
    """Refuse a reference whose first tokens are all less or more likely than rounding explains."""
    server, other = subject.server, subject.reference
    route = next((one for one in server.routes if one in other.routes), None)
    if route is None:
        raise UserError(
            f"{other.name} has no {server.routes[0]}; expected the routes of {server.name}. "
            "Correct --reference-endpoint."
        )
    prompts = _served_prompts(subject, route, "short", texts[:3])
    bound = max(1.0, _SAME_MODEL * subject.options.tolerance)
    answers = [one.ask(prompts, {"max_tokens": 1}) for one in (server, other)]
    found = []
    for mine, theirs in zip(*answers, strict=True):
        tops = [one.tokens[0].top if one.tokens else {} for one in (mine, theirs)]
        first = max(tops[0], key=lambda name: tops[0][name], default="")
        gap = abs(tops[0].get(first, 0.0) - tops[1].get(first, -99.0))
        found.append((gap, f"{_shown(first, tops[0])} and {_shown(first, tops[1])}"))
    gap, shown = min(found)
    if gap > bound:
        raise UserError(
            f"--reference-endpoint {other.name} serves another model: after {prompts[0].id} the "
            f"likeliest token at {server.name} and its log-probabilities at both are {shown}; "
            f"expected a difference below {bound:g}. Name a server of {server.backend.model!r} "
            "that names tokens alike."
        )


def _count_drafts(subject: ServedSubject, before: Counters | None) -> DraftCounts | None:
    """Return the drafts that the server counted during the run; note where there were none."""
    after = subject.server.backend.counters()
    if before is None or after is None or before.drafts is None or after.drafts is None:
        subject.notes.append("the server counts no drafts: whether it drafted is not known")
        return None
    drafts = after.drafts.since(before.drafts)
    if drafts.num_draft_tokens <= 0:
        subject.notes.append("the server drafted nothing during this run: no draft was tested")
    return drafts


# ---- greedy ----


def _greedy_conditions(
    subject: ServedSubject, kind: str, prompts: Prompts
) -> Iterator[list[ServedCase]]:
    """Yield the cases of one kind of prompt: half of them alone, then half under load."""
    halves = (("alone", prompts[::2], ()), ("under load", prompts[1::2] or prompts, prompts[::2]))
    route = prompts[0].route
    for load, some, others in halves:
        name = f"{route}, {kind} prompts, {load}"
        subject.watch(name)
        cold = _answers(subject, some, others)
        warm = _answers(subject, some, others)
        expected = subject.reference.ask(
            some, {"max_tokens": subject.options.max_new_tokens}, k=subject.reference_k
        )
        cases = [
            _compare(subject, f"{name}, first time", cold, expected),
            _compare(subject, f"{name}, again", warm, expected),
        ]
        if not others:
            cases.append(_stopped_case(subject, f"{name}, stop string", cold))
        yield cases


def _answers(subject: ServedSubject, prompts: Prompts, others: Prompts) -> list[ServedAnswer]:
    """Return the greedy answers to prompts: one after the other, or with others in flight."""
    options = subject.options
    greedy = {"max_tokens": options.max_new_tokens}
    if not others:
        return subject.server.ask(prompts, greedy, k=subject.k)
    count = max(options.concurrency + 1 - len(prompts), 0)
    more = [others[i % len(others)] for i in range(count)]
    drawn = {"temperature": 1.0} if subject.server.draws else {}
    beside = [{**greedy, **drawn, "seed": options.seed + i} for i in range(count)]
    every = subject.server.ask(
        [*prompts, *more],
        [greedy] * len(prompts) + beside,
        options.concurrency + 1,
        k=subject.k,
    )
    return every[: len(prompts)]


@dataclass(slots=True)
class _Findings:
    """The near-ties and faults of a condition."""

    num_near_ties: int = 0
    num_unjudged: int = 0
    num_asked_again: int = 0
    num_scored_anew: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, is_near_tie: bool, fault: str) -> None:
        if is_near_tie:
            self.num_near_ties += 1
        else:
            self.faults.append(fault)

    def case(self, condition: str, answers: Sequence[ServedAnswer]) -> ServedCase:
        return ServedCase(
            condition=condition,
            num_answers=len(answers),
            num_tokens=sum(len(one.tokens) for one in answers),
            num_cached_tokens=sum(one.usage.num_cached_tokens for one in answers),
            **asdict(self),
        )


def _compare(
    subject: ServedSubject,
    condition: str,
    answers: Sequence[ServedAnswer],
    expected: Sequence[ServedAnswer],
) -> ServedCase:
    found = _Findings()
    for answer, other in zip(answers, expected, strict=True):
        _check_difference(subject, found, answer, other)
        listed = [one.num_listed for one in answer.tokens]
        found.num_unjudged += sum(count < subject.server.num_top for count in listed)
        own = "but its own log-probabilities have"
        _check_likeliest(subject, found, answer, answer.tokens, own)
        _ask_again(subject, found, answer)
        count = len(answer.tokens)
        anew = subject.reference.next_token(answer, count - 1, echo=True) if count else None
        if anew is not None:
            found.num_scored_anew += count
            words = "computed anew with its whole prompt it is"
            _check_likeliest(subject, found, answer, anew.tokens[-count:], words)
    return found.case(condition, answers)


def deficit(top: Mapping[str, float], token: str) -> float:
    """Return the log-probability of the likeliest token less that of `token`.

    Of a token outside `top` it is a lower bound, by the last one there.
    """
    return max(top.values()) - top.get(token, min(top.values()))


def is_near_tie(top: Mapping[str, float], tokens: Sequence[str | None], tolerance: float) -> bool:
    """Return whether rounding explains that answers go on with different tokens.

    Each lies within the tolerance of the likeliest. None is an end that the server does not list:
    the runner-up stands for it.
    """
    ranked = sorted(top.values(), reverse=True)
    runner_up = ranked[0] - ranked[1] if len(ranked) > 1 else float("inf")
    gaps = (runner_up if one is None else deficit(top, one) for one in tokens)
    return all(gap < tolerance for gap in gaps)


def _check_difference(
    subject: ServedSubject, found: _Findings, answer: ServedAnswer, other: ServedAnswer
) -> None:
    """Compare an answer with the expected one up to the first difference."""
    mine, theirs = answer.names, other.names
    shared = min(len(mine), len(theirs))
    at = next((i for i in range(shared) if mine[i] != theirs[i]), shared)
    pair = [one[at] if at < len(one) else None for one in (mine, theirs)]
    if pair == [None, None]:
        if (answer.text, answer.finish_reason) != (other.text, other.finish_reason):
            found.faults.append(
                f"{answer.prompt.id}: the same tokens give {_ending(answer)}, expected "
                f"{_ending(other)}"
            )
        return
    asking = subject.reference.next_token
    asked = asking(other, at, echo=True) or asking(other, at, k=subject.reference_k)
    scored = [*(asked.tokens[-1:] if asked else ()), *other.tokens[at:], *answer.tokens[at:]]
    top = scored[0].top
    found.add(
        is_near_tie(top, pair, subject.options.tolerance),
        f"{answer.prompt.id}: token {at} is {_shown(pair[0], top)}, expected "
        f"{_shown(pair[1], top)}",
    )


def _check_likeliest(
    subject: ServedSubject,
    found: _Findings,
    answer: ServedAnswer,
    scored: Sequence[ScoredToken],
    words: str,
) -> None:
    """Compare each token with the likeliest one of its position; the first fault is named."""
    for at, (one, other) in enumerate(zip(answer.tokens, scored, strict=True)):
        top = other.top
        is_same = one.token == other.token  # then its log-probability is known whatever its name
        gap = other.best - other.logprob if is_same else deficit(top, one.token)
        if gap >= subject.options.tolerance:
            best = max(top, key=lambda name: top[name])
            is_hidden = top[best] < other.best
            likelier = f"another of a name ({other.best:.3g})" if is_hidden else _shown(best, top)
            found.faults.append(
                f"{answer.prompt.id}: token {at} is {_shown(one.token, top)}; {words} {likelier}"
            )
            return


def _ask_again(subject: ServedSubject, found: _Findings, answer: ServedAnswer) -> None:
    """Ask for some tokens again, each with all tokens before it as the prompt."""
    options, count = subject.options, len(answer.tokens)
    dice = random.Random(f"{options.seed} {answer.prompt.id}")
    for at in sorted(dice.sample(range(count), min(count, options.asked_again))):
        asked = subject.server.next_token(answer, at, k=subject.reference_k)
        if asked is None:
            continue
        found.num_asked_again += 1
        token, again = answer.tokens[at].token, asked.tokens[0]
        if deficit(again.top, token) > 0 or token != again.token:
            found.add(
                is_near_tie(again.top, [token, again.token], options.tolerance),
                f"{answer.prompt.id}: token {at} is {_shown(token, again.top)}; asked again it is "
                f"{_shown(again.token, again.top)}",
            )
        elif asked.has_ended and at < count - 1:
            found.faults.append(
                f"{answer.prompt.id}: token {at}, {token!r}, ends an answer, but "
                f"{count - 1 - at} tokens follow it"
            )


def _stopped_case(
    subject: ServedSubject, condition: str, answers: Sequence[ServedAnswer]
) -> ServedCase:
    """Ask again with some characters of each answer as its stop string."""
    found, every = _Findings(), []
    for answer in answers:
        middle = len(answer.text) // 2
        stop = answer.text[middle : middle + _STOP_CHARACTERS]
        if not stop.strip() or "\ufffd" in stop or answer.has_reasoning:
            continue
        fields = {"max_tokens": subject.options.max_new_tokens, "stop": [stop]}
        (stopped,) = subject.server.ask([answer.prompt], fields, k=subject.k)
        every.append(stopped)
        expected = answer.text[: answer.text.index(stop)]
        if (stopped.text, stopped.finish_reason) == (expected, "stop"):
            continue
        size = min(len(stopped.tokens), len(answer.tokens))
        if stopped.names[:size] != answer.names[:size]:
            _check_difference(subject, found, stopped, answer)
        else:
            found.faults.append(
                f"{answer.prompt.id}: with the stop string {stop!r} it gives {_ending(stopped)}, "
                f"expected {expected[-20:]!r} and the finish reason 'stop'"
            )
    if not every:
        subject.notes.append(f"{condition}: not checked, no answer has text for a stop string")
    return found.case(condition, every)


def _ending(answer: ServedAnswer) -> str:
    return f"{answer.text[-20:]!r} and the finish reason {answer.finish_reason!r}"


def _shown(token: str | None, top: Mapping[str, float]) -> str:
    if token is None:
        return "the end"
    logprob = top.get(token)
    return f"{token!r} ({'not among the likeliest' if logprob is None else f'{logprob:.3g}'})"


# ---- sampled ----


def _sampled_tests(
    subject: ServedSubject, texts: Sequence[tuple[str, str]]
) -> Iterator[SampledTest]:
    """Yield the tests of first and second tokens of some prompts."""
    options, server = subject.options, subject.server
    if not options.samples or not server.draws:
        return
    prompts = _served_prompts(subject, server.routes[0], "short", texts[: options.sampled_prompts])
    significance = options.alpha / (2 * len(prompts))
    greedy = server.ask(prompts, {"max_tokens": options.max_new_tokens}, k=subject.k)
    for number, answer in enumerate(greedy):
        subject.watch(f"sampling, {answer.prompt.id}")
        prompt = _context(server, answer)
        # One token more than is tested, so that the second one may be a draft.
        seeds = range(number * options.samples, (number + 1) * options.samples)
        fields = [
            {"max_tokens": 3, "temperature": 1.0, "seed": (options.seed << 24) + seed}
            for seed in seeds
        ]
        drawn = server.ask(
            [prompt] * options.samples, fields, options.concurrency, num_top=1, k=subject.k
        )
        firsts = [one.names[0] for one in drawn if one.tokens]
        (asked,) = server.ask(
            [prompt], {"max_tokens": 1, "temperature": 1.0}, k=subject.reference_k
        )
        if len(firsts) < len(drawn) or not asked.tokens:
            subject.notes.append(
                f"{prompt.id}: {len(drawn) - len(firsts)} of {len(drawn)} answers end before a "
                "token that the server lists; first tokens are not tested"
            )
            continue
        yield from _test(subject, asked, firsts, f"{prompt.id}, token 1", significance)
        mode = Counter(firsts).most_common(1)[0][0]
        begun = [one for one in drawn if one.names[:1] == [mode]]
        seconds = [one.names[1] for one in begun if len(one.tokens) > 1]
        if len(seconds) < max(len(begun), _MIN_SECOND):
            subject.notes.append(
                f"{prompt.id}: {len(begun)} answers share a token 1, of which {len(seconds)} go "
                f"on; the test of token 2 needs {_MIN_SECOND} and no end. Raise --samples"
            )
            continue
        after = server.next_token(begun[0], 1, temperature=1.0, k=subject.reference_k)
        if after is None:
            subject.notes.append(f"{prompt.id}: no prefix can be asked; token 2 is not tested")
        else:
            yield from _test(subject, after, seconds, f"{prompt.id}, token 2", significance)


def _test(
    subject: ServedSubject, asked: ServedAnswer, tokens: Sequence[str], name: str, limit: float
) -> Iterator[SampledTest]:
    """Yield the test of tokens, or note that several of the likeliest ones have one name."""
    top, most = asked.tokens[0].top, subject.server.num_top
    if len(top) < most:
        subject.notes.append(f"{name}: some of {most} tokens have one name; it is not tested")
    else:
        yield fit_tokens(top, tokens, name, limit)


def fit_tokens(
    top: Mapping[str, float], tokens: Sequence[str], prompt: str, significance: float
) -> SampledTest:
    """Test sampled tokens against the log-probabilities of the likeliest ones, and the rest.

    Parts of characters, which share a name with less likely tokens, count among the rest.
    """
    top = {name: logprob for name, logprob in top.items() if "\ufffd" not in name}
    ids = {name: number for number, name in enumerate(top)}
    masses = [exp(logprob) for logprob in top.values()]
    cells: dict[Tokens, float] = {(number,): mass for number, mass in enumerate(masses)}
    cells[()] = max(_LEAST_REST, 1.0 - sum(masses))
    outputs = [(ids.get(token, -1),) for token in tokens]
    found = fit(cells, outputs, 1, significance)
    return SampledTest(
        method="server", prompt=prompt, num_tokens=1, significance=significance, **asdict(found)
    )


def _context(server: ScoringServer, answer: ServedAnswer) -> ServedPrompt:
    """Return the prompt with the part of its answer after which drafts are uncertain.

    It ends before the token with the greatest p_j^2 (1 - p_j) p_j+1 (1 - p_j+1), p_j the
    probability of token j of the greedy answer.
    """
    p = [exp(one.logprob) for one in answer.tokens]
    scores = [a * a * (1 - a) * b * (1 - b) for a, b in itertools.pairwise(p)]
    place = scores.index(max(scores)) if scores else 0
    if not place or server.next_token(answer, place) is None:
        return answer.prompt
    return server.prefix(answer, place) or answer.prompt


# ---- text ----


def served_text(certificate: ServedCertificate) -> str:
    """Return a certificate of a server as text for a terminal."""
    settings = certificate.settings
    parts = [
        [
            f"Losslessness certificate of {settings['model']} at {settings['endpoint']}",
            f"  near-ties are gaps of log-probabilities below {settings['tolerance']:g}",
        ],
        [f"Greedy answers against {settings['compared_with']} and the server's log-probabilities"],
    ]
    width = max((len(case.condition) for case in certificate.conditions), default=0)
    for case in certificate.conditions:
        if not case.num_answers:
            parts[-1].append(f"  {case.condition:<{width}} not checked")
            continue
        # Many servers do not tell them.
        cached = f"{count} prompt tokens cached, " if (count := case.num_cached_tokens) else ""
        unjudged = f", {count} tokens unjudged" if (count := case.num_unjudged) else ""
        parts[-1].append(
            f"  {case.condition:<{width}} {case.num_answers} answers, {case.num_tokens} tokens, "
            f"{cached}{case.num_asked_again} asked again, "
            f"{case.num_scored_anew} scored anew: "
            f"{len(case.faults)} faults, {case.num_near_ties} near-ties{unjudged}"
        )
    if tests := certificate.distribution:
        parts.append(
            [
                "Sampled tokens against the server's log-probabilities (a fault is p < "
                f"{tests[0].significance:.2g}; at most 1% of runs of a lossless server have one)"
            ]
        )
        parts[-1] += [
            f"  {test.prompt}: p = {test.p_value:.3g}, {test.num_samples} samples, "
            f"{test.num_cells} cells; finds a shift of {test.detectable_shift:.1%} in 9 of 10 runs"
            for test in tests
        ]
    if (drafted := certificate.num_draft_tokens) is not None:
        accepted = certificate.num_accepted_tokens
        parts.append([f"Drafts of the server meanwhile: {accepted} of {drafted} accepted"])
    if certificate.notes:
        parts.append([f"note: {text}" for text in certificate.notes])
    verdict = "PASSED: drafts change nothing that was tested here."
    if certificate.faults:
        verdict = "FAILED:\n" + "\n".join(f"  {fault}" for fault in certificate.faults)
    return "\n\n".join(["\n".join(lines) for lines in parts]) + (
        f"\n\n{verdict} ({certificate.seconds:.0f} s)"
    )
