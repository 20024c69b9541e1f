// What this build has.

#pragma once

#include <vector>

#include "kernels.h"

namespace penstock {

extern const std::vector<const Kernels*> built;  // of each instruction set, from the slowest to the fastest
extern const char* const sources;                // a hash of what was compiled (CMakeLists.txt)
extern const char* const version;                // of the package; empty where it was not built as a part of it

}  // namespace penstock
