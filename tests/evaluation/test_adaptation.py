"""The verdict on an adapted head."""

import pytest

from peagle import LLM
from peagle.data.traffic import RecordedTurn
from peagle.evaluation.adaptation import AcceptanceChange, OwnOutputs, own_outputs, refusal

OLD = {f"c{number}": (2 * number, 10) for number in range(12)}


def more(drafts: int) -> dict[str, tuple[int, int]]:
    return {name: (accepted + drafts, count) for name, (accepted, count) in OLD.items()}


def test_figures_of_a_change() -> None:
    change = AcceptanceChange.of(OLD, more(5))
    assert change.before == pytest.approx(1 + 132 / 120)
    assert change.gain == pytest.approx(0.5) and change.num_conversations == 12
    # Every conversation gains the same, so each resample does too, however much they differ.
    assert change.ci == pytest.approx((0.5, 0.5))
    assert AcceptanceChange.of(OLD, more(-1)).loss == pytest.approx(0.1 / 2.1)


def test_only_a_sure_gain_without_forgetting_passes() -> None:
    gain, same, worse = (AcceptanceChange.of(OLD, more(drafts)) for drafts in (5, 0, -1))
    assert refusal(gain, None, 0.02) == refusal(gain, same, 0.02) == ""
    assert refusal(gain, worse, 0.05) == ""
    assert "fell from 2.100 to 2.000, by 4.8%; expected less than --max-loss, 2.0%" in refusal(
        gain, worse, 0.02
    )
    for poor in (same, worse):
        assert "on held-out traffic is" in refusal(poor, None, 0.02)
    noisy = {name: (a + 40 * (name == "c3") - 2, n) for name, (a, n) in OLD.items()}
    found = AcceptanceChange.of(OLD, noisy)
    assert found.gain > 0 and found.ci is not None and found.ci[0] < 0
    assert "expected one wholly above 0" in refusal(found, None, 0.02)
    few = AcceptanceChange.of({"c1": (1, 2)}, {"c1": (2, 2)})
    assert "interval unknown" in refusal(few, None, 0.02)


@pytest.mark.parametrize(("own", "compared", "passes"), [(64, 64, 1), (40, 64, 0), (2, 5, 1)])
def test_exchanged_outputs(own: int, compared: int, passes: int) -> None:
    assert (OwnOutputs(own, compared).refusal == "") == bool(passes)


def test_outputs_are_compared_where_the_context_has_room() -> None:
    llm = LLM("bundled", max_model_len=64)
    turns = [RecordedTurn([5] * n + [n], [n] * 16, str(n)) for n in range(20, 60, 4)]
    # Behind 21 to 45 tokens is room for 17.
    assert own_outputs(llm, turns).compared == 7
