// What the kernels are told, and the table of them that each instruction set fills.
//
// A call is cut into tasks that any thread may run in any order: no sum crosses tasks, and within a task the order of
// an output element's sum depends on that element alone. That is what makes results independent of the batch.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace penstock {

// What is computed in.
enum class Type : int32_t { float32, bfloat16 };

// How a matrix is kept: as it is, or as integers or tiny floating-point numbers (e2m1) with a scale for each output and group
// of inputs; `a8` means that what it is multiplied with is rounded to 8 bits, too.
enum class Format : int32_t { plain, w8a8, w4a8, wint8, wint4, wfloat4 };

// Functions of single numbers, as `ACTIVATIONS` of ops/activations.py has them: gelu by the error function, gelu_tanh by its
// approximation with the hyperbolic tangent. The last one is of a gate and what it gates (`GATES`).
enum class Activation : int32_t { silu, gelu, gelu_tanh, relu, tanh, swigluoai };

// Columns of a packed matrix that lie together. A panel of a [out, in] matrix holds 64 outputs, input after input, so
// that a vector holds one input (or some) of 16 outputs; how many is the format's matter (formats.h).
constexpr int64_t kPanel = 64;

// A number for each group and output, [panels][groups][64]: float32, float16 that are zero or normal, or int8.
enum class GroupType : int32_t { float32, float16, int8 };
struct OfGroups {
  const void* at;  // null: there are none
  GroupType type;
};

// A packed [outputs, in]. A weight of integers is q * scale + offset. With int8 group scales, it is q * scale * output_scale;
// q * scale fits in 8 bits, so products are summed in integers.
struct Matrix {
  const void* panels;
  OfGroups scales, offsets;
  const float* output_scales;  // [panels][64]; null unless group scales are int8
  const float* bias;           // [outputs]; null: none
  const int32_t* order;  // [in]: which input a column of the panels is; null: they lie as inputs come
  int64_t in, outputs, group;
  int64_t rotation;  // inputs of a Hadamard block (hadamard.h); 1: weights are not rotated
  bool x_in_groups;  // whether rows of integers have a scale for each of several groups
  Format format;
  Type type;
};

// [rows, in] by a matrix to [rows, out].
struct Linear {
  Matrix matrix;
  const void* x;          // of the matrix's type; for a8 formats int8, each row padded with zeros; in the matrix's order
  const float* x_scales;  // for a8 formats: [rows], or [rows, groups]
  const void* x_sums;     // [rows, sums_of(matrix)]: int32 for a8 formats; float32 for others with offsets
  void* out;
  int64_t out_stride;  // elements from one row to the next
  int64_t rows;
  int64_t panels;  // of a task
  Type out_type;
  Activation activation = Activation::silu;  // of a gated product
};

// Some rows by one of an adapter's two matrices: down to a few numbers each, which lie one after the other, or from there
// up, scaled, onto what a layer has made of the same rows.
struct LowRank {
  Matrix matrix;  // plain
  const void* x;
  void* out;
  const int32_t* rows;  // [count]: of the layer's input on the way down, of its output on the way up
  int64_t x_stride, out_stride;  // elements from one row to the next
  int64_t count;
  int64_t panels;  // of a task
  float scale;
};

// The choices of one expert in a mixture of experts, by its matrix: a choice is one of `top_k` experts of a token, and the
// c-th choice is of the token c / top_k.
struct Choices {
  Matrix matrix;
  const void* x;          // as in Linear, but not in the matrix's order
  const float* x_scales;
  const void* x_sums;
  void* out;
  const int32_t* choices;  // [count]
  int64_t count;
  int64_t choices_per_row;  // 1 where x has a row for each choice, top_k where it has one for each token
  int64_t out_stride;       // elements from one choice to the next
  int64_t panels;           // of a task
  Type out_type;
  Activation activation = Activation::silu;  // of a gated product
};

// Which experts each token goes to, and with which weights.
struct Router {
  const float* logits;  // [tokens, experts]
  const float* bias;    // [experts], added to scores for the choice alone; null: none
  int64_t* ids;         // [tokens, top_k]
  float* weights;       // [tokens, top_k]
  int64_t experts, top_k, groups, top_groups;
  float scale, least_sum;
  bool sigmoid, best_two, renormalize;  // `best_two`: a group's score is the sum of its two best, else its best
};

// The weighted sum of a token's choices, in their order, and what its shared expert made.
struct Combine {
  const void* x;         // [tokens, top_k, size]
  const float* weights;  // [tokens, top_k]
  const void* shared;    // [tokens, size], rows `shared_stride` elements apart; null: none
  const float* gate;     // [tokens]: the logit of the shared expert's weight; null: 1
  void* out;
  int64_t top_k, size, shared_stride, out_stride;
  Type type;
};

// Rows rounded to 8 bits, each with its own scale, as a8 formats multiply them.
struct Quantize {
  const void* x;  // [rows, in]
  int8_t* out;    // [rows, padded]
  float* scales;  // [rows], or with `in_groups` [rows, groups]
  int32_t* sums;  // [rows, groups]; with `has_total` [rows, groups + 1], the last of which is a whole row's
  int64_t in, padded, group, rotation;
  bool in_groups, has_total;
  Type type;
};

// Rows rotated as a matrix's weights are, for formats that do not round rows.
struct Rotate {
  const void* x;  // [rows, in]
  void* out;      // [rows, in]
  int64_t in, rotation;
  Type type;
};

// Sums of a row's groups, as formats that do not round rows take them where there are offsets.
struct GroupSums {
  const void* x;  // [rows, in]
  float* sums;    // [rows, groups]
  int64_t in, group;
  Type type;
};

// Which outputs of a row may be chosen: a bit each.
struct Allowed {
  const uint16_t* bits;  // [rows, sixteens]; null: all may
  int64_t sixteens;
};

// The largest output of each row, without keeping the others: of each task's panels the value and the output.
struct Likeliest {
  Linear product;  // `out` is void
  Allowed allowed;
  float* values;   // [rows, tasks of a row]
  int64_t* outputs;
};

// A plain matrix without bias, the same rounded to 8 bits, and how far off that is: of each panel's outputs the largest
// distance from what they were rounded to, and the largest length of the latter.
struct Sketch {
  Matrix whole, rounded;  // the latter's panels and scales are written
  float *off, *lengths;   // [panels]
};

// Sixteen outputs of a row, one of which may be the row's largest.
struct Candidate {
  int32_t row, sixteen;
  float value;   // no output is larger; once it is settled, the largest one
  int32_t lane;  // of it
};

// Finds candidates by a sketch, for at most kRowBlock rows.
struct Screening {
  Linear product;  // by the rounded matrix; `out` is void
  Allowed allowed;
  const Matrix* whole;
  const float *off, *lengths;
  const void* x;
  float *x_lengths, *x_off;  // [rows]
  std::atomic<float>* least;  // [rows]: what the largest output is at least
  Candidate* candidates;      // [tasks][rows * panels of a task * 4]
  int64_t* counts;            // [tasks]
};

// Rows of a packed [vocabulary, size] matrix that begins with the row `first` of the whole one; what is in none of its rows
// is left as it is.
struct Gather {
  Matrix matrix;
  const int64_t* ids;
  void* out;
  int64_t first;
};

// Packs some rows of a matrix, and rounds where the format wants it: its panels and scales are written; of integers that
// are given its panels alone.
struct Pack {
  Matrix matrix;
  const void* weight;  // [rows, in], row by row: of the matrix's type, or int8
  int64_t first, rows;  // the first one is the first of a panel
};

// Norms [rows, groups, size]; rows of x lie `stride` elements apart. With a residual, x is added to it first. A wide norm's
// weights are float32, and what they are multiplied with is rounded only then.
struct Norm {
  const void* x;
  void* residual;  // null: none; else read and written, [rows, size], and groups is 1
  const void* weight;  // null: only add to the residual
  void* out;
  int64_t groups, size, stride;
  float eps;
  Type type;
  bool wide, centered;    // the latter, of wide ones, takes the mean away first (LayerNorm)
  int64_t weight_stride;  // of a wide norm: elements from one group's weights to the next's
  const float* bias;      // [size], of a wide norm; null: none
};

// [tokens, heads, dim], tokens `stride` elements apart in x, of which the first `rotary` elements of each head are turned by
// the table's angles at their positions: those of the first half against those of the second, or, interleaved, neighbours.
struct Rope {
  const void* x;
  void* out;
  const int64_t* positions;
  const float* table;  // [longest, rotary], cosines then sines
  int64_t heads, dim, stride, rotary;
  Type type;
  bool interleaved;
};

// Of [rows, size], or where it is gated of [rows, 2 * size], whose second half it is multiplied with.
struct Activate {
  const void* x;
  void* out;                         // [rows, size]
  int64_t size, stride, out_stride;  // rows of x and out are so many elements apart
  Type type;
  Activation activation;
  bool gated;
};

// [rows, size] times a factor; with a cap, which is then not exceeded, cap * tanh(x / cap) of that.
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

// A layer's cache: for each panel of `panel` positions (`panel_of` a block's) and head the keys, then the values. Keys lie
// as `panel` columns over `dim` inputs, values as `dim` columns over `panel` inputs: both attention's products are then the
// linear layer's. Where keys and values are rounded to 8 bits, a float32 scale for each position's key follows, and for
// each one's value.
struct Store {
  const void *k, *v;  // [tokens, kv_heads, dim], tokens `stride_k` and `stride_v` elements apart
  void* cache;
  const int64_t* slots;
  int64_t kv_heads, dim, panel, stride_k, stride_v;
  Type type;
  bool rounded;
};

// A layer's keys and values of some tokens, between its cache and a buffer in which a layer is, for each `slot_tokens`
// tokens, [2, slot_tokens, all_heads] vectors, keys first. Where these are rounded, their scale follows each of them.
struct Exchange {
  void* cache;
  char* buffer;  // at the layer's part of the first slot
  const int64_t *slots, *places;  // [tokens]: in the cache, and in the buffer as if its slots were joined
  const int64_t* chosen;          // [count]: tokens
  int64_t count;
  int64_t kv_heads, dim, panel;
  int64_t all_heads, first_head, slot_tokens, slot_bytes;
  Type type;
  bool rounded;
  bool latent;  // [slot_tokens] vectors in the buffer
};

struct Attention {
  const void* q;  // [tokens, heads, dim]
  void* out;
  const void* cache;
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* lengths;       // [sequences]
  // [tasks, 2]: sequence and first row (query * heads per kv head) of each task; of a latent cache [tasks, 4]: these, and
  // which part of the positions (kPart) the task takes, of how many parts; -1: all of them, in turn.
  const int32_t* tiles;
  int64_t tasks, heads, kv_heads, dim, block_size, table_width, window;
  int64_t out_stride;  // elements from one token to the next
  float scale;
  Type type;
  bool rounded;
  float cap;           // of scores, cap * tanh(score / cap); 0: none
  const float* sinks;  // [heads]: scores that take part in the softmax and have no value; null: none
  int64_t latent;     // of a latent cache, elements of a value; 0: the cache has keys and values
  int64_t task_rows;  // of a latent cache: queries times heads of a task
  float* partial;     // of a latent cache: [tasks, task_rows, latent + 32], what rows come to in a task's part
  bool causal;  // else a query sees the positions after its own, too: all, or as many as `window` has before it
  const int32_t* key_ends;  // [tokens]: behind the last position that each query sees; null: as `causal` says
  bool chunked;  // a query sees its own chunk of `window` positions, from the beginning
};

// Rotary parts of queries and keys, turned, and what a latent cache keeps of a token: a panel's vectors lie one after the
// other, each a latent vector and the turned key behind it. Where these are rounded to 8 bits, a float32 scale for each
// follows the panel's.
struct LatentStore {
  const void *q, *k, *latent;  // [tokens, heads, rope], [tokens, rope] and [tokens, dim - rope]
  void* out;                   // [tokens, heads, rope], of queries
  const int64_t* positions;
  const float* table;  // [longest, rope], cosines then sines
  void* cache;
  const int64_t* slots;
  int64_t heads, rope, dim, panel;
  int64_t q_stride, q_head, k_stride, latent_stride, out_stride, out_head;  // elements from a token, or head, to the next
  bool pairs;  // neighbours are turned together, and not halves
  Type type;
  bool rounded;
};

// Each head of a row by its own matrix, which lie one after the other, each of `padded` outputs, of which it has `outputs`.
struct ByHead {
  Matrix matrix;  // plain
  const void* x;
  void* out;
  int64_t x_stride, x_head, out_stride, out_head;  // elements from a row, or head, to the next
  int64_t rows, heads, outputs, padded;
};

// A piece of memory for each task, `size` bytes, a multiple of 256.
struct Read {
  const void* from;
  int64_t size;
};

// Positions that attention takes together, whatever the block size, on which its results therefore do not depend.
constexpr int64_t kSpan = 64;

// Positions of a latent cache that are summed together, by whichever thread: sums of parts are joined in their order.
constexpr int64_t kPart = 512;

// Positions of a panel, of which both blocks and spans are made: a span, unless it is not of whole blocks. Block sizes are
// multiples of 16.
constexpr int64_t panel_of(int64_t block_size) {
  const int64_t power = block_size & -block_size;
  return power < kSpan ? power : kSpan;
}

constexpr int64_t kTileRows = 6;    // rows of a product, unless its format says otherwise
constexpr int64_t kMostPanels = 8;  // of a linear layer's task
constexpr int64_t kRowsTogether = 16;
constexpr int64_t kMaxHead = 256;   // largest head size
constexpr int64_t kMaxLatent = 512;     // largest value of a latent cache
constexpr int64_t kMaxLatentKey = 640;  // and key
constexpr int64_t kLatentGroups = 6;    // rows of a latent cache's task, in those of another one
constexpr int64_t kMaxBlock = 256;  // largest block size

struct Kernels {
  const char* name;
  int64_t linear_rows, attention_rows;  // of a task; of the latter's, queries times the heads that share keys
  void (*linear)(const Linear&, int64_t task);
  void (*gated)(const Linear&, int64_t task);  // silu of the first half of outputs by the other one
  void (*low_rank_down)(const LowRank&, int64_t task);
  void (*low_rank_up)(const LowRank&, int64_t task);
  void (*expert)(const Choices&, int64_t task);
  void (*gated_expert)(const Choices&, int64_t task);
  void (*router)(const Router&, int64_t row);
  void (*combine)(const Combine&, int64_t row);
  void (*likeliest)(const Likeliest&, int64_t task);
  void (*sketch)(const Sketch&, int64_t panel);
  void (*measure)(const Screening&, int64_t row);
  void (*screen)(const Screening&, int64_t task);
  void (*settle)(const Screening&, Candidate&);
  void (*quantize)(const Quantize&, int64_t task);
  void (*rotate)(const Rotate&, int64_t task);
  void (*sum_groups)(const GroupSums&, int64_t task);
  void (*gather)(const Gather&, int64_t task);
  void (*pack)(const Pack&, int64_t task);
  void (*pack_integers)(const Pack&, int64_t task);
  void (*norm)(const Norm&, int64_t task);
  void (*rope)(const Rope&, int64_t task);
  void (*activate)(const Activate&, int64_t task);
  void (*scale)(const Scale&, int64_t task);
  void (*to_float32)(const ToFloat32&, int64_t task);
  void (*store)(const Store&, int64_t task);
  void (*export_kv)(const Exchange&, int64_t task);  // of kRowsTogether tokens
  void (*import_kv)(const Exchange&, int64_t task);
  void (*attention)(const Attention&, int64_t task);
  void (*latent_join)(const Attention&, int64_t task);  // parts of the same rows, if the task takes the first of them
  void (*latent_store)(const LatentStore&, int64_t task);
  void (*by_head)(const ByHead&, int64_t task);  // of a head and linear_rows rows
  void (*read)(const Read&, int64_t task);
  int64_t (*float_dots)(int64_t steps);
  int64_t (*integer_dots)(int64_t steps);
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory with room for so many elements, which is kept from one call to the next.
template <class T>
inline T* with_room(std::vector<T>& memory, int64_t count) {
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// Inputs that a vector of a packed matrix holds for each of its 16 outputs.
inline int64_t step_of(Format format, Type type) {
  switch (format) {
    case Format::w8a8: return 4;
    case Format::w4a8: return 8;
    case Format::wint8: return 2;
    case Format::wint4:
    case Format::wfloat4: return 8;
    default: return type == Type::float32 ? 1 : 2;
  }
}

// Bytes of that vector.
inline int64_t step_bytes(Format format) { return format == Format::wint8 ? 32 : 64; }

inline int64_t panel_bytes(const Matrix& m) {
  return ceil_div(m.in, step_of(m.format, m.type)) * step_bytes(m.format) * (kPanel / 16);
}
inline int64_t groups_of(const Matrix& m) { return ceil_div(m.in, m.group); }

// Number of input sums per row: one per group, plus the row's total with int8 group scales.
inline int64_t sums_of(const Matrix& m) { return groups_of(m) + (m.output_scales ? 1 : 0); }

}  // namespace penstock
