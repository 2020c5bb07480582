"""GGUF files as folders that the rest of peagle loads: unpacked once, and kept in the cache."""

import logging
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peagle.disk import cache_folder, free_bytes, locked, put_in_place, size_text, sync
from peagle.errors import CheckpointError, UserError
from peagle.extras import require_package
from peagle.model_folder import sha256_of
from peagle.models.gguf_header import CONVERT_HINT, GgufHeader, read_gguf_header

# Part of the cache's paths: a change of what is written makes older folders unused.
_FORMAT = "1"
_PARTIAL = ".partial"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SMALL_FILES = 64 << 20  # room for tokenizer files beside the weights
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GgufConversion:
    """A GGUF file that became a folder.

    Attributes:
        source, destination: the file and the folder.
        model_type: of transformers.
        quantization: types of the file's tensors.
        dtype: of the folder's weights.
        num_bytes: of the folder's weights.
    """

    source: Path
    destination: Path
    model_type: str
    quantization: tuple[str, ...]
    dtype: str
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the conversion as one JSON object."""
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "format": "hf",
            "model_type": self.model_type,
            "quantization": list(self.quantization),
            "dtype": self.dtype,
            "num_bytes": self.num_bytes,
        }


def cached_folder(file: Path) -> Path:
    """Return the folder of a GGUF file: from the cache, else converted into it.

    Its place depends on the file's SHA-256, so a file that was moved or renamed is not converted
    again. Of several processes one converts and the others wait.

    Raises:
        CheckpointError: the file cannot be read, see `read_gguf_header`.
        UserError: a package is missing; the cache cannot be written, or has no room.
    """
    header = read_gguf_header(file)
    place = cache_folder() / "gguf" / _FORMAT / sha256_of(file)
    if (found := _find_made(place)) is not None:
        return found
    _require_packages(file)
    try:
        with locked(place, wait=True):
            if (found := _find_made(place)) is not None:
                return found
            _logger.warning(
                "The GGUF file %r is unpacked into the cache %r (%s), once.",
                str(file),
                str(place),
                size_text(_weight_bytes(header)),
            )
            made = place / (file.stem.lstrip(".") or "model")
            shutil.rmtree(made, ignore_errors=True)  # its config.json was removed
            _convert(file, header, made, place / _PARTIAL)
            return made
    except OSError as error:
        raise UserError(
            f"The GGUF file {str(file)!r} is unpacked into the cache {str(cache_folder())!r}, "
            f"which cannot be written: {error.strerror or error}. Set XDG_CACHE_HOME to a folder "
            f"that you may write to, or {CONVERT_HINT} and name the folder."
        ) from None


def convert_gguf(file: Path, destination: Path) -> GgufConversion:
    """Write the model of a GGUF file as a folder in Hugging Face format.

    Quantised weights are unpacked to bfloat16; a file of floats alone keeps its type. The tokenizer
    and the chat template are the file's. The folder appears whole or not at all.

    Args:
        file: the GGUF file.
        destination: the folder; must be new or empty.

    Raises:
        CheckpointError: the file cannot be read, see `read_gguf_header`.
        UserError: a package is missing; the destination is a file, not empty, or cannot be written.
    """
    header = read_gguf_header(file)
    if destination.exists() and not destination.is_dir():
        raise UserError(f"The destination {str(destination)!r} is a file; expected a folder.")
    if destination.is_dir() and any(destination.iterdir()):
        raise UserError(
            f"The destination {str(destination)!r} is not empty; expected a new or empty folder."
        )
    _require_packages(file)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=destination.parent, prefix=_PARTIAL) as partial:
            model_type = _convert(file, header, destination, Path(partial) / "work")
    except OSError as error:
        raise UserError(
            f"The destination {str(destination)!r} cannot be written: {error.strerror or error}. "
            "Name a folder that you may write to."
        ) from None
    return GgufConversion(
        file,
        destination,
        model_type,
        tuple(sorted({kind.name for kind in header.tensor_types.values()})),
        header.dtype,
        sum(one.stat().st_size for one in destination.glob("*.safetensors")),
    )


def _require_packages(file: Path) -> None:
    for package in ("gguf", "accelerate"):
        require_package(package, "gguf", f"The GGUF file {str(file)!r}")


def _find_made(place: Path) -> Path | None:
    """Return the folder that an earlier conversion put into a place of the cache."""
    made = (path.parent for path in place.glob("*/config.json") if path.parent.name != _PARTIAL)
    return next(made, None)


def _weight_bytes(header: GgufHeader) -> int:
    return header.num_values * _BYTES[header.dtype]


def _convert(file: Path, header: GgufHeader, folder: Path, partial: Path) -> str:
    """Write a folder by way of `partial`, a folder made anew and removed; return the model type.

    Raises:
        CheckpointError: transformers cannot read the file, or would read it in part.
        UserError: there is no room.
        OSError: the disk did not take it.
    """
    need, free = _weight_bytes(header) + _SMALL_FILES, free_bytes(partial)
    if need > free:
        raise UserError(
            f"The GGUF file {str(file)!r} takes {size_text(need)} when it is unpacked, but "
            f"{size_text(free)} are free in {str(folder.parent)!r}. Make room, or name another "
            "place (XDG_CACHE_HOME moves the cache)."
        )
    shutil.rmtree(partial, ignore_errors=True)
    try:
        source, new = partial / "source", partial / "new"
        source.mkdir(parents=True)
        new.mkdir()
        # Alone in a folder: transformers would also read a configuration that lies beside the file.
        (source / "model.gguf").symlink_to(file.resolve())
        model_type = _write(str(file), source, header, new)
        for one in new.iterdir():
            sync(one)
        put_in_place(new, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return model_type


def _write(name: str, source: Path, header: GgufHeader, folder: Path) -> str:
    import torch
    import transformers
    from safetensors import SafetensorError

    from peagle.models.architectures import check_architecture

    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    options: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
    try:
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(source, **options)
            check_architecture(config)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            model, loaded = load(
                source,
                config=config,
                dtype=getattr(torch, header.dtype),
                output_loading_info=True,
                **_dequantised(),
                **options,
            )
    except CheckpointError as error:
        raise CheckpointError(f"The GGUF file {name!r} cannot be used. {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # of a broken file, transformers raises any
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"The GGUF file {name!r} cannot be read by transformers {transformers.__version__}: "
            f"{first_line} Use the model's own folder (config.json, *.safetensors)."
        ) from None
    _check_complete(name, model, header, loaded["missing_keys"])
    ends = [header.metadata.get(f"tokenizer.ggml.{end}") for end in _ENDS]
    known = sorted({end for end in ends if isinstance(end, int)})
    if known:
        model.generation_config.eos_token_id = known if len(known) > 1 else known[0]
    try:
        with _quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(None, str(error)) from None
    return model.config.model_type


def _dequantised() -> dict[str, Any]:
    """Return the option that unpacks weights; transformers without it always unpacks them."""
    import transformers

    make = getattr(transformers, "GgufConfig", None)
    return {} if make is None else {"quantization_config": make(dequantize=True)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars of transformers, some of which it does not let anybody turn off, away."""
    with redirect_stderr(StringIO()):
        yield


def _check_complete(name: str, model: Any, header: GgufHeader, missing: Collection[str]) -> None:
    """Refuse a model that lacks values of the file, or that has values the file lacks.

    transformers leaves out tensors that it has no place for, and fills the rest at random.
    """
    if missing:
        raise CheckpointError(
            f"The GGUF file {name!r} has no weights for {len(missing)} tensors of a "
            f"{model.config.model_type} model, {sorted(missing)[0]!r} among them. "
            "Use the model's own folder (config.json, *.safetensors)."
        )
    count = model.num_parameters()
    if count == header.num_values:
        return
    rotary = sorted(one for one in header.tensor_types if one.startswith("rope_"))
    named = f" ({', '.join(rotary)}: scaled rotary positions)" if rotary else ""
    raise CheckpointError(
        f"The GGUF file {name!r} has {header.num_values:,} values, of which transformers reads "
        f"{count:,}{named}: the model would compute something else. Use the model's own folder "
        "(config.json, *.safetensors)."
    )
