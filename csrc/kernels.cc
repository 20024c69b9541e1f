// The kernels of one instruction set: compiled once for each, with PENSTOCK_ISA as the set's name.

#include "kernels.h"

#include "by_head.h"
#include "elementwise.h"
#include "experts.h"
#include "likeliest.h"
#include "limits.h"
#include "low_rank.h"

namespace penstock {
namespace PENSTOCK_ISA {

template <class A, void (*Float)(const A&, int64_t), void (*Brain)(const A&, int64_t)>
void by_type(const A& args, int64_t task) {
  args.type == Type::float32 ? Float(args, task) : Brain(args, task);
}

void linear(const Linear& a, int64_t task) {
  const TileUse tiles;
  a.out_type == Type::float32 ? linear_block<float>(a, task) : linear_block<bf16>(a, task);
}

void gated(const Linear& a, int64_t task) {
  const TileUse tiles;
  a.out_type == Type::float32 ? gated_block<float>(a, task) : gated_block<bf16>(a, task);
}

template <bool up>
void low_rank(const LowRank& a, int64_t task) {
  const TileUse tiles;
  a.matrix.type == Type::float32 ? low_rank_block<float, up>(a, task) : low_rank_block<bf16, up>(a, task);
}

template <bool gated>
void expert(const Choices& a, int64_t task) {
  const TileUse tiles;
  a.out_type == Type::float32 ? expert_block<float, gated>(a, task) : expert_block<bf16, gated>(a, task);
}

void by_head(const ByHead& a, int64_t task) {
  const TileUse tiles;
  a.matrix.type == Type::float32 ? by_head_block<float>(a, task) : by_head_block<bf16>(a, task);
}

template <void (*Float)(const Gather&, int64_t), void (*Brain)(const Gather&, int64_t)>
void gather(const Gather& a, int64_t task) {
  a.matrix.type == Type::float32 ? Float(a, task) : Brain(a, task);
}

void pack(const Pack& a, int64_t task) {
  a.matrix.type == Type::float32 ? pack_panel<float>(a, task) : pack_panel<bf16>(a, task);
}

void sketch(const Sketch& s, int64_t panel) {
  s.whole.type == Type::float32 ? sketch_panel<float>(s, panel) : sketch_panel<bf16>(s, panel);
}

void measure(const Screening& s, int64_t row) {
  s.whole->type == Type::float32 ? measure_row<float>(s, row) : measure_row<bf16>(s, row);
}

void likeliest(const Likeliest& l, int64_t task) {
  const TileUse tiles;
  likeliest_block(l, task);
}

void screen(const Screening& s, int64_t task) {
  const TileUse tiles;
  screen_block(s, task);
}

void settle(const Screening& s, Candidate& candidate) {
  const TileUse tiles;
  s.whole->type == Type::float32 ? settle_candidate<float>(s, candidate) : settle_candidate<bf16>(s, candidate);
}

void store(const Store& a, int64_t token);
void export_kv(const Exchange& a, int64_t task);
void import_kv(const Exchange& a, int64_t task);
void attention(const Attention& a, int64_t task);
void latent_join(const Attention& a, int64_t task);
void latent_store(const LatentStore& a, int64_t token);

#define PENSTOCK_TEXT(x) #x
#define PENSTOCK_NAME(x) PENSTOCK_TEXT(x)

extern const Kernels kernels;
const Kernels kernels = {
    PENSTOCK_NAME(PENSTOCK_ISA),
    kRowBlock,
    kTaskRows,
    linear,
    gated,
    low_rank<false>,
    low_rank<true>,
    expert<false>,
    expert<true>,
    route_token,
    by_type<Combine, combine_token<float>, combine_token<bf16>>,
    likeliest,
    sketch,
    measure,
    screen,
    settle,
    by_type<Quantize, quantize_row<float>, quantize_row<bf16>>,
    by_type<Rotate, rotate_row<float>, rotate_row<bf16>>,
    by_type<GroupSums, sum_groups_row<float>, sum_groups_row<bf16>>,
    gather<gather_row<float>, gather_row<bf16>>,
    pack,
    pack_panel<int8_t>,
    by_type<Norm, norm_row<float>, norm_row<bf16>>,
    by_type<Rope, rope_token<float>, rope_token<bf16>>,
    by_type<Activate, activate_row<float>, activate_row<bf16>>,
    by_type<Scale, scale_row<float>, scale_row<bf16>>,
    by_type<ToFloat32, to_float32_row<float>, to_float32_row<bf16>>,
    store,
    export_kv,
    import_kv,
    attention,
    latent_join,
    latent_store,
    by_head,
    read,
    dots<PairStep>,
    dots<QuadStep>,
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
