// Linear layers over packed matrices, packing them, and taking rows back out for embeddings.

#pragma once

#include "kernels.h"
#include "tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int64_t kSoon = 4096;  // bytes

// Where an element of a packed matrix lies.
template <class T>
inline int64_t packed_index(int64_t output, int64_t input, int64_t in) {
  constexpr int n = StepOf<T>::Step::kInputs;
  const int64_t padded = (in + n - 1) / n * n;
  const int64_t panel = output / kPanel * kPanel * padded;
  return panel + (input / n * kPanel + output % kPanel) * n + input % n;
}

template <class T>
void pack_panel(const Pack& a, int64_t panel) {
  const T* weight = (const T*)a.weight;
  T* packed = (T*)a.packed;
  const int64_t first = panel * kPanel;
  const int64_t count = a.outputs - first < kPanel ? a.outputs - first : kPanel;
  for (int64_t input = 0; input < a.in; input++)
    for (int64_t o = 0; o < count; o++)
      packed[packed_index<T>(first + o, input, a.in)] = weight[(first + o) * a.in + input];
}

template <class T>
void gather_row(const Gather& a, int64_t row) {
  const T* weight = (const T*)a.weight;
  T* out = (T*)a.out + row * a.size;
  for (int64_t i = 0; i < a.size; i++) out[i] = weight[packed_index<T>(a.ids[row], i, a.size)];
}

template <class T, class Out, int R>
void linear_tile(const Linear& a, const T* x, const T* panel, int64_t row, int64_t column, int64_t ahead) {
  constexpr int n = StepOf<T>::Step::kInputs;
  for (int64_t c = 0; c < kPanel; c += kGroups * 16) {
    f32x16 acc[R][kGroups] = {};
    multiply<T, R, kGroups>(x, a.in, panel + c * n, kPanel, a.in, acc, ahead);
    for (int r = 0; r < R; r++)
      for (int g = 0; g < kGroups; g++) {
        const int64_t at = column + c + g * 16;
        if (at >= a.outputs) break;
        const int64_t count = a.outputs - at < 16 ? a.outputs - at : 16;
        Out* out = (Out*)a.out + (row + r) * a.outputs + at;
        f32x16 v = acc[r][g];
        if (a.bias) v += load_part(a.bias + at, count);
        if (count == 16)
          store(out, v);
        else
          store_part(out, v, count);
      }
  }
}

// The largest of a tile's outputs, the first where several are, if it is larger than what was found before.
template <class T, int R>
void likeliest_tile(const Linear& a, const T* x, const T* panel, int64_t column, int64_t ahead, float* values,
                    int64_t* outputs) {
  constexpr int n = StepOf<T>::Step::kInputs;
  for (int64_t c = 0; c < kPanel; c += kGroups * 16) {
    f32x16 acc[R][kGroups] = {};
    multiply<T, R, kGroups>(x, a.in, panel + c * n, kPanel, a.in, acc, ahead);
    for (int r = 0; r < R; r++)
      for (int g = 0; g < kGroups; g++) {
        const int64_t at = column + c + g * 16;
        if (at >= a.outputs) break;
        const int64_t count = a.outputs - at < 16 ? a.outputs - at : 16;
        f32x16 v = acc[r][g];
        if (a.bias) v += load_part(a.bias + at, count);
        if (count == 16 && !any_above(v, values[r])) continue;
        for (int64_t i = 0; i < count; i++)
          if (v[i] > values[r]) {
            values[r] = v[i];
            outputs[r] = at + i;
          }
      }
  }
}

// A task is a block of rows by some panels; tasks of the same rows follow each other.
template <class T>
void likeliest_block(const Likeliest& l, int64_t task) {
  constexpr int n = StepOf<T>::Step::kInputs;
  const Linear& a = l.product;
  const int64_t tasks = ceil_div(a.outputs, kPanel * a.panels), own = task % tasks;
  const int64_t padded = (a.in + n - 1) / n * n;
  const int64_t first = task / tasks * kRowBlock, begin = own * kPanel * a.panels;
  const int64_t end = first + kRowBlock < a.rows ? first + kRowBlock : a.rows;
  float values[kRowBlock];
  int64_t outputs[kRowBlock];
  for (int64_t row = first; row < end; row++) {
    values[row - first] = -__builtin_inff();
    outputs[row - first] = begin;
  }
  for (int64_t column = begin; column < begin + kPanel * a.panels && column < a.outputs; column += kPanel) {
    const T* panel = (const T*)a.weight + column * padded;
    const int64_t ahead = end - first <= 2 ? kSoon : 0;
    for (int64_t row = first; row < end; row += kTileRows) {
      const T* x = (const T*)a.x + row * a.in;
      with_rows(end - row, [&]<int R>() {
        likeliest_tile<T, R>(a, x, panel, column, ahead, values + row - first, outputs + row - first);
      });
    }
  }
  for (int64_t row = first; row < end; row++) {
    l.values[row * tasks + own] = values[row - first];
    l.outputs[row * tasks + own] = outputs[row - first];
  }
}

// A task is a block of rows by some panels; tasks of the same rows follow each other.
template <class T, class Out>
void linear_block(const Linear& a, int64_t task) {
  constexpr int n = StepOf<T>::Step::kInputs;
  const int64_t tasks = ceil_div(a.outputs, kPanel * a.panels);
  const int64_t padded = (a.in + n - 1) / n * n;
  const int64_t first = task / tasks * kRowBlock, begin = task % tasks * kPanel * a.panels;
  const int64_t end = first + kRowBlock < a.rows ? first + kRowBlock : a.rows;
  for (int64_t column = begin; column < begin + kPanel * a.panels && column < a.outputs; column += kPanel) {
    const T* panel = (const T*)a.weight + column * padded;
    // One or two rows are held by memory, so what comes soon is asked for. With more, that costs more than it gives.
    const int64_t ahead = end - first <= 2 ? kSoon : 0;
    for (int64_t row = first; row < end; row += kTileRows) {
      const T* x = (const T*)a.x + row * a.in;
      with_rows(end - row, [&]<int R>() { linear_tile<T, Out, R>(a, x, panel, row, column, ahead); });
    }
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
