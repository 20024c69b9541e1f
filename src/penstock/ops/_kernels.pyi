"""The compiled CPU kernels (``csrc/module.cc``). Integer arguments such as ``x`` and ``out`` are addresses."""

PANEL: int
"""Number of outputs of a panel of a packed matrix."""
MAX_HEAD: int
"""Largest head size of attention."""
MAX_LATENT: int
"""Largest value size of a latent cache."""
MAX_LATENT_KEY: int
"""Largest key size of a latent cache."""
MAX_BLOCK: int
"""Largest number of tokens of a KV block."""
MAX_STREAMS: int
"""Largest number of residual streams."""
MAX_KERNEL: int
"""Largest number of tokens that a short convolution sees."""
BUILT: list[str]
"""Instruction sets of this build, from the slowest to the fastest."""
MACHINE: list[str]
"""Instruction sets that this machine supports, from the slowest to the fastest."""
SOURCES: str
"""Hash of the compiled sources (CMakeLists.txt)."""
VERSION: str
"""Version of the package for which the kernels were built."""

def available() -> list[str]: ...
def current() -> str: ...
def use(name: str) -> None: ...
def threads() -> int: ...
def set_threads(threads: int) -> None: ...

class Matrix:
    def __init__(
        self,
        panels: int,
        scales: int,
        scale_type: int,
        offsets: int,
        offset_type: int,
        output_scales: int,
        bias: int,
        order: int,
        inputs: int,
        outputs: int,
        group: int,
        rotation: int,
        x_in_groups: bool,
        format: int,
        type: int,
        /,
    ) -> None: ...
    @property
    def panel_bytes(self) -> int: ...

class Adapters:
    def __init__(self, slots: int, /) -> None: ...
    def put(self, slot: int, down: Matrix, /) -> None: ...
    def add(self, slot: int, up: Matrix, first: int, scale: float, /) -> None: ...
    def clear(self, slot: int, /) -> None: ...

class Experts:
    def __init__(self, first: int, /) -> None: ...
    def add(self, matrix: Matrix, /) -> None: ...

class Sketch:
    def __init__(self, matrix: Matrix, quantized: Matrix, error_norms: int, norms: int, /) -> None: ...

class LinkLostError(ConnectionError):
    """The connection to a rank of another node was lost."""

class Group:
    RANK_BYTES: int
    """Bytes of shared memory per rank."""
    STEP_BITS: int
    """Number of low bits of a rank's progress, which count the barriers of a step. The high bits number the step."""
    def __init__(self, memory: int, rank: int, size: int, spins: int, seconds: float, /) -> None: ...
    def connect(self, socket: int, rank: int, sends: bool, receives: bool, capacity: int, /) -> None: ...
    def begin(self, step: int, /) -> None: ...
    def end(self, step: int, failed: bool, /) -> int: ...

class Graph:
    def __init__(self) -> None: ...
    def record(self) -> None: ...
    def stop(self) -> None: ...
    def run(self, tokens: int, sequences: int, rows: int, sequences_of_rows: int, /) -> None: ...

def time_read(memory: int, size: int, /) -> float: ...
def dot_rate(integers: bool, steps: int, /) -> float: ...

class StateRows:
    def __init__(
        self,
        starts: int,
        slots: int,
        accepted: int,
        drafts: int,
        save_starts: int,
        save_after: int,
        save_slots: int,
        /,
    ) -> None: ...

def linear(
    x: int, x_scales: int, x_sums: int, matrix: Matrix, out: int, out_stride: int, rows: int, out_type: int, /
) -> None: ...
def linear_activation_and_mul(
    x: int,
    x_scales: int,
    x_sums: int,
    matrix: Matrix,
    out: int,
    out_stride: int,
    rows: int,
    out_type: int,
    activation: int,
    /,
) -> None: ...
def add_lora(x: int, out: int, adapters: Adapters, slots: int, rows: int, out_stride: int, /) -> None: ...
def argmax(
    x: int, x_scales: int, x_sums: int, matrix: Matrix, bitmask: int, out: int, max_values: int, rows: int, /
) -> None: ...
def sketch(sketch: Sketch, /) -> None: ...
def argmax_by_sketch(
    x: int, x_int8: int, x_scales: int, x_sums: int, sketch: Sketch, bitmask: int, out: int, values: int, rows: int, /
) -> bool: ...
def sample_random(logits: int, columns: int, out: int, largest: int, rows: int, stride: int, size: int, /) -> None: ...
def experts_linear(
    x: int,
    x_scales: int,
    x_sums: int,
    experts: Experts,
    ids: int,
    top_k: int,
    assignments_per_row: int,
    out: int,
    out_stride: int,
    rows: int,
    out_type: int,
    activation: int,
    /,
) -> None: ...

experts_activation_and_mul = experts_linear

def route(
    logits: int,
    bias: int,
    factors: int,
    ids: int,
    weights: int,
    tokens: int,
    experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    scale: float,
    min_sum: float,
    added_sum: float,
    function: int,
    sum_top2: bool,
    renormalize: bool,
    token_ids: int,
    table: int,
    /,
) -> None: ...
def selective_scan(
    rows: StateRows,
    x: int,
    steps: int,
    b: int,
    c: int,
    gate: int,
    out: int,
    state: int,
    kept_x: int,
    kept_steps: int,
    kept_b: int,
    rates: int,
    step_bias: int,
    skip: int,
    sequences: int,
    x_stride: int,
    steps_stride: int,
    b_stride: int,
    c_stride: int,
    gate_stride: int,
    out_stride: int,
    channels: int,
    size: int,
    max_drafts: int,
    type: int,
    /,
) -> None: ...
def rg_lru(
    rows: StateRows,
    x: int,
    gates: int,
    out: int,
    state: int,
    kept_x: int,
    kept_gates: int,
    rates: int,
    bias: int,
    positions: int,
    sequences: int,
    x_stride: int,
    gates_stride: int,
    out_stride: int,
    heads: int,
    width: int,
    max_drafts: int,
    type: int,
    /,
) -> None: ...
def concatenate(x: int, y: int, out: int, rows: int, x_bytes: int, y_bytes: int, /) -> None: ...
def multiply_rows(
    x: int,
    gate: int,
    out: int,
    rows: int,
    width: int,
    stride: int,
    gate_stride: int,
    out_stride: int,
    activation: int,
    type: int,
    /,
) -> None: ...
def combine(
    x: int,
    weights: int,
    shared: int,
    gate: int,
    out: int,
    tokens: int,
    top_k: int,
    width: int,
    shared_stride: int,
    out_stride: int,
    type: int,
    /,
) -> None: ...
def quantize(
    x: int,
    out: int,
    scales: int,
    sums: int,
    rows: int,
    each: int,
    inputs: int,
    padded: int,
    group: int,
    rotation: int,
    in_groups: bool,
    has_total: bool,
    type: int,
    /,
) -> None: ...
def rotate(x: int, out: int, rows: int, each: int, inputs: int, rotation: int, type: int, /) -> None: ...
def sum_groups(x: int, sums: int, rows: int, each: int, inputs: int, group: int, type: int, /) -> None: ...
def permute(x: int, matrix: Matrix, out: int, rows: int, type: int, /) -> None: ...
def embedding(ids: int, matrix: Matrix, out: int, first: int, rows: int, /) -> None: ...
def pack(weight: int, matrix: Matrix, first: int, rows: int, /) -> None: ...
def pack_integers(values: int, matrix: Matrix, first: int, rows: int, /) -> None: ...
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
    wide: bool,
    centered: bool,
    weight_stride: int,
    bias: int,
    /,
) -> None: ...
def rope(
    x: int,
    out: int,
    positions: int,
    table: int,
    tokens: int,
    heads: int,
    dim: int,
    stride: int,
    rotary: int,
    interleaved: bool,
    type: int,
    /,
) -> None: ...
def index_select(x: int, rows: int, out: int, count: int, row_bytes: int, stride: int, /) -> None: ...
def copy(x: int, out: int, rows: int, row_bytes: int, /) -> None: ...
def activate(
    x: int,
    out: int,
    rows: int,
    each: int,
    size: int,
    stride: int,
    out_stride: int,
    activation: int,
    gated: bool,
    type: int,
    /,
) -> None: ...
def count_experts(ids: int, counts: int, tokens: int, top_k: int, /) -> None: ...
def place_experts(ids: int, places: int, out: int, tokens: int, top_k: int, width: int, /) -> None: ...
def to_float32(x: int, out: int, rows: int, width: int, type: int, /) -> None: ...
def scale(x: int, out: int, rows: int, width: int, factor: float, cap: float, type: int, /) -> None: ...
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
    quantized: bool,
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
    out_stride: int,
    scale: float,
    type: int,
    quantized: bool,
    cap: float,
    sinks: int,
    latent: int,
    causal: bool,
    key_ends: int,
    chunked: bool,
    alibi: int,
    row: int,
    parts: int,
    /,
) -> None: ...
def select_keys(
    q: int,
    weights: int,
    cache: int,
    block_tables: int,
    query_starts: int,
    lengths: int,
    starts: int,
    counts: int,
    slots: int,
    sequences: int,
    heads: int,
    dim: int,
    row: int,
    block_size: int,
    table_width: int,
    top_k: int,
    scale: float,
    type: int,
    rate: int,
    window: int,
    parts: int,
    /,
) -> None: ...
def compress(
    rows: StateRows,
    x: int,
    state: int,
    kept: int,
    bias: int,
    norm: int,
    positions: int,
    table: int,
    cache: int,
    slots: int,
    sequences: int,
    x_stride: int,
    dim: int,
    rate: int,
    max_drafts: int,
    rope: int,
    row: int,
    offset: int,
    eps: float,
    overlap: bool,
    type: int,
    /,
) -> None: ...
def hyper_weights(
    logits: int,
    base: int,
    scale: int,
    out: int,
    rows: int,
    width: int,
    streams: int,
    iterations: int,
    eps: float,
    /,
) -> None: ...
def collapse_streams(
    x: int, weights: int, out: int, rows: int, stride: int, streams: int, size: int, type: int, /
) -> None: ...
def mix_streams(
    x: int, residual: int, weights: int, rows: int, stride: int, streams: int, size: int, type: int, /
) -> None: ...
def equalize_streams(x: int, rows: int, streams: int, size: int, min_square: float, type: int, /) -> None: ...
def gaussian_topk(x: int, out: int, rows: int, stride: int, size: int, multiplier: float, type: int, /) -> None: ...
def rotate_tail(
    x: int, positions: int, table: int, tokens: int, heads: int, dim: int, rotary: int, inverse: bool, type: int, /
) -> None: ...
def latent_store(
    q: int,
    k: int,
    latent: int,
    out: int,
    positions: int,
    table: int,
    cache: int,
    slots: int,
    tokens: int,
    heads: int,
    rope: int,
    dim: int,
    block_size: int,
    q_stride: int,
    q_head: int,
    k_stride: int,
    latent_stride: int,
    out_stride: int,
    out_head: int,
    interleaved: bool,
    type: int,
    quantized: bool,
    index_keys: int,
    index_dim: int,
    index_stride: int,
    /,
) -> None: ...
def linear_by_head(
    x: int,
    matrix: Matrix,
    out: int,
    x_stride: int,
    x_head: int,
    out_stride: int,
    out_head: int,
    rows: int,
    heads: int,
    outputs: int,
    /,
) -> None: ...
def export_kv(
    cache: int,
    buffer: int,
    slots: int,
    places: int,
    tokens: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    all_heads: int,
    first_head: int,
    slot_tokens: int,
    slot_bytes: int,
    offset: int,
    type: int,
    quantized: bool,
    latent: bool,
    progress: int,
    /,
) -> None: ...

import_kv = export_kv

def barrier(group: Group, /) -> None: ...
def gather_part(group: Group, data: int, row_bytes: int, stride: int, rows: int, each: int, /) -> None: ...
def gather_rows(
    group: Group, data: int, row_bytes: int, ids: int, rows: int, each: int, first: int, end: int, /
) -> None: ...
def keep_inputs(
    rows: StateRows, x: int, kept: int, row_bytes: int, stride: int, max_drafts: int, sequences: int, /
) -> None: ...
def convolution(
    rows: StateRows,
    x: int,
    out: int,
    state: int,
    kept: int,
    weight: int,
    bias: int,
    sequences: int,
    x_stride: int,
    out_stride: int,
    channels: int,
    kernel: int,
    max_drafts: int,
    silu: bool,
    type: int,
    /,
) -> None: ...
def linear_attention(
    rows: StateRows,
    x: int,
    gates: int,
    out: int,
    state: int,
    kept: int,
    kept_gates: int,
    log_decay: int,
    gate_bias: int,
    skip: int,
    sequences: int,
    x_stride: int,
    gates_stride: int,
    out_stride: int,
    width: int,
    gates_width: int,
    max_drafts: int,
    heads: int,
    groups: int,
    key_dim: int,
    value_dim: int,
    q_offset: int,
    k_offset: int,
    v_offset: int,
    step_offset: int,
    scale: float,
    l2_eps: float,
    min_step: float,
    max_step: float,
    delta: bool,
    beta_scale: float,
    decay_dim: int,
    decay: int,
    type: int,
    /,
) -> None: ...
def gated_norm(
    x: int,
    gate: int,
    weight: int,
    out: int,
    rows: int,
    groups: int,
    width: int,
    stride: int,
    gate_stride: int,
    weight_stride: int,
    out_stride: int,
    eps: float,
    gate_first: bool,
    sigmoid: bool,
    type: int,
    /,
) -> None: ...
def multiply_gate(
    x: int, gate: int, out: int, rows: int, width: int, stride: int, gate_stride: int, out_stride: int, type: int, /
) -> None: ...

class TokenHistory:
    """Earlier occurrences of the last tokens of a text (``csrc/token_history.h``)."""

    SEPARATOR: int
    """Token between texts: no occurrence extends over it."""
    bytes: int
    """Size in memory."""

    def __init__(self, capacity: int) -> None:
        """Keep the last ``capacity`` tokens, or up to twice as many."""

    def __len__(self) -> int:
        """Number of appended tokens, the forgotten ones included."""

    def append(self, tokens: list[int], /) -> None: ...
    def find(self, text: TokenHistory, longest: int, /) -> tuple[int, int, int, int, int] | None:
        """Find the longest of the recent occurrences of the last tokens of ``text``.

        Args:
            text: may be this object.
            longest: length of the longest match that is told apart from longer ones, up to 32.

        Returns the position after the occurrence, the token there, the length of the occurrence, the number of
        occurrences with at least half of this length, and the number of those that are followed by the same token;
        None if there is no occurrence.
        """

    def tokens(self, position: int, count: int, /) -> list[int]:
        """Up to ``count`` tokens from a position, up to a separator. After the last token, they continue with the
        returned tokens themselves."""
