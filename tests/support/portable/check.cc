// Compares the portable kernels with plain loops in double precision, for platforms on which the Python tests do not run.
// Prints the differences, and exits with status 1 if there are any. test_ops.py tests adapters and sketches.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/kernels.h"

namespace penstock {
namespace portable {
extern const Kernels kernels;
}
namespace {

const Kernels& kernels = portable::kernels;
int failures = 0, compared = 0;
std::mt19937 random_bits(0);

double draw() { return double(random_bits()) / 2147483648.0 - 1; }  // from -1 to 1
int64_t draw(int64_t least, int64_t most) { return least + int64_t(random_bits()) % (most - least + 1); }

void close(const std::string& name, int64_t index, double found, double expected, double tolerance) {
  compared++;
  if (std::fabs(found - expected) <= tolerance) return;
  if (failures++ < 20)
    std::printf("%s [%lld]: %.9g, not %.9g (within %.3g)\n", name.c_str(), (long long)index, found, expected, tolerance);
}

// An array of a type that the kernels read and write.
struct Numbers {
  Type type;
  std::vector<char> bytes;

  Numbers(Type type, int64_t count) : type(type), bytes(count * width(type)) {}

  static int64_t width(Type type) { return type == Type::float32 ? 4 : 2; }
  static Numbers drawn(Type type, int64_t count) {
    Numbers result(type, count);
    for (int64_t i = 0; i < count; i++) result.set(i, draw());
    return result;
  }
  void* at(int64_t i) { return bytes.data() + i * width(type); }
  double operator[](int64_t i) const {
    uint32_t bits = 0;
    memcpy((char*)&bits + 4 - width(type), bytes.data() + i * width(type), width(type));
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  void set(int64_t i, double value) {  // truncates to bfloat16
    const float narrow = float(value);
    memcpy(at(i), (const char*)&narrow + 4 - width(type), width(type));
  }
  // Largest error of rounding a value to the type.
  double step(double value) const { return std::fabs(value) * (type == Type::float32 ? 1.2e-7 : 4e-3); }
};

std::string name_of(Format format, Type type) {
  static const char* formats[] = {"plain", "w8a8", "w4a8", "wint8", "wint4"};
  return std::string(formats[int(format)]) + (type == Type::float32 ? " float32" : " bfloat16");
}

// --- Linear layers ---------------------------------------------------------------------------------------------------

struct Layer {
  Matrix matrix{};
  std::vector<char> panels;
  std::vector<float> scales, bias;
  std::vector<double> weights;  // dequantized

  Layer(Format format, Type type, int64_t in, int64_t outputs, int64_t group, bool biased) {
    const std::string name = name_of(format, type) + " pack";
    Numbers weight = Numbers::drawn(type, outputs * in);
    matrix.in = in;
    matrix.outputs = outputs;
    matrix.group = group ? group : in;
    matrix.format = format;
    matrix.type = type;
    const int64_t count = ceil_div(outputs, kPanel), groups = num_groups(matrix);
    panels.resize(count * panel_bytes(matrix));
    scales.resize(count * groups * kPanel);
    bias.resize(count * kPanel);
    for (float& each : bias) each = float(draw());
    matrix.panels = panels.data();
    matrix.scales = {scales.data(), GroupType::float32};
    matrix.bias = biased ? bias.data() : nullptr;
    const Pack pack{matrix, weight.at(0), 0, outputs};
    for (int64_t task = 0; task < count; task++) kernels.pack(pack, task);

    std::vector<int64_t> ids(outputs);
    std::iota(ids.begin(), ids.end(), 0);
    Numbers kept(type, outputs * in);
    const Embedding embedding{matrix, ids.data(), kept.at(0), 0};
    for (int64_t row = 0; row < outputs; row++) kernels.embedding(embedding, row);
    weights.resize(outputs * in);
    for (int64_t i = 0; i < outputs * in; i++) {
      const int64_t output = i / in, input = i % in;
      if (format == Format::unquantized) {
        weights[i] = kept[i];
        close(name, i, kept[i], weight[i], 0);
        continue;
      }
      const double scale = scales[(output / kPanel * groups + input / matrix.group) * kPanel + output % kPanel];
      const double integer = std::rint(kept[i] / scale);
      const bool eight = format == Format::w8a8 || format == Format::wint8;
      const bool cut = !eight && (integer == 7 || integer == -8);  // clipped: the search chose a smaller scale
      weights[i] = integer * scale;
      close(name, i, weights[i], weight[i], std::fabs(scale) * (cut ? 4 : 0.501));
    }
  }
};

// Inputs of a layer, quantized if its format has quantized activations.
struct Inputs {
  Numbers x;
  std::vector<int8_t> integers;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  std::vector<double> values;  // the inputs, dequantized
  int64_t rows, row_bytes, groups;
  bool rounded;

  Inputs(const Matrix& m, Type type, int64_t rows)
      : x(Numbers::drawn(type, rows * m.in)), values(rows * m.in), rows(rows), groups(num_groups(m)),
        rounded(m.format == Format::w8a8 || m.format == Format::w4a8) {
    const int64_t padded = ceil_div(m.in, 8) * 8;
    row_bytes = rounded ? padded : m.in * Numbers::width(type);
    for (int64_t i = 0; i < rows * m.in; i++) values[i] = x[i];
    if (!rounded) return;
    integers.resize(rows * padded);
    scales.resize(rows);
    sums.resize(rows * groups);
    const Quantize quantize{x.at(0), integers.data(), scales.data(), sums.data(), m.in, padded, m.group, 1, false, false, type};
    for (int64_t row = 0; row < rows; row++) {
      kernels.quantize(quantize, row);
      std::vector<int64_t> expected(groups);
      for (int64_t i = 0; i < padded; i++) {
        const int integer = integers[row * padded + i];
        if (i >= m.in) {
          close("quantize, padding", i, integer, 0, 0);
          continue;
        }
        expected[i / m.group] += integer;
        values[row * m.in + i] = double(integer) * scales[row];
        close("quantize", i, values[row * m.in + i], x[row * m.in + i], scales[row] * 0.501);
      }
      for (int64_t group = 0; group < groups; group++)
        close("quantize, sums", group, sums[row * groups + group], double(expected[group]), 0);
    }
  }

  // The product of some rows. Rows of the outputs are `stride` elements apart.
  Linear product(const Matrix& m, int64_t first, int64_t count, int64_t panels, Numbers& out, int64_t stride) {
    return {m, rounded ? (void*)(integers.data() + first * row_bytes) : x.at(first * m.in), scales.data() + (rounded ? first : 0),
            sums.data() + (rounded ? first * groups : 0), out.at(0), stride, count, panels, out.type};
  }
};

void run(void (*kernel)(const Linear&, int64_t), const Linear& a, int64_t outputs) {
  const int64_t tasks = ceil_div(a.rows, kernels.linear_rows) * ceil_div(outputs, kPanel * a.panels);
  for (int64_t task = 0; task < tasks; task++) kernel(a, task);
}

void check_linear(Format format, Type type, int64_t rows, int64_t in, int64_t outputs, int64_t group) {
  const std::string name = name_of(format, type);
  const int64_t panels = draw(1, kMaxTaskPanels);
  Layer layer(format, type, in, outputs, group, draw(0, 1));
  Inputs inputs(layer.matrix, type, rows);
  Numbers wide(Type::float32, rows * outputs), out(type, rows * outputs), alone(type, outputs);
  run(kernels.linear, inputs.product(layer.matrix, 0, rows, panels, wide, outputs), outputs);
  run(kernels.linear, inputs.product(layer.matrix, 0, rows, panels, out, outputs), outputs);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t o = 0; o < outputs; o++) {
      double sum = layer.matrix.bias ? layer.bias[o] : 0, size = std::fabs(sum);
      for (int64_t i = 0; i < in; i++) {
        const double product = inputs.values[row * in + i] * layer.weights[o * in + i];
        sum += product;
        size += std::fabs(product);
      }
      close(name, row * outputs + o, wide[row * outputs + o], sum, 4e-6 * size);
      close(name + " narrowed", row * outputs + o, out[row * outputs + o], sum, 4e-6 * size + out.step(sum));
    }
  // A row computed alone has the same bits.
  for (int64_t row : {int64_t(0), rows / 2, rows - 1}) {
    run(kernels.linear, inputs.product(layer.matrix, row, 1, 1, alone, outputs), outputs);
    close(name + " alone", row, memcmp(alone.at(0), out.at(row * outputs), alone.bytes.size()), 0, 0);
  }

  const int64_t tasks = ceil_div(outputs, kPanel * panels);
  std::vector<float> values(rows * tasks);
  std::vector<int64_t> places(rows * tasks);
  Linear product = inputs.product(layer.matrix, 0, rows, panels, wide, outputs);
  product.out = nullptr;
  const ArgMax argmax{product, {nullptr, 0}, values.data(), places.data()};
  for (int64_t task = 0; task < tasks * ceil_div(rows, kernels.linear_rows); task++) kernels.argmax(argmax, task);
  for (int64_t row = 0; row < rows; row++) {
    int64_t expected = 0;
    for (int64_t o = 0; o < outputs; o++)
      if (wide[row * outputs + o] > wide[row * outputs + expected]) expected = o;
    const auto begin = values.begin() + row * tasks;
    const int64_t found = places[std::max_element(begin, begin + tasks) - values.begin()];
    close(name + " argmax", row, double(found), double(expected), 0);
  }

  const int64_t size = outputs / 2;
  if (outputs % (2 * kPanel)) return;
  Numbers gated(Type::float32, rows * size);
  run(kernels.gated, inputs.product(layer.matrix, 0, rows, panels, gated, size), size);
  for (int64_t i = 0; i < rows * size; i++) {
    const double gate = wide[i / size * outputs + i % size], up = wide[i / size * outputs + size + i % size];
    const double expected = gate / (1 + std::exp(-gate)) * up;
    close(name + " gated", i, gated[i], expected, 1e-6 * std::fabs(expected) + 1e-30);
  }
}

// Multiplies each block of a row by the Hadamard matrix (of 1 and -1).
void rotate(std::vector<double>& x, int64_t block) {
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t i = 0; i < int64_t(x.size()); i++)
      if (!(i & half)) {
        const double sum = x[i] + x[i + half];
        x[i + half] = x[i] - x[i + half], x[i] = sum;
      }
}

void check_rotation(Format format, Type type, int64_t in, int64_t group) {
  const int64_t block = std::min(in & -in, int64_t(64)), padded = ceil_div(in, 8) * 8, groups = ceil_div(in, group);
  Numbers x = Numbers::drawn(type, in), out(type, in);
  std::vector<double> expected(in);
  for (int64_t i = 0; i < in; i++) expected[i] = x[i];
  rotate(expected, block);
  std::vector<int8_t> integers(padded);
  std::vector<int32_t> sums(groups);
  float scale;
  kernels.quantize({x.at(0), integers.data(), &scale, sums.data(), in, padded, group, block, false, false, type}, 0);
  kernels.rotate({x.at(0), out.at(0), in, block, type}, 0);
  for (int64_t i = 0; i < in; i++) {
    close("quantize, rotated", i, integers[i] * double(scale), expected[i], scale * 0.501);
    close("rotate", i, out[i], expected[i], out.step(expected[i]) + 1e-5);
  }

  Matrix m{};
  m.in = in, m.outputs = 1, m.group = group, m.rotation = block, m.format = format, m.type = type;
  std::vector<char> panels(panel_bytes(m));
  std::vector<float> scales(groups * kPanel);
  m.panels = panels.data(), m.scales = {scales.data(), GroupType::float32};
  kernels.pack({m, x.at(0), 0, 1}, 0);
  const int64_t id = 0;
  kernels.embedding({m, &id, out.at(0), 0}, 0);
  double largest = 0;
  for (int64_t i = 0; i < groups; i++) largest = std::max(largest, std::fabs(double(scales[i * kPanel])));
  for (int64_t i = 0; i < in; i++)
    close(name_of(format, type) + " rotated", i, out[i], x[i], double(block) * largest * 1.01 + out.step(x[i]));
}

// --- Element-wise kernels --------------------------------------------------------------------------------------------

void check_norm(Type type, int64_t rows, int64_t size, bool added) {
  Numbers x = Numbers::drawn(type, rows * size), weight = Numbers::drawn(type, size), out(type, rows * size);
  Numbers residual = Numbers::drawn(type, rows * size), before = residual;
  Norm norm{};
  norm.x = x.at(0);
  norm.residual = added ? residual.at(0) : nullptr;
  norm.weight = weight.at(0);
  norm.out = out.at(0);
  norm.groups = 1;
  norm.size = norm.stride = size;
  norm.eps = 1e-6f;
  norm.type = type;
  for (int64_t row = 0; row < rows; row++) {
    kernels.norm(norm, row);
    double squares = 0;
    auto input = [&](int64_t i) { return added ? residual[row * size + i] : x[row * size + i]; };
    for (int64_t i = 0; i < size; i++) squares += input(i) * input(i);
    for (int64_t i = 0; i < size; i++) {
      const int64_t at = row * size + i;
      const double sum = x[at] + before[at], expected = input(i) / std::sqrt(squares / double(size) + 1e-6) * weight[i];
      if (added) close("norm, residual", at, residual[at], sum, residual.step(sum));
      close("norm", at, out[at], expected, 2 * out.step(expected) + 1e-6);
    }
  }
}

void check_rope(Type type, int64_t tokens, int64_t heads, int64_t half) {
  const int64_t longest = 20, dim = 2 * half, stride = heads * dim + 3;
  Numbers x = Numbers::drawn(type, tokens * stride), table = Numbers::drawn(Type::float32, longest * dim);
  Numbers out(type, tokens * heads * dim);
  std::vector<int64_t> positions(tokens);
  for (auto& position : positions) position = draw(0, longest - 1);
  Rope rope{};
  rope.x = x.at(0);
  rope.out = out.at(0);
  rope.positions = positions.data();
  rope.table = (const float*)table.at(0);
  rope.heads = heads;
  rope.dim = rope.rotary = dim;
  rope.stride = stride;
  rope.type = type;
  for (int64_t token = 0; token < tokens; token++) {
    kernels.rope(rope, token);
    for (int64_t i = 0; i < heads * half; i++) {
      const int64_t from = token * stride + i / half * dim + i % half, to = (token * heads + i / half) * dim + i % half;
      const double low = x[from], high = x[from + half];
      const double cosine = table[positions[token] * dim + i % half], sine = table[positions[token] * dim + half + i % half];
      const double first = low * cosine - high * sine, second = high * cosine + low * sine;
      close("rope", to, out[to], first, out.step(first) + 4e-7);
      close("rope", to + half, out[to + half], second, out.step(second) + 4e-7);
    }
  }
}

void check_activate(Type type, int64_t rows, int64_t size) {
  Numbers both = Numbers::drawn(type, rows * 2 * size), out(type, rows * size);
  for (int64_t i = 0; i < rows * 2 * size; i++) both.set(i, 10 * both[i]);
  Activate activate{};
  activate.x = both.at(0);
  activate.out = out.at(0);
  activate.size = activate.out_stride = size;
  activate.stride = 2 * size;
  activate.type = type;
  activate.activation = Activation::silu;
  activate.gated = true;
  for (int64_t row = 0; row < rows; row++) {
    kernels.activate(activate, row);
    for (int64_t i = 0; i < size; i++) {
      const double gate = both[row * 2 * size + i], up = both[row * 2 * size + size + i];
      const double expected = gate / (1 + std::exp(-gate)) * up;
      close("silu", i, out[row * size + i], expected, out.step(expected) + 1e-6 * std::fabs(expected));
    }
  }
}

// --- Attention -------------------------------------------------------------------------------------------------------

void check_attention(Type type, bool rounded, int64_t dim, int64_t block_size, int64_t window) {
  const int64_t kv_heads = 2, sharing = draw(1, 4), heads = kv_heads * sharing;
  std::vector<int32_t> lengths, starts{0}, tables, tiles;
  int64_t width = 0, blocks = 0;
  for (int i = 0; i < 4; i++) {
    lengths.push_back(int32_t(draw(1, 100)));
    starts.push_back(starts.back() + int32_t(i ? draw(1, lengths.back()) : 1));
    width = std::max(width, ceil_div(lengths.back(), block_size));
  }
  blocks = int64_t(lengths.size()) * width;
  tables.resize(blocks);
  std::iota(tables.begin(), tables.end(), 0);
  std::shuffle(tables.begin(), tables.end(), random_bits);
  const int64_t element = rounded ? 1 : Numbers::width(type);
  std::vector<char> cache(blocks * kv_heads * 2 * block_size * (dim * element + (rounded ? 4 : 0)));

  std::vector<Numbers> keys, values;
  for (size_t s = 0; s < lengths.size(); s++) {
    const int64_t tokens = lengths[s], stride = kv_heads * dim;
    keys.push_back(Numbers::drawn(type, tokens * stride));
    values.push_back(Numbers::drawn(type, tokens * stride));
    std::vector<int64_t> slots(tokens);
    for (int64_t t = 0; t < tokens; t++) slots[t] = tables[s * width + t / block_size] * block_size + t % block_size;
    const Store store{keys[s].at(0), values[s].at(0), cache.data(), slots.data(), kv_heads, dim, panel_positions(block_size),
                      stride,        stride,          type,         rounded};
    for (int64_t t = 0; t < tokens; t++) kernels.store(store, t);
    for (int64_t row = 0; row < (starts[s + 1] - starts[s]) * sharing; row += kernels.attention_rows)
      tiles.insert(tiles.end(), {int32_t(s), int32_t(row)});
  }
  Numbers q = Numbers::drawn(type, starts.back() * heads * dim), out(type, starts.back() * heads * dim);
  const float scale = 1 / std::sqrt(float(dim));
  Attention attention{};
  attention.q = q.at(0);
  attention.out = out.at(0);
  attention.cache = cache.data();
  attention.block_tables = tables.data();
  attention.query_starts = starts.data();
  attention.lengths = lengths.data();
  attention.tiles = tiles.data();
  attention.tasks = int64_t(tiles.size()) / 2 * kv_heads;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.dim = dim;
  attention.block_size = block_size;
  attention.table_width = width;
  attention.window = window;
  attention.out_stride = heads * dim;
  attention.scale = scale;
  attention.type = type;
  attention.quantized = rounded;
  attention.causal = true;
  for (int64_t task = 0; task < attention.tasks; task++) kernels.attention(attention, task);

  const std::string name = std::string("attention") + (rounded ? " of 8 bits, " : ", ") + name_of(Format::unquantized, type);
  const double tolerance = rounded ? 0.02 : type == Type::bfloat16 ? 0.01 : 2e-5;
  for (size_t s = 0; s < lengths.size(); s++)
    for (int64_t row = starts[s]; row < starts[s + 1]; row++)
      for (int64_t head = 0; head < heads; head++) {
        const int64_t last = lengths[s] - (starts[s + 1] - row), at = (row * heads + head) * dim;
        const int64_t first = window && last >= window ? last - window + 1 : 0;
        std::vector<double> expected(dim), weights(last + 1);
        double total = 0;
        for (int64_t t = first; t <= last; t++) {
          double score = 0;
          for (int64_t d = 0; d < dim; d++) score += q[at + d] * keys[s][(t * kv_heads + head / sharing) * dim + d];
          total += weights[t] = std::exp(score * scale);
        }
        for (int64_t t = first; t <= last; t++)
          for (int64_t d = 0; d < dim; d++)
            expected[d] += weights[t] / total * values[s][(t * kv_heads + head / sharing) * dim + d];
        for (int64_t d = 0; d < dim; d++) close(name, at + d, out[at + d], expected[d], tolerance);
      }
}

void check_sampling(int64_t size, int64_t top_k, double top_p) {
  const int64_t rows = 20;
  const double temperature = 0.25, min_p = 0.001;
  std::vector<float> logits(rows * size), largest(rows);
  std::vector<double> uniform(rows);
  std::vector<int64_t> token_ids(rows);
  for (auto& logit : logits) logit = float(draw());
  for (auto& number : uniform) number = (draw() + 1) / 2;
  const auto column = [&](double value) { return std::vector<double>(rows, value); };
  const auto temperatures = column(temperature), top_ks = column(double(top_k)), top_ps = column(top_p), min_ps = column(min_p);
  const SampleRandom sampling{logits.data(), temperatures.data(), top_ks.data(), top_ps.data(), min_ps.data(), uniform.data(),
                              token_ids.data(), largest.data(), size, size};
  for (int64_t row = 0; row < rows; row++) {
    kernels.sample(sampling, row);
    const float* x = logits.data() + row * size;
    close("largest logit", row, largest[row], *std::max_element(x, x + size), 0);
    std::vector<double> weights(size);
    for (int64_t i = 0; i < size; i++) weights[i] = std::exp((x[i] - double(largest[row])) / temperature);
    std::vector<int64_t> order(size);  // from the largest weight
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
    for (int64_t i = 0; i < size; i++)
      if (weights[order[i]] < min_p || (top_k && i >= top_k)) weights[order[i]] = 0;
    const double limit = top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
    double total = 0;
    for (int64_t i : order) total += total < limit ? weights[i] : weights[i] = 0;
    const double before = std::accumulate(weights.begin(), weights.begin() + token_ids[row], 0.0) / total;
    const double share = weights[token_ids[row]] / total;
    close("sampled token", row, uniform[row], before + share / 2, share / 2 + 1e-5);
    close("weight of sampled token is not 0", row, share > 0, 1, 0);
  }
}

void check_all() {
  for (int64_t size : {1, 40, 1100})
    for (int64_t top_k : {0, 5, 37})
      for (double top_p : {1.0, 0.7}) check_sampling(size, top_k, top_p);
  const std::pair<Format, Type> kept[] = {{Format::unquantized, Type::float32}, {Format::unquantized, Type::bfloat16},
                                          {Format::w8a8, Type::bfloat16}, {Format::w8a8, Type::float32},
                                          {Format::w4a8, Type::bfloat16}, {Format::wint8, Type::bfloat16},
                                          {Format::wint4, Type::bfloat16}};
  for (const auto& [format, type] : kept)
    for (int64_t group : {0, 32}) {
      if (group && format == Format::unquantized) continue;
      for (int64_t rows : {1, 6, 7, 19}) check_linear(format, type, rows, draw(1, 150), draw(1, 150), group);
      check_linear(format, type, 3, 40, 2 * kPanel, group);                                         // gated
      check_linear(format, type, kernels.linear_rows + 3, draw(1, 40), draw(1, 2 * kPanel), group);  // several tasks
      check_linear(format, type, 19, 1000 + draw(0, 50), 20, group);                                // several input chunks
    }
  for (const auto& [format, type] : kept)
    for (int64_t in : {64, 192, 96, 40, 37})
      if (format != Format::unquantized) check_rotation(format, type, in, in % 32 ? in : 32);
  for (Type type : {Type::float32, Type::bfloat16}) {
    for (int64_t size : {1, 16, 40, 200}) {
      check_norm(type, 5, size, false);
      check_norm(type, 5, size, true);
      check_rope(type, 5, 3, size);
      check_activate(type, 5, size);
    }
    for (bool rounded : {false, true})
      for (int64_t window : {0, 20}) {
        check_attention(type, rounded, 64, 16, window);
        check_attention(type, rounded, 128, 32, window);
      }
  }
}

}  // namespace
}  // namespace penstock

int main() {
  penstock::check_all();
  std::printf("%d of %d values differ\n", penstock::failures, penstock::compared);
  return penstock::failures ? 1 : 0;
}
