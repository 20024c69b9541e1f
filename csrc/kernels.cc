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

template <class A>
Type type_of(const A& args) {
  if constexpr (requires { args.out_type; })
    return args.out_type;
  else if constexpr (requires { args.matrix; })
    return args.matrix.type;
  else if constexpr (requires { args.whole->type; })
    return args.whole->type;
  else if constexpr (requires { args.whole; })
    return args.whole.type;
  else
    return args.type;
}

template <class A, void (*Float)(const A&, int64_t), void (*Brain)(const A&, int64_t)>
void by_type(const A& args, int64_t task) {
  type_of(args) == Type::float32 ? Float(args, task) : Brain(args, task);
}

template <class A, void (*Kernel)(const A&, int64_t)>
void with_tiles(const A& args, int64_t task) {
  const TileUse tiles;
  Kernel(args, task);
}

template <class A, void (*Float)(const A&, int64_t), void (*Brain)(const A&, int64_t)>
constexpr auto product = with_tiles<A, by_type<A, Float, Brain>>;

void settle(const Screening& s, Candidate& candidate) {
  const TileUse tiles;
  type_of(s) == Type::float32 ? settle_candidate<float>(s, candidate) : settle_candidate<bf16>(s, candidate);
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
    product<Linear, linear_block<float>, linear_block<bf16>>,
    product<Linear, gated_block<float>, gated_block<bf16>>,
    product<LowRank, low_rank_block<float, false>, low_rank_block<bf16, false>>,
    product<LowRank, low_rank_block<float, true>, low_rank_block<bf16, true>>,
    product<Choices, expert_block<float, false>, expert_block<bf16, false>>,
    product<Choices, expert_block<float, true>, expert_block<bf16, true>>,
    route_token,
    by_type<Combine, combine_token<float>, combine_token<bf16>>,
    with_tiles<Likeliest, likeliest_block>,
    by_type<Sketch, sketch_panel<float>, sketch_panel<bf16>>,
    by_type<Screening, measure_row<float>, measure_row<bf16>>,
    with_tiles<Screening, screen_block>,
    settle,
    by_type<Quantize, quantize_row<float>, quantize_row<bf16>>,
    by_type<Rotate, rotate_row<float>, rotate_row<bf16>>,
    by_type<GroupSums, sum_groups_row<float>, sum_groups_row<bf16>>,
    by_type<Gather, gather_row<float>, gather_row<bf16>>,
    by_type<Pack, pack_panel<float>, pack_panel<bf16>>,
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
    product<ByHead, by_head_block<float>, by_head_block<bf16>>,
    read,
    dots<PairStep>,
    dots<QuadStep>,
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
