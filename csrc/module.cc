// The Python module: one function per op, with addresses and sizes as arguments, and the choice of the instruction set.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "built.h"
#include "group.h"
#include "kernels.h"
#include "machine.h"
#include "pool.h"
#include "token_history.h"

namespace nb = nanobind;

namespace penstock {

namespace {

// Kernels of this build for the instruction sets that the machine supports, from the slowest to the fastest.
std::vector<const Kernels*> available_kernels() {
  const auto names = machine_sets();
  std::vector<const Kernels*> found;
  for (const Kernels* set : built)
    if (std::find(names.begin(), names.end(), set->name) != names.end()) found.push_back(set);
  return found;
}

const Kernels* kernels = nullptr;
std::shared_ptr<Pool> shared_pool = std::make_shared<Pool>(1);

// Returns the current pool. Callers keep it alive even if another thread changes the number of threads.
std::shared_ptr<Pool> pool() { return std::atomic_load(&shared_pool); }

template <class T>
T* ptr(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Constructs an aggregate from its fields in order.
template <class A, class... Fields>
A make(Fields... fields) {
  return A{fields...};
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::vector<std::string> names_of(const std::vector<const Kernels*>& sets) {
  std::vector<std::string> names;
  for (const Kernels* set : sets) names.push_back(set->name);
  return names;
}

void use(const std::string& name) {
  for (const Kernels* set : available_kernels())
    if (set->name == name) {
      kernels = set;
      return;
    }
  const auto machine = machine_sets(), all = names_of(built);
  auto in = [&](const auto& names) { return std::find(names.begin(), names.end(), name) != names.end(); };
  if (in(all)) throw std::invalid_argument("this processor does not support " + name + "; it supports " + joined(machine));
  throw std::invalid_argument("this build has no kernels for " + name + "; it has kernels for " + joined(all));
}

using Address = uintptr_t;

// --- Captured steps --------------------------------------------------------------------------------------------------

// Sizes of a step.
struct Size {
  int64_t tokens, sequences;
};

// An op on one row. Consecutive ops of this kind run together on a few rows at a time, so that results stay in the
// processor's cache for the next op. A buffer that a later op reuses has the same number of rows and of bytes per row.
// Therefore only ops on row i access row i of a buffer.
using RowOp = std::function<void(int64_t row)>;

// A call of a step: either ops on single rows (`row_ops`), or another kind of op (`op`).
struct Call {
  std::vector<RowOp> row_ops;
  std::function<void(Size)> op;
  bool on_selected_rows = false;  // the call is after `index_select`, and uses its rows

  void operator()(Size size) const {
    if (op) return op(size);
    if (!size.tokens) return;
    const int64_t fair = ceil_div(size.tokens, pool()->threads()), count = std::min(fair, kRowsPerTask);
    pool()->run(ceil_div(size.tokens, count), [&](int64_t task) {
      const int64_t first = task * count, end = std::min(first + count, size.tokens);
      for (const auto& op : row_ops)
        for (int64_t row = first; row < end; row++) op(row);
    });
  }
};

// The recorded calls of a step, which are replayed with other numbers of rows; addresses do not change. A step then needs
// one call from Python instead of hundreds. Calls process all tokens until `index_select`, then the selected rows.
struct Graph {
  std::vector<Call> calls;
  bool rows_selected = false;

  void run(int64_t tokens, int64_t sequences, int64_t rows, int64_t sequences_of_rows) const {
    for (const auto& call : calls) call(call.on_selected_rows ? Size{rows, sequences_of_rows} : Size{tokens, sequences});
  }
};

thread_local Graph* recorded_graph = nullptr;

// Runs an op, or records it. `call` is called with the sizes of the step.
template <class F>
void submit(Size size, F&& call) {
  if (recorded_graph)
    recorded_graph->calls.push_back({{}, std::forward<F>(call), recorded_graph->rows_selected});
  else
    call(size);
}

// Runs or records an op on single rows.
void submit_rows(int64_t rows, const RowOp& op) {
  if (!recorded_graph) return Call{{op}, {}}({rows, 0});
  if (recorded_graph->calls.empty() || recorded_graph->calls.back().op)
    recorded_graph->calls.push_back({{}, {}, recorded_graph->rows_selected});
  recorded_graph->calls.back().row_ops.push_back(op);
}
template <class A>
void submit_rows(int64_t rows, void (*Kernels::*kernel)(const A&, int64_t row), const A& args) {
  submit_rows(rows, [=](int64_t row) { (kernels->*kernel)(args, row); });
}

// Runs or records an op on `each` rows per token.
template <class A>
void submit_rows(int64_t rows, int64_t each, void (*Kernels::*kernel)(const A&, int64_t row), const A& args) {
  submit_rows(rows, [=](int64_t row) {
    for (int64_t i = row * each; i < (row + 1) * each; i++) (kernels->*kernel)(args, i);
  });
}

// --- Ops -------------------------------------------------------------------------------------------------------------

// Number of panels of a task: several, so that a thread can prefetch, but few enough to balance the load of threads.
int64_t panels_of_task(int64_t outputs) {
  const int64_t fair = ceil_div(outputs, kPanel) / (4 * pool()->threads());
  return fair < 1 ? 1 : fair > kMaxTaskPanels ? kMaxTaskPanels : fair;
}

using Product = void (*Kernels::*)(const Linear&, int64_t task);

void multiply(Product kernel, Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address out,
              int64_t out_stride, int64_t outputs, int64_t rows, int out_type, int activation = 0) {
  submit({rows, 0}, [=](Size size) {
    const auto args = make<Linear>(matrix, ptr<void>(x), ptr<float>(x_scales), ptr<void>(x_sums), ptr<void>(out), out_stride,
                                   size.tokens, panels_of_task(outputs), Type(out_type), Activation(activation));
    const int64_t tasks = ceil_div(args.rows, kernels->linear_rows) * ceil_div(outputs, kPanel * args.panels);
    pool()->run(tasks, [&](int64_t task) { (kernels->*kernel)(args, task); });
  });
}

void linear(Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address out, int64_t out_stride, int64_t rows,
            int out_type) {
  multiply(&Kernels::linear, x, x_scales, x_sums, matrix, out, out_stride, matrix.outputs, rows, out_type);
}

// Gated product. Each half of the outputs must consist of whole panels.
void gated(Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address out, int64_t out_stride, int64_t rows,
           int out_type, int activation) {
  multiply(&Kernels::gated, x, x_scales, x_sums, matrix, out, out_stride, matrix.outputs / 2, rows, out_type, activation);
}

// Item numbers grouped by key, in ascending order per key. Items with a negative key are omitted.
struct GroupedByKey {
  std::vector<int64_t> begins;  // [keys + 1]
  int32_t* items;  // in thread-local memory, valid until the next instance is made

  template <class Key>
  GroupedByKey(int64_t count, int64_t keys, Key&& key_of) : begins(keys + 1) {
    static thread_local std::vector<int32_t> memory;
    for (int64_t i = 0; i < count; i++)
      if (const int64_t key = key_of(i); key >= 0) begins[key + 1]++;
    for (int64_t key = 0; key < keys; key++) begins[key + 1] += begins[key];
    items = scratch(memory, begins[keys]);
    auto next = begins;
    for (int64_t i = 0; i < count; i++)
      if (const int64_t key = key_of(i); key >= 0) items[next[key]++] = int32_t(i);
  }
  int64_t count(int64_t key) const { return begins[key + 1] - begins[key]; }
};

// Runs several calls of one kernel in parallel. `tasks_of(call)`: number of tasks of a call.
template <class A, class Tasks>
void run_together(void (*kernel)(const A&, int64_t), const std::vector<A>& calls, Tasks&& tasks_of) {
  std::vector<int64_t> begins{0};
  for (const auto& call : calls) begins.push_back(begins.back() + tasks_of(call));
  pool()->run(begins.back(), [&](int64_t task) {
    const auto call = std::upper_bound(begins.begin(), begins.end(), task) - begins.begin() - 1;
    kernel(calls[call], task - begins[call]);
  });
}

// LoRA adapters of a layer by slot: the stacked `down` matrices of all parts, and for each part its `up` matrix, which adds
// to the outputs from `first` on.
struct Adapters {
  struct Part {
    Matrix up;
    int64_t first;
    float scale;
  };
  struct Adapter {
    Matrix down{};
    std::vector<Part> parts;
  };
  std::vector<Adapter> slots;
};

// Adds the adapters of rows to `out`. `slots`: slot of each row; -1: no adapter.
void add_lora(Address x, Address out, const Adapters& adapters, Address slots, int64_t rows, int64_t out_stride) {
  submit({rows, 0}, [=, &adapters](Size size) {
    thread_local std::vector<char> memory;
    const int64_t num_slots = adapters.slots.size();
    const GroupedByKey rows_by_slot(size.tokens, num_slots, [&](int64_t row) {
      const int32_t slot = ptr<int32_t>(slots)[row];
      return slot >= 0 && !adapters.slots[slot].parts.empty() ? slot : -1;
    });
    if (!rows_by_slot.begins.back()) return;
    int64_t bytes_needed = 0;
    for (int64_t slot = 0; slot < num_slots; slot++)
      bytes_needed += rows_by_slot.count(slot) * adapters.slots[slot].down.outputs * 4;
    std::vector<LoRA> down, up;
    char* ranks = scratch(memory, bytes_needed);
    for (int64_t slot = 0; slot < num_slots; slot++) {
      const auto& [matrix, parts] = adapters.slots[slot];
      const int64_t count = rows_by_slot.count(slot);
      if (!count) continue;
      const int32_t* rows = rows_by_slot.items + rows_by_slot.begins[slot];
      const int64_t bytes = matrix.type == Type::float32 ? 4 : 2, width = matrix.outputs;
      down.push_back({matrix, ptr<void>(x), ranks, rows, matrix.in, width, count, ceil_div(width, kPanel), 1});
      int64_t rank = 0;
      for (const auto& part : parts) {
        up.push_back({part.up, ranks + rank * bytes, ptr<char>(out) + part.first * bytes, rows, width, out_stride, count,
                      panels_of_task(part.up.outputs), part.scale});
        rank += part.up.in;
      }
      ranks += count * width * 4;
    }
    auto tasks_of = [](const LoRA& a) {
      return ceil_div(a.count, kernels->linear_rows) * ceil_div(a.matrix.outputs, kPanel * a.panels);
    };
    run_together(kernels->lora_down, down, tasks_of);
    run_together(kernels->lora_up, up, tasks_of);
  });
}

// Matrices of a layer's experts on this rank, of one shape and format, starting with expert `first`.
struct Experts {
  std::vector<Matrix> matrices;
  int64_t first;
};

// Products with the `top_k` experts of each token (`ids`). x has a row per token, or a row per assignment.
template <auto kernel>
void experts_linear(Address x, Address x_scales, Address x_sums, const Experts& experts, Address ids, int64_t top_k,
                    int64_t assignments_per_row, Address out, int64_t out_stride, int64_t rows, int out_type,
                    int activation) {
  submit({rows, 0}, [=, &experts](Size size) {
    const int64_t num_experts = experts.matrices.size();
    const GroupedByKey assignments_by_expert(size.tokens * top_k, num_experts, [&](int64_t assignment) {
      const int64_t expert = ptr<int64_t>(ids)[assignment] - experts.first;
      return expert < num_experts ? expert : -1;
    });
    const int64_t outputs = experts.matrices[0].outputs / (kernel == &Kernels::gated_expert ? 2 : 1);
    std::vector<ExpertLinear> calls;
    for (int64_t e = 0; e < num_experts; e++)
      if (const int64_t count = assignments_by_expert.count(e))
        calls.push_back({experts.matrices[e], ptr<void>(x), ptr<float>(x_scales), ptr<void>(x_sums), ptr<void>(out),
                         assignments_by_expert.items + assignments_by_expert.begins[e], count, assignments_per_row,
                         out_stride, 1, Type(out_type), Activation(activation)});
    auto blocks_of = [](const ExpertLinear& call) { return ceil_div(call.count, kernels->linear_rows); };
    int64_t blocks = 0;
    for (const auto& call : calls) blocks += blocks_of(call);
    const int64_t panels = panels_of_task(blocks * ceil_div(outputs, kPanel) * kPanel);
    for (auto& call : calls) call.panels = panels;
    run_together(kernels->*kernel, calls,
                 [&](const ExpertLinear& a) { return blocks_of(a) * ceil_div(outputs, kPanel * panels); });
  });
}

void route(Address logits, Address bias, Address factors, Address ids, Address weights, int64_t tokens, int64_t experts,
           int64_t top_k, int64_t groups, int64_t top_groups, float scale, float min_sum, float added_sum, int function,
           bool sum_top2, bool renormalize, Address token_ids, Address table) {
  submit_rows(tokens, &Kernels::router,
              Router{ptr<float>(logits), ptr<float>(bias), ptr<float>(factors), ptr<int64_t>(ids), ptr<float>(weights),
                     experts, top_k, groups, top_groups, scale, min_sum, added_sum, Scores(function), sum_top2, renormalize,
                     ptr<int64_t>(token_ids), ptr<int64_t>(table)});
}

void count_experts(Address ids, Address counts, int64_t tokens, int64_t top_k) {
  submit({tokens, 0}, [=](Size size) {
    for (int64_t i = 0; i < size.tokens * top_k; i++) ptr<int64_t>(counts)[ptr<int64_t>(ids)[i]]++;
  });
}

// Maps logical to physical expert ids. `places`: a row of `width` numbers per expert: number of replicas, then their ids.
void place_experts(Address ids, Address places, Address out, int64_t tokens, int64_t top_k, int64_t width) {
  submit({tokens, 0}, [=](Size size) {
    for (int64_t token = 0; token < size.tokens; token++)
      for (int64_t i = token * top_k; i < (token + 1) * top_k; i++) {
        const int64_t* entry = ptr<int64_t>(places) + ptr<int64_t>(ids)[i] * width;
        ptr<int64_t>(out)[i] = entry[1 + token % entry[0]];
      }
  });
}

void combine(Address x, Address weights, Address shared, Address gate, Address out, int64_t tokens, int64_t top_k,
             int64_t width, int64_t shared_stride, int64_t out_stride, int type) {
  submit_rows(tokens, &Kernels::combine,
              Combine{ptr<void>(x), ptr<float>(weights), ptr<void>(shared), ptr<float>(gate), ptr<void>(out), top_k, width,
                      shared_stride, out_stride, Type(type)});
}

// Bitmask of the rows from `first` on. A row of `bits` is padded to 32 bits.
Bitmask bitmask_of(Address bits, const Matrix& matrix, int64_t first = 0) {
  const int64_t stride = ceil_div(matrix.outputs, 32) * 2;
  return {bits ? ptr<uint16_t>(bits) + first * stride : nullptr, stride};
}

bool any_allowed(const Bitmask& a, int64_t row) {
  if (!a.bits) return true;
  const uint16_t* bits = a.bits + row * a.stride;
  return std::any_of(bits, bits + a.stride, [](uint16_t bits) { return bits != 0; });
}

// Writes the index of each row's largest output to `out`, and its value to `max_values`.
void argmax(Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address bitmask, Address out,
            Address max_values, int64_t rows) {
  submit({rows, 0}, [=](Size size) {
    const auto product = make<Linear>(matrix, ptr<void>(x), ptr<float>(x_scales), ptr<void>(x_sums), nullptr, 0, size.tokens,
                                      panels_of_task(matrix.outputs), Type::float32);
    const int64_t tasks = ceil_div(matrix.outputs, kPanel * product.panels);
    std::vector<float> values(product.rows * tasks);
    std::vector<int64_t> outputs(product.rows * tasks);
    const ArgMax args{product, bitmask_of(bitmask, matrix), values.data(), outputs.data()};
    pool()->run(ceil_div(product.rows, kernels->linear_rows) * tasks, [&](int64_t task) { kernels->argmax(args, task); });
    for (int64_t row = 0; row < product.rows; row++) {
      const auto begin = values.begin() + row * tasks;
      const auto largest = std::max_element(begin, begin + tasks);
      ptr<int64_t>(out)[row] = outputs[largest - values.begin()];
      ptr<float>(max_values)[row] = *largest;
    }
  });
}

void sketch(const Sketch& s) {
  pool()->run(ceil_div(s.matrix.outputs, kPanel), [&](int64_t panel) { kernels->sketch(s, panel); });
}

// `argmax` with a sketch. Returns false if the sketch gives no bounds (a value is too large or NaN), or if so many
// candidates remain that the full product is faster.
bool argmax_by_sketch(Address x, Address quantized, Address x_scales, Address x_sums, const Sketch& sketch, Address bitmask,
                      Address out, Address max_values, int64_t rows) {
  thread_local std::vector<Candidate> candidates;  // reused, since allocating it would take as long as the other work
  const Matrix& m = sketch.matrix;
  const auto threads = pool();
  for (int64_t first = 0; first < rows; first += kernels->linear_rows) {
    const int64_t rows_at_once = std::min(kernels->linear_rows, rows - first), width = (m.in + 7) / 8 * 8;
    const auto product =
        make<Linear>(sketch.quantized, ptr<int8_t>(quantized) + first * width, ptr<float>(x_scales) + first,
                     ptr<int32_t>(x_sums) + first, nullptr, 0, rows_at_once, panels_of_task(m.outputs), Type::float32);
    const int64_t tasks = ceil_div(m.outputs, kPanel * product.panels),
                  capacity = rows_at_once * product.panels * (kPanel / 16);
    std::vector<float> x_norms(rows_at_once), x_error_norms(rows_at_once);
    std::vector<std::atomic<float>> lower_bounds(rows_at_once);
    std::vector<int64_t> counts(tasks);
    for (auto& bound : lower_bounds) bound = -INFINITY;
    scratch(candidates, tasks * capacity);
    const int64_t bytes = m.in * (m.type == Type::float32 ? 4 : 2);
    const auto args = make<SketchSearch>(product, bitmask_of(bitmask, m, first), &m, sketch.error_norms, sketch.norms,
                                         ptr<char>(x) + first * bytes, x_norms.data(), x_error_norms.data(),
                                         lower_bounds.data(), candidates.data(), counts.data());
    threads->run(rows_at_once, [&](int64_t row) { kernels->measure_norms(args, row); });
    for (int64_t row = 0; row < rows_at_once; row++)
      if (!std::isfinite(x_norms[row]) || !std::isfinite(x_error_norms[row])) return false;
    threads->run(tasks, [&](int64_t task) { kernels->find_candidates(args, task); });
    // Evaluate the best candidate of each row first, then all candidates that may exceed it.
    std::vector<Candidate*> best(rows_at_once), others;
    auto for_each_candidate = [&](auto&& f) {
      for (int64_t task = 0; task < tasks; task++)
        for (int64_t i = 0; i < counts[task]; i++) f(candidates[task * capacity + i]);
    };
    for_each_candidate([&](Candidate& c) {
      if (!best[c.row] || c.value > best[c.row]->value) best[c.row] = &c;
    });
    for (int64_t row = 0; row < rows_at_once; row++)
      if (!best[row] && any_allowed(args.bitmask, row)) return false;  // a value is NaN
    threads->run(rows_at_once, [&](int64_t row) {
      if (best[row]) kernels->evaluate(args, *best[row]);
    });
    for (const Candidate* c : best)
      if (c && !std::isfinite(c->value)) return false;
    for_each_candidate([&](Candidate& c) {
      if (&c != best[c.row] && c.value >= best[c.row]->value) others.push_back(&c);
    });
    if (int64_t(others.size()) > ceil_div(m.outputs, 16) / 2) return false;
    threads->run(others.size(), [&](int64_t i) { kernels->evaluate(args, *others[i]); });
    for (Candidate* c : others) {
      Candidate*& known = best[c->row];
      if (c->value > known->value || (c->value == known->value && c->vector < known->vector)) known = c;
    }
    for (int64_t row = 0; row < rows_at_once; row++) {
      const Candidate* c = best[row];
      ptr<int64_t>(out)[first + row] = c ? int64_t(c->vector) * 16 + c->lane : 0;
      ptr<float>(max_values)[first + row] = c ? c->value : -INFINITY;
    }
  }
  return true;
}

// `columns`: temperature, top-k, top-p, min-p and random numbers, [5, rows] float64.
void sample_random(Address logits, Address columns, Address out, Address largest, int64_t rows, int64_t stride,
                   int64_t size) {
  auto column = [&](int64_t i) { return ptr<double>(columns) + i * rows; };
  const auto args = make<SampleRandom>(ptr<float>(logits), column(0), column(1), column(2), column(3), column(4),
                                       ptr<int64_t>(out), ptr<float>(largest), stride, size);
  pool()->run(rows, [&](int64_t row) { kernels->sample(args, row); });
}

// Quantizes `each` rows of each of `rows` tokens.
void quantize(Address x, Address out, Address scales, Address sums, int64_t rows, int64_t each, int64_t in, int64_t padded,
              int64_t group, int64_t rotation, bool in_groups, bool has_total, int type) {
  submit_rows(rows, each, &Kernels::quantize,
              Quantize{ptr<void>(x), ptr<int8_t>(out), ptr<float>(scales), ptr<int32_t>(sums), in, padded, group, rotation,
                       in_groups, has_total, Type(type)});
}

void rotate(Address x, Address out, int64_t rows, int64_t each, int64_t in, int64_t rotation, int type) {
  submit_rows(rows, each, &Kernels::rotate, Rotate{ptr<void>(x), ptr<void>(out), in, rotation, Type(type)});
}

void sum_groups(Address x, Address sums, int64_t rows, int64_t each, int64_t in, int64_t group, int type) {
  submit_rows(rows, each, &Kernels::sum_groups, GroupSums{ptr<void>(x), ptr<float>(sums), in, group, Type(type)});
}

void embedding(Address ids, const Matrix& matrix, Address out, int64_t first, int64_t rows) {
  submit_rows(rows, &Kernels::embedding, Embedding{matrix, ptr<int64_t>(ids), ptr<void>(out), first});
}

// Copies selected rows. This is no op on single rows, since it does not write the row that it reads.
void index_select(Address x, Address rows, Address out, int64_t count, int64_t row_bytes, int64_t stride) {
  if (recorded_graph) recorded_graph->rows_selected = true;
  submit({count, 0}, [=](Size size) {
    pool()->run(size.tokens, [&](int64_t row) {
      memcpy(ptr<char>(out) + row * row_bytes, ptr<char>(x) + ptr<int64_t>(rows)[row] * stride, row_bytes);
    });
  });
}

void copy(Address x, Address out, int64_t rows, int64_t row_bytes) {
  submit_rows(rows,
              [=](int64_t row) { memcpy(ptr<char>(out) + row * row_bytes, ptr<char>(x) + row * row_bytes, row_bytes); });
}

template <class T>
void select_columns(const T* x, const int32_t* order, T* out, int64_t in) {
  for (int64_t i = 0; i < in; i++) out[i] = x[order[i]];
}

// Permutes inputs to the order of a matrix's columns.
void permute(Address x, const Matrix& matrix, Address out, int64_t rows, int type) {
  submit_rows(rows, [=](int64_t row) {
    const int64_t first = row * matrix.in;
    if (Type(type) == Type::float32)
      select_columns(ptr<float>(x) + first, matrix.order, ptr<float>(out) + first, matrix.in);
    else
      select_columns(ptr<uint16_t>(x) + first, matrix.order, ptr<uint16_t>(out) + first, matrix.in);
  });
}

template <auto kernel>
void pack(Address weight, const Matrix& matrix, int64_t first, int64_t rows) {
  const Pack args{matrix, ptr<void>(weight), first, rows};
  pool()->run(ceil_div(rows, kPanel), [&](int64_t task) { (kernels->*kernel)(args, task); });
}

void norm(Address x, Address residual, Address weight, Address out, int64_t rows, int64_t groups, int64_t width,
          int64_t stride, float eps, int type, bool wide, bool centered, int64_t weight_stride, Address bias) {
  submit_rows(rows, &Kernels::norm,
              Norm{ptr<void>(x), ptr<void>(residual), ptr<void>(weight), ptr<void>(out), groups, width, stride, eps,
                   Type(type), wide, centered, weight_stride, ptr<float>(bias)});
}

void rope(Address x, Address out, Address positions, Address table, int64_t tokens, int64_t heads, int64_t dim,
          int64_t stride, int64_t rotary, bool interleaved, int type) {
  submit_rows(tokens, &Kernels::rope,
              Rope{ptr<void>(x), ptr<void>(out), ptr<int64_t>(positions), ptr<float>(table), heads, dim, stride, rotary,
                   Type(type), interleaved});
}

void activate(Address x, Address out, int64_t rows, int64_t each, int64_t width, int64_t stride, int64_t out_stride,
              int activation, bool gated, int type) {
  submit_rows(rows, each, &Kernels::activate,
              Activate{ptr<void>(x), ptr<void>(out), width, stride, out_stride, Type(type), Activation(activation), gated});
}

void scale(Address x, Address out, int64_t rows, int64_t width, float factor, float cap, int type) {
  submit_rows(rows, &Kernels::scale, Scale{ptr<void>(x), ptr<void>(out), width, factor, cap, Type(type)});
}

void to_float32(Address x, Address out, int64_t rows, int64_t width, int type) {
  submit_rows(rows, &Kernels::to_float32, ToFloat32{ptr<void>(x), ptr<float>(out), width, Type(type)});
}

void store(Address k, Address v, Address cache, Address slots, int64_t tokens, int64_t kv_heads, int64_t dim,
           int64_t block_size, int64_t stride_k, int64_t stride_v, int type, bool quantized) {
  submit_rows(tokens, &Kernels::store,
              Store{ptr<void>(k), ptr<void>(v), ptr<void>(cache), ptr<int64_t>(slots), kv_heads, dim,
                    panel_positions(block_size), stride_k, stride_v, Type(type), quantized});
}

// Copies tokens between the cache and a transfer buffer, except tokens with a negative place. `progress` (int64, may be
// null) is incremented after the copy.
template <auto kernel>
void transfer_kv(Address cache, Address buffer, Address slots, Address places, int64_t tokens, int64_t kv_heads, int64_t dim,
                 int64_t block_size, int64_t all_heads, int64_t first_head, int64_t slot_tokens, int64_t slot_bytes,
                 int64_t offset, int type, bool quantized, bool latent, Address progress) {
  submit({tokens, 0}, [=](Size size) {
    thread_local std::vector<int64_t> selected;
    selected.clear();
    for (int64_t token = 0; token < size.tokens; token++)
      if (ptr<int64_t>(places)[token] >= 0) selected.push_back(token);
    if (selected.empty()) return;
    const auto args =
        make<KVTransfer>(ptr<void>(cache), ptr<char>(buffer) + offset, ptr<int64_t>(slots), ptr<int64_t>(places),
                         selected.data(), int64_t(selected.size()), kv_heads, dim, panel_positions(block_size), all_heads,
                         first_head, slot_tokens, slot_bytes, Type(type), quantized, latent);
    pool()->run(ceil_div(args.count, kRowsPerTask), [&](int64_t task) { (kernels->*kernel)(args, task); });
    if (progress) ptr<std::atomic<int64_t>>(progress)->fetch_add(1, std::memory_order_release);
  });
}

struct alignas(64) CacheLine {
  float numbers[16];
};

// Tasks of attention over a latent cache. The fewer tasks, the less often is the cache transposed. Therefore tasks have as
// many rows as possible, with at least one task per thread. If there are too few rows, positions are split among tasks.
struct LatentTasks {
  std::vector<int32_t> tiles;
  int64_t rows;
  float* partial;
};

LatentTasks latent_tasks(const int32_t* starts, const int32_t* lengths, int64_t sequences, int64_t heads, int64_t latent) {
  const int64_t threads = pool()->threads();
  auto tasks = [&](int64_t num_splits, bool split) {
    const int64_t fair =
        ceil_div(ceil_div(starts[sequences] * heads, kernels->attention_rows), ceil_div(threads, num_splits));
    LatentTasks result{{}, kernels->attention_rows * std::clamp<int64_t>(fair, 1, kMaxLatentGroups), nullptr};
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
      const int64_t rows = (starts[sequence + 1] - starts[sequence]) * heads;
      const int64_t splits = split ? ceil_div(lengths[sequence], kSplitPositions) : 1;
      for (int64_t row = 0; row < rows; row += result.rows)
        for (int64_t i = 0; i < splits; i++)
          for (int64_t number : {sequence, row, split ? i : -1, splits}) result.tiles.push_back(int32_t(number));
    }
    return result;
  };
  LatentTasks whole = tasks(1, false);
  const int64_t max_splits = sequences ? ceil_div(*std::max_element(lengths, lengths + sequences), kSplitPositions) : 0;
  if (int64_t(whole.tiles.size()) / 4 > threads || max_splits < 2 || threads < 2) return whole;
  LatentTasks split = tasks(max_splits, true);
  static thread_local std::vector<CacheLine> memory;
  split.partial = (float*)scratch(memory, split.tiles.size() / 4 * split.rows * (latent + 32) / 16);
  return split;
}

void attention(Address q, Address out, Address cache, Address block_tables, Address query_starts, Address lengths,
               int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t table_width,
               int64_t window, int64_t out_stride, float scale, int type, bool quantized, float cap, Address sinks,
               int64_t latent, bool causal, Address key_ends, bool chunked, Address alibi, int64_t row, int64_t parts) {
  submit({sequences, sequences}, [=](Size size) {
    const int32_t* starts = ptr<int32_t>(query_starts);
    auto args =
        make<Attention>(ptr<void>(q), ptr<void>(out), ptr<void>(cache), ptr<int32_t>(block_tables), starts,
                        ptr<int32_t>(lengths), nullptr, 0, heads, kv_heads, dim, block_size, table_width, window, out_stride,
                        scale, Type(type), quantized, cap, ptr<float>(sinks), latent, kernels->attention_rows, nullptr,
                        causal, ptr<int32_t>(key_ends), chunked, ptr<float>(alibi), row, parts);
    if (latent) {
      const LatentTasks tasks = latent_tasks(starts, args.lengths, row ? size.tokens : size.sequences, heads, latent);
      args.tiles = tasks.tiles.data(), args.tasks = int64_t(tasks.tiles.size()) / 4;
      args.task_rows = tasks.rows, args.partial = tasks.partial;
      pool()->run(args.tasks, [&](int64_t task) { kernels->attention(args, task); });
      if (tasks.partial) pool()->run(args.tasks, [&](int64_t task) { kernels->latent_merge(args, task); });
      return;
    }
    std::vector<int32_t> tiles;
    for (int64_t sequence = 0; sequence < size.sequences; sequence++) {
      const int64_t rows = (starts[sequence + 1] - starts[sequence]) * (heads / kv_heads);
      for (int64_t row = 0; row < rows; row += args.task_rows)
        for (int64_t number : {sequence, row}) tiles.push_back(int32_t(number));
    }
    args.tiles = tiles.data(), args.tasks = int64_t(tiles.size()) / 2 * kv_heads;
    pool()->run(args.tasks, [&](int64_t task) { kernels->attention(args, task); });
  });
}

void latent_store(Address q, Address k, Address latent, Address out, Address positions, Address table, Address cache,
                  Address slots, int64_t tokens, int64_t heads, int64_t rope, int64_t dim, int64_t block_size,
                  int64_t q_stride, int64_t q_head, int64_t k_stride, int64_t latent_stride, int64_t out_stride,
                  int64_t out_head, bool interleaved, int type, bool quantized, Address index_keys, int64_t index_dim,
                  int64_t index_stride) {
  submit_rows(tokens, &Kernels::latent_store,
              make<LatentStore>(ptr<void>(q), ptr<void>(k), ptr<void>(latent), ptr<void>(out), ptr<int64_t>(positions),
                                ptr<float>(table), ptr<void>(cache), ptr<int64_t>(slots), heads, rope, dim,
                                panel_positions(block_size), q_stride, q_head, k_stride, latent_stride, out_stride, out_head,
                                interleaved, Type(type), quantized, ptr<void>(index_keys), index_dim, index_stride));
}

// Selects positions for sparse attention, and writes the slots and their numbers as a batch of one sequence per token:
// `starts` [tokens + 1], `counts` [tokens], `slots` [tokens, top_k]. Tokens are processed in groups, whose scores use limited
// memory. With `rate` or `window`, selects for compressed attention (SelectKeys).
void select_keys(Address q, Address weights, Address cache, Address block_tables, Address query_starts, Address lengths,
                 Address starts, Address counts, Address slots, int64_t sequences, int64_t heads, int64_t dim, int64_t row,
                 int64_t block_size, int64_t table_width, int64_t top_k, float scale, int type, int64_t rate, int64_t window,
                 int64_t parts) {
  constexpr int64_t kGroupScores = 1 << 22;
  submit({0, sequences}, [=](Size size) {
    static thread_local std::vector<CacheLine> memory;
    const int32_t* first = ptr<int32_t>(query_starts);
    const int64_t tokens = first[size.sequences];
    std::vector<int32_t> sequence_of(tokens), lasts(tokens), ends(tokens), tiles;
    std::vector<int64_t> offsets(tokens, -1);
    for (int64_t sequence = 0; sequence < size.sequences; sequence++)
      for (int32_t token = first[sequence]; token < first[sequence + 1]; token++) {
        sequence_of[token] = int32_t(sequence);
        lasts[token] = ptr<int32_t>(lengths)[sequence] - (first[sequence + 1] - token) + 1;
        ends[token] = rate ? int32_t(lasts[token] / rate) : window ? 0 : lasts[token];
        ptr<int32_t>(starts)[token] = token;
        ptr<int32_t>(counts)[token] =
            int32_t(std::min<int64_t>(lasts[token], window) + std::min<int64_t>(ends[token], top_k));
      }
    ptr<int32_t>(starts)[tokens] = int32_t(tokens);
    auto args =
        make<SelectKeys>(ptr<void>(q), ptr<float>(weights), ptr<void>(cache), ptr<int32_t>(block_tables), sequence_of.data(),
                         ends.data(), nullptr, offsets.data(), nullptr, ptr<int32_t>(slots), heads, dim, row, block_size,
                         table_width, top_k, scale, Type(type), rate, window, parts, lasts.data());
    for (int64_t begin = 0, end; begin < tokens; begin = end) {
      int64_t scores = 0;
      tiles.clear();
      for (end = begin; end < tokens && (end == begin || scores + ends[end] <= kGroupScores); end++) {
        if (ends[end] <= top_k) continue;
        offsets[end] = scores, scores += ends[end];
        for (int32_t position = 0; position < ends[end]; position += kSplitPositions)
          for (int64_t number : {end, int64_t(position)}) tiles.push_back(int32_t(number));
      }
      args.tiles = tiles.data(), args.scores = (float*)scratch(memory, ceil_div(scores, 16));
      pool()->run(tiles.size() / 2, [&](int64_t task) { kernels->index_scores(args, task); });
      pool()->run(end - begin, [&](int64_t token) { kernels->select_keys(args, begin + token); });
    }
  });
}

void linear_by_head(Address x, const Matrix& matrix, Address out, int64_t x_stride, int64_t x_head, int64_t out_stride,
                    int64_t out_head, int64_t rows, int64_t heads, int64_t outputs) {
  submit({rows, 0}, [=](Size size) {
    const auto args = make<LinearByHead>(matrix, ptr<void>(x), ptr<void>(out), x_stride, x_head, out_stride, out_head,
                                         size.tokens, heads, outputs, ceil_div(outputs, kPanel) * kPanel);
    const int64_t tasks = heads * ceil_div(args.rows, kernels->linear_rows);
    pool()->run(tasks, [&](int64_t task) { kernels->linear_by_head(args, task); });
  });
}

// Keeps the inputs of drafts for the next step (StateBatch in ops/batch.py).
void keep_inputs(const StateRows& rows, Address x, Address kept, int64_t row_bytes, int64_t stride, int64_t max_drafts,
                 int64_t sequences) {
  submit({0, sequences}, [=](Size size) {
    for (int64_t sequence = 0; sequence < size.sequences; sequence++) {
      const int64_t drafts = rows.drafts[sequence], first = rows.starts[sequence + 1] - drafts;
      for (int64_t i = 0; i < drafts; i++)
        memcpy(ptr<char>(kept) + (rows.slots[sequence] * max_drafts + i) * row_bytes, ptr<char>(x) + (first + i) * stride,
               row_bytes);
    }
  });
}

// Computes the compressed entries that end with tokens of this step, then applies the tokens to the states (Compress).
void compress(const StateRows& rows, Address x, Address state, Address kept, Address bias, Address norm, Address positions,
              Address table, Address cache, Address slots, int64_t sequences, int64_t x_stride, int64_t dim, int64_t rate,
              int64_t max_drafts, int64_t rope, int64_t row, int64_t offset, float eps, bool overlap, int type) {
  submit({0, sequences}, [=](Size size) {
    auto a = make<Compress>(rows, ptr<void>(x), ptr<void>(state), ptr<void>(kept), ptr<float>(bias), ptr<float>(norm),
                            ptr<int64_t>(positions), ptr<float>(table), ptr<void>(cache), ptr<int64_t>(slots), nullptr,
                            x_stride, dim, rate, max_drafts, rope, row, offset, eps, overlap, Type(type));
    const int64_t span = a.span(), item = Type(type) == Type::float32 ? 4 : 2, bytes = 2 * a.channels() * item;
    auto cell = [&](int64_t slot, int64_t position) { return ptr<char>(state) + (slot * span + position % span) * bytes; };
    std::vector<int32_t> tasks;
    for (int64_t sequence = 0; sequence < size.sequences; sequence++) {
      const int64_t start = rows.starts[sequence], slot = rows.slots[sequence], accepted = rows.accepted[sequence];
      for (int64_t i = 0; i < accepted; i++)
        memcpy(cell(slot, a.positions[start] - accepted + i), ptr<char>(kept) + (slot * max_drafts + i) * bytes, bytes);
      for (int64_t token = start; token < rows.starts[sequence + 1]; token++)
        if ((a.positions[token] + 1) % rate == 0)
          for (int64_t number : {sequence, token}) tasks.push_back(int32_t(number));
    }
    a.tasks = tasks.data();
    pool()->run(tasks.size() / 2, [&](int64_t task) { kernels->compress(a, task); });
    for (int64_t sequence = 0; sequence < size.sequences; sequence++) {
      const int64_t start = rows.starts[sequence], slot = rows.slots[sequence], first = a.positions[start];
      // Writes the state after `count` tokens of this step to a slot.
      auto write = [&](int64_t to, int64_t count) {
        for (int64_t position = std::max<int64_t>(first + count - span, 0); position < first + count; position++) {
          const char* from = cell(slot, position);
          if (position >= first) from = ptr<char>(x) + (start + position - first) * x_stride * item;
          if (char* target = cell(to, position); target != from) memcpy(target, from, bytes);
        }
      };
      for (int64_t i = rows.save_starts[sequence]; i < rows.save_starts[sequence + 1]; i++)
        write(rows.save_slots[i], rows.save_after[i]);
      write(slot, rows.starts[sequence + 1] - rows.drafts[sequence] - start);
    }
  });
}

void hyper_weights(Address logits, Address base, Address scale, Address out, int64_t rows, int64_t width, int64_t streams,
                   int64_t iterations, float eps) {
  submit_rows(rows, &Kernels::hyper_weights,
              HyperWeights{ptr<float>(logits), ptr<float>(base), ptr<float>(scale), ptr<float>(out), width, streams,
                           iterations, eps});
}

void collapse_streams(Address x, Address weights, Address out, int64_t rows, int64_t stride, int64_t streams, int64_t size,
                      int type) {
  submit_rows(rows, &Kernels::collapse_streams,
              CollapseStreams{ptr<void>(x), ptr<float>(weights), ptr<void>(out), stride, streams, size, Type(type)});
}

void mix_streams(Address x, Address residual, Address weights, int64_t rows, int64_t stride, int64_t streams, int64_t size,
                 int type) {
  submit_rows(rows, &Kernels::mix_streams,
              MixStreams{ptr<void>(x), ptr<void>(residual), ptr<float>(weights), stride, streams, size, Type(type)});
}

void equalize_streams(Address x, int64_t rows, int64_t streams, int64_t size, float min_square, int type) {
  submit_rows(rows, &Kernels::equalize_streams, EqualizeStreams{ptr<void>(x), streams, size, min_square, Type(type)});
}

void gaussian_topk(Address x, Address out, int64_t rows, int64_t stride, int64_t size, float multiplier, int type) {
  submit_rows(rows, &Kernels::gaussian_topk,
              GaussianTopK{ptr<void>(x), ptr<void>(out), stride, size, multiplier, Type(type)});
}

void rotate_tail(Address x, Address positions, Address table, int64_t tokens, int64_t heads, int64_t dim, int64_t rotary,
                 bool inverse, int type) {
  submit_rows(tokens, &Kernels::rotate_tail,
              RotateTail{ptr<void>(x), ptr<int64_t>(positions), ptr<float>(table), heads, dim, rotary, inverse, Type(type)});
}

void convolution(const StateRows& rows, Address x, Address out, Address state, Address kept, Address weight, Address bias,
                 int64_t sequences, int64_t x_stride, int64_t out_stride, int64_t channels, int64_t kernel,
                 int64_t max_drafts, bool silu, int type) {
  const auto args =
      make<Convolution>(rows, ptr<void>(x), ptr<void>(out), ptr<void>(state), ptr<void>(kept), ptr<float>(weight),
                        ptr<float>(bias), x_stride, out_stride, channels, kernel, max_drafts, silu, Type(type));
  submit({0, sequences}, [=](Size size) {
    const int64_t tasks = size.sequences * ceil_div(args.channels, kernels->convolution_channels);
    pool()->run(tasks, [&](int64_t task) { kernels->convolution(args, task); });
  });
}

void linear_attention(const StateRows& rows, Address x, Address gates, Address out, Address state, Address kept,
                      Address kept_gates, Address log_decay, Address gate_bias, Address skip, int64_t sequences,
                      int64_t x_stride, int64_t gates_stride, int64_t out_stride, int64_t width, int64_t gates_width,
                      int64_t max_drafts, int64_t heads, int64_t groups, int64_t key_dim, int64_t value_dim,
                      int64_t q_offset, int64_t k_offset, int64_t v_offset, int64_t step_offset, float scale, float l2_eps,
                      float min_step, float max_step, bool delta, float beta_scale, int64_t decay_dim, Address decay,
                      int type) {
  const auto args = make<LinearAttention>(
      rows, ptr<void>(x), ptr<void>(gates), ptr<void>(out), ptr<float>(state), ptr<void>(kept), ptr<void>(kept_gates),
      ptr<float>(log_decay), ptr<float>(gate_bias), ptr<float>(skip), x_stride, gates_stride, out_stride, width, gates_width,
      max_drafts, heads, groups, key_dim, value_dim, q_offset, k_offset, v_offset, step_offset, scale, l2_eps, min_step,
      max_step, delta, beta_scale, decay_dim, ptr<float>(decay), Type(type));
  submit({0, sequences}, [=](Size size) {
    pool()->run(size.sequences * args.heads, [&](int64_t task) { kernels->linear_attention(args, task); });
  });
}

void gated_norm(Address x, Address gate, Address weight, Address out, int64_t rows, int64_t groups, int64_t width,
                int64_t stride, int64_t gate_stride, int64_t weight_stride, int64_t out_stride, float eps, bool gate_first,
                bool sigmoid, int type) {
  submit_rows(rows, &Kernels::gated_norm,
              GatedNorm{ptr<void>(x), ptr<void>(gate), ptr<void>(weight), ptr<void>(out), groups, width, stride, gate_stride,
                        weight_stride, out_stride, eps, gate_first, sigmoid, Type(type)});
}

void multiply_gate(Address x, Address gate, Address out, int64_t rows, int64_t width, int64_t stride, int64_t gate_stride,
                   int64_t out_stride, int type) {
  submit_rows(
      rows, &Kernels::multiply_gate,
      MultiplyGate{ptr<void>(x), ptr<void>(gate), ptr<void>(out), width, stride, gate_stride, out_stride, Type(type)});
}

void selective_scan(const StateRows& rows, Address x, Address steps, Address b, Address c, Address gate, Address out,
                    Address state, Address kept_x, Address kept_steps, Address kept_b, Address rates, Address step_bias,
                    Address skip, int64_t sequences, int64_t x_stride, int64_t steps_stride, int64_t b_stride,
                    int64_t c_stride, int64_t gate_stride, int64_t out_stride, int64_t channels, int64_t size,
                    int64_t max_drafts, int type) {
  const auto args =
      make<SelectiveScan>(rows, ptr<void>(x), ptr<void>(steps), ptr<void>(b), ptr<void>(c), ptr<void>(gate), ptr<void>(out),
                          ptr<float>(state), ptr<void>(kept_x), ptr<void>(kept_steps), ptr<void>(kept_b), ptr<float>(rates),
                          ptr<float>(step_bias), ptr<float>(skip), x_stride, steps_stride, b_stride, c_stride, gate_stride,
                          out_stride, channels, size, max_drafts, Type(type));
  submit({0, sequences}, [=](Size step) {
    const int64_t tasks = step.sequences * ceil_div(args.channels, kernels->scan_channels);
    pool()->run(tasks, [&](int64_t task) { kernels->selective_scan(args, task); });
  });
}

void rg_lru(const StateRows& rows, Address x, Address gates, Address out, Address state, Address kept_x, Address kept_gates,
            Address rates, Address bias, Address positions, int64_t sequences, int64_t x_stride, int64_t gates_stride,
            int64_t out_stride, int64_t heads, int64_t width, int64_t max_drafts, int type) {
  const auto args = make<RgLru>(rows, ptr<void>(x), ptr<void>(gates), ptr<void>(out), ptr<float>(state), ptr<void>(kept_x),
                                ptr<void>(kept_gates), ptr<float>(rates), ptr<float>(bias), ptr<int64_t>(positions),
                                x_stride, gates_stride, out_stride, heads, width, max_drafts, Type(type));
  submit({0, sequences},
         [=](Size step) { pool()->run(step.sequences * args.heads, [&](int64_t task) { kernels->rg_lru(args, task); }); });
}

// `activation`: -1: none.
void multiply_rows(Address x, Address gate, Address out, int64_t rows, int64_t width, int64_t stride, int64_t gate_stride,
                   int64_t out_stride, int activation, int type) {
  submit_rows(rows, &Kernels::multiply_rows,
              MultiplyRows{ptr<void>(x), ptr<void>(gate), ptr<void>(out), width, stride, gate_stride, out_stride,
                           activation >= 0, Activation(activation), Type(type)});
}

// Rows of x, each followed by a row of y.
void concatenate(Address x, Address y, Address out, int64_t rows, int64_t x_bytes, int64_t y_bytes) {
  submit_rows(rows, [=](int64_t row) {
    char* to = ptr<char>(out) + row * (x_bytes + y_bytes);
    memcpy(to, ptr<char>(x) + row * x_bytes, x_bytes);
    memcpy(to + x_bytes, ptr<char>(y) + row * y_bytes, y_bytes);
  });
}

// Waits for the other ranks.
void barrier(Group& group) {
  submit({0, 0}, [&group](Size) { group.barrier(); });
}

// Barrier with an all-gather between nodes of the rows at `data`: `each` rows per token.
void gather_part(Group& group, Address data, int64_t row_bytes, int64_t stride, int64_t rows, int64_t each) {
  submit({rows, 0}, [=, &group](Size size) { group.gather(ptr<void>(data), row_bytes, stride, size.tokens * each); });
}

// `gather_part` of the rows of `data` with ids in [first, end).
void gather_rows(Group& group, Address data, int64_t row_bytes, Address ids, int64_t rows, int64_t each, int64_t first,
                 int64_t end) {
  submit({rows, 0}, [=, &group](Size size) {
    group.gather_rows(ptr<void>(data), row_bytes, ptr<int64_t>(ids), size.tokens * each, first, end);
  });
}

// --- Benchmarks ------------------------------------------------------------------------------------------------------

// Returns the seconds that all threads take to read `size` bytes.
double time_read(Address from, int64_t size) {
  const int64_t threads = pool()->threads();
  const Read args{ptr<void>(from), size / threads / 256 * 256};
  const auto start = std::chrono::steady_clock::now();
  pool()->run(threads, [&](int64_t task) { kernels->read(args, task); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Returns multiply-adds (two operations each) per second, of bfloat16 or 8-bit integers.
double dot_rate(bool integers, int64_t steps) {
  const int64_t threads = pool()->threads();
  std::atomic<int64_t> operations{0};
  const auto start = std::chrono::steady_clock::now();
  pool()->run(threads, [&](int64_t) { operations += (integers ? kernels->integer_dots : kernels->float_dots)(steps); });
  return double(operations) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace
}  // namespace penstock

NB_MODULE(_kernels, m) {
  using namespace penstock;
  if (available_kernels().empty())
    throw std::runtime_error("this processor supports none of the instruction sets of this build: " +
                             joined(names_of(built)));
  kernels = available_kernels().back();
  m.doc() = "CPU kernels. Addresses and sizes are not checked: use penstock.ops.cpu instead.";
  m.attr("PANEL") = kPanel;
  m.attr("MAX_HEAD") = kMaxHead;
  m.attr("MAX_LATENT") = kMaxLatent;
  m.attr("MAX_LATENT_KEY") = kMaxLatentKey;
  m.attr("MAX_BLOCK") = kMaxBlock;
  m.attr("MAX_STREAMS") = kMaxStreams;
  m.attr("MAX_KERNEL") = 8;
  nb::set_leak_warnings(false);  // objects that live until the process ends are not leaks
  m.attr("BUILT") = names_of(built);
  m.attr("MACHINE") = machine_sets();
  m.attr("SOURCES") = sources;
  m.attr("VERSION") = version;
  m.def(
      "available", [] { return names_of(available_kernels()); },
      "Instruction sets of this build that the processor supports, from the slowest to the fastest.");
  m.def("current", [] { return std::string(kernels->name); });
  m.def("use", &use, nb::arg("name"));
  m.def("threads", [] { return pool()->threads(); });
  m.def(
      "set_threads",
      [](int threads) {
        if (threads < 1)
          throw std::invalid_argument("the number of threads must be at least 1, is " + std::to_string(threads));
        std::atomic_store(&shared_pool, std::make_shared<Pool>(threads));
      },
      nb::arg("threads"));
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, Address panels, Address scales, int scale_type, Address offsets, int offset_type,
              Address output_scales, Address bias, Address order, int64_t in, int64_t outputs, int64_t group,
              int64_t rotation, bool x_in_groups, int format, int type) {
             const GroupValues group_scales{ptr<void>(scales), GroupType(scale_type)};
             const GroupValues group_offsets{ptr<void>(offsets), GroupType(offset_type)};
             new (self) Matrix(make<Matrix>(ptr<void>(panels), group_scales, group_offsets, ptr<float>(output_scales),
                                            ptr<float>(bias), ptr<int32_t>(order), in, outputs, group, rotation, x_in_groups,
                                            Format(format), Type(type)));
           })
      .def_prop_ro("panel_bytes", &panel_bytes);
  nb::class_<Graph>(m, "Graph")
      .def(nb::init<>())
      .def("record", [](Graph* self) { recorded_graph = self; })
      .def("stop", [](Graph*) { recorded_graph = nullptr; })
      .def("run", &Graph::run, nb::call_guard<nb::gil_scoped_release>());
  nb::exception<LinkLost>(m, "LinkLostError", PyExc_ConnectionError);
  nb::class_<Group>(m, "Group")
      .def("__init__", [](Group* self, Address memory, int rank, int size, int spins,
                          double seconds) { new (self) Group(ptr<void>(memory), rank, size, spins, seconds); })
      .def_ro_static("RANK_BYTES", &Group::kRankBytes)
      .def_ro_static("STEP_BITS", &Group::kStepBits)
      .def("connect", &Group::connect)
      .def("begin", &Group::begin)
      .def("end", &Group::end, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Sketch>(m, "Sketch")
      .def("__init__", [](Sketch* self, const Matrix& matrix, const Matrix& quantized, Address error_norms, Address norms) {
        new (self) Sketch{matrix, quantized, ptr<float>(error_norms), ptr<float>(norms)};
      });
  nb::class_<Adapters>(m, "Adapters")
      .def("__init__", [](Adapters* self, int64_t slots) { new (self) Adapters{std::vector<Adapters::Adapter>(slots)}; })
      .def("put", [](Adapters* self, int64_t slot, const Matrix& down) { self->slots.at(slot) = {down, {}}; })
      .def("add", [](Adapters* self, int64_t slot, const Matrix& up, int64_t first,
                     float scale) { self->slots.at(slot).parts.push_back({up, first, scale}); })
      .def("clear", [](Adapters* self, int64_t slot) { self->slots.at(slot) = {}; });
  nb::class_<TokenHistory>(m, "TokenHistory")
      .def(nb::init<int64_t>(), nb::arg("capacity"))
      .def("__len__", &TokenHistory::size)
      .def_prop_ro("bytes", &TokenHistory::bytes)
      .def("append",
           [](TokenHistory* self, const std::vector<int32_t>& tokens) { self->append(tokens.data(), tokens.size()); })
      .def("find",
           [](const TokenHistory& self, const TokenHistory& text, int64_t longest) {
             const TokenHistory::Match match = self.find(text, longest);
             if (match.next < 0) return nb::object(nb::none());
             return nb::object(nb::make_tuple(match.next, match.token, match.length, match.occurrences, match.agreeing));
           })
      .def("tokens", &TokenHistory::tokens)
      .def_ro_static("SEPARATOR", &TokenHistory::kSeparator);
  nb::class_<Experts>(m, "Experts")
      .def("__init__", [](Experts* self, int64_t first) { new (self) Experts{{}, first}; })
      .def("add", [](Experts* self, const Matrix& matrix) { self->matrices.push_back(matrix); });
  const auto free = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<StateRows>(m, "StateRows")
      .def("__init__", [](StateRows* self, Address starts, Address slots, Address accepted, Address drafts,
                          Address save_starts, Address save_after, Address save_slots) {
        new (self)
            StateRows{ptr<int32_t>(starts),      ptr<int32_t>(slots),      ptr<int32_t>(accepted),  ptr<int32_t>(drafts),
                      ptr<int32_t>(save_starts), ptr<int32_t>(save_after), ptr<int32_t>(save_slots)};
      });
  m.def("keep_inputs", &keep_inputs, free);
  m.def("convolution", &convolution, free);
  m.def("linear_attention", &linear_attention, free);
  m.def("gated_norm", &gated_norm, free);
  m.def("multiply_gate", &multiply_gate, free);
  m.def("selective_scan", &selective_scan, free);
  m.def("rg_lru", &rg_lru, free);
  m.def("multiply_rows", &multiply_rows, free);
  m.def("concatenate", &concatenate, free);
  m.def("linear", &linear, free);
  m.def("linear_activation_and_mul", &gated, free);
  m.def("add_lora", &add_lora, free);
  m.def("experts_linear", &experts_linear<&Kernels::expert>, free);
  m.def("experts_activation_and_mul", &experts_linear<&Kernels::gated_expert>, free);
  m.def("route", &route, free);
  m.def("count_experts", &count_experts, free);
  m.def("place_experts", &place_experts, free);
  m.def("combine", &combine, free);
  m.def("argmax", &argmax, free);
  m.def("sketch", &sketch, free);
  m.def("argmax_by_sketch", &argmax_by_sketch, free);
  m.def("sample_random", &sample_random, free);
  m.def("quantize", &quantize, free);
  m.def("rotate", &rotate, free);
  m.def("time_read", &time_read, free);
  m.def("dot_rate", &dot_rate, free);
  m.def("embedding", &embedding, free);
  m.def("index_select", &index_select, free);
  m.def("pack", &pack<&Kernels::pack>, free);
  m.def("pack_integers", &pack<&Kernels::pack_integers>, free);
  m.def("permute", &permute, free);
  m.def("sum_groups", &sum_groups, free);
  m.def("copy", &copy, free);
  m.def("norm", &norm, free);
  m.def("rope", &rope, free);
  m.def("activate", &activate, free);
  m.def("scale", &scale, free);
  m.def("to_float32", &to_float32, free);
  m.def("store", &store, free);
  m.def("attention", &attention, free);
  m.def("latent_store", &latent_store, free);
  m.def("select_keys", &select_keys, free);
  m.def("compress", &compress, free);
  m.def("hyper_weights", &hyper_weights, free);
  m.def("collapse_streams", &collapse_streams, free);
  m.def("mix_streams", &mix_streams, free);
  m.def("equalize_streams", &equalize_streams, free);
  m.def("gaussian_topk", &gaussian_topk, free);
  m.def("rotate_tail", &rotate_tail, free);
  m.def("linear_by_head", &linear_by_head, free);
  m.def("export_kv", &transfer_kv<&Kernels::export_kv>, free);
  m.def("import_kv", &transfer_kv<&Kernels::import_kv>, free);
  m.def("barrier", &barrier, free);
  m.def("gather_part", &gather_part, free);
  m.def("gather_rows", &gather_rows, free);
}
