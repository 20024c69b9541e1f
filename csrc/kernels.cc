// Kernel table, compiled once per instruction set with its name as PENSTOCK_ISA.

#include "kernels.h"

#include "by_head.h"
#include "elementwise.h"
#include "experts.h"
#include "argmax.h"
#include "compress.h"
#include "hyper.h"
#include "limits.h"
#include "lora.h"
#include "sampling.h"
#include "selective_scan.h"
#include "states.h"

namespace penstock {
namespace PENSTOCK_ISA {

template <class A>
Type type_of(const A& args) {
  if constexpr (requires { args.out_type; })
    return args.out_type;
  else if constexpr (requires { args.matrix.type; })
    return args.matrix.type;
  else if constexpr (requires { args.matrix->type; })
    return args.matrix->type;
  else
    return args.type;
}

template <class A, void (*Float32)(const A&, int64_t), void (*Bf16)(const A&, int64_t)>
void by_type(const A& args, int64_t task) {
  type_of(args) == Type::float32 ? Float32(args, task) : Bf16(args, task);
}

template <class A, void (*Kernel)(const A&, int64_t)>
void with_amx(const A& args, int64_t task) {
  const AmxScope tiles;
  Kernel(args, task);
}

template <class A, void (*Float32)(const A&, int64_t), void (*Bf16)(const A&, int64_t)>
constexpr auto product = with_amx<A, by_type<A, Float32, Bf16>>;

void evaluate(const SketchSearch& s, Candidate& candidate) {
  const AmxScope tiles;
  type_of(s) == Type::float32 ? evaluate_candidate<float>(s, candidate) : evaluate_candidate<bf16>(s, candidate);
}

void store(const Store& a, int64_t token);
void export_kv(const KVTransfer& a, int64_t task);
void import_kv(const KVTransfer& a, int64_t task);
void attention(const Attention& a, int64_t task);
void latent_merge(const Attention& a, int64_t task);
void latent_store(const LatentStore& a, int64_t token);
void index_scores(const SelectKeys& a, int64_t task);
void select_keys(const SelectKeys& a, int64_t token);

#define PENSTOCK_TEXT(x) #x
#define PENSTOCK_NAME(x) PENSTOCK_TEXT(x)

extern const Kernels kernels;
const Kernels kernels = {
    PENSTOCK_NAME(PENSTOCK_ISA),
    kRowBlock,
    kTaskRows,
    product<Linear, linear_block<float>, linear_block<bf16>>,
    product<Linear, gated_block<float>, gated_block<bf16>>,
    product<LoRA, lora_block<float, false>, lora_block<bf16, false>>,
    product<LoRA, lora_block<float, true>, lora_block<bf16, true>>,
    product<ExpertLinear, expert_block<float, false>, expert_block<bf16, false>>,
    product<ExpertLinear, expert_block<float, true>, expert_block<bf16, true>>,
    route_token,
    by_type<Combine, combine_token<float>, combine_token<bf16>>,
    with_amx<ArgMax, argmax_block>,
    sample_row,
    by_type<Sketch, sketch_panel<float>, sketch_panel<bf16>>,
    by_type<SketchSearch, measure_norms_row<float>, measure_norms_row<bf16>>,
    with_amx<SketchSearch, find_candidates_block>,
    evaluate,
    by_type<Quantize, quantize_row<float>, quantize_row<bf16>>,
    by_type<Rotate, rotate_row<float>, rotate_row<bf16>>,
    by_type<GroupSums, sum_groups_row<float>, sum_groups_row<bf16>>,
    by_type<Embedding, embedding_row<float>, embedding_row<bf16>>,
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
    latent_merge,
    latent_store,
    index_scores,
    select_keys,
    by_type<Compress, compress_entry<float>, compress_entry<bf16>>,
    hyper_weights_row,
    by_type<CollapseStreams, collapse_row<float>, collapse_row<bf16>>,
    by_type<MixStreams, mix_row<float>, mix_row<bf16>>,
    by_type<EqualizeStreams, equalize_row<float>, equalize_row<bf16>>,
    by_type<GaussianTopK, gaussian_topk_row<float>, gaussian_topk_row<bf16>>,
    by_type<RotateTail, rotate_tail_token<float>, rotate_tail_token<bf16>>,
    product<LinearByHead, linear_by_head_block<float>, linear_by_head_block<bf16>>,
    by_type<Convolution, convolution_task<float>, convolution_task<bf16>>,
    kConvolutionTask,
    by_type<LinearAttention, linear_attention_task<float>, linear_attention_task<bf16>>,
    by_type<GatedNorm, gated_norm_row<float>, gated_norm_row<bf16>>,
    by_type<MultiplyGate, multiply_gate_row<float>, multiply_gate_row<bf16>>,
    by_type<SelectiveScan, selective_scan_task<float>, selective_scan_task<bf16>>,
    kScanTask,
    by_type<RgLru, rg_lru_task<float>, rg_lru_task<bf16>>,
    by_type<MultiplyRows, multiply_row<float>, multiply_row<bf16>>,
    read,
    run_dots<Bf16Step>,
    run_dots<Int8Step>,
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
