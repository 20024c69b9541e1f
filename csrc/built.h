// Contents of this build.

#pragma once

#include <vector>

#include "kernels.h"

namespace penstock {

extern const std::vector<const Kernels*> built;  // kernels of each instruction set, from the slowest to the fastest
extern const char* const sources;  // hash of the compiled sources (CMakeLists.txt)
extern const char* const version;  // version of the package; empty if built separately

}  // namespace penstock
