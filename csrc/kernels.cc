// The kernels of one instruction set: compiled once for each, with PENSTOCK_ISA as the set's name.

#include "kernels.h"

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace penstock {
namespace PENSTOCK_ISA {

template <class A, void (*Float)(const A&, int64_t), void (*Brain)(const A&, int64_t)>
void by_type(const A& args, int64_t task) {
  args.type == Type::float32 ? Float(args, task) : Brain(args, task);
}

void linear(const Linear& a, int64_t task) {
  if (a.type == Type::float32)
    linear_block<float, float>(a, task);
  else if (a.out_type == Type::float32)
    linear_block<bf16, float>(a, task);
  else
    linear_block<bf16, bf16>(a, task);
}

void likeliest(const Likeliest& a, int64_t task) {
  a.product.type == Type::float32 ? likeliest_block<float>(a, task) : likeliest_block<bf16>(a, task);
}

#define PENSTOCK_TEXT(x) #x
#define PENSTOCK_NAME(x) PENSTOCK_TEXT(x)

extern const Kernels kernels;
const Kernels kernels = {
    PENSTOCK_NAME(PENSTOCK_ISA),
    linear,
    likeliest,
    by_type<Gather, gather_row<float>, gather_row<bf16>>,
    by_type<Pack, pack_panel<float>, pack_panel<bf16>>,
    by_type<Norm, norm_row<float>, norm_row<bf16>>,
    by_type<Rope, rope_token<float>, rope_token<bf16>>,
    by_type<SiluMul, silu_mul_row<float>, silu_mul_row<bf16>>,
    by_type<Store, store_token<float>, store_token<bf16>>,
    by_type<Attention, attention_tile<float>, attention_tile<bf16>>,
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
