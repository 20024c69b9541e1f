// Products of all formats, compiled once per instruction set.

#include "multiply.h"

namespace penstock {
namespace PENSTOCK_ISA {

#define PENSTOCK_PRODUCT(F) template void multiply_format<F>(const Linear&, int64_t, int64_t, int64_t, int64_t, const Sink&)

PENSTOCK_PRODUCT(Unquantized<float>);
PENSTOCK_PRODUCT(Unquantized<bf16>);
PENSTOCK_PRODUCT(W8A8);
PENSTOCK_PRODUCT(W4A8);
PENSTOCK_PRODUCT(WInt8);
PENSTOCK_PRODUCT(WInt4);
PENSTOCK_PRODUCT(WFloat4);

}  // namespace PENSTOCK_ISA
}  // namespace penstock
