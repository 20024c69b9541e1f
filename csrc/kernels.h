// Arguments of the kernels, and the table of kernels (`Kernels`) that each instruction set provides.
//
// A call is divided into tasks that any thread may run in any order. No sum crosses tasks, and within a task the order of
// summation of an output depends only on that output. Therefore results do not depend on other rows of the batch.
//
// Notation: [rows, in] are the dimensions of a row-major array. "Elements apart" are strides in elements.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace penstock {

// Data type of activations and results.
enum class Type : int32_t { float32, bfloat16 };

// Storage format of a matrix: unquantized, integers, or 4-bit floating-point numbers (e2m1) with one scale per output and
// group of inputs. With the `a8` formats, activations are also quantized to 8 bits.
enum class Format : int32_t { unquantized, w8a8, w4a8, wint8, wint4, wfloat4 };

// Activation functions, in the order of `ACTIVATIONS` and `GATES` in ops/activations.py: gelu is exact, gelu_tanh its tanh
// approximation. swigluoai and swiglu10 are functions of both a gate and the value that it gates.
enum class Activation : int32_t { silu, gelu, gelu_tanh, relu, tanh, relu2, swigluoai, swiglu10 };

// Function from a router's logits to scores.
enum class Scores : int32_t { softmax, sigmoid, sqrtsoftplus };

// Number of outputs of a panel. A packed [out, in] matrix consists of panels of 64 outputs. A panel stores the weights of
// one input after another, so that a vector holds one input (or a few, depending on the format: formats.h) of 16 outputs.
constexpr int64_t kPanel = 64;

// A value for each group and output, [panels][groups][64]: float32, float16 (zero or normal), or int8.
enum class GroupType : int32_t { float32, float16, int8 };
struct GroupValues {
  const void* data;  // null: absent
  GroupType type;
};

// A packed matrix [outputs, in]. A quantized weight is q * scale + offset. With int8 group scales, it is
// q * scale * output_scale; q * scale fits into 8 bits, so that products are summed in integers.
struct Matrix {
  const void* panels;
  GroupValues scales, offsets;
  const float* output_scales;  // [panels][64]; null unless group scales are int8
  const float* bias;           // [outputs]; null: absent
  const int32_t* order;        // [in]: index of the input in each column of the panels; null: unpermuted
  int64_t in, outputs, group;  // `group`: number of inputs of a group
  int64_t rotation;            // size of the Hadamard blocks (hadamard.h); 1: weights are not rotated
  bool x_in_groups;            // quantized activations have one scale per group, and there are several groups
  Format format;
  Type type;
};

// Product of x [rows, in] and a matrix: [rows, outputs].
struct Linear {
  Matrix matrix;
  const void* x;  // in the matrix's type and order of inputs; a8 formats: int8, rows padded with zeros to 8 inputs
  const float* x_scales;  // a8 formats: [rows], or [rows, groups]
  const void* x_sums;  // [rows, num_sums(matrix)]: int32 for a8 formats, float32 for other formats with offsets
  void* out;
  int64_t out_stride;  // elements between rows
  int64_t rows;
  int64_t panels;  // panels per task
  Type out_type;
  Activation activation = Activation::silu;  // only for gated products
};

// Product of selected rows and one of the two matrices of a LoRA adapter. Down: from the layer's input to the ranks, which
// are stored contiguously. Up: from the ranks to the outputs, scaled and added to the layer's output.
struct LoRA {
  Matrix matrix;  // unquantized
  const void* x;
  void* out;
  const int32_t* rows;  // [count]: rows of the layer's input (down) or output (up)
  int64_t x_stride, out_stride;  // elements between rows
  int64_t count;
  int64_t panels;  // panels per task
  float scale;
};

// Product of an expert's matrix and the rows assigned to it. An assignment is one of the `top_k` experts of a token: number
// c belongs to token c / top_k.
struct ExpertLinear {
  Matrix matrix;
  const void* x;  // like Linear::x, but with unpermuted inputs
  const float* x_scales;
  const void* x_sums;
  void* out;
  const int32_t* assignments;  // [count]
  int64_t count;
  int64_t assignments_per_row;  // 1 if x has a row per assignment, top_k if it has one per token
  int64_t out_stride;  // elements between assignments
  int64_t panels;  // panels per task
  Type out_type;
  Activation activation = Activation::silu;  // only for gated products
};

// Selection of the experts of each token, and their weights.
struct Router {
  const float* logits;  // [tokens, experts]
  const float* bias;  // [experts], added to scores for the selection only; null: absent
  const float* factors;  // [experts], factor of each expert's weight; null: absent
  int64_t* ids;  // [tokens, top_k]
  float* weights;  // [tokens, top_k]
  int64_t experts, top_k, groups, top_groups;
  float scale, min_sum, added_sum;
  Scores function;
  bool sum_top2, renormalize;  // `sum_top2`: a group's score is the sum of its two best scores, else its best score
  const int64_t* token_ids;  // [tokens], with `table`
  const int64_t* table;  // [vocabulary, top_k]: experts of each token id (hash routing); null: chosen by score
};

// Weighted sum of the outputs of a token's experts, in the order of x, plus the output of the shared experts.
struct Combine {
  const void* x;  // [tokens, top_k, size]
  const float* weights;  // [tokens, top_k]
  const void* shared;  // [tokens, size], rows `shared_stride` elements apart; null: absent
  const float* gate;  // [tokens]: logit of the weight of `shared`; null: weight 1
  void* out;
  int64_t top_k, size, shared_stride, out_stride;
  Type type;
};

// Quantization of rows to 8 bits for a8 formats.
struct Quantize {
  const void* x;  // [rows, in]
  int8_t* out;  // [rows, padded]
  float* scales;  // [rows], or with `in_groups` [rows, groups]
  int32_t* sums;  // [rows, groups]; with `has_total` [rows, groups + 1]: the last entry is the sum of the row
  int64_t in, padded, group, rotation;
  bool in_groups, has_total;
  Type type;
};

// Rotation of rows, for rotated matrices with a format that does not quantize rows.
struct Rotate {
  const void* x;  // [rows, in]
  void* out;  // [rows, in]
  int64_t in, rotation;
  Type type;
};

// Sums of the groups of a row, for formats that have offsets and do not quantize rows.
struct GroupSums {
  const void* x;  // [rows, in]
  float* sums;  // [rows, groups]
  int64_t in, group;
  Type type;
};

// Allowed outputs of each row: one bit per output.
struct Bitmask {
  const uint16_t* bits;  // [rows, stride], 16 outputs per element; null: all outputs are allowed
  int64_t stride;
};

// Largest output of each row: value and index for each task's panels.
struct ArgMax {
  Linear product;  // `out` is not used
  Bitmask bitmask;
  float* values;  // [rows, tasks per row]
  int64_t* outputs;
};

// An unquantized matrix without bias, its copy quantized to 8 bits, and bounds of the errors of each panel.
struct Sketch {
  Matrix matrix, quantized;  // panels and scales of `quantized` are written
  float *error_norms, *norms;  // [panels]: largest norm of an output's quantization error, and of its quantized weights
};

// Sixteen outputs of a row, one of which may be the row's largest.
struct Candidate {
  int32_t row, vector;  // `vector`: index of the first output / 16
  float value;  // upper bound of the outputs; after `evaluate` the largest output
  int32_t lane;  // lane of the largest output
};

// Search of candidates with a sketch, for at most kRowBlock rows.
struct SketchSearch {
  Linear product;  // with the quantized matrix; `out` is not used
  Bitmask bitmask;
  const Matrix* matrix;
  const float *error_norms, *norms;
  const void* x;
  float *x_norms, *x_error_norms;  // [rows]
  std::atomic<float>* lower_bounds;  // [rows]: lower bound of the largest output
  Candidate* candidates;  // [tasks][rows * panels per task * 4]
  int64_t* counts;  // [tasks]
};

// Lookup of rows of a packed matrix, which has the rows of the vocabulary from `first` on. For ids outside the matrix, the
// row of `out` is not written.
struct Embedding {
  Matrix matrix;
  const int64_t* ids;
  void* out;
  int64_t first;
};

// Packs rows of a matrix. If the format quantizes, panels and scales are written; if the input is integers, only panels.
struct Pack {
  Matrix matrix;
  const void* weight;  // [rows, in], in the matrix's type or int8
  int64_t first, rows;  // `first`: first row, a multiple of kPanel
};

// RMS norms or layer norms of [rows, groups, size]; rows of x are `stride` elements apart. With a residual, x is first added
// to the residual, and the sum is normalized.
struct Norm {
  const void* x;
  void* residual;  // [rows, size], updated; `groups` is then 1. null: absent
  const void* weight;  // null: only add to the residual
  void* out;
  int64_t groups, size, stride;
  float eps;
  Type type;
  bool wide, centered;  // `wide`: float32 weights, round once; `centered` (with `wide`): subtract the mean (layer norm)
  int64_t weight_stride;  // with `wide`: elements between the weights of groups
  const float* bias;  // [size], with `wide`; null: absent
};

// Rotary embedding of [tokens, heads, dim]; tokens of x are `stride` elements apart. The first `rotary` elements of each
// head are rotated by the table's angles at the token's position: halves against each other or, interleaved, adjacent
// elements.
struct Rope {
  const void* x;
  void* out;
  const int64_t* positions;
  const float* table;  // [max positions, rotary], cosines then sines
  int64_t heads, dim, stride, rotary;
  Type type;
  bool interleaved;
};

// Activation of [rows, size]; if gated, of the first half of [rows, 2 * size], multiplied by the second half.
struct Activate {
  const void* x;
  void* out;  // [rows, size]
  int64_t size, stride, out_stride;  // `stride`, `out_stride`: elements between rows of x and out
  Type type;
  Activation activation;
  bool gated;
};

// [rows, size] times a factor, then the soft cap cap * tanh(x / cap) unless `cap` is 0.
struct Scale {
  const void* x;
  void* out;
  int64_t size;
  float factor, cap;
  Type type;
};

struct ToFloat32 {
  const void* x;  // [rows, size]
  float* out;
  int64_t size;
  Type type;
};

// Stores keys and values in a layer's cache. The cache holds, for each panel of `panel` positions (`panel_positions` of the
// block size) and head, the keys, then the values. Keys are stored as a matrix of `panel` columns and `dim` inputs, values
// as one of `dim` columns and `panel` inputs, so that attention's products have the form of linear layers. In a quantized
// cache, the float32 scales of the panel's keys follow, then those of its values.
struct Store {
  const void *k, *v;  // [tokens, kv_heads, dim], tokens `stride_k` and `stride_v` elements apart
  void* cache;
  const int64_t* slots;
  int64_t kv_heads, dim, panel, stride_k, stride_v;
  Type type;
  bool quantized;
};

// Copies a layer's keys and values of some tokens between its cache and a transfer buffer. The buffer holds, for each slot
// of `slot_tokens` tokens, [2, slot_tokens, all_heads] vectors, keys first. Quantized vectors are followed by their scale.
struct KVTransfer {
  void* cache;
  char* buffer;  // the layer's data of the first slot
  const int64_t *slots, *places;  // [tokens]: slots of the cache; positions in the buffer, slot * slot_tokens + index
  const int64_t* tokens;  // [count]: indices of the tokens to copy
  int64_t count;
  int64_t kv_heads, dim, panel;
  int64_t all_heads, first_head, slot_tokens, slot_bytes;
  Type type;
  bool quantized;
  bool latent;  // the buffer holds [slot_tokens] vectors per slot
};

struct Attention {
  const void* q;  // [tokens, heads, dim]
  void* out;
  const void* cache;
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* lengths;  // [sequences]
  // [tasks, 2]: sequence and first row (query * heads per KV head) of each task. Latent cache: [tasks, 4]: additionally the
  // split of positions (kSplitPositions) that the task computes, and the number of splits; split -1: all of them, in order.
  const int32_t* tiles;
  int64_t tasks, heads, kv_heads, dim, block_size, table_width, window;
  int64_t out_stride;  // elements between tokens
  float scale;
  Type type;
  bool quantized;
  float cap;  // soft cap of the scores, cap * tanh(score / cap); 0: off
  const float* sinks;  // [heads]: sink logits; null: absent
  int64_t latent;  // latent cache: elements of a value; 0: separate keys and values
  int64_t task_rows;  // latent cache: rows (queries times heads) of a task
  float* partial;  // latent cache: [tasks, task_rows, latent + 32], partial results of splits
  bool causal;  // false: queries also attend to later positions: to all, or with a window to window - 1 of them
  const int32_t* key_ends;  // [tokens]: position after the last one to which each query attends; null: see `causal`
  bool chunked;  // queries attend only within their chunk of `window` positions
  const float* alibi;  // [heads]: slope of the scores by the distance of keys; null: absent
  // Sparse attention over a latent cache: elements between the cache's vectors. Each query is a sequence, and
  // `block_tables` has the slots of the positions to which it attends (SelectKeys). 0: dense attention.
  int64_t row;
  int64_t parts;  // vectors of a slot, with `row` (SelectKeys)
};

// Rotary embedding of the rotary parts of queries and keys, and storage of latent vectors. A panel of a latent cache holds
// contiguous vectors: each is a latent vector followed by the rotated key. In a quantized cache, the float32 scales of the
// panel's vectors follow. With sparse attention, each vector is followed by the token's index key.
struct LatentStore {
  const void *q, *k, *latent;  // [tokens, heads, rope], [tokens, rope] and [tokens, dim - rope]
  void* out;  // [tokens, heads, rope], the rotated queries
  const int64_t* positions;
  const float* table;  // [max positions, rope], cosines then sines
  void* cache;
  const int64_t* slots;
  int64_t heads, rope, dim, panel;
  int64_t q_stride, q_head, k_stride, latent_stride, out_stride, out_head;  // elements between tokens; `_head`: heads
  bool interleaved;
  Type type;
  bool quantized;
  const void* index_keys;  // [tokens, index_dim], rows `index_stride` elements apart; null: not written
  int64_t index_dim, index_stride;  // `index_dim` 0: no index keys
};

// Selection of the positions to which queries attend (sparse attention). The score of a position is the sum over the index
// heads, in order, of weight * max(query * key, 0). A query attends to the `top_k` positions with the largest scores, and of
// positions with equal scores to the first ones.
struct SelectKeys {
  const void* q;  // [tokens, heads, dim]
  const float* weights;  // [tokens, heads]
  const void* cache;  // latent cache: the last `dim` of the `row` elements of a vector are the index key
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* sequences;  // [tokens]
  const int32_t* ends;  // [tokens]: number of positions up to the query's
  const int32_t* tiles;  // [tasks, 2]: token, and first of kSplitPositions positions to score
  const int64_t* offsets;  // [tokens]: index of the token's first score; -1: all of its positions are selected
  float* scores;
  int32_t* slots;  // [tokens, top_k]: slots of the selected positions, in ascending order of positions
  int64_t heads, dim, row, block_size, table_width, top_k;
  float scale;  // factor of the weights
  Type type;
  // Compressed attention: the query attends to its last `window` positions, then to selected entries. Entry i is that of
  // the `rate` positions up to (i + 1) * rate - 1, in whose slot it is stored. Then `ends` counts entries, `lasts` [tokens]
  // positions, and `slots` are [tokens, window + top_k]. A slot has `parts` vectors, the last of which is an entry:
  // vector v of slot s is numbered s * parts + v. `rate` 0: positions are selected.
  int64_t rate, window, parts;
  const int32_t* lasts;
};

// Sequences of a step, and what happens to their recurrent states (StateBatch in ops/batch.py).
struct StateRows {
  const int32_t *starts, *slots, *accepted, *drafts, *save_starts, *save_after, *save_slots;
};

// Compressed entries of a KV cache (compressed attention; DeepSeek-V4): each is a sum of the values of `rate` consecutive
// tokens, or with `overlap` 2 * `rate`, by the softmax of their gates per channel; normalized; with its last `rope` elements
// rotated. It is stored at `offset` in the vector of the last token.
struct Compress {
  StateRows rows;
  const void* x;  // [tokens, 2 * channels], values then gates; with `overlap`, those for the next entry precede their own
  void* state;  // [slots, span, 2 * channels]: token at each position modulo the span
  const void* kept;  // [slots, max_drafts, 2 * channels]
  const float* bias;  // [rate, channels], added to the gates
  const float* norm;  // [dim]
  const int64_t* positions;
  const float* table;  // rotary table, [max positions, rope]
  void* cache;
  const int64_t* slots;  // [tokens], of the cache
  const int32_t* tasks;  // [tasks, 2]: sequence, and last token of an entry
  int64_t x_stride, dim, rate, max_drafts, rope, row, offset;  // `x_stride`: elements between tokens
  float eps;
  bool overlap;
  Type type;

  int64_t channels() const { return overlap ? 2 * dim : dim; }
  int64_t span() const { return overlap ? 2 * rate : rate; }
};

// Weights of hyper-connections (DeepSeek-V4) from their logits: `streams` weights to collapse the streams, and, unless there
// are only these, as many to expand an output, and a matrix that mixes the streams, [in, out], doubly stochastic by
// Sinkhorn's algorithm.
struct HyperWeights {
  const float* logits;  // [rows, width]: `streams`, or (2 + streams) * streams
  const float *base, *scale;  // [width], and [1] or [3]: one for each kind of weight
  float* out;  // [rows, width]
  int64_t width, streams, iterations;
  float eps;
};

// Weighted sum of the streams of each row.
struct CollapseStreams {
  const void* x;  // [rows, streams * size]
  const float* weights;  // HyperWeights::out
  void* out;  // [rows, size]
  int64_t stride, streams, size;  // `stride`: elements between the weights of two rows; 0: all rows have the same
  Type type;
};

// Mixes the streams of each row in place, and adds the weighted output of a layer to each.
struct MixStreams {
  const void* x;  // [rows, size]
  void* residual;  // [rows, streams * size]
  const float* weights;  // HyperWeights::out
  int64_t stride, streams, size;  // `stride`: elements between the weights of two rows; 0: all rows have the same
  Type type;
};

// Scales the streams of each row in place, so that each has the root mean square (RMS) of the first.
struct EqualizeStreams {
  void* x;  // [rows, streams * size]
  int64_t streams, size;
  float min_square;  // smaller mean squares are replaced by it
  Type type;
};

// relu(x - (mean + multiplier * standard deviation)) of each row.
struct GaussianTopK {
  const void* x;
  void* out;  // [rows, size]
  int64_t stride, size;  // `stride`: elements between rows of x
  float multiplier;
  Type type;
};

// Rotation of the last `rotary` elements of each head of x in place, adjacent elements against each other.
struct RotateTail {
  void* x;  // [tokens, heads, dim]
  const int64_t* positions;
  const float* table;  // [max positions, rotary], cosines then sines
  int64_t heads, dim, rotary;
  bool inverse;  // rotate by the negative angle
  Type type;
};

// Product of each head of a row and the head's matrix. The matrices are stacked, each padded from `outputs` to `padded`
// outputs.
struct LinearByHead {
  Matrix matrix;  // unquantized
  const void* x;
  void* out;
  int64_t x_stride, x_head, out_stride, out_head;  // elements between rows; `_head`: heads
  int64_t rows, heads, outputs, padded;
};

// Causal convolution of each channel.
struct Convolution {
  StateRows rows;
  const void* x;
  void* out;
  void* state;  // [slots, kernel - 1, channels]: the last inputs
  const void* kept;  // [slots, max_drafts, channels]
  const float *weight, *bias;  // [kernel, channels], [channels]; `bias` null: absent
  int64_t x_stride, out_stride, channels, kernel, max_drafts;  // strides: elements between tokens
  bool silu;
  Type type;
};

// Linear attention with one state [key_dim, value_dim] per value head: by the gated delta rule (`delta`), or as a state space
// model (Mamba 2), whose keys, queries and values are B, C and x, and are multiplied by the step.
struct LinearAttention {
  StateRows rows;
  const void *x, *gates;  // queries, keys and values at the offsets; steps at `step_offset`, with `delta` after the betas
  void* out;
  float* state;  // [slots, heads, key_dim, value_dim]
  const void *kept, *kept_gates;  // [slots, max_drafts, width], [slots, max_drafts, gates_width]
  const float *log_decay, *gate_bias, *skip;  // [heads]; `skip`: factor of the values that are added; null: absent
  int64_t x_stride, gates_stride, out_stride, width, gates_width, max_drafts;
  int64_t heads, groups, key_dim, value_dim, q_offset, k_offset, v_offset, step_offset;  // `groups`: heads per key head
  float scale, l2_eps, min_step, max_step;
  bool delta;
  float beta_scale;
  int64_t decay_dim;  // steps per head: 1, or `key_dim` for a decay per channel; `gate_bias` then is [heads, key_dim]
  const float* decay;  // [heads]: constant decay, with beta 1 and without gates; null: computed from the gates
  Type type;
};

// RMS norm of groups of a row, and multiplication by SiLU of a gate.
struct GatedNorm {
  const void *x, *gate, *weight;
  void* out;
  int64_t groups, size, stride, gate_stride, weight_stride, out_stride;
  float eps;
  bool gate_first, sigmoid;  // `sigmoid`: activation of the gate, instead of SiLU
  Type type;
};

struct MultiplyGate {
  const void *x, *gate;
  void* out;
  int64_t size, stride, gate_stride, out_stride;
  Type type;
};

// Selective scan (Mamba): each channel has `size` states.
struct SelectiveScan {
  StateRows rows;
  const void *x, *steps, *b, *c, *gate;  // [tokens, channels], the same, [tokens, size], the same, [tokens, channels]
  void* out;
  float* state;  // [slots, size, channels]
  const void *kept_x, *kept_steps, *kept_b;  // [slots, max_drafts, channels], the same, [slots, max_drafts, size]
  const float *rates, *step_bias, *skip;  // [size, channels]: logarithm of the decay per unit of the step; [channels]
  int64_t x_stride, steps_stride, b_stride, c_stride, gate_stride, out_stride, channels, size, max_drafts;
  Type type;
};

// Real-gated linear recurrent unit (Griffin).
struct RgLru {
  StateRows rows;
  const void *x, *gates;  // [tokens, heads, width], [tokens, heads, 2, width]: gate of the input, gate of the decay
  void* out;
  float* state;  // [slots, heads, width]
  const void *kept_x, *kept_gates;  // [slots, max_drafts, heads, width], [slots, max_drafts, heads, 2, width]
  const float *rates, *bias;  // [heads, width]: logarithm of the smallest decay; [heads, 2, width]: bias of the gates
  const int64_t* positions;  // [tokens]
  int64_t x_stride, gates_stride, out_stride, heads, width, max_drafts;
  Type type;
};

// Product of two rows, the second after an activation (`activated`).
struct MultiplyRows {
  const void *x, *gate;
  void* out;
  int64_t size, stride, gate_stride, out_stride;
  bool activated;
  Activation activation;
  Type type;
};

// Random sampling, also greedy (temperature 0), of a token of each row.
struct SampleRandom {
  const float* logits;  // [rows, size]
  const double *temperature, *top_k, *top_p, *min_p, *uniform;  // [rows]; `uniform`: random numbers in [0, 1)
  int64_t* out;  // [rows]: token ids
  float* largest;  // [rows]: largest logits; NaN if a logit is NaN
  int64_t stride, size;  // `stride`: elements between rows
};

// Memory to read; `size`: bytes per task, a multiple of 256.
struct Read {
  const void* from;
  int64_t size;
};

// Number of positions that attention processes at a time. It is the same for all block sizes, so that results do not depend
// on the block size.
constexpr int64_t kSpan = 64;

// Number of positions of a split of a latent cache. Splits are computed separately, and their results are merged in order.
constexpr int64_t kSplitPositions = 512;

// Number of positions of a panel of the KV cache. It divides both the block size (a multiple of 16) and kSpan.
constexpr int64_t panel_positions(int64_t block_size) {
  const int64_t power = block_size & -block_size;
  return power < kSpan ? power : kSpan;
}

constexpr int64_t kTileRows = 6;  // rows of a register tile of products, unless the format defines another number
constexpr int64_t kMaxTaskPanels = 8;  // panels of a linear layer's task
constexpr int64_t kRowsPerTask = 16;  // rows of a task of row kernels
constexpr int64_t kMaxHead = 512;  // largest head size
constexpr int64_t kMaxLatent = 512;  // largest value size of a latent cache
constexpr int64_t kMaxLatentKey = 640;  // largest key size of a latent cache
constexpr int64_t kMaxLatentGroups = 6;  // maximum rows of a task over a latent cache, in units of Kernels::attention_rows
constexpr int64_t kMaxBlock = 256;  // largest block size
constexpr int64_t kMaxIndexDim = 256;  // largest index key
constexpr int64_t kMaxStreams = 8;  // largest number of residual streams

struct Kernels {
  const char* name;
  int64_t linear_rows, attention_rows;  // rows of a task; attention: queries times heads per KV head
  void (*linear)(const Linear&, int64_t task);
  void (*gated)(const Linear&, int64_t task);  // activation of the first half of the outputs, times the second half
  void (*lora_down)(const LoRA&, int64_t task);
  void (*lora_up)(const LoRA&, int64_t task);
  void (*expert)(const ExpertLinear&, int64_t task);
  void (*gated_expert)(const ExpertLinear&, int64_t task);
  void (*router)(const Router&, int64_t row);
  void (*combine)(const Combine&, int64_t row);
  void (*argmax)(const ArgMax&, int64_t task);
  void (*sample)(const SampleRandom&, int64_t row);
  void (*sketch)(const Sketch&, int64_t panel);
  void (*measure_norms)(const SketchSearch&, int64_t row);
  void (*find_candidates)(const SketchSearch&, int64_t task);
  void (*evaluate)(const SketchSearch&, Candidate&);
  void (*quantize)(const Quantize&, int64_t task);
  void (*rotate)(const Rotate&, int64_t task);
  void (*sum_groups)(const GroupSums&, int64_t task);
  void (*embedding)(const Embedding&, int64_t task);
  void (*pack)(const Pack&, int64_t task);
  void (*pack_integers)(const Pack&, int64_t task);
  void (*norm)(const Norm&, int64_t task);
  void (*rope)(const Rope&, int64_t task);
  void (*activate)(const Activate&, int64_t task);
  void (*scale)(const Scale&, int64_t task);
  void (*to_float32)(const ToFloat32&, int64_t task);
  void (*store)(const Store&, int64_t task);
  void (*export_kv)(const KVTransfer&, int64_t task);  // a task is kRowsPerTask tokens
  void (*import_kv)(const KVTransfer&, int64_t task);
  void (*attention)(const Attention&, int64_t task);
  void (*latent_merge)(const Attention&, int64_t task);  // merges the splits of the same rows, in the task of split 0
  void (*latent_store)(const LatentStore&, int64_t task);
  void (*index_scores)(const SelectKeys&, int64_t task);
  void (*select_keys)(const SelectKeys&, int64_t token);
  void (*compress)(const Compress&, int64_t task);
  void (*hyper_weights)(const HyperWeights&, int64_t row);
  void (*collapse_streams)(const CollapseStreams&, int64_t row);
  void (*mix_streams)(const MixStreams&, int64_t row);
  void (*equalize_streams)(const EqualizeStreams&, int64_t row);
  void (*gaussian_topk)(const GaussianTopK&, int64_t row);
  void (*rotate_tail)(const RotateTail&, int64_t token);
  void (*linear_by_head)(const LinearByHead&, int64_t task);  // a task is one head and linear_rows rows
  void (*convolution)(const Convolution&, int64_t task);
  int64_t convolution_channels;  // of a task
  void (*linear_attention)(const LinearAttention&, int64_t task);
  void (*gated_norm)(const GatedNorm&, int64_t row);
  void (*multiply_gate)(const MultiplyGate&, int64_t row);
  void (*selective_scan)(const SelectiveScan&, int64_t task);
  int64_t scan_channels;  // of a task
  void (*rg_lru)(const RgLru&, int64_t task);
  void (*multiply_rows)(const MultiplyRows&, int64_t row);
  void (*read)(const Read&, int64_t task);
  int64_t (*float_dots)(int64_t steps);
  int64_t (*integer_dots)(int64_t steps);
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns memory for `count` elements, which is reused by later calls.
template <class T>
inline T* scratch(std::vector<T>& memory, int64_t count) {
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// Number of inputs of a step: the inputs that a vector of a packed matrix holds for 16 outputs.
inline int64_t inputs_per_step(Format format, Type type) {
  switch (format) {
    case Format::w8a8: return 4;
    case Format::w4a8: return 8;
    case Format::wint8: return 2;
    case Format::wint4:
    case Format::wfloat4: return 8;
    default: return type == Type::float32 ? 1 : 2;
  }
}

// Bytes of a step's vector of 16 outputs.
inline int64_t step_bytes(Format format) { return format == Format::wint8 ? 32 : 64; }

inline int64_t panel_bytes(const Matrix& m) {
  return ceil_div(m.in, inputs_per_step(m.format, m.type)) * step_bytes(m.format) * (kPanel / 16);
}
inline int64_t num_groups(const Matrix& m) { return ceil_div(m.in, m.group); }

// Number of input sums per row: one per group, plus the row's total with int8 group scales.
inline int64_t num_sums(const Matrix& m) { return num_groups(m) + (m.output_scales ? 1 : 0); }

}  // namespace penstock
