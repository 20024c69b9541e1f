// Paged attention: one function for a single query and for a thousand.
//
// A task is some rows (queries times the heads that share keys and values). They walk over the sequence's blocks from the
// first one on with an online softmax (Milakov and Gimelshein, 2018), block by block at absolute positions, so that a
// row's result does not depend on which rows share its task, nor on how a prompt was cut into chunks, as long as keys and
// values are finite. Products take six rows at a time; all rows of a task take a block before the next one is touched, so
// that it comes from near.

#pragma once

#include "kernels.h"
#include "tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr float kNever = -__builtin_inff();

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

// out[R][G * 16] (float32, `ldo` apart) = or += x[R][inputs] * panel[inputs][G * 16 of `width`].
template <class T, int R, int G, bool add>
inline void multiply_groups(const T* x, int64_t ldx, const T* panel, int64_t width, int64_t inputs, float* out,
                            int64_t ldo) {
  using Step = typename StepOf<T>::Step;
  f32x16 acc[R][G];
  PENSTOCK_UNROLL for (int r = 0; r < R; r++)
    PENSTOCK_UNROLL for (int g = 0; g < G; g++) acc[r][g] = add ? load(out + r * ldo + g * 16) : f32x16{};
  multiply<Step, R, G>(x, ldx, (const char*)panel, width / 16 * Step::kBytes, inputs, acc);
  PENSTOCK_UNROLL for (int r = 0; r < R; r++)
    PENSTOCK_UNROLL for (int g = 0; g < G; g++) store(out + r * ldo + g * 16, acc[r][g]);
}

// out[R][columns] = or += x[R][inputs] * panel[inputs][columns of `width`], as many columns at a time as registers hold.
template <class T, int R, bool add>
inline void multiply_into(const T* x, int64_t ldx, const T* panel, int64_t width, int64_t columns, int64_t inputs,
                          float* out, int64_t ldo) {
  constexpr int n = StepOf<T>::Step::kInputs;
  int64_t c = 0;
  for (; c + kGroups * 16 <= columns; c += kGroups * 16)
    multiply_groups<T, R, kGroups, add>(x, ldx, panel + c * n, width, inputs, out + c, ldo);
  for (; c < columns; c += 16)
    multiply_groups<T, R, 1, add>(x, ldx, panel + c * n, width, inputs, out + c, ldo);
}

// What the rows of a task have come to; vectors of a row lie `dim` apart.
template <class T>
struct Rows {
  alignas(64) T q[kTaskRows * kMaxHead];
  alignas(64) float out[kTaskRows * kMaxHead];
  f32x16 total[kTaskRows];
  float top[kTaskRows];
  int64_t seen[kTaskRows], from[kTaskRows];  // a row sees positions from..seen
};

// Rows first.. and a block of keys and values that begins at position `begin`. e^(scale * x) is 2^(power * x).
template <class T, int R>
void attend(Rows<T>& rows, int first, const T* keys, const T* values, int64_t dim, int64_t size, int64_t begin,
            float power) {
  float scores[R * kMaxBlock];
  T weights[R * kMaxBlock];
  float* out = rows.out + first * dim;
  int64_t last = 0;
  for (int r = 0; r < R; r++) last = rows.seen[first + r] > last ? rows.seen[first + r] : last;
  if (last < begin) return;
  // What is filled and seen by one of the rows: beyond it lies what other sequences left, which may be anything.
  const int64_t filled = last + 1 - begin < size ? last + 1 - begin : size, columns = (filled + 15) / 16 * 16;
  multiply_into<T, R, false>(rows.q + first * dim, dim, keys, size, columns, dim, scores, size);
  for (int r = 0; r < R; r++) {
    const int64_t from = rows.from[first + r], seen = rows.seen[first + r];
    float &top = rows.top[first + r], *row = scores + r * size;
    f32x16 high = all(kNever), total = rows.total[first + r];
    if (begin >= from && begin + columns - 1 <= seen) {
      for (int64_t p = 0; p < columns; p += 16) high = max(high, load(row + p));
    } else {
      for (int64_t p = 0; p < columns; p += 16) {
        const i32x16 position = kLanes + int32_t(begin + p);
        const i32x16 visible = (position >= int32_t(from)) & (position <= int32_t(seen));
        const f32x16 known = visible ? load(row + p) : all(kNever);
        store(row + p, known);
        high = max(high, known);
      }
    }
    const float block_top = largest(high);
    if (block_top > top) {  // what was summed so far shrinks
      const f32x16 keep = exp2_of_negative<false>(all((top - block_top) * power));
      for (int64_t d = 0; d < dim; d += 16) store(out + r * dim + d, load(out + r * dim + d) * keep);
      total *= keep;
      top = block_top;
    }
    const float base = top == kNever ? 0.0f : -top * power;  // nothing seen yet: every weight is zero
    for (int64_t p = 0; p < columns; p += 16) {
      const f32x16 w = exp2_of_negative<sizeof(T) == 2>(fma(load(row + p), all(power), all(base)));
      total += w;
      store(weights + r * size + p, w);
    }
    rows.total[first + r] = total;
  }
  multiply_into<T, R, true>(weights, size, values, dim, dim, filled, out, dim);
}

// Tasks of a head follow each other, so that its keys and values stay near.
template <class T>
void attention_task(const Attention& a, int64_t task) {
  const int64_t tiles = a.tasks / a.kv_heads, tile = task % tiles, kv_head = task / tiles;
  const int64_t sequence = a.tiles[2 * tile], first_row = a.tiles[2 * tile + 1];
  const int64_t sharing = a.heads / a.kv_heads, dim = a.dim, size = a.block_size;
  const int64_t start = a.query_starts[sequence], queries = a.query_starts[sequence + 1] - start;
  const int64_t before = a.lengths[sequence] - queries, left = queries * sharing - first_row;
  const int count = int(left < kTaskRows ? left : kTaskRows);
  Rows<T> rows;
  int64_t offsets[kTaskRows], last = 0, earliest = a.lengths[sequence];
  for (int r = 0; r < count; r++) {
    const int64_t query = (first_row + r) / sharing, head = kv_head * sharing + (first_row + r) % sharing;
    const int64_t seen = before + query, from = a.window && seen >= a.window ? seen - a.window + 1 : 0;
    offsets[r] = ((start + query) * a.heads + head) * dim;
    memcpy(rows.q + r * dim, (const T*)a.q + offsets[r], dim * sizeof(T));
    rows.top[r] = kNever;
    rows.total[r] = f32x16{};
    rows.seen[r] = seen;
    rows.from[r] = from;
    last = seen > last ? seen : last;
    earliest = from < earliest ? from : earliest;
  }
  memset(rows.out, 0, count * dim * sizeof(float));
  for (int64_t block = earliest / size; block <= last / size; block++) {
    const int64_t number = a.block_tables[sequence * a.table_width + block];
    const T* keys = (const T*)a.cache + (number * a.kv_heads + kv_head) * 2 * dim * size;
    const T* values = keys + dim * size;
    for (int first = 0; first < count; first += kTileRows)
      with_rows(count - first, [&]<int R>() {
        attend<T, R>(rows, first, keys, values, dim, size, block * size, a.scale * 1.44269504088896341f);
      });
  }
  for (int r = 0; r < count; r++) {
    const float mass = sum(rows.total[r]);
    for (int64_t d = 0; d < dim; d += 16) store((T*)a.out + offsets[r] + d, load(rows.out + r * dim + d) / mass);
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
