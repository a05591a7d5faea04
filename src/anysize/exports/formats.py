"""A finished network as a file: ONNX, torch.export, ExecuTorch or weights, read back and compared before it is kept."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anysize.atomic import replaced
from anysize.config.extras import needs
from anysize.elastic.skeleton import tensors_of
from anysize.elastic.tracing.forward import unread_masks
from anysize.errors import ModelError, unknown
from anysize.experiment.signature import Signature
from anysize.inputs import Input, Inputs, mapped, named, tensors_in
from anysize.models import Keyed, keyed, plain, vocabulary
from anysize.models.keyed import is_pretrained_model
from anysize.models.pretrained import distance, refitted
from anysize.rng import generator
from anysize.wire import Json

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        size_bytes: its length.
        difference: the largest difference between its outputs and the network's, on random inputs.
        length: how many tokens a text must have; None if any number will do, or if inputs are no texts.
    """

    path: Path
    size_bytes: int
    difference: float
    length: int | None = None


def export(network: nn.Module, path: str | Path, signature: Signature, about: Json | None = None) -> Exported:
    """Write `network` in the format of the path's ending, and check the file against the network.

    Args:
        network: a network in evaluation mode, with fixed statistics.
        path: a path that ends in .onnx or .pt2 (torch.export), both for any number of samples in a batch and, where
            the network's code allows it, texts of any length; in .pte (ExecuTorch, one sample at a time); in
            .safetensors (weights); or a folder, for a network of transformers, which its `from_pretrained` opens.
        signature: shapes and types of its inputs.
        about: facts to store with the weights, if the format can.
    """
    path = Path(path)
    check_path(path)
    inputs = sample_inputs(signature, 2, vocabulary(network))
    if not path.suffix:
        return _export_folder(network, path, inputs, about or {})
    ending = path.suffix.lower()
    network = keyed(network, signature.names).eval()
    try:
        with replaced(path, ending) as new:
            difference, length = _written(network, new, inputs, about or {}, ending)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror or error}") from None
    return Exported(path, path.stat().st_size, difference, length)


def _written(network: nn.Module, path: Path, inputs: Input, about: Json, ending: str) -> tuple[float, int | None]:
    """Write a network, for texts of any length if that works, and compare: the difference, and the length it needs."""
    write, read = _FORMATS[ending]
    length = None if ending == ".safetensors" else text_length(inputs)
    shorter = None if length is None else _shortened(network, inputs, length)
    if shorter is not None:
        with contextlib.suppress(ModelError):
            write(network, path, inputs, about, True)
            return max(_compared(network, path, x, read) for x in (inputs, shorter)), None
    write(network, path, inputs, about, False)
    return _compared(network, path, inputs, read), length


def _shortened(network: nn.Module, inputs: Input, length: int) -> Input | None:
    """The first half of the texts and one token more; None if the network does not run on that."""
    shorter: Input = mapped(inputs, lambda tensor: tensor[:, : length // 2 + 1])
    try:
        with torch.no_grad():
            network(shorter)
    except Exception:  # a network's code may raise anything
        return None
    return shorter if length > 2 else None


def _compared(network: nn.Module, path: Path, inputs: Input, read: _Read) -> float:
    """The largest difference between a file's outputs and the network's, which must be small."""
    with torch.no_grad():
        expected = network(inputs)
    difference = _difference(read(network, path, inputs), expected)
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelError(f"{path}: the written file's outputs differ from the network's by {difference:g}")
    return difference


def text_length(inputs: Input) -> int | None:
    """How many tokens each text has, if all inputs are texts of one length; None otherwise."""
    shapes = {tuple(tensor.shape) for tensor in tensors_in(inputs)}
    texts = all(tensor.dim() == 2 and not tensor.is_floating_point() for tensor in tensors_in(inputs))
    return next(iter(shapes))[1] if texts and len(shapes) == 1 else None


def check_path(path: Path, endings: Collection[str] | None = None) -> None:
    """Refuse a path that no network can be written to; by default, one that `export` cannot write."""
    known = _FORMATS if endings is None else endings
    folder, ending, listed = endings is None and not path.suffix, path.suffix.lower(), ", ".join(known)
    if not folder and ending not in known:
        if endings is not None and ending in _FORMATS:
            raise ModelError(f"{path}: a bundle of sizes ends in {listed}; {ending} holds one customised size")
        if ending == ".anysize":
            raise ModelError(f"{path}: .anysize holds a bundle of sizes; one network is {listed}")
        raise ModelError(unknown("export format", path.suffix or path.name, known))
    if not path.parent.is_dir():
        raise ModelError(f"cannot write {path}: the folder {path.parent} does not exist")
    if folder and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ModelError(f"cannot write {path}: it exists and is not an empty folder")
    if path.is_dir() and not folder:
        raise ModelError(f"cannot write {path}: it is a folder")


def _export_folder(network: nn.Module, path: Path, inputs: Input, about: Json) -> Exported:
    """Write a network of transformers as a folder, read it back and compare it with the network."""
    network = plain(network)
    if not is_pretrained_model(network):
        raise ModelError(
            f"cannot write {path}: only a network of transformers is written as a folder, and this is a "
            f"{type(network).__name__}; allowed otherwise: {', '.join(_FORMATS)}"
        )
    made: Any = refitted(network, inputs)
    with tempfile.TemporaryDirectory(dir=path.parent) as near:
        new = Path(near) / path.name
        try:
            made.save_pretrained(new)
            (new / "anysize.json").write_text(json.dumps(about, sort_keys=True), encoding="utf-8")
            difference = distance(network, type(made).from_pretrained(new), inputs)
            if not difference <= TOLERANCE:
                raise ModelError(f"{path}: the written network's outputs differ from the network's by {difference:g}")
            new.replace(path)
        except OSError as error:
            raise ModelError(f"cannot write {path}: {error.strerror or error}") from None
    return Exported(path, sum(file.stat().st_size for file in path.iterdir()), difference)


def sample_inputs(signature: Signature, count: int, tokens: int | None = None) -> Any:
    """Random inputs of the network's input type: values in [0, 1], or tokens.

    Args:
        signature: shapes and types of the inputs.
        count: how many samples.
        tokens: how many tokens the network knows, if it says so.
    """
    random = generator("export", count)
    if signature.inputs is not None:
        return Inputs({name: _sample(name, (count, *shape), of, tokens) for name, shape, of in signature.inputs})
    shape = (count, *signature.input_shape)
    if signature.tokens:
        # The vocabulary is known if every position is predicted; otherwise it has at least two tokens.
        vocabulary = signature.outputs if signature.target_shape == signature.input_shape else 2
        return torch.randint(vocabulary, shape, generator=random)
    return torch.rand(shape, generator=random)


def _sample(name: str, shape: tuple[int, ...], integers: bool, tokens: int | None) -> Tensor:
    """One of several named inputs: a mask hides the last position, types of tokens are all the first."""
    random = generator("export", name, *shape)
    if not integers:
        return torch.rand(shape, generator=random)
    if name.endswith("mask"):
        mask = torch.ones(shape, dtype=torch.int64)
        mask[..., shape[-1] - 1 :] = int(shape[-1] < 2)
        return mask
    return torch.randint(1 if "type" in name else tokens or 2, shape, generator=random)


def _difference(outputs: Tensor, expected: Tensor) -> float:
    if outputs.shape != expected.shape:
        return math.inf
    return float((outputs - expected).abs().max())


def _write_onnx(network: nn.Module, path: Path, inputs: Input, about: Json, any_length: bool) -> None:
    if (missing := onnx_needs()) is not None:
        raise ModelError(missing)
    program = onnx_program(network, inputs, path, any_length=any_length)
    program.model.metadata_props["anysize"] = json.dumps(about, sort_keys=True)
    program.save(str(path), external_data=False)


def onnx_program(
    network: nn.Module, inputs: Input, path: Path, optimize: bool = True, any_length: bool = False
) -> torch.onnx.ONNXProgram:
    """The network in ONNX's operations, for any number of samples.

    Args:
        network: with fixed statistics.
        inputs: an example.
        path: the file that it is for.
        optimize: whether weights may be changed ahead, so that the graph does less.
        any_length: whether texts may have any number of tokens too.
    """
    quiet = contextlib.redirect_stdout(io.StringIO())
    with traced("ONNX", path), warnings.catch_warnings(), quiet, silenced("torch.onnx", "onnxscript"):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network,
            tensors_in(inputs),
            dynamo=True,
            input_names=[name or "input" for name, _ in named(inputs)],
            output_names=["output"],
            dynamic_shapes=dynamic(network, inputs, any_length),
            optimize=optimize,
        )
    assert program is not None
    return program


def dynamic(network: nn.Module, inputs: Input, any_length: bool = False, batch: Any = None) -> Any:
    """That each input may have any number of samples, and of tokens, in the form of the network's arguments.

    Args:
        network: a module of the inputs.
        inputs: an example.
        any_length: whether the second axis is free too.
        batch: the kind of free axis that counts samples; by default one that must not become a constant.
    """
    sizes = {0: batch or torch.export.Dim("batch")} | ({1: torch.export.Dim("length")} if any_length else {})
    each = tuple(dict(sizes) for _ in tensors_in(inputs))
    return (each,) if isinstance(network, Keyed) else each  # one argument that takes all inputs


def _run_onnx(network: nn.Module, path: Path, inputs: Input) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    # Also one sample at a time: a batch size that became a constant would show here.
    given = [[(name or "input", t.numpy()) for name, t in named(inputs[i : i + 1])] for i in range(len(inputs))]
    try:
        rows = [session.run(None, dict(row))[0] for row in given]
    except Exception as error:  # onnxruntime's exceptions have no common type
        raise ModelError(f"{path}: the written file does not run: {error}") from None
    return torch.cat([torch.from_numpy(row) for row in rows])


def _write_program(network: nn.Module, path: Path, inputs: Input, about: Json, any_length: bool) -> None:
    with traced("torch.export", path), warnings.catch_warnings(), silenced("torch.export"):
        warnings.simplefilter("ignore")
        shapes = dynamic(network, inputs, any_length)
        program = torch.export.export(network, tensors_in(inputs), dynamic_shapes=shapes)
        torch.export.save(program, str(path), extra_files={"anysize.json": json.dumps(about, sort_keys=True)})


def _run_program(network: nn.Module, path: Path, inputs: Input) -> Tensor:
    module = torch.export.load(str(path)).module()
    with torch.no_grad():
        return torch.cat([module(*tensors_in(inputs[i : i + 1])) for i in range(len(inputs))])


def _write_weights(network: nn.Module, path: Path, inputs: Input, about: Json, any_length: bool) -> None:
    safetensors.torch.save_file(tensors_of(network), path, {"anysize": json.dumps(about, sort_keys=True)})


def _run_weights(network: nn.Module, path: Path, inputs: Input) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = torch.func.functional_call(network, safetensors.torch.load_file(path), (inputs,))
    return outputs


def _write_executorch(network: nn.Module, path: Path, inputs: Input, about: Json, any_length: bool) -> None:
    if any_length:
        raise ModelError(f"{path}: a program of ExecuTorch plans its memory ahead, for texts of one length")
    if (missing := needs("ExecuTorch", "executorch", "executorch")) is not None:
        raise ModelError(missing)
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    quiet = contextlib.redirect_stdout(io.StringIO())
    with (
        traced("ExecuTorch", path),
        warnings.catch_warnings(),
        quiet,
        silenced("torch.export", "root"),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        # A program plans its memory ahead, for one sample at a time.
        program = torch.export.export(network, tensors_in(inputs[:1]))
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)


def _run_executorch(network: nn.Module, path: Path, inputs: Input) -> Tensor:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path)  # its methods read from it
    method = program.load_method("forward")
    assert method is not None
    rows = [method.execute(list(tensors_in(inputs[i : i + 1])))[0].clone() for i in range(len(inputs))]
    return torch.cat(rows)


def onnx_needs() -> str | None:
    """What is missing for ONNX, and how to get it; None where nothing is."""
    return needs("ONNX", "export", "onnx", "onnxscript", "onnxruntime")


@contextlib.contextmanager
def traced(form: str, path: Path) -> Iterator[None]:
    """Turn any exception of the tracer, which raises many types, into one line that says what to do."""
    try:
        # Kernels for attention lay out what they return in other orders; the tracer later takes that of this one.
        with unread_masks(), sdpa_kernel(SDPBackend.MATH):
            yield
    except OSError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise ModelError(
            f"the network cannot be written as {path.suffix}: {form} failed ({reason}). Its weights can be written as "
            ".safetensors"
        ) from error


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


_Write = Callable[[nn.Module, Path, Input, Json, bool], None]
_Read = Callable[[nn.Module, Path, Input], Tensor]
_FORMATS: dict[str, tuple[_Write, _Read]] = {
    ".onnx": (_write_onnx, _run_onnx),
    ".pt2": (_write_program, _run_program),
    ".pte": (_write_executorch, _run_executorch),
    ".safetensors": (_write_weights, _run_weights),
}
