"""The recipe's target training and response generation, on a tiny model and random text."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

RECIPE = Path(__file__).parents[2] / "recipes" / "bundled_pair"
VOCAB, PROMPT_LENS, MAX_NEW = 64, (8, 13), 24


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"bundled_pair_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pretrain, responses = load("pretrain"), load("respond")


def run(module, *arguments) -> None:
    """Call the script's main as its command line would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
        module.main()


def markov_tokens(count: int, seed: int) -> np.ndarray:
    """Text in which a token nearly fixes the next: low loss is reachable in few steps."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros(count, dtype="<u2")
    for i in range(1, count):
        jump = rng.integers(VOCAB) if rng.random() < 0.1 else (5 * tokens[i - 1] + 3) % VOCAB
        tokens[i] = jump
    return tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder as the data recipe leaves it, after 60 training steps of a tiny target."""
    folder = tmp_path_factory.mktemp("pair")
    config = json.loads((RECIPE / "target.json").read_text())
    config |= {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    config |= {"num_hidden_layers": 2, "max_position_embeddings": 128}
    (folder / "tiny.json").write_text(json.dumps(config))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    compressed = pretrain.lzma.compress(markov_tokens(20_000, 0).tobytes())
    (folder / "train.u16.xz").write_bytes(compressed)
    markov_tokens(2_000, 1).tofile(folder / "val.u16")
    arguments = ["--config", folder / "tiny.json", "--data", folder, "--out", folder]
    arguments += ["--steps", 60, "--batch", 8, "--seq-len", 64, "--lr", 0.01, "--warmup", 5]
    run(pretrain, *arguments)
    return folder


@pytest.fixture(scope="module")
def prompts(trained) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    arrays = {f"p{n}": rng.integers(1, VOCAB, (7, n)).astype(np.uint16) for n in PROMPT_LENS}
    np.savez(trained / "response_prompts.npz", **arrays)
    return arrays


def test_training_learns_and_saves_a_folder(trained):
    log = json.loads((trained / "target_train.json").read_text())
    assert log["steps"] == 60 and log["tokens"] == 60 * 8 * 64
    assert log["val_loss"] < 0.6 * np.log(VOCAB)
    assert (trained / "target" / "tokenizer_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(trained / "target")
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    # The logged loss is that of the saved weights.
    tokens = torch.from_numpy(np.fromfile(trained / "val.u16", "<u2").astype(np.int64))
    windows = tokens[: 31 * 64 + 1].unfold(0, 65, 64)[:24]
    with torch.no_grad():
        logits = model.float()(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss.item() == pytest.approx(log["val_loss"], abs=2e-3)


def test_minutes_end_the_training(trained, tmp_path, monkeypatch):
    """No time is left after the steps that are timed: one more is taken."""
    monkeypatch.setattr(pretrain, "CALIBRATION_STEPS", (2, 4))
    arguments = ["--config", trained / "tiny.json", "--data", trained, "--out", tmp_path]
    run(pretrain, *arguments, "--minutes", 0.001, "--batch", 2, "--seq-len", 64)
    assert json.loads((tmp_path / "target_train.json").read_text())["steps"] == 5


def test_schedule_warms_up_holds_and_ends_at_zero():
    config = pretrain.TrainConfig(100, None, 1, 1, "muon", 0.5, 10, 0.5, 0.1, 1.0, 0.0, 0)
    rates = [pretrain.learning_rate(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.05) and rates[10:50] == [0.5] * 40
    assert rates[75] == pytest.approx(0.25) and rates[100] == 0


def test_wrong_data_is_named(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no train\.u16 or train\.u16\.xz"):
        pretrain.load_tokens(tmp_path, "train", torch.device("cpu"))
    with pytest.raises(ValueError, match="expected more than one sequence of 4096"):
        run(pretrain, "--config", trained / "tiny.json", "--data", trained, "--seq-len", 4096)


def test_greedy_rows_equal_generate(trained, prompts):
    reference = AutoModelForCausalLM.from_pretrained(trained / "target", dtype=torch.float32)
    model = responses.load_target(trained / "target", torch.device("cpu"))
    for array in prompts.values():
        decoder = responses.StaticDecoder(model, 8, array.shape[1], MAX_NEW)
        # The odd row out is sampled and must not disturb the others; the batch is not full either.
        temperatures = np.array([0.0] * 6 + [1.0], np.float32)
        for _ in range(2):  # buffers are reused
            rows = decoder.generate(array, temperatures)
        for prompt, row in zip(array[:6], rows, strict=False):
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            expected = reference.generate(ids, max_new_tokens=MAX_NEW, do_sample=False)
            assert row.tolist() == expected[0, len(prompt) :].tolist()


def test_sampling_follows_the_temperature(trained, prompts):
    reference = AutoModelForCausalLM.from_pretrained(trained / "target", dtype=torch.float32)
    model = responses.load_target(trained / "target", torch.device("cpu"))
    prompt, draws, temperature = prompts["p8"][:1], 4000, 0.7
    decoder = responses.StaticDecoder(model, draws, 8, 1)
    torch.manual_seed(3)
    rows = decoder.generate(prompt.repeat(draws, 0), np.full(draws, temperature, np.float32))
    counts = np.bincount([row[0] for row in rows], minlength=VOCAB) / draws
    with torch.no_grad():
        logits = reference(torch.from_numpy(prompt.astype(np.int64))).logits[0, -1]
    probs = (logits / temperature).softmax(-1).numpy()
    assert np.abs(counts - probs).max() < 5 * np.sqrt(0.25 / draws)


@pytest.mark.parametrize(
    ("tokens", "cut"),
    [("abcabd", 3), ("abcdef", 6), ("aaaa", 1), ("xyabyabz", 4), ("a", 1), ("", 0)],
)
def test_loop_is_cut_at_the_second_occurrence(tokens, cut):
    assert responses.loop_start(np.array([ord(c) for c in tokens], np.int16), ngram=2) == cut


def test_response_files(trained, prompts):
    options = ["--max-new", MAX_NEW, "--batch", 4, "--val", 3, "--temperatures", "0,0.8"]
    options += ["--shares", "1,0.5"]
    run(responses, "--data", trained, "--out", trained / "out", *options)
    summary = json.loads((trained / "out" / "responses.json").read_text())
    assert summary["samples"] == 2 * (7 + 4)
    sizes, seen = [], set()
    for name in ("responses", "responses_val"):
        with safe_open(trained / "out" / f"{name}.safetensors", "pt") as file:
            assert file.metadata()["format_version"] == "1"
            tokens, starts = file.get_tensor("tokens"), file.get_tensor("sequence_start_loc")
            prompt_lens = file.get_tensor("prompt_lens")
            assert set(file.get_tensor("temperature").tolist()) <= {0.0, np.float32(0.8).item()}
        assert tokens.dtype == torch.int16 and starts[-1] == len(tokens)
        sizes.append(len(prompt_lens))
        for start, end, length in zip(starts[:-1], starts[1:], prompt_lens, strict=True):
            assert start + length < end <= start + length + MAX_NEW
            seen.add(tuple(tokens[start : start + length].tolist()))
    assert sizes == [19, 3]
    assert seen == {tuple(row.tolist()) for array in prompts.values() for row in array}


def test_responses_end_with_their_minutes(trained, prompts):
    options = ["--batch", 2, "--max-new", 4, "--val", 1, "--dtype", "bfloat16", "--minutes", 0]
    run(responses, "--data", trained, "--out", trained / "short", *options)
    summary = json.loads((trained / "short" / "responses.json").read_text())
    assert summary["samples"] == 2 and summary["dtype"] == "bfloat16"
