// Prints the instruction sets that this machine supports, separated by `;`, for CMakeLists.txt.

#include "machine.h"

#include <cstdio>

int main() {
  const char* separator = "";
  for (const auto& name : penstock::machine_sets()) {
    std::printf("%s%s", separator, name.c_str());
    separator = ";";
  }
}
