// What Python sees: one function an op, given addresses and sizes, and which kernels this machine runs.

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

namespace nb = nanobind;

namespace penstock {

namespace {

// Those of the build that this machine runs, from the slowest to the fastest.
std::vector<const Kernels*> usable() {
  const auto names = sets_of_machine();
  std::vector<const Kernels*> found;
  for (const Kernels* each : built)
    if (std::find(names.begin(), names.end(), each->name) != names.end()) found.push_back(each);
  return found;
}

const Kernels* kernels = nullptr;
std::shared_ptr<Pool> shared_pool = std::make_shared<Pool>(1);

// The pool as it is now: who works with it keeps it, even if another thread sets another number of threads meanwhile.
std::shared_ptr<Pool> pool() { return std::atomic_load(&shared_pool); }

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// An aggregate by its fields, in their order.
template <class A, class... Fields>
A fields_of(Fields... fields) {
  return A{fields...};
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::vector<std::string> names_of(const std::vector<const Kernels*>& sets) {
  std::vector<std::string> names;
  for (const Kernels* each : sets) names.push_back(each->name);
  return names;
}

void use(const std::string& name) {
  for (const Kernels* each : usable())
    if (each->name == name) {
      kernels = each;
      return;
    }
  const auto machine = sets_of_machine(), all = names_of(built);
  auto in = [&](const auto& names) { return std::find(names.begin(), names.end(), name) != names.end(); };
  if (in(all)) throw std::invalid_argument("this processor does not run " + name + ", but " + listed(machine));
  throw std::invalid_argument("this build has no kernels for " + name + ", but for " + listed(all));
}

using Address = uintptr_t;

// --- Steps -----------------------------------------------------------------------------------------------------------

// How much there is to do.
struct Size {
  int64_t tokens, sequences;
};

// Calls whose rows stand alone, made in turn for some rows at a time, so that what one writes is near when the next one
// reads it. Memory that a later call uses again is the same row's, since all have as many rows of as many bytes.
using Row = std::function<void(int64_t row)>;

// A part of a step: rows, or something else.
struct Call {
  std::vector<Row> rows;
  std::function<void(Size)> whole;
  bool of_taken = false;  // whether it is about the rows that were taken

  void operator()(Size size) const {
    if (whole) return whole(size);
    if (!size.tokens) return;
    const int64_t fair = ceil_div(size.tokens, pool()->threads()), some = fair < kRowsTogether ? fair : kRowsTogether;
    pool()->run(ceil_div(size.tokens, some), [&](int64_t task) {
      const int64_t first = task * some, end = std::min(first + some, size.tokens);
      for (const auto& call : rows)
        for (int64_t row = first; row < end; row++) call(row);
    });
  }
};

// The calls of a step in their order, to be made again with other sizes: where things lie stays, how many rows there are
// does not. So a step costs one call from Python, not hundreds. It begins with all tokens; once some of their rows are
// taken, it goes on with those.
struct Tape {
  std::vector<Call> calls;
  bool taken = false;

  void run(int64_t tokens, int64_t sequences, int64_t rows, int64_t sequences_of_rows) const {
    for (const auto& call : calls) call(call.of_taken ? Size{rows, sequences_of_rows} : Size{tokens, sequences});
  }
};

thread_local Tape* recording = nullptr;

// Calls now, or notes for later. What is given to `call` holds for rows and sequences of the step.
template <class F>
void make(Size size, F&& call) {
  if (recording)
    recording->calls.push_back({{}, std::forward<F>(call), recording->taken});
  else
    call(size);
}

// The same where rows stand alone.
void make_rows(int64_t rows, const Row& row) {
  if (!recording) return Call{{row}, {}}({rows, 0});
  if (recording->calls.empty() || recording->calls.back().whole) recording->calls.push_back({{}, {}, recording->taken});
  recording->calls.back().rows.push_back(row);
}
template <class A>
void make_rows(int64_t rows, void (*Kernels::*kernel)(const A&, int64_t row), const A& args) {
  make_rows(rows, [=](int64_t row) { (kernels->*kernel)(args, row); });
}

// The same for `each` rows of every one.
template <class A>
void make_rows(int64_t rows, int64_t each, void (*Kernels::*kernel)(const A&, int64_t row), const A& args) {
  make_rows(rows, [=](int64_t row) {
    for (int64_t i = row * each; i < (row + 1) * each; i++) (kernels->*kernel)(args, i);
  });
}

// --- Ops -------------------------------------------------------------------------------------------------------------

// Panels of a task: a few, so that a thread knows what it will need next, but tasks enough to share out evenly.
int64_t panels_of_task(int64_t outputs) {
  const int64_t fair = ceil_div(outputs, kPanel) / (4 * pool()->threads());
  return fair < 1 ? 1 : fair > kMostPanels ? kMostPanels : fair;
}

using Product = void (*Kernels::*)(const Linear&, int64_t task);

void multiply(Product kernel, Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address out,
              int64_t out_stride, int64_t outputs, int64_t rows, int out_type, int activation = 0) {
  make({rows, 0}, [=](Size size) {
    const auto args =
        fields_of<Linear>(matrix, at<void>(x), at<float>(x_scales), at<void>(x_sums), at<void>(out), out_stride, size.tokens,
                          panels_of_task(outputs), Type(out_type), Activation(activation));
    const int64_t tasks = ceil_div(args.rows, kernels->linear_rows) * ceil_div(outputs, kPanel * args.panels);
    pool()->run(tasks, [&](int64_t task) { (kernels->*kernel)(args, task); });
  });
}

void linear(Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address out, int64_t out_stride, int64_t rows,
            int out_type) {
  multiply(&Kernels::linear, x, x_scales, x_sums, matrix, out, out_stride, matrix.outputs, rows, out_type);
}

// Halves of the outputs are whole panels.
void gated(Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address out, int64_t out_stride, int64_t rows,
           int out_type, int activation) {
  multiply(&Kernels::gated, x, x_scales, x_sums, matrix, out, out_stride, matrix.outputs / 2, rows, out_type, activation);
}

// Items from 0 on, those of a key together and in ascending order; items whose key is negative are left out.
struct ByKey {
  std::vector<int64_t> begins;  // [keys + 1]
  int32_t* items;               // in memory of this thread's that lasts until the next one is made

  template <class Key>
  ByKey(int64_t count, int64_t keys, Key&& key_of) : begins(keys + 1) {
    static thread_local std::vector<int32_t> memory;
    for (int64_t i = 0; i < count; i++)
      if (const int64_t key = key_of(i); key >= 0) begins[key + 1]++;
    for (int64_t key = 0; key < keys; key++) begins[key + 1] += begins[key];
    items = with_room(memory, begins[keys]);
    auto next = begins;
    for (int64_t i = 0; i < count; i++)
      if (const int64_t key = key_of(i); key >= 0) items[next[key]++] = int32_t(i);
  }
  int64_t count(int64_t key) const { return begins[key + 1] - begins[key]; }
};

// The tasks of several calls of one kernel at once; a call has `tasks_of(call)`.
template <class A, class Tasks>
void run_together(void (*kernel)(const A&, int64_t), const std::vector<A>& calls, Tasks&& tasks_of) {
  std::vector<int64_t> begins{0};
  for (const auto& call : calls) begins.push_back(begins.back() + tasks_of(call));
  pool()->run(begins.back(), [&](int64_t task) {
    const auto call = std::upper_bound(begins.begin(), begins.end(), task) - begins.begin() - 1;
    kernel(calls[call], task - begins[call]);
  });
}

// What adapters add to a layer, by their slots: x down to the ranks of all its parts, and from each part's up onto the
// outputs from its first one on.
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

// For rows whose slot is one (`slots`, -1 is none) that adds something here.
void add_low_rank(Address x, Address out, const Adapters& adapters, Address slots, int64_t rows, int64_t out_stride) {
  make({rows, 0}, [=, &adapters](Size size) {
    thread_local std::vector<char> between;
    const int64_t count_of_slots = adapters.slots.size();
    const ByKey of_slots(size.tokens, count_of_slots, [&](int64_t row) {
      const int32_t slot = at<int32_t>(slots)[row];
      return slot >= 0 && !adapters.slots[slot].parts.empty() ? slot : -1;
    });
    if (!of_slots.begins.back()) return;
    int64_t room = 0;
    for (int64_t slot = 0; slot < count_of_slots; slot++)
      room += of_slots.count(slot) * adapters.slots[slot].down.outputs * 4;
    std::vector<LowRank> down, up;
    char* ranks = with_room(between, room);
    for (int64_t slot = 0; slot < count_of_slots; slot++) {
      const auto& [matrix, parts] = adapters.slots[slot];
      const int64_t count = of_slots.count(slot);
      if (!count) continue;
      const int32_t* rows = of_slots.items + of_slots.begins[slot];
      const int64_t bytes = matrix.type == Type::float32 ? 4 : 2, width = matrix.outputs;
      down.push_back({matrix, at<void>(x), ranks, rows, matrix.in, width, count, ceil_div(width, kPanel), 1});
      int64_t rank = 0;
      for (const auto& part : parts) {
        up.push_back({part.up, ranks + rank * bytes, at<char>(out) + part.first * bytes, rows, width, out_stride, count,
                      panels_of_task(part.up.outputs), part.scale});
        rank += part.up.in;
      }
      ranks += count * width * 4;
    }
    auto tasks_of = [](const LowRank& a) {
      return ceil_div(a.count, kernels->linear_rows) * ceil_div(a.matrix.outputs, kPanel * a.panels);
    };
    run_together(kernels->low_rank_down, down, tasks_of);
    run_together(kernels->low_rank_up, up, tasks_of);
  });
}

// The matrices of a layer's experts that this rank has, all of one shape and format, from the expert `first` on.
struct Experts {
  std::vector<Matrix> matrices;
  int64_t first;
};

// `top_k` experts for each of `rows` tokens (`ids`). x has a row for each token, or for each choice.
template <auto kernel>
void expert_products(Address x, Address x_scales, Address x_sums, const Experts& experts, Address ids, int64_t top_k,
                     int64_t choices_per_row, Address out, int64_t out_stride, int64_t rows, int out_type, int activation) {
  make({rows, 0}, [=, &experts](Size size) {
    const int64_t own = experts.matrices.size();
    const ByKey of_experts(size.tokens * top_k, own, [&](int64_t choice) {
      const int64_t expert = at<int64_t>(ids)[choice] - experts.first;
      return expert < own ? expert : -1;
    });
    const int64_t outputs = experts.matrices[0].outputs / (kernel == &Kernels::gated_expert ? 2 : 1);
    std::vector<Choices> calls;
    for (int64_t e = 0; e < own; e++)
      if (const int64_t count = of_experts.count(e))
        calls.push_back({experts.matrices[e], at<void>(x), at<float>(x_scales), at<void>(x_sums), at<void>(out),
                         of_experts.items + of_experts.begins[e], count, choices_per_row, out_stride, 1, Type(out_type),
                         Activation(activation)});
    auto blocks_of = [](const Choices& call) { return ceil_div(call.count, kernels->linear_rows); };
    int64_t blocks = 0;
    for (const auto& call : calls) blocks += blocks_of(call);
    const int64_t panels = panels_of_task(blocks * ceil_div(outputs, kPanel) * kPanel);
    for (auto& call : calls) call.panels = panels;
    run_together(kernels->*kernel, calls,
                 [&](const Choices& a) { return blocks_of(a) * ceil_div(outputs, kPanel * panels); });
  });
}

void route(Address logits, Address bias, Address ids, Address weights, int64_t tokens, int64_t experts, int64_t top_k,
           int64_t groups, int64_t top_groups, float scale, float least_sum, bool sigmoid, bool best_two, bool renormalize) {
  make_rows(tokens, &Kernels::router,
            Router{at<float>(logits), at<float>(bias), at<int64_t>(ids), at<float>(weights), experts, top_k, groups,
                   top_groups, scale, least_sum, sigmoid, best_two, renormalize});
}

void count_experts(Address ids, Address counts, int64_t tokens, int64_t top_k) {
  make({tokens, 0}, [=](Size size) {
    for (int64_t i = 0; i < size.tokens * top_k; i++) at<int64_t>(counts)[at<int64_t>(ids)[i]]++;
  });
}

// `places`: for each expert the number of its replicas and then their places, in rows of `width`.
void place_experts(Address ids, Address places, Address out, int64_t tokens, int64_t top_k, int64_t width) {
  make({tokens, 0}, [=](Size size) {
    for (int64_t token = 0; token < size.tokens; token++)
      for (int64_t i = token * top_k; i < (token + 1) * top_k; i++) {
        const int64_t* own = at<int64_t>(places) + at<int64_t>(ids)[i] * width;
        at<int64_t>(out)[i] = own[1 + token % own[0]];
      }
  });
}

void combine(Address x, Address weights, Address shared, Address gate, Address out, int64_t tokens, int64_t top_k,
             int64_t width, int64_t shared_stride, int64_t out_stride, int type) {
  make_rows(tokens, &Kernels::combine,
            Combine{at<void>(x), at<float>(weights), at<void>(shared), at<float>(gate), at<void>(out), top_k, width,
                    shared_stride, out_stride, Type(type)});
}

// Of outputs that rows may choose, as words of 32 bits.
Allowed allowed_of(Address bits, const Matrix& matrix, int64_t first = 0) {
  const int64_t sixteens = ceil_div(matrix.outputs, 32) * 2;
  return {bits ? at<uint16_t>(bits) + first * sixteens : nullptr, sixteens};
}

bool allows_any(const Allowed& a, int64_t row) {
  if (!a.bits) return true;
  const uint16_t* bits = a.bits + row * a.sixteens;
  return std::any_of(bits, bits + a.sixteens, [](uint16_t some) { return some != 0; });
}

// Writes to `out` which output of each row is the largest, and to `most` how large it is.
void likeliest(Address x, Address x_scales, Address x_sums, const Matrix& matrix, Address allowed, Address out, Address most,
               int64_t rows) {
  make({rows, 0}, [=](Size size) {
    const auto product = fields_of<Linear>(matrix, at<void>(x), at<float>(x_scales), at<void>(x_sums), nullptr, 0,
                                           size.tokens, panels_of_task(matrix.outputs), Type::float32);
    const int64_t tasks = ceil_div(matrix.outputs, kPanel * product.panels);
    std::vector<float> values(product.rows * tasks);
    std::vector<int64_t> places(product.rows * tasks);
    const Likeliest args{product, allowed_of(allowed, matrix), values.data(), places.data()};
    pool()->run(ceil_div(product.rows, kernels->linear_rows) * tasks, [&](int64_t task) { kernels->likeliest(args, task); });
    for (int64_t row = 0; row < product.rows; row++) {
      const auto begin = values.begin() + row * tasks;
      const auto largest = std::max_element(begin, begin + tasks);
      at<int64_t>(out)[row] = places[largest - values.begin()];
      at<float>(most)[row] = *largest;
    }
  });
}

void sketch(const Sketch& s) {
  pool()->run(ceil_div(s.whole.outputs, kPanel), [&](int64_t panel) { kernels->sketch(s, panel); });
}

// What `likeliest` finds, by a sketch; false where that has no bounds, since something is too large or no number, or where
// too much is left to compute for it to be worth it.
bool likeliest_by_sketch(Address x, Address rounded, Address x_scales, Address x_sums, const Sketch& sketch, Address allowed,
                         Address out, Address most, int64_t rows) {
  thread_local std::vector<Candidate> candidates;  // kept, since to get and clear memory would take as long as the rest
  const Matrix& m = sketch.whole;
  const auto threads = pool();
  for (int64_t first = 0; first < rows; first += kernels->linear_rows) {
    const int64_t some = std::min(kernels->linear_rows, rows - first), width = (m.in + 7) / 8 * 8;
    const auto product =
        fields_of<Linear>(sketch.rounded, at<int8_t>(rounded) + first * width, at<float>(x_scales) + first,
                          at<int32_t>(x_sums) + first, nullptr, 0, some, panels_of_task(m.outputs), Type::float32);
    const int64_t tasks = ceil_div(m.outputs, kPanel * product.panels), room = some * product.panels * (kPanel / 16);
    std::vector<float> lengths(some), off(some);
    std::vector<std::atomic<float>> least(some);
    std::vector<int64_t> counts(tasks);
    for (auto& each : least) each = -INFINITY;
    with_room(candidates, tasks * room);
    const int64_t bytes = m.in * (m.type == Type::float32 ? 4 : 2);
    const auto args = fields_of<Screening>(product, allowed_of(allowed, m, first), &m, sketch.off, sketch.lengths,
                                           at<char>(x) + first * bytes, lengths.data(), off.data(), least.data(),
                                           candidates.data(), counts.data());
    threads->run(some, [&](int64_t row) { kernels->measure(args, row); });
    for (int64_t row = 0; row < some; row++)
      if (!std::isfinite(lengths[row]) || !std::isfinite(off[row])) return false;
    threads->run(tasks, [&](int64_t task) { kernels->screen(args, task); });
    // First of each row the one that may be largest, then those that may be larger than what that one is.
    std::vector<Candidate*> best(some), others;
    auto each = [&](auto&& f) {
      for (int64_t task = 0; task < tasks; task++)
        for (int64_t i = 0; i < counts[task]; i++) f(candidates[task * room + i]);
    };
    each([&](Candidate& c) {
      if (!best[c.row] || c.value > best[c.row]->value) best[c.row] = &c;
    });
    for (int64_t row = 0; row < some; row++)
      if (!best[row] && allows_any(args.allowed, row)) return false;  // something is no number
    threads->run(some, [&](int64_t row) {
      if (best[row]) kernels->settle(args, *best[row]);
    });
    for (const Candidate* c : best)
      if (c && !std::isfinite(c->value)) return false;
    each([&](Candidate& c) {
      if (&c != best[c.row] && c.value >= best[c.row]->value) others.push_back(&c);
    });
    if (int64_t(others.size()) > ceil_div(m.outputs, 16) / 2) return false;
    threads->run(others.size(), [&](int64_t i) { kernels->settle(args, *others[i]); });
    for (Candidate* c : others) {
      Candidate*& known = best[c->row];
      if (c->value > known->value || (c->value == known->value && c->sixteen < known->sixteen)) known = c;
    }
    for (int64_t row = 0; row < some; row++) {
      const Candidate* c = best[row];
      at<int64_t>(out)[first + row] = c ? int64_t(c->sixteen) * 16 + c->lane : 0;
      at<float>(most)[first + row] = c ? c->value : -INFINITY;
    }
  }
  return true;
}

// Of `rows` tokens with `each` rows.
void quantize(Address x, Address out, Address scales, Address sums, int64_t rows, int64_t each, int64_t in, int64_t padded,
              int64_t group, int64_t rotation, bool in_groups, bool has_total, int type) {
  make_rows(rows, each, &Kernels::quantize,
            Quantize{at<void>(x), at<int8_t>(out), at<float>(scales), at<int32_t>(sums), in, padded, group, rotation,
                     in_groups, has_total, Type(type)});
}

void rotate(Address x, Address out, int64_t rows, int64_t each, int64_t in, int64_t rotation, int type) {
  make_rows(rows, each, &Kernels::rotate, Rotate{at<void>(x), at<void>(out), in, rotation, Type(type)});
}

void sum_groups(Address x, Address sums, int64_t rows, int64_t each, int64_t in, int64_t group, int type) {
  make_rows(rows, each, &Kernels::sum_groups, GroupSums{at<void>(x), at<float>(sums), in, group, Type(type)});
}

void gather(Address ids, const Matrix& matrix, Address out, int64_t first, int64_t rows) {
  make_rows(rows, &Kernels::gather, Gather{matrix, at<int64_t>(ids), at<void>(out), first});
}

// Not as calls by rows are made, since it reads other rows than it writes.
void take(Address x, Address rows, Address out, int64_t count, int64_t row_bytes) {
  if (recording) recording->taken = true;
  make({count, 0}, [=](Size size) {
    pool()->run(size.tokens, [&](int64_t row) {
      memcpy(at<char>(out) + row * row_bytes, at<char>(x) + at<int64_t>(rows)[row] * row_bytes, row_bytes);
    });
  });
}

void copy(Address x, Address out, int64_t rows, int64_t row_bytes) {
  make_rows(rows, [=](int64_t row) { memcpy(at<char>(out) + row * row_bytes, at<char>(x) + row * row_bytes, row_bytes); });
}

template <class T>
void select_columns(const T* x, const int32_t* order, T* out, int64_t in) {
  for (int64_t i = 0; i < in; i++) out[i] = x[order[i]];
}

// Inputs in the order of a matrix's columns.
void permute(Address x, const Matrix& matrix, Address out, int64_t rows, int type) {
  make_rows(rows, [=](int64_t row) {
    const int64_t first = row * matrix.in;
    if (Type(type) == Type::float32)
      select_columns(at<float>(x) + first, matrix.order, at<float>(out) + first, matrix.in);
    else
      select_columns(at<uint16_t>(x) + first, matrix.order, at<uint16_t>(out) + first, matrix.in);
  });
}

template <auto kernel>
void pack(Address weight, const Matrix& matrix, int64_t first, int64_t rows) {
  const Pack args{matrix, at<void>(weight), first, rows};
  pool()->run(ceil_div(rows, kPanel), [&](int64_t task) { (kernels->*kernel)(args, task); });
}

void norm(Address x, Address residual, Address weight, Address out, int64_t rows, int64_t groups, int64_t width,
          int64_t stride, float eps, int type, bool wide, bool centered, int64_t weight_stride, Address bias) {
  make_rows(rows, &Kernels::norm,
            Norm{at<void>(x), at<void>(residual), at<void>(weight), at<void>(out), groups, width, stride, eps, Type(type),
                 wide, centered, weight_stride, at<float>(bias)});
}

void rope(Address x, Address out, Address positions, Address table, int64_t tokens, int64_t heads, int64_t dim,
          int64_t stride, int64_t rotary, bool interleaved, int type) {
  make_rows(tokens, &Kernels::rope,
            Rope{at<void>(x), at<void>(out), at<int64_t>(positions), at<float>(table), heads, dim, stride, rotary,
                 Type(type), interleaved});
}

void activate(Address x, Address out, int64_t rows, int64_t each, int64_t width, int64_t stride, int64_t out_stride,
              int activation, bool gated, int type) {
  make_rows(rows, each, &Kernels::activate,
            Activate{at<void>(x), at<void>(out), width, stride, out_stride, Type(type), Activation(activation), gated});
}

void scale(Address x, Address out, int64_t rows, int64_t width, float factor, float cap, int type) {
  make_rows(rows, &Kernels::scale, Scale{at<void>(x), at<void>(out), width, factor, cap, Type(type)});
}

void to_float32(Address x, Address out, int64_t rows, int64_t width, int type) {
  make_rows(rows, &Kernels::to_float32, ToFloat32{at<void>(x), at<float>(out), width, Type(type)});
}

void store(Address k, Address v, Address cache, Address slots, int64_t tokens, int64_t kv_heads, int64_t dim,
           int64_t block_size, int64_t stride_k, int64_t stride_v, int type, bool rounded) {
  make_rows(tokens, &Kernels::store,
            Store{at<void>(k), at<void>(v), at<void>(cache), at<int64_t>(slots), kv_heads, dim, panel_of(block_size),
                  stride_k, stride_v, Type(type), rounded});
}

// Tokens whose place is negative are left out. `progress`, an int64 if there is one, is raised once the others are copied.
template <auto kernel>
void exchange(Address cache, Address buffer, Address slots, Address places, int64_t tokens, int64_t kv_heads, int64_t dim,
              int64_t block_size, int64_t all_heads, int64_t first_head, int64_t slot_tokens, int64_t slot_bytes,
              int64_t offset, int type, bool rounded, bool latent, Address progress) {
  make({tokens, 0}, [=](Size size) {
    thread_local std::vector<int64_t> chosen;
    chosen.clear();
    for (int64_t token = 0; token < size.tokens; token++)
      if (at<int64_t>(places)[token] >= 0) chosen.push_back(token);
    if (chosen.empty()) return;
    const auto args =
        fields_of<Exchange>(at<void>(cache), at<char>(buffer) + offset, at<int64_t>(slots), at<int64_t>(places),
                            chosen.data(), int64_t(chosen.size()), kv_heads, dim, panel_of(block_size), all_heads,
                            first_head, slot_tokens, slot_bytes, Type(type), rounded, latent);
    pool()->run(ceil_div(args.count, kRowsTogether), [&](int64_t task) { (kernels->*kernel)(args, task); });
    if (progress) at<std::atomic<int64_t>>(progress)->fetch_add(1, std::memory_order_release);
  });
}

// The tasks of attention over a latent cache. One of many rows lays out the cache less often, as long as there is one for
// each thread. Where rows do not give every thread one, parts of the positions do.
struct alignas(64) Piece {
  float numbers[16];
};

struct LatentTasks {
  std::vector<int32_t> tiles;
  int64_t rows;
  float* partial;
};

LatentTasks latent_tasks(const int32_t* starts, const int32_t* lengths, int64_t sequences, int64_t heads, int64_t latent) {
  const int64_t threads = pool()->threads();
  auto tasks = [&](int64_t each, bool split) {
    const int64_t fair = ceil_div(ceil_div(starts[sequences] * heads, kernels->attention_rows), ceil_div(threads, each));
    LatentTasks made{{}, kernels->attention_rows * (fair < 1 ? 1 : fair > kLatentGroups ? kLatentGroups : fair), nullptr};
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
      const int64_t rows = (starts[sequence + 1] - starts[sequence]) * heads;
      const int64_t parts = split ? ceil_div(lengths[sequence], kPart) : 1;
      for (int64_t row = 0; row < rows; row += made.rows)
        for (int64_t part = 0; part < parts; part++)
          for (int64_t number : {sequence, row, split ? part : -1, parts}) made.tiles.push_back(int32_t(number));
    }
    return made;
  };
  LatentTasks whole = tasks(1, false);
  const int64_t parts = sequences ? ceil_div(*std::max_element(lengths, lengths + sequences), kPart) : 0;
  if (int64_t(whole.tiles.size()) / 4 > threads || parts < 2 || threads < 2) return whole;
  LatentTasks split = tasks(parts, true);
  static thread_local std::vector<Piece> memory;
  split.partial = (float*)with_room(memory, split.tiles.size() / 4 * split.rows * (latent + 32) / 16);
  return split;
}

void attention(Address q, Address out, Address cache, Address block_tables, Address query_starts, Address lengths,
               int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t table_width,
               int64_t window, int64_t out_stride, float scale, int type, bool rounded, float cap, Address sinks,
               int64_t latent, bool causal, Address key_ends, bool chunked) {
  make({0, sequences}, [=](Size size) {
    const int32_t* starts = at<int32_t>(query_starts);
    auto args = fields_of<Attention>(at<void>(q), at<void>(out), at<void>(cache), at<int32_t>(block_tables), starts,
                                     at<int32_t>(lengths), nullptr, 0, heads, kv_heads, dim, block_size, table_width, window,
                                     out_stride, scale, Type(type), rounded, cap, at<float>(sinks), latent,
                                     kernels->attention_rows, nullptr, causal, at<int32_t>(key_ends), chunked);
    if (latent) {
      const LatentTasks tasks = latent_tasks(starts, args.lengths, size.sequences, heads, latent);
      args.tiles = tasks.tiles.data(), args.tasks = int64_t(tasks.tiles.size()) / 4;
      args.task_rows = tasks.rows, args.partial = tasks.partial;
      pool()->run(args.tasks, [&](int64_t task) { kernels->attention(args, task); });
      if (tasks.partial) pool()->run(args.tasks, [&](int64_t task) { kernels->latent_join(args, task); });
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
                  int64_t out_head, bool pairs, int type, bool rounded) {
  make_rows(
      tokens, &Kernels::latent_store,
      fields_of<LatentStore>(at<void>(q), at<void>(k), at<void>(latent), at<void>(out), at<int64_t>(positions),
                             at<float>(table), at<void>(cache), at<int64_t>(slots), heads, rope, dim, panel_of(block_size),
                             q_stride, q_head, k_stride, latent_stride, out_stride, out_head, pairs, Type(type), rounded));
}

void by_head(Address x, const Matrix& matrix, Address out, int64_t x_stride, int64_t x_head, int64_t out_stride,
             int64_t out_head, int64_t rows, int64_t heads, int64_t outputs) {
  make({rows, 0}, [=](Size size) {
    const auto args = fields_of<ByHead>(matrix, at<void>(x), at<void>(out), x_stride, x_head, out_stride, out_head,
                                        size.tokens, heads, outputs, ceil_div(outputs, kPanel) * kPanel);
    const int64_t tasks = heads * ceil_div(args.rows, kernels->linear_rows);
    pool()->run(tasks, [&](int64_t task) { kernels->by_head(args, task); });
  });
}

// Waits for the other ranks.
void barrier(Group& group) {
  make({0, 0}, [&group](Size) { group.barrier(); });
}

// The same, and exchanges with other nodes what lies at `part`: of `rows` tokens, `each` rows of every one.
void gather_part(Group& group, Address part, int64_t row_bytes, int64_t stride, int64_t rows, int64_t each) {
  make({rows, 0}, [=, &group](Size size) { group.gather(at<void>(part), row_bytes, stride, size.tokens * each); });
}

// The same with the rows of `all` whose ids are from `first` on and before `end`.
void gather_rows(Group& group, Address all, int64_t row_bytes, Address ids, int64_t rows, int64_t each, int64_t first,
                 int64_t end) {
  make({rows, 0}, [=, &group](Size size) {
    group.gather_rows(at<void>(all), row_bytes, at<int64_t>(ids), size.tokens * each, first, end);
  });
}

// --- Limits ----------------------------------------------------------------------------------------------------------

// Seconds that it takes to read so much, shared out evenly.
double time_read(Address from, int64_t size) {
  const int64_t threads = pool()->threads();
  const Read args{at<void>(from), size / threads / 256 * 256};
  const auto begun = std::chrono::steady_clock::now();
  pool()->run(threads, [&](int64_t task) { kernels->read(args, task); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Products and sums a second, of bfloat16 or of 8-bit integers.
double dot_rate(bool integers, int64_t steps) {
  const int64_t threads = pool()->threads();
  std::atomic<int64_t> made{0};
  const auto begun = std::chrono::steady_clock::now();
  pool()->run(threads, [&](int64_t) { made += (integers ? kernels->integer_dots : kernels->float_dots)(steps); });
  return double(made) / std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

}  // namespace
}  // namespace penstock

NB_MODULE(_kernels, m) {
  using namespace penstock;
  if (usable().empty())
    throw std::runtime_error("kernels for " + listed(names_of(built)) + " only, none of which this processor runs");
  kernels = usable().back();
  m.doc() = "CPU kernels. Addresses and sizes are trusted: penstock.ops.cpu is the face to use.";
  m.attr("PANEL") = kPanel;
  m.attr("MAX_HEAD") = kMaxHead;
  m.attr("MAX_LATENT") = kMaxLatent;
  m.attr("MAX_LATENT_KEY") = kMaxLatentKey;
  m.attr("MAX_BLOCK") = kMaxBlock;
  nb::set_leak_warnings(false);  // what lives until the process ends is no leak
  m.attr("BUILT") = names_of(built);
  m.attr("MACHINE") = sets_of_machine();
  m.attr("SOURCES") = sources;
  m.attr("VERSION") = version;
  m.def(
      "available", [] { return names_of(usable()); },
      "Instruction sets that this build has kernels for and this processor runs, the fastest last.");
  m.def("current", [] { return std::string(kernels->name); });
  m.def("use", &use, nb::arg("name"));
  m.def("threads", [] { return pool()->threads(); });
  m.def(
      "set_threads",
      [](int threads) {
        if (threads < 1) throw std::invalid_argument("at least one thread");
        std::atomic_store(&shared_pool, std::make_shared<Pool>(threads));
      },
      nb::arg("threads"));
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, Address panels, Address scales, int scale_type, Address offsets, int offset_type,
              Address output_scales, Address bias, Address order, int64_t in, int64_t outputs, int64_t group,
              int64_t rotation, bool x_in_groups, int format, int type) {
             const OfGroups group_scales{at<void>(scales), GroupType(scale_type)};
             const OfGroups group_offsets{at<void>(offsets), GroupType(offset_type)};
             new (self) Matrix(fields_of<Matrix>(at<void>(panels), group_scales, group_offsets, at<float>(output_scales),
                                                 at<float>(bias), at<int32_t>(order), in, outputs, group, rotation,
                                                 x_in_groups, Format(format), Type(type)));
           })
      .def_prop_ro("panel_bytes", &panel_bytes);
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("record", [](Tape* self) { recording = self; })
      .def("stop", [](Tape*) { recording = nullptr; })
      .def("run", &Tape::run, nb::call_guard<nb::gil_scoped_release>());
  nb::exception<LinkLost>(m, "LinkLostError", PyExc_ConnectionError);
  nb::class_<Group>(m, "Group")
      .def("__init__", [](Group* self, Address memory, int rank, int size, int spins,
                          double seconds) { new (self) Group(at<void>(memory), rank, size, spins, seconds); })
      .def_ro_static("RANK_BYTES", &Group::kRankBytes)
      .def_ro_static("STEP_BITS", &Group::kStepBits)
      .def("connect", &Group::connect)
      .def("begin", &Group::begin)
      .def("end", &Group::end, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Sketch>(m, "Sketch")
      .def("__init__", [](Sketch* self, const Matrix& whole, const Matrix& rounded, Address off, Address lengths) {
        new (self) Sketch{whole, rounded, at<float>(off), at<float>(lengths)};
      });
  nb::class_<Adapters>(m, "Adapters")
      .def("__init__", [](Adapters* self, int64_t slots) { new (self) Adapters{std::vector<Adapters::Adapter>(slots)}; })
      .def("put", [](Adapters* self, int64_t slot, const Matrix& down) { self->slots.at(slot) = {down, {}}; })
      .def("add", [](Adapters* self, int64_t slot, const Matrix& up, int64_t first,
                     float scale) { self->slots.at(slot).parts.push_back({up, first, scale}); })
      .def("clear", [](Adapters* self, int64_t slot) { self->slots.at(slot) = {}; });
  nb::class_<Experts>(m, "Experts")
      .def("__init__", [](Experts* self, int64_t first) { new (self) Experts{{}, first}; })
      .def("add", [](Experts* self, const Matrix& matrix) { self->matrices.push_back(matrix); });
  const auto free = nb::call_guard<nb::gil_scoped_release>();
  m.def("linear", &linear, free);
  m.def("gated", &gated, free);
  m.def("add_low_rank", &add_low_rank, free);
  m.def("expert_products", &expert_products<&Kernels::expert>, free);
  m.def("gated_expert_products", &expert_products<&Kernels::gated_expert>, free);
  m.def("route", &route, free);
  m.def("count_experts", &count_experts, free);
  m.def("place_experts", &place_experts, free);
  m.def("combine", &combine, free);
  m.def("likeliest", &likeliest, free);
  m.def("sketch", &sketch, free);
  m.def("likeliest_by_sketch", &likeliest_by_sketch, free);
  m.def("quantize", &quantize, free);
  m.def("rotate", &rotate, free);
  m.def("time_read", &time_read, free);
  m.def("dot_rate", &dot_rate, free);
  m.def("gather", &gather, free);
  m.def("take", &take, free);
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
  m.def("by_head", &by_head, free);
  m.def("export_kv", &exchange<&Kernels::export_kv>, free);
  m.def("import_kv", &exchange<&Kernels::import_kv>, free);
  m.def("barrier", &barrier, free);
  m.def("gather_part", &gather_part, free);
  m.def("gather_rows", &gather_rows, free);
}
