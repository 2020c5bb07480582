"""Names of src/peagle: a public class or function has a name of its own, and a step is a step."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "peagle"

# The same name in several modules, where all of them do the same.
SHARED = {
    # A kernel and what it computes in plain torch.
    "advance": {"kernels/drafts/step_state.py", "kernels/drafts/step_state_triton.py"},
    "as_stored": {"attention/base.py", "kernels/attention/fp8_cache_triton.py"},
    "build_target_batch": {"kernels/drafts/batches.py", "kernels/drafts/batches_triton.py"},
    "expand_draft_batch": {"kernels/drafts/batches.py", "kernels/drafts/batches_triton.py"},
    "uniform": {"kernels/sampling/random.py", "kernels/sampling/random_triton.py"},
    # The tiles of a kernel by the shape of its input.
    "choose_config": {
        "kernels/attention/paged_attention.py",
        "kernels/linear/experts.py",
        "kernels/linear/skinny_linear.py",
    },
    # A command, which has the name of its function, and what it runs.
    "create": {"cli/deploy_create.py", "deploy/stack.py"},
    # A command of two groups.
    "adapt": {"cli/adapt.py", "cli/deploy_adapt.py"},
    "delete": {"cli/deploy_operate.py", "deploy/stack.py"},
    "find": {"cli/vllm.py", "deploy/catalog.py"},
    "invoke": {"cli/deploy_invoke.py", "deploy/invoke.py"},
    "prepare": {"cli/data_prepare.py", "data/prepare.py"},
    "regenerate": {"cli/data_regenerate.py", "data/regenerate.py"},
    "serve": {"cli/serve.py", "serving/server.py"},
    "synthesize": {"cli/data_synthesize.py", "data/synthesize.py"},
    "update": {"cli/deploy_create.py", "deploy/stack.py"},
}
# The two steps of docs/glossary.md: of decoding, and of training.
STEPS = {"DecodeStep", "TrainingStep"}


def definitions(package: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the name of each class and function at the top of a module, the module, and its kind.

    The last is true of a class. Names that begin with _ belong to their module.
    """
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                module = path.relative_to(package).as_posix()
                yield node.name, module, isinstance(node, ast.ClassDef)


def shared_names(package: Path) -> dict[str, set[str]]:
    """Return the public names that several modules define, with these modules."""
    modules = defaultdict(set)
    for name, module, _ in definitions(package):
        if not name.startswith("_"):
            modules[name].add(module)
    return {name: found for name, found in modules.items() if len(found) > 1}


def steps(package: Path) -> set[str]:
    """Return the classes that call themselves a step, private ones too."""
    return {name for name, _, is_class in definitions(package) if is_class and "Step" in name}


def test_a_public_name_means_one_thing():
    assert shared_names(PACKAGE) == SHARED, (
        "name the new one after what it alone does, by docs/glossary.md"
    )


def test_only_a_step_is_called_step():
    assert steps(PACKAGE) == STEPS


def test_names_are_found_in_every_folder(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.py").write_text("def pack(): ...\ndef _own(): ...\nclass _StepSize: ...\n")
    (tmp_path / "deep" / "b.py").write_text("async def pack(): ...\ndef _own(): ...\n")
    (tmp_path / "deep" / "c.py").write_text("def first_step():\n    def pack(): ...\n")
    assert shared_names(tmp_path) == {"pack": {"a.py", "deep/b.py"}}
    assert steps(tmp_path) == {"_StepSize"}
