"""The compiled CPU kernels (``csrc/module.cc``). Arguments ``x``, ``out`` and so on are addresses."""

PANEL: int
MAX_HEAD: int
MAX_BLOCK: int

def available() -> list[str]: ...
def current() -> str: ...
def use(name: str) -> None: ...
def threads() -> int: ...
def set_threads(threads: int) -> None: ...
def packed_size(outputs: int, inputs: int, /) -> int: ...
def linear(
    x: int, weight: int, bias: int, out: int, rows: int, inputs: int, outputs: int, type: int, out_type: int, /
) -> None: ...
def likeliest(x: int, weight: int, bias: int, out: int, rows: int, inputs: int, outputs: int, type: int, /) -> None: ...
def gather(ids: int, weight: int, out: int, rows: int, size: int, type: int, /) -> None: ...
def pack(weight: int, packed: int, inputs: int, outputs: int, type: int, /) -> None: ...
def norm(
    x: int,
    residual: int,
    weight: int,
    out: int,
    rows: int,
    groups: int,
    size: int,
    stride: int,
    eps: float,
    type: int,
    /,
) -> None: ...
def rope(
    x: int, out: int, positions: int, table: int, tokens: int, heads: int, dim: int, stride: int, type: int, /
) -> None: ...
def silu_mul(gate_up: int, out: int, rows: int, size: int, type: int, /) -> None: ...
def store(
    k: int,
    v: int,
    cache: int,
    slots: int,
    tokens: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    stride_k: int,
    stride_v: int,
    type: int,
    /,
) -> None: ...
def attention(
    q: int,
    out: int,
    cache: int,
    block_tables: int,
    query_starts: int,
    lengths: int,
    sequences: int,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    table_width: int,
    window: int,
    scale: float,
    type: int,
    /,
) -> None: ...
