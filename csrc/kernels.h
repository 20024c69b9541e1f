// What the kernels are told, and the table of them that each instruction set fills.
//
// A call is cut into tasks that any thread may run in any order: no sum crosses tasks, and within a task the order of
// an output element's sum depends on that element alone. That is what makes results independent of the batch.

#pragma once

#include <cstdint>

namespace penstock {

enum class Type : int32_t { float32, bfloat16 };

// Columns of a packed matrix that lie together. A panel of a [out, in] matrix holds 64 outputs: for float32 as
// [in][64], for bfloat16 as [in / 2][64][2], so that a vector holds one input (or two) of 16 outputs.
constexpr int64_t kPanel = 64;

// [rows, in] by a packed [out, in] to [rows, out].
struct Linear {
  const void* x;
  const void* weight;
  const float* bias;  // null: none
  void* out;
  int64_t rows, in, outputs;
  int64_t panels;  // of a task
  Type type, out_type;
};

// The largest output of each row, without keeping the others: of each task's panels the value and the output.
struct Likeliest {
  Linear product;  // `out` is void
  float* values;   // [rows, tasks of a row]
  int64_t* outputs;
};

// Rows of a packed [vocabulary, size] matrix.
struct Gather {
  const int64_t* ids;
  const void* weight;
  void* out;
  int64_t rows, size;
  Type type;
};

struct Pack {
  const void* weight;  // [outputs, in], row by row
  void* packed;
  int64_t in, outputs;
  Type type;
};

// Norms [rows, groups, size]; rows of x lie `stride` elements apart. With a residual, x is added to it first.
struct Norm {
  const void* x;
  void* residual;  // null: none; else read and written, [rows, size], and groups is 1
  const void* weight;
  void* out;
  int64_t rows, groups, size, stride;
  float eps;
  Type type;
};

// [tokens, heads, dim], tokens `stride` elements apart in x, turned by the table's angles at their positions.
struct Rope {
  const void* x;
  void* out;
  const int64_t* positions;
  const float* table;  // [longest, dim], cosines then sines
  int64_t tokens, heads, dim, stride;
  Type type;
};

struct SiluMul {
  const void* gate_up;  // [rows, 2 * size]
  void* out;            // [rows, size]
  int64_t rows, size;
  Type type;
};

// A layer's cache: for each block and head the keys, then the values. Keys lie as a panel of `block_size` columns over
// `dim` inputs, values as one of `dim` columns over `block_size` inputs: both attention's products are then the
// linear layer's.
struct Store {
  const void *k, *v;  // [tokens, kv_heads, dim], tokens `stride_k` and `stride_v` elements apart
  void* cache;
  const int64_t* slots;
  int64_t tokens, kv_heads, dim, block_size, stride_k, stride_v;
  Type type;
};

struct Attention {
  const void* q;  // [tokens, heads, dim]
  void* out;
  const void* cache;
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* lengths;       // [sequences]
  const int32_t* tiles;         // [tasks, 2]: sequence and first row (query * heads per kv head) of each task's tile
  int64_t tasks, heads, kv_heads, dim, block_size, table_width, window;
  float scale;
  Type type;
};

constexpr int64_t kTileRows = 6;    // query rows that attention handles together
constexpr int64_t kRowBlock = 96;   // rows of a linear layer's task
constexpr int64_t kMostPanels = 8;  // of a linear layer's task
constexpr int64_t kMaxHead = 256;   // largest head size
constexpr int64_t kMaxBlock = 256;  // largest block size

struct Kernels {
  const char* name;
  void (*linear)(const Linear&, int64_t task);
  void (*likeliest)(const Likeliest&, int64_t task);
  void (*gather)(const Gather&, int64_t task);
  void (*pack)(const Pack&, int64_t task);
  void (*norm)(const Norm&, int64_t task);
  void (*rope)(const Rope&, int64_t task);
  void (*silu_mul)(const SiluMul&, int64_t task);
  void (*store)(const Store&, int64_t task);
  void (*attention)(const Attention&, int64_t task);
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements of a packed [outputs, in] matrix.
inline int64_t packed_size(int64_t outputs, int64_t in) { return ceil_div(outputs, kPanel) * kPanel * (in + in % 2); }

}  // namespace penstock
