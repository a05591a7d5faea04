"""Layers that are followed as a whole: recurrent cells and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from anysize.elastic.tracing.classes import Clash
from anysize.elastic.tracing.tracer import Tracer, varying
from anysize.errors import ModelError


def _rows(tracer: Tracer, tensor: Tensor | None, axis: int) -> Tensor | None:
    """The labels of one axis of a stored tensor."""
    if tensor is None:
        return None
    return tracer.lane([p for p in tracer.labels(tensor).planes if varying(p) == (axis,)], axis)


def _tied(tracer: Tracer, unit: Tensor | None, row: Tensor | None) -> None:
    """Unite a row with `unit`, which it repeats a whole number of times; without a unit fix the row."""
    if row is None:
        return
    if unit is None:
        tracer.classes.pin(row)
    else:
        tracer.classes.unite(unit, row.reshape(-1, unit.numel()))


def _last_axis(tracer: Tracer, tensor: Tensor) -> Tensor | None:
    return tracer.lane(tracer.labels(tensor).planes, tensor.dim() - 1)


def _label_last(tracer: Tracer, tensor: Tensor, lane: Tensor | None) -> None:
    shape = (1,) * (tensor.dim() - 1) + (-1,)
    tracer.put(tensor, [lane.reshape(shape)] if lane is not None else [])


def _recurrent(tracer: Tracer, module: nn.RNNBase, given: tuple[Any, ...], result: Any) -> None:
    """All layers, gates and directions share one set of hidden units and one set of projected units."""
    stored = dict(module.named_parameters(recurse=False))
    ends = ["_reverse"] if module.bidirectional else []
    layers = [f"_l{layer}{end}" for layer in range(module.num_layers) for end in ["", *ends]]
    gates = _rows(tracer, stored["weight_ih_l0"], 0)
    hidden = gates.reshape(-1, module.hidden_size)[0] if gates is not None else None
    made = _rows(tracer, stored.get("weight_hr_l0"), 0) if module.proj_size else hidden
    source, *states = given
    packed = isinstance(source, nn.utils.rnn.PackedSequence)
    read = _last_axis(tracer, source.data if packed else source)
    for end in layers:
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            _tied(tracer, hidden, _rows(tracer, stored.get(name + end), 0))
        _tied(tracer, made, _rows(tracer, stored["weight_hh" + end], 1))
        _tied(tracer, hidden, _rows(tracer, stored.get("weight_hr" + end), 1))
        _tied(tracer, made, _rows(tracer, stored.get("weight_hr" + end), 0))
        into = _rows(tracer, stored["weight_ih" + end], 1)
        if end.startswith("_l0"):
            tracer.couple(read, into)
        else:
            _tied(tracer, made, into)
    tracer.produce([lane for lane in (hidden, made) if lane is not None])
    output, last = result
    output = output.data if packed else output
    _label_last(tracer, output, made.repeat(1 + len(ends)) if made is not None else None)
    first = [state for state in states if state is not None]
    for state in (last, *first):
        _label_states(tracer, state, made, hidden, known=state is not last)


def _label_states(tracer: Tracer, state: Any, made: Tensor | None, hidden: Tensor | None, *, known: bool) -> None:
    """Label the states that a recurrent module returned, or couple the ones it was given."""
    parts = state if isinstance(state, tuple) else (state,)
    for part, lane in zip(parts, (made, hidden)):
        if known:
            tracer.couple(_last_axis(tracer, part), lane, loose=tracer.labels(part).neutral)
        else:
            _label_last(tracer, part, lane)


def _attention(tracer: Tracer, module: nn.MultiheadAttention, given: tuple[Any, ...], result: Any) -> None:
    """The stream's and the inner channels are one set, since `embed_dim` is one number; `heads` says how it is cut."""
    units = _rows(tracer, module.out_proj.weight, 0)
    if units is None:
        return
    query, key, value = given[:3]
    tracer.couple(_last_axis(tracer, query), units)
    into = (module.in_proj_weight, module.q_proj_weight, module.out_proj.weight)
    along: tuple[tuple[int, tuple[Tensor | None, ...]], ...] = (
        (0, (*into, module.k_proj_weight, module.v_proj_weight, module.in_proj_bias, module.out_proj.bias)),
        (1, into),
        (2, (module.bias_k, module.bias_v)),
    )
    for axis, tensor in ((axis, tensor) for axis, tensors in along for tensor in tensors):
        _tied(tracer, units, _rows(tracer, tensor, axis))
    fused = module.in_proj_weight is not None
    for source, weight in ((key, module.k_proj_weight), (value, module.v_proj_weight)):
        tracer.couple(_last_axis(tracer, source), units if fused else _rows(tracer, weight, 1))
    grid = units.reshape(module.num_heads, -1)
    grid = tracer.unite_along(grid, 0 if tracer.heads == "within" else 1)
    tracer.produce([units, *(row for row in [_rows(tracer, module.in_proj_weight, 0)] if row is not None)])
    output, weights = result
    _label_last(tracer, output, units)
    if weights is not None and weights.dim() == 4 and varying(grid) == (0,):
        tracer.put(weights, [grid.reshape(1, -1, 1, 1)])


def _bilinear(tracer: Tracer, module: nn.Bilinear, given: tuple[Any, ...], result: Any) -> None:
    """Both inputs meet their axis of the weight (out, in1, in2)."""
    for axis, source in enumerate(given[:2], start=1):
        tracer.couple(_last_axis(tracer, source), _rows(tracer, module.weight, axis))
    out = _rows(tracer, module.weight, 0)
    _tied(tracer, out, _rows(tracer, module.bias, 0))
    tracer.produce([out] if out is not None else [])
    _label_last(tracer, result, out)


LeafRule = Callable[[Tracer, Any, tuple[Any, ...], Any], None]


LEAVES: dict[type[nn.Module], LeafRule] = {
    nn.RNNBase: _recurrent,
    nn.MultiheadAttention: _attention,
    nn.Bilinear: _bilinear,
}


_INPUT_NAMES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.RNNBase: ("input", "hx"),
    nn.MultiheadAttention: ("query", "key", "value"),
    nn.Bilinear: ("input1", "input2"),
}


def _one_step(module: Any, forward: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """A recurrent module's result, by shape, from one time step: on the meta device all steps would take time."""
    source, *states = given
    if not isinstance(source, Tensor):
        return forward(*given)
    time = 1 if module.batch_first and source.dim() == 3 else 0
    output, last = forward(source.narrow(time, 0, 1), *states)
    shape = [source.shape[time] if axis == time else size for axis, size in enumerate(output.shape)]
    return output.new_empty(shape), last


def wrap_leaf(tracer: Tracer, module: nn.Module) -> None:
    """Replace the forward of a (copied) module by one that labels its results by the module's special rule."""
    kind = next((kind for kind in LEAVES if isinstance(module, kind)), None)
    if kind is None:
        return
    names, original = _INPUT_NAMES[kind], module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if tracer.paused:
            return original(*args, **kwargs)
        given = tuple(args) + tuple(kwargs.get(name) for name in names[len(args) :])
        with tracer.pause():
            brief = isinstance(module, nn.RNNBase)
            result = _one_step(module, original, given) if brief else original(*args, **kwargs)
            try:
                LEAVES[kind](tracer, module, given, result)
            except Clash:
                raise ModelError(f"narrowing changes what meets what at {tracer.where()}") from None
        return result

    module.forward = forward
