// Paged attention: one function for a single query and for a thousand.
//
// A tile is up to six rows (queries times the heads that share keys and values). It walks over the sequence's blocks
// from the first one on with an online softmax (Milakov and Gimelshein, 2018), block by block at absolute positions,
// so that a row's result does not depend on which rows share its tile, nor on how a prompt was cut into chunks.

#pragma once

#include "kernels.h"
#include "tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr float kNever = -__builtin_inff();
constexpr i32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Where a position's key and value lie in a block and head of the cache.
template <class T>
inline int64_t key_index(int64_t position, int64_t d, int64_t block_size) {
  constexpr int n = StepOf<T>::Step::kInputs;
  return (d / n * block_size + position) * n + d % n;
}
template <class T>
inline int64_t value_index(int64_t position, int64_t d, int64_t dim) {
  constexpr int n = StepOf<T>::Step::kInputs;
  return (position / n * dim + d) * n + position % n;
}

template <class T>
void store_token(const Store& a, int64_t token) {
  const int64_t slot = a.slots[token], block = slot / a.block_size, position = slot % a.block_size;
  for (int64_t head = 0; head < a.kv_heads; head++) {
    T* keys = (T*)a.cache + (block * a.kv_heads + head) * 2 * a.dim * a.block_size;
    T* values = keys + a.dim * a.block_size;
    const T* k = (const T*)a.k + token * a.stride_k + head * a.dim;
    const T* v = (const T*)a.v + token * a.stride_v + head * a.dim;
    for (int64_t d = 0; d < a.dim; d++) keys[key_index<T>(position, d, a.block_size)] = k[d];
    for (int64_t d = 0; d < a.dim; d++) values[value_index<T>(position, d, a.dim)] = v[d];
  }
}

// out[R][G * 16] (float32, `ldo` apart) += x[R][inputs] * panel[inputs][G * 16 of `columns`].
template <class T, int R, int G>
inline void multiply_groups(const T* x, int64_t ldx, const T* panel, int64_t columns, int64_t inputs, float* out,
                            int64_t ldo) {
  using Step = typename StepOf<T>::Step;
  f32x16 acc[R][G];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) acc[r][g] = load(out + r * ldo + g * 16);
  multiply<Step, R, G>(x, ldx, (const char*)panel, columns / 16 * Step::kBytes, inputs, acc);
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) store(out + r * ldo + g * 16, acc[r][g]);
}

// out[R][columns] += x[R][inputs] * panel[inputs][columns], as many columns at a time as registers hold.
template <class T, int R>
inline void multiply_into(const T* x, int64_t ldx, const T* panel, int64_t columns, int64_t inputs, float* out,
                          int64_t ldo) {
  constexpr int n = StepOf<T>::Step::kInputs;
  int64_t c = 0;
  for (; c + kGroups * 16 <= columns; c += kGroups * 16)
    multiply_groups<T, R, kGroups>(x, ldx, panel + c * n, columns, inputs, out + c, ldo);
  for (; c < columns; c += 16) multiply_groups<T, R, 1>(x, ldx, panel + c * n, columns, inputs, out + c, ldo);
}

template <class T, int R>
void attend(const Attention& a, int64_t sequence, int64_t kv_head, int64_t first_row) {
  const int64_t sharing = a.heads / a.kv_heads, dim = a.dim, size = a.block_size;
  const int64_t start = a.query_starts[sequence], queries = a.query_starts[sequence + 1] - start;
  const int64_t length = a.lengths[sequence], before = length - queries;
  T q[R * kMaxHead];
  float out[R * kMaxHead] = {};
  float scores[R * kMaxBlock];
  T weights[R * kMaxBlock];
  float top[R];
  f32x16 total[R] = {};
  int64_t seen[R], from[R];  // a row sees positions from..seen
  int64_t offsets[R], last = 0, earliest = length;
  for (int r = 0; r < R; r++) {
    const int64_t query = (first_row + r) / sharing, head = kv_head * sharing + (first_row + r) % sharing;
    offsets[r] = ((start + query) * a.heads + head) * dim;
    memcpy(q + r * dim, (const T*)a.q + offsets[r], dim * sizeof(T));
    top[r] = kNever;
    seen[r] = before + query;
    from[r] = a.window && seen[r] >= a.window ? seen[r] - a.window + 1 : 0;
    last = seen[r] > last ? seen[r] : last;
    earliest = from[r] < earliest ? from[r] : earliest;
  }
  // e^(scale * x) is 2^(power * x).
  const float power = a.scale * 1.44269504088896341f;
  for (int64_t block = earliest / size; block <= last / size; block++) {
    const int64_t number = a.block_tables[sequence * a.table_width + block];
    const T* keys = (const T*)a.cache + (number * a.kv_heads + kv_head) * 2 * dim * size;
    const T* values = keys + dim * size;
    const int64_t begin = block * size;
    const int64_t filled = length - begin < size ? length - begin : size;
    memset(scores, 0, sizeof(float) * R * size);
    multiply_into<T, R>(q, dim, keys, size, dim, scores, size);
    for (int r = 0; r < R; r++) {
      float* row = scores + r * size;
      f32x16 high = all(kNever);
      if (begin >= from[r] && begin + size - 1 <= seen[r]) {
        for (int64_t p = 0; p < size; p += 16) high = max(high, load(row + p));
      } else {
        for (int64_t p = 0; p < size; p += 16) {
          const i32x16 position = kLanes + int32_t(begin + p);
          const i32x16 visible = (position >= int32_t(from[r])) & (position <= int32_t(seen[r]));
          const f32x16 known = visible ? load(row + p) : all(kNever);
          penstock::PENSTOCK_ISA::store(row + p, known);
          high = max(high, known);
        }
      }
      const float block_top = largest(high);
      if (block_top > top[r]) {  // what was summed so far shrinks
        const f32x16 keep = exp2_of_negative<false>(all((top[r] - block_top) * power));
        for (int64_t d = 0; d < dim; d += 16) {
          float* o = out + r * dim + d;
          penstock::PENSTOCK_ISA::store(o, load(o) * keep);
        }
        total[r] *= keep;
        top[r] = block_top;
      }
      const float base = top[r] == kNever ? 0.0f : -top[r] * power;  // nothing seen yet: every weight is zero
      for (int64_t p = 0; p < size; p += 16) {
        const f32x16 w = exp2_of_negative<sizeof(T) == 2>(fma(load(row + p), all(power), all(base)));
        total[r] += w;
        penstock::PENSTOCK_ISA::store(weights + r * size + p, w);
      }
    }
    // Only what is filled: beyond it lies what other sequences left, and zero times infinity is no zero.
    multiply_into<T, R>(weights, size, values, dim, filled, out, dim);
  }
  for (int r = 0; r < R; r++) {
    const float mass = sum(total[r]);
    for (int64_t d = 0; d < dim; d += 16)
      penstock::PENSTOCK_ISA::store((T*)a.out + offsets[r] + d, load(out + r * dim + d) / mass);
  }
}

// A task is a tile of one sequence and kv head; those of a head follow each other, so that its keys and values stay near.
template <class T>
void attention_tile(const Attention& a, int64_t task) {
  const int64_t tiles = a.tasks / a.kv_heads, tile = task % tiles, kv_head = task / tiles;
  const int64_t sequence = a.tiles[2 * tile], first_row = a.tiles[2 * tile + 1];
  const int64_t queries = a.query_starts[sequence + 1] - a.query_starts[sequence];
  const int64_t rows = queries * (a.heads / a.kv_heads) - first_row;
  with_rows(rows, [&]<int R>() { attend<T, R>(a, sequence, kv_head, first_row); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
