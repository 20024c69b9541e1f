"""Assignment of layers to pipeline stages."""

from __future__ import annotations

from penstock.core.errors import invalid

from .kv_size import bytes_per_weight, weight_bytes
from .model_size import ModelSize

FIELD = "pipeline_parallel_size"
LAYERS_FIELD = "pipeline_parallel_layers"


def split_layers(
    size: ModelSize, stages: int, layers: str = "", quantization: str = "none", dtype: str = "auto"
) -> list[range]:
    """Assign layers to stages.

    Args:
        layers: the option ``pipeline_parallel_layers``: number of layers of each stage, such as ``10,18``. Empty:
            balance the bytes that stages read in a decode step, including the LM head in the last stage.
        quantization: a key of ``SCHEMES``.
        dtype: data type of the computation; ``auto``: the checkpoint's.

    No stage begins with a layer that uses the key selection of the layer before it (``ModelSize.shared_layers``): the
    balanced stages begin with the nearest other layer.

    Raises ``PenstockError`` (``invalid``) for fewer layers than stages, or an invalid value of ``layers``.
    """
    total, joined = size.num_layers, size.num_joined_layers
    if stages > total:
        raise invalid(FIELD, f"is {stages}, more than the model's {total} layers", total)
    if joined and stages > total - joined + 1:
        message = f"is {stages}, but the last {joined} of {total} layers share keys and values and must be in one stage"
        raise invalid(FIELD, message, total - joined + 1)
    counts = _given(layers, stages, total) if layers else _balanced(size, stages, quantization, dtype)
    if counts[-1] < joined:
        message = f"the last {joined} layers share keys and values, so the last stage must have at least these"
        raise invalid(LAYERS_FIELD, f"{message} (is {layers!r})")
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    if size.shared_layers:
        ends = [*_whole_groups(size, ends[:-1], bool(layers)), total]
        counts = [end - first for first, end in zip([0, *ends], ends, strict=False)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def stage_weight_bytes(
    size: ModelSize, layers: range, quantization: str = "none", dtype: str = "auto", mtp: bool = False
) -> int:
    """Bytes of the matrices of a stage with the given layers. Other arguments as for ``weight_bytes``."""
    whole = weight_bytes(size, quantization, dtype, mtp)
    if len(layers) == size.num_layers:
        return whole
    layer, head = bytes_per_weight(size, quantization, dtype)
    ends = (layers.start == 0) + (layers.stop == size.num_layers)
    return int(size.layer_weights * layer * len(layers) / size.num_layers + ends * size.head_weights * head)


def _whole_groups(size: ModelSize, starts: list[int], given: bool) -> list[int]:
    """First layers of the later stages, moved so that none of them is in ``size.shared_layers``.

    Args:
        given: the user has given the numbers of layers, which are not changed.
    """
    allowed = [layer for layer in range(1, size.num_layers) if layer not in size.shared_layers]
    if given and (cut := next((start for start in starts if start not in allowed), None)):
        message = f"begins a stage with layer {cut}, which attends to the keys selected by the layer before it"
        raise invalid(LAYERS_FIELD, f"{message}; stages may begin with layers {', '.join(map(str, allowed))}")
    if len(allowed) < len(starts):
        message = f"is {len(starts) + 1}, but only {len(allowed) + 1} groups of layers select their own keys"
        raise invalid(FIELD, message, len(allowed) + 1)
    moved, first = list[int](), 0
    for later, start in zip(reversed(range(len(starts))), starts, strict=True):
        choices = range(first, len(allowed) - later)
        chosen = min(choices, key=lambda index: abs(allowed[index] - start))
        moved, first = [*moved, allowed[chosen]], chosen + 1
    return moved


def _given(layers: str, stages: int, total: int) -> list[int]:
    try:
        counts = [int(count) for count in layers.split(",")]
    except ValueError as error:
        raise invalid(LAYERS_FIELD, f"{layers!r} is not a list of numbers of layers, such as 10,18") from error
    if len(counts) != stages or min(counts) < 1 or sum(counts) != total:
        expected = f"{stages} numbers of at least 1 that add up to {total}, the model's number of layers"
        raise invalid(LAYERS_FIELD, f"must be {expected}, is {layers!r}")
    return counts


def _balanced(size: ModelSize, stages: int, quantization: str, dtype: str) -> list[int]:
    """Number of layers of each stage, chosen so that the largest stage is as small as possible."""
    if stages == 1:
        return [size.num_layers]
    layer, head = bytes_per_weight(size, quantization, dtype)
    head_layers = size.head_weights * head / (size.layer_weights * layer / size.num_layers)

    def largest(last: int) -> float:
        return max(-(-(size.num_layers - last) // (stages - 1)), last + head_layers)

    last = min(range(max(1, size.num_joined_layers), size.num_layers - stages + 2), key=largest)
    each, more = divmod(size.num_layers - last, stages - 1)
    return [*(each + (stage < more) for stage in range(stages - 1)), last]
